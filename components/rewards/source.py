"""The interface of a source of reward, which gives each response one number or parts of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from components.base.errors import UserError
from components.base.jsonl import Message

LARGEST = 3.4028234663852886e38
"""The largest float32; PPO computes in float32."""
A_SCORE = "a score must be a finite number that float32 can hold"
A_PART = "the parts of a score are pairs of a character's offset (a whole number) and a number"


class Replies(NamedTuple):
    """n responses with their prompts. Each list has n entries."""

    prompts: Sequence[Sequence[Message]]
    responses: Sequence[str]
    """The responses without the final EOS. A special token inside is shown as ⟨name⟩."""
    rows: Sequence[Mapping[str, Any]]
    """The columns of each prompt's row that `data.reward_columns` names."""
    ended: Sequence[bool] = ()
    """Whether each response ended before the cap; empty if all did."""


Parts = list[tuple[int, float]]
"""A response's score in parts: the offset of a character in the response (from 0), and the reward of its token."""
Score = float | Parts
"""One number for a whole response, or its parts."""


def total(score: Score) -> float:
    """Return a score as one number: the sum of its parts."""
    return sum(value for _, value in score) if isinstance(score, list) else score


def checked_scores(
    returned: Sequence[Any], replies: Replies, scorer: str, error: Callable[[str], UserError]
) -> list[Score]:
    """Check what a user's scorer returned for each response, and return it as scores.

    Args:
        scorer: the scorer's name, for messages.
        error: makes a UserError from a message.

    Raises:
        UserError: one of them is not a score.
    """
    scores = list[Score]()
    for index, value in enumerate(returned):
        try:
            scores.append(_checked(value, len(replies.responses[index])))
        except ValueError as bad:
            what, why = bad.args
            raise error(f"it gives {what} for {named(replies, index)}; {why}. Correct the {scorer}.") from None
    return scores


def _checked(returned: Any, length: int) -> Score:
    """Return what a scorer gave a response of `length` characters as a score. Raises ValueError(what, why)."""
    if not isinstance(returned, list):
        return _number(returned)
    parts = Parts()
    for part in returned:
        if not isinstance(part, list) or len(part) != 2:
            raise ValueError(f"{part!r:.80} in a list", A_PART)
        offset, value = part
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise ValueError(f"the offset {offset!r:.80}", A_PART)
        if not 0 <= offset < length:
            raise ValueError(f"the offset {offset}", f"the response has {length} characters, and the first is 0")
        parts.append((offset, _number(value)))
    _number(total(parts))
    return parts


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"{value!r:.80}", A_SCORE)
    return float(value)


class Source(Protocol):
    """Scores responses. Equal responses to equal prompts must get equal scores."""

    def score(self, replies: Replies) -> Sequence[Score]:
        """Return a score for each response. Raises UserError if the user's scorer returns something else."""
        ...

    def close(self) -> None:
        """End its process or close its connections."""
        ...


def named(replies: Replies, index: int) -> str:
    """Describe response `index` for a message: its number from 1, its prompt's last turn and its text, shortened."""
    prompt, response = replies.prompts[index], replies.responses[index]
    last_turn = prompt[-1]["content"] if prompt else ""
    return f"response {index + 1} of {len(replies.responses)} (prompt {_short(last_turn)}, response {_short(response)})"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
