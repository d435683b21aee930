"""What the votes of a source say of its annotators: how far they agree, and each with the others."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.dawid_skene import DawidSkene
from components.stats import Interval
from components.votes import (
    NONE,
    Votes,
    annotator_agreement,
    fleiss_kappa_interval,
    krippendorff_alpha,
    plurality,
)
from data_contracts.ledger import Ledger

_ANSWERS = {0: "a", 1: "b", 2: "equal", NONE: "none"}


@dataclass
class Agreement:
    """What the votes of all readable rows say, those of quarantined rows too; None without votes."""

    kappa: Interval | None
    """Fleiss', each pair in both orders: which response stands first means nothing, and with the winner always first
    chance agreement would be overstated."""
    alpha: Interval | None
    """Krippendorff's, likewise."""
    majority: dict[str, int] | None
    """Rows by their most frequent answer (a is the response that stands first, chosen where there is no order); `none`
    where two are equally frequent."""

    def as_json(self) -> dict[str, Any]:
        """Its part of `tether data check --json`; what is unknown, as an interval over one prompt, is None."""
        out: dict[str, Any] = {"majority": self.majority}
        for name, found in (("kappa", self.kappa), ("alpha", self.alpha)):
            out |= {name: found and found.value, f"{name}_interval": found and found.ends}
        return out


def agreement_of(facts: NDArray[Any]) -> Agreement:
    """The agreement in a ledger's facts (n,); intervals are clustered by prompt."""
    facts = facts[facts["voted"]]
    # Rows kept out when they were read have no prompt's hash: each is a cluster of its own.
    return agreement_of_counts(facts["ballot"], np.where(facts["out"], facts["row"].astype(np.uint64), facts["prompt"]))


def agreement_of_counts(counts: NDArray[Any], clusters: NDArray[Any]) -> Agreement:
    """The agreement in counts (I, 3) of votes for the first, the second and neither; `clusters` (I,)."""
    if not counts.any():
        return Agreement(None, None, None)
    kappa, alpha = (
        found if math.isfinite((found := statistic(counts, clusters.tolist(), symmetric=True)).value) else None
        for statistic in (fleiss_kappa_interval, krippendorff_alpha)
    )
    labels = plurality(counts)
    return Agreement(kappa, alpha, {answer: int((labels == label).sum()) for label, answer in _ANSWERS.items()})


def annotator_table(ledger: Ledger, competence: DawidSkene | None) -> list[dict[str, Any]]:
    """Each named annotator: votes, agreement with the plurality of the others' with its interval (None where there is
    nothing to compare), and, where the labels are Dawid and Skene's, `accuracy`, the probability of naming the true
    one."""
    item, annotator, label = ledger.votes.T
    found = annotator_agreement(Votes(item, annotator, label, items=len(ledger.facts)))
    rows = []
    for name, i in ledger.annotators.items():
        share = float(found.share[i]) if found.compared[i] else None
        rows.append(
            {"annotator": name, "votes": int(found.votes[i]), "compared": int(found.compared[i]),
             "agreement": share, "interval": None if share is None else [float(found.low[i]), float(found.high[i])]}
            | ({} if competence is None else {"accuracy": float(competence.accuracy[i])})
        )  # fmt: skip
    return rows
