"""Print what a batch's page knows, in the terminal."""

import math
from typing import Any

from components.base.text import counted
from components.stats.intervals import Interval
from flows.review.batch_summary import BatchSummary
from flows.review.bound import EarlyBound


def as_text(found: BatchSummary, bound: EarlyBound | None) -> str:
    """Return the status as text."""
    lines = [
        f"Page: {found.progress.address or 'not served'}, {found.progress.text}",
        f"Agreement (Fleiss' kappa) on {counted(found.compared, 'item')}: {_interval(found.kappa)}",
    ]
    for each in found.raters:
        time = "-" if each.seconds is None else f"{each.seconds:.0f} s"
        lean = ", leans to a side" if each.leans else ""
        lines.append(
            f"  {each.number}. {each.name}: {each.answered} answered, {each.skipped} skipped, {each.late} too late, "
            f"{time} each, share of A {_interval(each.side_a)}{lean}"
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


def as_record(found: BatchSummary, bound: EarlyBound | None) -> dict[str, Any]:
    """Return the status as a JSON object."""
    return {
        "raters": [
            each._asdict() | {"side_a": None if each.side_a is None else each.side_a._asdict()} for each in found.raters
        ],
        "kappa": None if found.kappa is None else found.kappa.named("kappa"),
        "late": found.late,
        "undone": found.undone,
        "bound": None if bound is None else bound._asdict(),
    }


def _interval(found: Interval | None) -> str:
    if found is None:
        return "-"
    ends = f" ({found.low:.2f} to {found.high:.2f})" if math.isfinite(found.low) else ""
    return f"{found.value:.2f}{ends}"
