"""Gates and metrics in words for people."""

from collections.abc import Sequence

from components.base.text import markdown as words
from components.gates.judging import Verdict
from components.gates.table import GATES


def outcome(verdict: Verdict) -> str:
    """Return one word: PASS, FAIL, WARN, WAIVED, SKIPPED or OFF."""
    if verdict.threshold is None:
        return "OFF"
    if verdict.passed:
        return "PASS"
    if verdict.waived:
        return "WAIVED"
    return "WARN" if verdict.warn_only else "SKIPPED" if verdict.skipped else "FAIL"


def markdown(verdicts: Sequence[Verdict]) -> str:
    """Return the gates as a Markdown table."""
    lines = ["| gate | outcome | metric | value | rule | what it asks |", "|---|---|---|---|---|---|"]
    for verdict in verdicts:
        why = f" Waived by {verdict.user}: {verdict.reason}" if verdict.waived else ""
        about, name, metric = words(verdict.description + why), words(verdict.name), words(verdict.metric)
        cells = (name, outcome(verdict), metric, number(verdict.value), rule(verdict), about)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rule(verdict: Verdict) -> str:
    """Return a gate's rule, `<= 0.05`, with its second bound if it has one: `<= 0.05 or within 0.173`.

    A gate that judges both ends of an interval says so, since the value that is shown may lie within.
    """
    threshold = verdict.threshold
    if threshold is None:
        off = f"off: {verdict.reason}" if verdict.reason else "off"
        return off if verdict.within is None else "too few pairs to judge"
    first = _ends(threshold) if isinstance(threshold, tuple) else f"{verdict.op} {number(threshold)}"
    if verdict.name in GATES and GATES[verdict.name].interval == "both":
        first = f"interval within {first}"
    return first if verdict.within is None else f"{first} or within {_ends(verdict.within)}"


def _ends(bound: float | tuple[float, float]) -> str:
    return " to ".join(map(number, bound if isinstance(bound, tuple) else (bound,)))


def number(value: float | None) -> str:
    """Format a metric for people: four significant digits, or all digits of an integer below a billion; thousands are
    separated (`14,000`); `none` if there is no value."""
    if value is None:
        return "none"
    if (float(value).is_integer() or abs(value) >= 999.95) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"
