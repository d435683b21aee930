"""The pairs that a model judges, its vote on each, and the rows that `data.preferences` reads as votes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from components.base.jsonl import Message
from components.data.rows import OF_MODEL
from components.human_eval.candidates.feedback.answers import BothOrders, KeptAnswers, pair_id
from components.human_eval.candidates.feedback.judges import Judge
from components.human_eval.candidates.feedback.rubric import question

VoteRule = Literal["mean", "agree"]
LABELS = ("a", "b", "tie")
"""A vote by its place in `Ballot`."""


class PairToJudge(NamedTuple):
    """A pair to judge, and what is known of it."""

    row: int
    prompt: list[Message]
    a: str
    b: str
    votes: tuple[tuple[str | None, int], ...]
    """Votes that it has: annotator, where it is named, and place in `Ballot`."""
    kept: Mapping[str, Any]
    """Fields of its row that go over into the votes."""

    @property
    def id(self) -> str:
        """Its name in `answers.jsonl`."""
        return pair_id(self.prompt, self.a, self.b)

    @property
    def people(self) -> tuple[tuple[str | None, int], ...]:
        """The votes of people."""
        return tuple(each for each in self.votes if each[0] is None or not each[0].startswith(OF_MODEL))

    @property
    def majority(self) -> int | None:
        """0 or 1 where more people prefer `a` or `b`, as human_eval counts; None where as many do, or nobody voted."""
        counts = Counter(side for _, side in self.people)
        return None if counts[0] == counts[1] else int(counts[1] > counts[0])


def ask(
    pairs: Sequence[PairToJudge],
    rubric: str,
    kept: KeptAnswers,
    open_judge: Callable[[], Judge],
    observe: Callable[[int, int], None],
) -> dict[str, BothOrders]:
    """Ask about each pair in both orders; pairs with kept answers are not asked again.

    Args:
        open_judge: called once where a pair has to be asked.
        observe: called with the pairs that are answered and those there are.

    Returns:
        The answers by the pair's id.
    """
    judge, found = None, dict[str, BothOrders]()
    try:
        for done, pair in enumerate(pairs, 1):
            answers = kept.get(pair.id)
            if answers is None:
                judge = judge or open_judge()
                given, swapped = (
                    judge.answer(question(rubric, pair.prompt, first, second))
                    for first, second in ((pair.a, pair.b), (pair.b, pair.a))
                )
                answers = BothOrders(given, swapped)
                kept.add(pair.id, answers)
                observe(done, len(pairs))
            found[pair.id] = answers
    finally:
        if judge is not None:
            judge.close()
    return found


def preference(answers: BothOrders, rule: VoteRule) -> float | None:
    """Preference for `a`, 0 to 1; None where an answer can't be read.

    The mean over both orders (Lee et al. 2023, arXiv:2309.00267, section 2.1), which a preference for a position
    cancels out of. With the rule `agree` it is a half where the two orders name different responses (Zheng et al. 2023,
    arXiv:2306.05685, section 3.4).
    """
    if answers.sides is None:
        return None
    given, swapped = answers.sides
    if rule == "agree" and (given > 0.5) - (given < 0.5) != (swapped > 0.5) - (swapped < 0.5):
        return 0.5
    return (given + swapped) / 2


def vote(preferred: float) -> int:
    """The place in `Ballot` of the vote for a preference for `a`."""
    return 0 if preferred > 0.5 else 1 if preferred < 0.5 else 2


def vote_rows(
    pairs: Sequence[PairToJudge], answers: Mapping[str, BothOrders], name: str, rule: VoteRule, alone: bool
) -> Iterator[dict[str, Any]]:
    """A row of votes for each pair that has one.

    Args:
        name: the model's; its annotator is called `model:NAME`.
        alone: leave out all votes but its own.
    """
    own = f"{OF_MODEL}{name}"
    for pair in pairs:
        votes: list[dict[str, Any]] = []
        for annotator, side in () if alone else pair.votes:
            if annotator != own:
                votes.append(({} if annotator is None else {"annotator": annotator}) | {"label": LABELS[side]})
        preferred = preference(answers[pair.id], rule)
        if preferred is not None:
            votes.append({"annotator": own, "label": LABELS[vote(preferred)], "preference": preferred})
        if votes:
            yield {**pair.kept, "prompt": pair.prompt, "a": pair.a, "b": pair.b, "votes": votes}
