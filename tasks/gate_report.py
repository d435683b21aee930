"""A stage's gates as a table for people."""

from collections.abc import Sequence

from components.gates import Verdict


def outcome(verdict: Verdict) -> str:
    """One word: PASS, FAIL, WARN, WAIVED or OFF."""
    if verdict.threshold is None:
        return "OFF"
    if verdict.passed:
        return "PASS"
    if verdict.waived:
        return "WAIVED"
    return "WARN" if verdict.warn_only else "FAIL"


def markdown(verdicts: Sequence[Verdict]) -> str:
    """The gates as a Markdown table."""
    lines = ["| gate | outcome | metric | value | rule | what it asks |", "|---|---|---|---|---|---|"]
    for verdict in verdicts:
        value = "none" if verdict.value is None else f"{verdict.value:.6g}"
        rule = "off" if verdict.threshold is None else _rule(verdict.op, verdict.threshold)
        why = f" Waived by {verdict.user}: {verdict.reason}" if verdict.waived else ""
        cells = (verdict.name, outcome(verdict), verdict.metric, value, rule, verdict.description + why)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _rule(op: str, threshold: float | tuple[float, float]) -> str:
    if isinstance(threshold, tuple):
        return f"{threshold[0]:.6g} to {threshold[1]:.6g}"
    return f"{op} {threshold:.6g}"
