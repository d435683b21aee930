"""What a source of reward is: something that gives each response one number."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from components.base.jsonl import Message

LARGEST = 3.4028234663852886e38
"""The largest float32, which PPO computes in."""
A_SCORE = "a score must be a finite number that float32 can hold"


class Replies(NamedTuple):
    """n responses with what they answer. Each list has n entries."""

    prompts: Sequence[Sequence[Message]]
    responses: Sequence[str]
    """Without the final EOS; a special token inside is shown as ⟨name⟩."""
    rows: Sequence[Mapping[str, Any]]
    """The other columns of each prompt's row, as `data.reward_columns` names them."""


class Source(Protocol):
    """Scores responses; the same ones get the same scores."""

    def score(self, replies: Replies) -> list[float]:
        """Return a finite number for each response. Raises UserError where the user's scorer gives none."""
        ...

    def close(self) -> None:
        """Let go of its process, or of its connections."""
        ...


def named(replies: Replies, index: int) -> str:
    """Response `index` for a message: its number from 1, its prompt's last turn and its text, cut short."""
    prompt, response = replies.prompts[index], replies.responses[index]
    asked = prompt[-1]["content"] if prompt else ""
    return f"response {index + 1} of {len(replies.responses)} (prompt {_short(asked)}, response {_short(response)})"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
