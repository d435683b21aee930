"""The pairs that a model judges, its vote on each, and the rows of votes for `data.preferences`."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from components.base.jsonl import Message
from components.data.rows import OF_MODEL
from components.labelling.feedback.answers import BothOrders, StoredAnswers, pair_id
from components.labelling.feedback.judges import Judge
from components.labelling.feedback.rubric import question

VoteRule = Literal["mean", "agree"]
LABELS = ("a", "b", "tie")
"""Names of votes, by their index in `Ballot`."""


class PairToJudge(NamedTuple):
    """A pair to judge, with the votes that it has."""

    row: int
    prompt: list[Message]
    a: str
    b: str
    votes: tuple[tuple[str | None, int], ...]
    """Its votes: the annotator, if named, and the index in `Ballot`."""
    further: Mapping[str, Any]
    """Fields of its row that are copied to the rows of votes."""

    @property
    def id(self) -> str:
        """Return its name in `answers.jsonl`."""
        return pair_id(self.prompt, self.a, self.b)

    @property
    def people(self) -> tuple[tuple[str | None, int], ...]:
        """Return the votes of people."""
        return tuple(ballot for ballot in self.votes if ballot[0] is None or not ballot[0].startswith(OF_MODEL))

    @property
    def majority(self) -> int | None:
        """Return 0 if more people prefer `a`, 1 if more prefer `b`, None in a tie or without votes."""
        counts = Counter(side for _, side in self.people)
        return None if counts[0] == counts[1] else int(counts[1] > counts[0])


def ask(
    pairs: Sequence[PairToJudge],
    rubric: str,
    store: StoredAnswers,
    open_judge: Callable[[], Judge],
    observe: Callable[[int, int], None],
) -> dict[str, BothOrders]:
    """Ask about each pair in both orders; pairs with kept answers are not asked again.

    Args:
        open_judge: called once if any pair has to be asked.
        observe: called with the number of answered pairs and the number of all pairs.

    Returns:
        Maps a pair's id to the answers.
    """
    judge, by_pair = None, dict[str, BothOrders]()
    try:
        for done, pair in enumerate(pairs, 1):
            answers = store.get(pair.id)
            if answers is None:
                judge = judge or open_judge()
                in_order, swapped = (
                    judge.answer(question(rubric, pair.prompt, first, second))
                    for first, second in ((pair.a, pair.b), (pair.b, pair.a))
                )
                answers = BothOrders(in_order, swapped)
                store.add(pair.id, answers)
                observe(done, len(pairs))
            by_pair[pair.id] = answers
    finally:
        if judge is not None:
            judge.close()
    return by_pair


def preference(answers: BothOrders, rule: VoteRule) -> float | None:
    """Return the preference for `a`, 0 to 1; None if an answer cannot be read.

    It is the mean over both orders, in which a position bias cancels (Lee et al. 2023, arXiv:2309.00267, section 2.1).
    With the rule `agree` it is 1/2 if the two orders name different responses (Zheng et al. 2023, arXiv:2306.05685,
    section 3.4).
    """
    if answers.sides is None:
        return None
    in_order, swapped = answers.sides
    if rule == "agree" and (in_order > 0.5) - (in_order < 0.5) != (swapped > 0.5) - (swapped < 0.5):
        return 0.5
    return (in_order + swapped) / 2


def vote(preferred: float) -> int:
    """Return the index in `Ballot` of the vote that a preference for `a` gives."""
    return 0 if preferred > 0.5 else 1 if preferred < 0.5 else 2


def vote_rows(
    pairs: Sequence[PairToJudge], answers: Mapping[str, BothOrders], name: str, rule: VoteRule, alone: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row of votes for each pair that has a vote.

    Args:
        name: the model's name; as annotator it is called `model:NAME`.
        alone: leave out all votes except the model's.
    """
    voter = f"{OF_MODEL}{name}"
    for pair in pairs:
        votes: list[dict[str, Any]] = []
        for annotator, side in () if alone else pair.votes:
            if annotator != voter:
                votes.append(({} if annotator is None else {"annotator": annotator}) | {"label": LABELS[side]})
        preferred = preference(answers[pair.id], rule)
        if preferred is not None:
            votes.append({"annotator": voter, "label": LABELS[vote(preferred)], "preference": preferred})
        if votes:
            yield {**pair.further, "prompt": pair.prompt, "a": pair.a, "b": pair.b, "votes": votes}
