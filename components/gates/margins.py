"""The distance of a gate's value from its bound, as a number to sort by and in words."""

from collections.abc import Mapping
from typing import NamedTuple

from components.gates.gate_text import number, outcome
from components.gates.judging import Verdict
from components.gates.table import GATES

Range = tuple[float, float]


class Margin(NamedTuple):
    """The distance of a gate's value from its bound."""

    slack: float | None
    """Distance from the bound divided by the larger of value and bound, or by the range's width (`between`): below 0 if
    the gate fails, 0 at the bound, None if there is nothing to compare."""
    text: str
    """The same in words: `43 % above the bound`."""


def margin(verdict: Verdict, metrics: Mapping[str, float | None]) -> Margin:
    """Return the margin of one gate. If a second bound also lets it pass, the wider margin counts.

    Args:
        verdict: the gate's verdict.
        metrics: the stage's final metrics, since some gates judge both ends of an interval.
    """
    value, threshold = verdict.value, verdict.threshold
    if threshold is None:
        return Margin(None, "")
    if value is None:
        return Margin(None, "not measured")
    ends = _ends(verdict, value, metrics)
    margins = [_of(verdict.op, ends, bound) for bound in (threshold, verdict.within) if bound is not None]
    return max(margins, key=lambda candidate: candidate.slack or 0.0)


def _ends(verdict: Verdict, value: float, metrics: Mapping[str, float | None]) -> Range:
    """Return the lowest and the highest number that is judged: the value, or the ends of its interval."""
    gate = GATES.get(verdict.name)
    if gate is None or gate.interval != "both":
        return value, value
    low, high = (metrics.get(f"{verdict.metric}{end}") for end in ("_low", "_high"))
    return (value if low is None else low), (value if high is None else high)


def _of(op: str, ends: Range, bound: float | Range) -> Margin:
    if isinstance(bound, tuple):
        low, high = bound
        width = high - low or 1.0
        slack = min(ends[0] - low, high - ends[1]) / width
        if not slack:
            return Margin(0.0, "at the end of the range")
        return Margin(slack, f"{'inside' if slack > 0 else 'outside'} the range by {_share(abs(slack))} of its width")
    value = ends[0]
    room = -abs(value - bound) if op == "==" else bound - value if op == "<=" else value - bound
    if not room:
        return Margin(0.0, "at the bound")
    side = "above" if value > bound else "below"
    return Margin(room / max(abs(value), abs(bound)), f"{_apart(value, bound)} {side} the bound")


def _apart(value: float, bound: float) -> str:
    """Describe how far apart two numbers are: as a share of the bound, or as a difference if the bound is near 0."""
    share = abs(value - bound) / abs(bound) if bound else 0.0
    return _share(share) if 0 < share <= 2 else number(abs(value - bound))


def _share(share: float) -> str:
    return "under 1 %" if share < 0.01 else f"{share:.0%}".replace("%", " %")


_WORST_FIRST = ("FAIL", "WAIVED", "SKIPPED", "WARN", "PASS", "OFF")


def tightness(verdict: Verdict, distance: Margin) -> tuple[int, bool, float]:
    """Return the key by which gates are sorted: failed ones first, then the tightest.

    A gate that passes exactly at its bound comes last: such gates count things that must all be there, or must not
    occur at all.
    """
    slack = -1.0 if distance.slack is None else distance.slack
    return _WORST_FIRST.index(outcome(verdict)), verdict.passed and not slack, slack
