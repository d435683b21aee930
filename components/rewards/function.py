"""A user's Python function as a source of reward, in a separate process with a time limit."""

from components.base.errors import UserError
from components.base.text import counted
from components.keys.function_process import FunctionProcess
from components.keys.plugins import find_plugin
from components.rewards.code import code_digest, code_files, root_of
from components.rewards.config import FunctionReward, PluginReward
from components.rewards.source import Replies, Score, checked_scores, named


class FunctionSource(FunctionProcess):
    """Calls the function. Each of its mistakes becomes a UserError that names module, function and response."""

    _known: set[str] | None

    def __init__(self, config: FunctionReward | PluginReward) -> None:
        """Start the function's process.

        Raises:
            UserError: the module cannot be imported, lacks the function, or was edited after the run began.
        """
        if isinstance(config, PluginReward):
            plugin = find_plugin("tether.rewards", config.entry, "ppo.rewards", config.code)
            root, module, name = plugin.root.resolve(), plugin.module, plugin.attribute
            self._known = None  # all files of its distribution are in the key
        else:
            root, (module, name) = root_of(config), config.target
            self._known = {str(path.resolve()) for path in code_files(config)}
            if config.code != "auto" and (code := code_digest(config)) != config.code:
                raise UserError(
                    f"{config.where}: its source files changed after the run began (from {config.code[:12]} to "
                    f"{code[:12]}). Run again, and do not edit them until PPO is done."
                )
        super().__init__(config.where, root, module, name, config.timeout, installed=self._known is None)
        try:
            self.call("importing it", {})
        except BaseException:
            self.close()
            raise

    def score(self, replies: Replies) -> list[Score]:
        """Return the function's scores."""
        request = {"prompts": replies.prompts, "responses": replies.responses, "rows": replies.rows}
        answer = self.call(f"scoring {counted(len(replies.responses), 'response')}", request)
        if "error" in answer:
            row = answer["row"]
            where = "a call with all responses, though with none alone" if row is None else named(replies, row)
            raise self.error(f"it raises {answer['error']} for {where}. Correct the function.")
        if len(answer["scores"]) != len(replies.responses):
            raise self.error(
                f"it gives {counted(len(answer['scores']), 'score')} for "
                f"{counted(len(replies.responses), 'response')}. Return a list with "
                "one number for each response, in their order."
            )
        if self._known is not None and (unseen := sorted(set(answer["modules"]) - self._known)):
            raise self.error(
                f"it imports {unseen[0]} by a name that is not in an import statement, so the run's key does not "
                "depend on that file. Import it with an import statement."
            )
        return checked_scores(answer["scores"], replies, "function", self.error)
