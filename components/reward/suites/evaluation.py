"""Evaluate a reward model on suites of judged pairs; write the reports of the reward stage's model."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from components.base.errors import CheckFailed
from components.base.jsonl import write_json
from components.base.observe import Observe
from components.base.text import counted
from components.reward.suites.report import suite_report
from components.reward.suites.scorer import RewardScorer
from components.reward.suites.suite_formats import SUITES, SuitePairs, read_suite

FILE = "suites.json"
MOST_SUBSETS = 40
"""Number of a suite's largest subsets that get metrics. The artifact has all subsets."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def on_suite(scorer: RewardScorer, suite: SuitePairs) -> dict[str, Any]:
    """Return a report on a suite: its `shape`, `ties_left_out`, the number of `cut` pairs, and that of `suite_report`.

    Raises:
        CheckFailed: a score is not finite.
    """
    chosen, rejected = (scorer.score([getattr(pair, side) for pair in suite.pairs]) for side in ("chosen", "rejected"))
    scores = np.stack([chosen.scores.double().numpy(), rejected.scores.double().numpy()])
    if not np.isfinite(scores).all():
        raise CheckFailed("some scores of the suite are NaN or infinite: the model is damaged.")
    report = suite_report(
        scores, np.array([chosen.tokens, rejected.tokens]), [pair.subset for pair in suite.pairs],
        [pair.cluster for pair in suite.pairs], scorer.temperature,
    )  # fmt: skip
    cut = int(np.logical_or(chosen.cut, rejected.cut).sum())
    return {"shape": suite.shape, "ties_left_out": suite.ties, "cut": cut, **report}


def suite_metrics(inputs: Mapping[str, Path], scorer: RewardScorer, out: Path, observe: Observe) -> dict[str, float]:
    """Evaluate the suites among a reward stage's `inputs`; write `suites.json`, and return the metrics.

    The file is written to `out/artifact` and, for MLflow, to `out/attachments`. Without suites nothing is written.

    Returns:
        `reward/suite_NAME` (accuracy) and of each subset `reward/suite_NAME/SUBSET`, each with `_low` and `_high`;
        `reward/suite_accuracy_low`, the lowest lower end of a whole suite; 0 if one is unknown.
    """
    named = {name.partition("/")[2]: path for name, path in sorted(inputs.items()) if name.startswith(f"{SUITES}/")}
    if not named:
        return {}
    observe(0, {}, doing=f"evaluating on {counted(len(named), 'suite')}")
    reports = {name: on_suite(scorer, read_suite(path)) for name, path in named.items()}
    for folder in ("artifact", "attachments"):
        (out / folder).mkdir(exist_ok=True)
        write_json(out / folder / FILE, reports)
    lows = [report["overall"]["accuracy_low"] or 0.0 for report in reports.values()]
    metrics = {"reward/suite_accuracy_low": min(lows)}
    for name, report in reports.items():
        metrics |= _accuracy(f"reward/suite_{name}", report["overall"])
        largest = sorted(report["subsets"].items(), key=lambda item: -item[1]["pairs"])
        if len(largest) > 1:
            for subset, numbers in largest[:MOST_SUBSETS]:
                metrics |= _accuracy(f"reward/suite_{name}/{_UNSAFE.sub('_', subset)[:60]}", numbers)
    return metrics


def _accuracy(name: str, numbers: Mapping[str, Any]) -> dict[str, float]:
    ends = {f"{name}{end}": numbers[f"accuracy{end}"] for end in ("", "_low", "_high")}
    return {key: float(value) for key, value in ends.items() if value is not None}
