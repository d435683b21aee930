"""A user's Python function as a source of reward, in a separate process with a time limit."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.text import counted
from components.keys.plugins import check_plugin, find_plugin
from components.rewards import function_worker
from components.rewards.code import code_digest, code_files, root_of
from components.rewards.config import FunctionReward, PluginReward
from components.rewards.source import Replies, Score, checked_scores, named


class FunctionSource:
    """Calls the function. Each of its mistakes becomes a UserError that names module, function and response."""

    _known: set[str] | None

    def __init__(self, config: FunctionReward | PluginReward) -> None:
        """Start the function's process.

        Raises:
            UserError: the module cannot be imported, lacks the function, or was edited after the run began.
        """
        self._config = config
        if isinstance(config, PluginReward):
            plugin = find_plugin("tether.rewards", config.entry, "ppo.rewards")
            check_plugin(plugin, config.code, "ppo.rewards")
            root, module, name, installed = plugin.root.resolve(), plugin.module, plugin.attribute, ["installed"]
            self._known = None  # all files of its distribution are in the key
        else:
            root, (module, name), installed = root_of(config), config.target, []
            self._known = {str(path.resolve()) for path in code_files(config)}
            if config.code != "auto" and (code := code_digest(config)) != config.code:
                raise self._error(
                    f"its source files changed after the run began (from {config.code[:12]} to {code[:12]}). Run "
                    "again, and do not edit them until PPO is done."
                )
        worker = str(Path(function_worker.__file__).resolve())
        self._process = subprocess.Popen(
            [sys.executable, worker, str(root), module, name, str(os.getpid()), *installed],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C goes to the stage only; the process ends when its input closes
        )  # fmt: skip
        self._rest = b""
        try:
            answer = self._answer("importing it")
            if answer.get("error") == "missing":
                raise self._error(f"{module} has no function of this name. Check the name.")
            if "error" in answer:
                raise self._error(f"importing {module} raises {answer['text']}. Correct it.")
        except BaseException:
            self.close()
            raise

    def score(self, replies: Replies) -> list[Score]:
        """Return the function's scores."""
        asked = {"prompts": replies.prompts, "responses": replies.responses, "rows": replies.rows}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked, default=dict).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answer(f"scoring {counted(len(replies.responses), 'response')}")
        except BrokenPipeError:
            raise self._ended() from None
        if "error" in answer:
            row = answer["row"]
            where = "a call with all responses, though with none alone" if row is None else named(replies, row)
            raise self._error(f"it raises {answer['text']} for {where}. Correct the function.")
        if len(answer["scores"]) != len(replies.responses):
            raise self._error(
                f"it gives {counted(len(answer['scores']), 'score')} for "
                f"{counted(len(replies.responses), 'response')}. Return a list with "
                "one number for each response, in their order."
            )
        if self._known is not None and (unseen := sorted(set(answer["modules"]) - self._known)):
            raise self._error(
                f"it imports {unseen[0]} by a name that is not in an import statement, so the run's key does not "
                "depend on that file. Import it with an import statement."
            )
        return checked_scores(answer["scores"], replies, "function", self._error)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _answer(self, what: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit, file = time.monotonic() + self._config.timeout, self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left = limit - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.close()
                    raise self._error(
                        f"{what} takes longer than its time limit of {self._config.timeout:g} s. Make it faster, or "
                        "raise timeout."
                    )
                got = os.read(file.fileno(), 1 << 16)
                if not got:
                    raise self._ended()
                self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _ended(self) -> UserError:
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        return self._error(f"its process ended ({how}). Look at what it printed above, and correct the function.")

    def _error(self, text: str) -> UserError:
        return UserError(f"{self._config.where}: {text}")
