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


class BadScore(ValueError):
    """An invalid score from a user's scorer, and what is wrong with it."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why


def checked_score(found: Any, replies: Replies, index: int) -> Score:
    """Check what a user's scorer returned for response `index`, read from JSON, and return it as a score.

    Raises:
        BadScore: it is not a score.
    """
    if not isinstance(found, list):
        return _checked_number(found)
    parts, length = Parts(), len(replies.responses[index])
    for each in found:
        if not isinstance(each, list) or len(each) != 2:
            raise BadScore(f"{each!r:.80} in a list", A_PART)
        offset, value = each
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise BadScore(f"the offset {offset!r:.80}", A_PART)
        if not 0 <= offset < length:
            raise BadScore(f"the offset {offset}", f"the response has {length} characters, and the first is 0")
        parts.append((offset, _checked_number(value)))
    _checked_number(total(parts))
    return parts


def checked_scores(
    found: Sequence[Any], replies: Replies, scorer: str, error: Callable[[str], UserError]
) -> list[Score]:
    """Check what a user's scorer returned for each response, and return it as scores.

    Args:
        scorer: the scorer's name, for messages.
        error: makes a UserError from a message.

    Raises:
        UserError: one of them is not a score.
    """
    scores = list[Score]()
    for index, each in enumerate(found):
        try:
            scores.append(checked_score(each, replies, index))
        except BadScore as bad:
            text = f"it gives {bad.what} for {named(replies, index)}; {bad.why}. Correct the {scorer}."
            raise error(text) from None
    return scores


def _checked_number(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= LARGEST:
        raise BadScore(f"{found!r:.80}", A_SCORE)
    return float(found)


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
    asked = prompt[-1]["content"] if prompt else ""
    return f"response {index + 1} of {len(replies.responses)} (prompt {_short(asked)}, response {_short(response)})"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
