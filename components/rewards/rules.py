"""Count how often each response violates the team's own rules."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from components.base.jsonl import Message
from components.rewards.config import RulesConfig
from components.rewards.function import FunctionSource
from components.rewards.source import named, total
from components.rewards.weighted import PromptColumns


class Rules(ExitStack[None]):
    """Counts violations by patterns or by a function. Use it as a context manager, which ends its process."""

    def __init__(self, config: RulesConfig, data: Path) -> None:
        """Compile the patterns, or start the function's process.

        Args:
            data: a validate artifact, which has the prompts' other columns.

        Raises:
            UserError: the function cannot be imported, or was edited after the run began.
        """
        super().__init__()
        self._patterns = {name: re.compile(pattern) for name, pattern in config.patterns.items()}
        self._columns = PromptColumns(data)
        self._function = None if config.caller is None else self.enter_context(closing(FunctionSource(config.caller)))

    def count(self, prompts: Sequence[Sequence[Message]], responses: Sequence[str]) -> list[dict[str, float]]:
        """Return for each response its total `violations` and, with patterns, the matches of each pattern by name.

        Matches of one pattern do not overlap. Matches of different patterns may overlap, and then all count.

        Raises:
            UserError: the function raises, or returns a number below 0 or something that is not a number.
        """
        if self._function is None:
            matches = [{n: float(sum(1 for _ in p.finditer(text))) for n, p in self._patterns.items()}
                     for text in responses]  # fmt: skip
            return [{"violations": sum(by_pattern.values()), **by_pattern} for by_pattern in matches]
        replies = self._columns.replies(prompts, responses)
        counts = self._function.score(replies)
        for index, count in enumerate(counts):
            if isinstance(count, list) or count < 0 or count != int(count):
                amount = "parts" if isinstance(count, list) else f"{count:g}"
                raise self._function.error(
                    f"it gives {amount} for {named(replies, index)}; a number of violations is "
                    "a whole number, 0 or more. Correct the function."
                )
        return [{"violations": total(count)} for count in counts]


class RuleActions(NamedTuple):
    """The violations of `ppo.rules` in a batch of B responses, and what its options do about them."""

    counts: Sequence[Mapping[str, float]] = ()
    """(B,) as `Rules.count` returns them; empty without rules."""
    penalties: Sequence[float] = ()
    """(B,) what is subtracted from each rewarded score; empty without rules."""
    rows: Sequence[int] | None = None
    """The responses from which the update learns, in order; None for all."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Shares of the B responses, by rule and in all."""

    @classmethod
    def of(cls, config: RulesConfig, counts: Sequence[Mapping[str, float]], group_size: int) -> "RuleActions":
        """Return what `drop` and `penalty` do to the responses that have `counts`.

        The metrics `ppo/dropped_NAME` and `ppo/penalised_NAME` are the shares that violate the rule NAME, and
        `ppo/left_out` is the share that is not learned from. Each `group_size` consecutive responses are compared with
        each other, if it is not 1, else all of the batch. A response that is left alone has nothing to be compared
        with: it is left out too.
        """
        rows, metrics = list[int](), dict[str, float]()
        for first in range(0, len(counts), group_size):
            group = range(first, first + group_size)
            left = [row for row in group if not any(counts[row][name] for name in config.drop)]
            rows += left if len(left) > 1 or group_size == 1 else []
        rows = rows if len(rows) > 1 else []
        for verb, names in (("dropped", config.drop), ("penalised", config.penalty)):
            metrics |= {f"ppo/{verb}_{name}": sum(c[name] > 0 for c in counts) / len(counts) for name in names}
        if config.drop:
            metrics["ppo/left_out"] = 1 - len(rows) / len(counts)
        penalties = [sum(amount for name, amount in config.penalty.items() if count[name]) for count in counts]
        return cls(counts, penalties, rows if len(rows) < len(counts) else None, metrics)


NO_RULES = RuleActions()
"""Of a run without `ppo.rules`."""


def rule_metrics(counts: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Return `rule_violations` and `rule_NAME` after the prefix: means over the responses of what `Rules.count`
    returned."""
    return {f"{prefix}rule_{name}": sum(count[name] for count in counts) / len(counts) for name in counts[0]}
