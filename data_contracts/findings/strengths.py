"""Strengths of the models that votes compare: Bradley-Terry with Davidson's ties (`components.stats.paired`)."""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from components.stats.intervals import Interval
from components.stats.paired import Inseparable, PairedScore, strengths
from data_contracts.rows.ledger import Ledger

DRAWS = 200
"""Number of bootstrap resamples for an interval."""


class ModelRow(TypedDict):
    """A model whose responses were compared in votes."""

    model: str
    votes: int
    """Number of votes in which it was compared."""
    strength: float | None
    """Strength in logits, relative to the model with most votes; None if the votes do not determine it."""
    interval: list[float] | None


def model_table(ledger: Ledger, seed: int) -> tuple[list[ModelRow], str | None]:
    """Return a row for each model in readable rows with votes, the strongest first, and the reason if strengths can't
    be estimated. A row with a label but no votes counts as one vote."""
    if not ledger.models:
        return [], None
    names = list(ledger.models)
    index, one, other = ledger.compared.T
    ballots = _ballots(ledger.facts[index])
    counts = np.zeros(len(names), np.int64)
    np.add.at(counts, one, ballots.sum(axis=1))
    np.add.at(counts, other, ballots.sum(axis=1))
    why: str | None = None
    votes: list[PairedScore] = []
    prompts: list[int] = []
    for a, b, prompt, ballot in zip(one.tolist(), other.tolist(), ledger.facts["prompt"][index].tolist(),
                                    ballots.tolist(), strict=True):  # fmt: skip
        for score, times in zip((1.0, 0.0, 0.5), ballot, strict=True):
            votes += [PairedScore(a, b, score)] * times
            prompts += [prompt] * times
    if not votes:
        return [], None
    estimates: Sequence[Interval | None] = [None] * len(names)
    try:
        baseline = int(counts.argmax())
        estimates = strengths(votes, len(names), prompts, baseline=baseline, draws=DRAWS, seed=seed).strength
    except Inseparable as error:
        sides = " against ".join(_named(names, side) for side in (error.better, error.worse) if side)
        why = f"{error}{sides and f' ({sides})'}"
    rows = [
        ModelRow(model=name, votes=int(n), strength=estimate and estimate.value, interval=estimate and estimate.ends)
        for name, n, estimate in zip(names, counts, estimates, strict=True)
    ]
    return sorted(rows, key=lambda row: (-(row["strength"] or 0.0), -row["votes"] if why else 0)), why


def _ballots(facts: Any) -> NDArray[np.int64]:
    ballots: NDArray[np.int64] = facts["ballot"].astype(np.int64)
    alone, first = ~facts["voted"], facts["first_wins"]
    ballots[alone & (first == 1), 0] = 1
    ballots[alone & (first == 0), 1] = 1
    return ballots


def _named(names: Sequence[str], which: Sequence[int]) -> str:
    first = [names[i] for i in which[:5]]
    return ", ".join(first) + (f" and {len(which) - 5} more" if len(which) > 5 else "")
