"""Measure how far a model's votes can be trusted: position bias, agreement with people, preference for length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from components.base.hashing import canonical_json
from components.data.words import words_of
from components.labelling.feedback.answers import BothOrders
from components.labelling.feedback.feedback_votes import PairToJudge, VoteRule, preference, vote
from components.stats.intervals import Interval, clustered_proportion
from components.stats.raters import crossed_agreement

_MOST_CELLS = 20_000_000
"""Largest number of pairs times people for which the interval also covers people."""


def judge_report(pairs: Sequence[PairToJudge], answers: Mapping[str, BothOrders], rule: VoteRule) -> dict[str, Any]:
    """Return the measurements of a judge; every interval is clustered by prompt.

    `first` is the share of answers for the response that is shown first; an unbiased judge has 1/2, since each pair is
    shown in both orders. `position_bias` is its distance from 1/2, with the upper end that human_eval's gate of that
    name judges. `consistent` is the share of pairs whose two answers name the same response. `longer` is the share of
    decided votes for the response with more words. `agreement` with people is over the pairs with a majority among
    people; a tie of the judge counts 1/2. `longer_agreement` is the same for a judge who always votes for the longer
    response.
    """
    read = [pair for pair in pairs if answers[pair.id].sides is not None]
    report: dict[str, Any] = {
        "pairs": len(pairs), "unreadable": len(pairs) - len(read), "prompts": len({_prompt(pair) for pair in pairs}),
    }  # fmt: skip
    mass = [answer["mass"] for pair in read for answer in answers[pair.id] if "mass" in answer]
    if mass:
        report["answer_mass"] = float(np.mean(mass))
    if not read:
        return report
    sides = np.array([answers[pair.id].sides for pair in read])
    chosen = np.where(sides > 0.5, 1.0, np.where(sides < 0.5, 0.0, 0.5))
    prompts = [_prompt(pair) for pair in read]
    first = clustered_proportion((chosen[:, 0] + 1 - chosen[:, 1]) / 2, prompts)
    report |= first.named("first")
    report["position_bias"] = abs(first.value - 0.5)
    report["position_bias_high"] = max(abs(first.low - 0.5), abs(first.high - 0.5))
    report |= clustered_proportion((chosen[:, 0] == chosen[:, 1]).astype(float), prompts).named("consistent")
    preferred = np.array([preference(answers[pair.id], rule) for pair in read], dtype=float)
    votes = np.array([vote(share) for share in preferred])
    report["votes"] = {label: int((votes == place).sum()) for place, label in enumerate(("a", "b", "tie"))}
    lead = np.array([len(words_of(pair.a)) - len(words_of(pair.b)) for pair in read])
    decisive = (lead != 0) & (votes < 2)
    if decisive.any():
        longer = ((lead > 0) == (votes == 0))[decisive].astype(float)
        report |= clustered_proportion(longer, [p for p, keep in zip(prompts, decisive, strict=True) if keep]).named(
            "longer"
        )
    return report | _with_people(read, preferred, lead)


def _with_people(read: Sequence[PairToJudge], preferred: Any, lead: Any) -> dict[str, Any]:
    """Return the agreement with people's majority; empty if no pair has one."""
    decided = [i for i, pair in enumerate(read) if pair.majority is not None]
    if not decided:
        return {}
    side = np.array([1.0 if read[i].majority == 0 else -1.0 for i in decided])
    clusters = [_prompt(read[i]) for i in decided]
    ours = preferred[decided] - 0.5

    def share(of: Any) -> Interval:
        return clustered_proportion((np.sign(of) * side + 1) / 2, clusters)

    report: dict[str, Any] = {"decided_by_people": len(decided), "interval_over": "prompts"}
    agreement = share(ours)
    people = sorted({name or "" for i in decided for name, _ in read[i].people})
    if "" not in people and len(people) > 1 and len(people) * len(decided) <= _MOST_CELLS:
        place = {name: column for column, name in enumerate(people)}
        table = np.full((len(decided), len(people)), np.nan)
        for row, i in enumerate(decided):
            for name, choice in read[i].people:
                table[row, place[name or ""]] = (1.0, -1.0, 0.0)[choice]
        agreement = crossed_agreement(table, ours, clusters)
        report |= {"interval_over": "prompts and people", "people": len(people)}
    return report | agreement.named("agreement") | share(lead[decided]).named("longer_agreement")


def _prompt(pair: PairToJudge) -> str:
    return canonical_json(pair.prompt)
