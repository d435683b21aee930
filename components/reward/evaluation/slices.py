"""Calibration by slice: a model can be calibrated on average and wrong on long answers. Needs numpy and scipy only.

A slice is judged if it does not depend on the label: by length, by whether a response is cut, by source, by category,
or by which response the model prefers. Which response was chosen, and how clear the vote was, depend on the label; on
such a slice even a perfect model is miscalibrated. (If the longer response wins with probability 0.6, that model is
right on all pairs whose longer response was chosen, and on none of the others.) Such slices are reported but not
judged; for the length of the winner there is `balanced_length_accuracy`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from components.reward.evaluation.length import balanced_length_accuracy, length_partial_correlation
from components.reward.training_pairs import PreferencePair
from components.stats.calibration.calibration_metrics import ConfidenceBin, calibration, correctness, equal_mass_bins
from components.stats.calibration.nulls import Judgements, cells_of, ece_nulls
from components.stats.intervals import FloatArray, Numbers, cluster_codes

BoolArray = NDArray[np.bool_]

SMALLEST, FEWEST_PROMPTS = 100, 5
"""The fewest pairs and prompts of a slice that is reported. With 100 pairs an accuracy is known to about +-0.09."""
BINS = 5
"""Number of equal-mass bins of a slice's ECE; each has at least 20 pairs."""
DRAWS = 500
"""Draws for a slice's own intervals and nulls. The joint null, by which a gate judges, uses more."""
LENGTHS, GAPS = 4, 3
"""Number of slices by the length of the longer response, and by the difference of lengths."""
MOST_NAMES = 20
"""Number of most frequent sources or categories with a slice of their own; the rest form one slice."""
CLEAR = 0.75
"""A vote that is not unanimous is clear from this share of votes for the chosen response on, and narrow below it."""


_TOO_SMALL = f"fewer than {SMALLEST} pairs or {FEWEST_PROMPTS} prompts"
_AFTER_LABEL = "known only with the label"
_OF_ALL = ("level", "temperature", "temperature_at_end")
"""Names of `calibration`'s numbers that are the same in every slice."""


@dataclass
class Slice:
    """A subset of the test pairs, and what is measured on it."""

    kind: str
    name: str
    inside: BoolArray
    """(n,) whether a pair is in the slice."""
    after_label: bool = False
    """Whether membership depends on the label; such a slice is not judged."""
    prompts: int = 0
    """Number of prompts; filled by `slice_report`, as are the measurements."""
    numbers: Numbers = field(default_factory=dict)
    """Empty if the slice is too small. Else the numbers of `calibration` (`calibration_slope` is None if infinite), the
    mean `confidence`, and for a judged slice `ece_null_joint`: quantiles of the slices' nulls such that, by chance, any
    slice exceeds its own in 5 % of runs."""
    bins: dict[str, list[ConfidenceBin]] = field(default_factory=dict)

    @property
    def why_not(self) -> str | None:
        """Return why the gates do not judge it; None if they do."""
        if self.inside.sum() < SMALLEST or self.prompts < FEWEST_PROMPTS:
            return _TOO_SMALL
        return _AFTER_LABEL if self.after_label else None

    def document(self) -> dict[str, object]:
        """Return the slice as one JSON object."""
        about = {"kind": self.kind, "slice": self.name, "pairs": int(self.inside.sum()), "prompts": self.prompts}
        by_gates = {"why_not": self.why_not, "judged": self.why_not is None}
        return {**about, **by_gates, **self.numbers, **self.bins}


class ScoredPairs(NamedTuple):
    """The data from which slices are made, for n test pairs; the chosen responses come first."""

    rows: Sequence[PreferencePair]
    tokens: NDArray[np.int64]
    """(2, n) number of tokens of the responses as they are scored."""
    scores: FloatArray
    """(2, n) raw scores."""


class SliceReport(NamedTuple):
    """The result of `slice_report`."""

    slices: list[Slice]
    numbers: Numbers

    def document(self) -> dict[str, object]:
        """Return the report as one JSON object."""
        return {"slices": [part.document() for part in self.slices], **self.numbers}


def slices_of(pairs: ScoredPairs) -> list[Slice]:
    """Return every slice that has a pair, grouped by kind."""
    tokens, rows = pairs.tokens, pairs.rows
    prefers_longer = np.sign(pairs.scores[0] - pairs.scores[1]) * np.sign(tokens[0] - tokens[1])
    shares = np.array([(row["votes_chosen"] or 0) / votes if (votes := row.get("votes")) else np.nan for row in rows])
    gaps = character_gaps(rows)
    cut = np.array([row.get("overlong", False) for row in rows])
    slices = [
        *_by_quantile("length", tokens.max(axis=0), LENGTHS),
        *_by_quantile("length difference", np.abs(tokens[0] - tokens[1]), GAPS),
        Slice("model prefers", "the longer", prefers_longer > 0),
        Slice("model prefers", "the shorter", prefers_longer < 0),
        *(
            [Slice("response cap", "within", ~cut), Slice("response cap", "a response is cut", cut)]
            if cut.any()
            else []
        ),
        *_by_name("source", [row.get("source") for row in rows]),
        *_by_name("category", [row.get("category") for row in rows]),
        Slice("chosen is", "the longer", gaps > 0, after_label=True),
        Slice("chosen is", "the shorter", gaps < 0, after_label=True),
        Slice("vote", "unanimous", shares == 1, after_label=True),
        Slice("vote", "clear", (shares >= CLEAR) & (shares < 1), after_label=True),
        Slice("vote", "narrow", shares < CLEAR, after_label=True),
    ]
    return [part for part in slices if part.inside.any()]


def character_gaps(rows: Sequence[PreferencePair]) -> NDArray[np.int64]:
    """Return (n,) length(chosen) - length(rejected) in characters, the input of the length-only rule."""
    return np.fromiter((len(row["chosen"]) - len(row["rejected"]) for row in rows), np.int64, len(rows))


def slice_report(
    pairs: ScoredPairs, clusters: Sequence[Hashable], temperature: float, seed: int, draws: int = 2000,
    judgements: Judgements | None = None,
) -> SliceReport:  # fmt: skip
    """Measure each slice after temperature, the worst slice, and the influence of length.

    Numbers: `slices_judged`; `slice_accuracy_low`, the lowest lower end of a slice's accuracy. That every slice is
    above a threshold is judged by it at the level of a single interval, without a correction for several slices (an
    intersection-union test, Berger 1982, Technometrics 24:295). `slice_ece_excess`, the largest `ece - ece_null_joint`;
    `accuracy_chosen_longer`, `accuracy_chosen_shorter`, `balanced_length_accuracy` and `length_partial_correlation`,
    each with `_low` and `_high`.
    """
    codes = cluster_codes(clusters)
    d = pairs.scores[0] - pairs.scores[1]
    confidence, right = expit(np.abs(d) / temperature), correctness(d)
    judgements = judgements or Judgements.alone(codes)
    slices = slices_of(pairs)
    for part in slices:
        part.prompts = int(np.unique(codes[part.inside]).size)
    measured = [part for part in slices if part.why_not != _TOO_SMALL]
    for part in measured:
        inside = part.inside
        calibrated = calibration(
            d[inside], codes[inside].tolist(), temperature, seed, BINS, DRAWS, judgements.inside(inside)
        )
        part.numbers = {name: value for name, value in calibrated.numbers.items() if name not in _OF_ALL}
        part.numbers["confidence"] = float(confidence[inside].mean())
        if calibrated.numbers["slope_capped"] or not np.isfinite(_known(calibrated.numbers, "calibration_slope")):
            part.numbers["calibration_slope"] = None
        part.bins = calibrated.bins
    gated = [part for part in measured if part.why_not is None]
    if measured:
        members = [part.inside for part in measured]
        cells = cells_of(members, [equal_mass_bins(confidence[inside], BINS) for inside in members], BINS)
        sizes = np.array([inside.sum() for inside in members])
        null = ece_nulls(d / temperature, judgements, cells, sizes, seed, draws)
        for part, above in zip(measured, null.quantile(0.95), strict=True):
            part.numbers["ece_null_95"] = float(above)
        if gated:
            joint = null.joint_quantile([part.why_not is None for part in measured])
            for part, above in zip(gated, joint, strict=True):
                part.numbers["ece_null_joint"] = float(above)
    lows = [_known(part.numbers, "accuracy_low") for part in gated]
    excesses = [_known(part.numbers, "ece") - _known(part.numbers, "ece_null_joint") for part in gated]
    worst: Numbers = {
        "slices_judged": len(gated),
        "slice_accuracy_low": min(lows, default=None),
        "slice_ece_excess": max(excesses, default=None),
    }
    return SliceReport(slices, worst | _length(pairs, right, codes))


def _known(numbers: Numbers, name: str) -> float:
    return float("nan") if (value := numbers[name]) is None else value


def _length(pairs: ScoredPairs, right: FloatArray, codes: NDArray[np.int64]) -> Numbers:
    by_side = balanced_length_accuracy(right, character_gaps(pairs.rows), codes)
    return {
        **by_side["chosen_longer"].named("accuracy_chosen_longer"),
        **by_side["chosen_shorter"].named("accuracy_chosen_shorter"),
        **by_side["balanced"].named("balanced_length_accuracy"),
        **length_partial_correlation(pairs.scores, pairs.tokens, codes).named("length_partial_correlation"),
    }


def _by_quantile(kind: str, values: NDArray[np.int64], parts: int) -> list[Slice]:
    """Return slices of about n / parts pairs by quantile; equal values are in the same slice."""
    cuts = np.quantile(values, np.arange(1, parts) / parts)
    part = np.searchsorted(cuts, values, side="left")
    names = {p: f"{values[part == p].min()} to {values[part == p].max()} tokens" for p in np.unique(part)}
    return [Slice(kind, name, part == p) for p, name in names.items()]


def _by_name(kind: str, names: Sequence[str | None]) -> list[Slice]:
    counts = {name: names.count(name) for name in set(names) if name is not None}
    often = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_NAMES]
    column = np.array([None if name is None else name if name in often else "all others" for name in names])
    return [Slice(kind, name, column == name) for name in dict.fromkeys([*often, "all others"])]
