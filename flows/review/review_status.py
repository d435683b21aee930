"""Print what a batch's page knows, in the terminal."""

import math
from typing import Any

from components.base.text import counted
from components.stats.intervals import Interval
from flows.review.batch_summary import BatchSummary
from flows.review.bound import EarlyBound


def as_text(summary: BatchSummary, bound: EarlyBound | None) -> str:
    """Return the status as text."""
    lines = [
        f"Page: {summary.progress.address or 'not served'}, {summary.progress.text}",
        f"Agreement (Fleiss' kappa) on {counted(summary.compared, 'item')}: {_interval(summary.kappa)}",
    ]
    for rater in summary.raters:
        time = "-" if rater.seconds is None else f"{rater.seconds:.0f} s"
        lean = ", leans to a side" if rater.leans else ""
        lines.append(
            f"  {rater.number}. {rater.name}: {rater.answered} answered, {rater.skipped} skipped, "
            f"{rater.late} too late, {time} each, share of A {_interval(rater.side_a)}{lean}"
        )
    if bound is not None:
        lines.append(
            f"Win rate of these raters above {bound.low:.3f}, of all people above {bound.low_of_people:.3f} (always "
            f"valid, {1 - bound.alpha:.1%} one-sided), on the first {bound.items} of {bound.items_asked} items"
        )
        if bound.low_of_people > 0.5:
            lines.append("People prefer the policy to SFT: you may stop here.")
        elif bound.low > 0.5:
            lines.append("These raters prefer the policy to SFT; others may not: continue, or ask more people.")
    return "\n".join(lines)


def as_record(summary: BatchSummary, bound: EarlyBound | None) -> dict[str, Any]:
    """Return the status as a JSON object."""
    return {
        "raters": [
            rater._asdict() | {"side_a": rater.side_a and rater.side_a._asdict()} for rater in summary.raters
        ],
        "kappa": None if summary.kappa is None else summary.kappa.named("kappa"),
        "late": summary.late,
        "undone": summary.undone,
        "bound": None if bound is None else bound._asdict(),
    }


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    ends = f" ({interval.low:.2f} to {interval.high:.2f})" if math.isfinite(interval.low) else ""
    return f"{interval.value:.2f}{ends}"
