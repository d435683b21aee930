"""Agreement of a source's annotators: overall, and of each annotator with the others."""

import math
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from components.stats.annotator_votes import (
    NONE,
    Votes,
    annotator_agreement,
    fleiss_kappa,
    krippendorff_alpha,
    pairwise_agreement,
    plurality,
    raw_agreement,
)
from components.stats.dawid_skene import DawidSkene
from components.stats.intervals import Interval
from data_contracts.rows.ledger import Ledger

LEAST_COMMON = 20
"""Fewest rows that two annotators must both have voted on for their agreement to be reported."""
_ANSWERS = {0: "a", 1: "b", 2: "tie", NONE: "none"}


class AgreementReport(TypedDict):
    """The votes' part of `tether data check --json`; a value that is unknown (for example without votes) is None."""

    majority: dict[str, int] | None
    kappa: float | None
    kappa_interval: list[float] | None
    alpha: float | None
    alpha_interval: list[float] | None
    raw_agreement: float | None
    """Share of vote pairs on the same row that agree."""
    raw_agreement_interval: list[float] | None


class PairwiseRow(TypedDict):
    """Two named annotators, compared on the rows that both voted on."""

    annotators: list[str]
    rows: int
    agreement: float
    kappa: float | None
    """Cohen's kappa; None if both gave the same single answer to every row."""


class AnnotatorRow(TypedDict):
    """An entry of `annotators.json`: how often a named annotator agrees with the plurality of the others."""

    annotator: str
    votes: int
    compared: int
    """Number of the annotator's votes on rows that have other votes."""
    agreement: float | None
    interval: list[float] | None
    accuracy: NotRequired[float]
    """The Dawid-Skene estimate of the probability of naming the true label, if labels come from that model."""


@dataclass
class Agreement:
    """Agreement over the votes of all readable rows, including quarantined ones; values are None without votes."""

    kappa: Interval | None = None
    """Fleiss' kappa, with each pair counted in both orders. The order of responses is arbitrary, and with the winner
    always first, chance agreement would be overestimated."""
    alpha: Interval | None = None
    """Krippendorff's alpha, also with each pair counted in both orders."""
    raw: Interval | None = None
    """Share of vote pairs on a row that agree, averaged over rows."""
    majority: dict[str, int] | None = None
    """Number of rows by most frequent answer: `a` is the first response (the chosen one if the format has no order),
    and `none` means a tie for the most votes."""

    def as_json(self) -> AgreementReport:
        """Return its part of `tether data check --json`."""
        kappa, alpha, raw = self.kappa, self.alpha, self.raw
        return {
            "majority": self.majority, "kappa": kappa and kappa.value, "kappa_interval": kappa and kappa.ends,
            "alpha": alpha and alpha.value, "alpha_interval": alpha and alpha.ends,
            "raw_agreement": raw and raw.value, "raw_agreement_interval": raw and raw.ends,
        }  # fmt: skip


def agreement_of(facts: Any) -> Agreement:
    """Return the agreement in a ledger's facts (n,); intervals are clustered by prompt."""
    facts = facts[np.flatnonzero(facts["voted"])]
    counts, clusters = facts["ballot"], facts["prompt"]
    if not counts.any():
        return Agreement()
    kappa, alpha = (
        interval if math.isfinite((interval := statistic(counts, clusters, symmetric=True)).value) else None
        for statistic in (fleiss_kappa, krippendorff_alpha)
    )
    labels = plurality(counts)
    raw = raw_agreement(counts, clusters)
    return Agreement(kappa, alpha, raw, {answer: int((labels == label).sum()) for label, answer in _ANSWERS.items()})


def annotator_table(ledger: Ledger, competence: DawidSkene | None) -> list[AnnotatorRow]:
    """Return one row for each named annotator."""
    item, annotator, label = ledger.votes.T
    agreement = annotator_agreement(Votes(item, annotator, label, items=len(ledger.facts)))
    rows: list[AnnotatorRow] = []
    for name, i in ledger.annotators.items():
        share = float(agreement.share[i]) if agreement.compared[i] else None
        interval = None if share is None else [float(agreement.low[i]), float(agreement.high[i])]
        rows.append(
            {"annotator": name, "votes": int(agreement.votes[i]), "compared": int(agreement.compared[i]),
             "agreement": share, "interval": interval}
        )  # fmt: skip
        if competence is not None:
            rows[-1]["accuracy"] = float(competence.accuracy[i])
    return rows


def pairwise_table(ledger: Ledger) -> list[PairwiseRow]:
    """Return a row for every two named annotators with at least `LEAST_COMMON` common rows, lowest agreement first."""
    item, annotator, label = ledger.votes.T
    agreement = pairwise_agreement(Votes(item, annotator, label, items=len(ledger.facts)), LEAST_COMMON)
    names = list(ledger.annotators)
    rows: list[PairwiseRow] = [
        {"annotators": [names[one], names[other]], "rows": int(n), "agreement": float(share),
         "kappa": float(kappa) if math.isfinite(kappa) else None}
        for one, other, n, share, kappa in zip(*agreement, strict=True)
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (row["agreement"], row["annotators"]))
