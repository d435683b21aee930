"""A run's end for people: the stages with their main numbers, the gates with value, rule and verdict."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.gates import GATES

Status = Mapping[str, Any]

MAIN_METRICS = {
    "validate": ("data/pairs", "data/quarantined", "data/annotator_agreement"),
    "sft": ("sft/loss", "sft/perplexity", "sft/gold", "sft/violations"),
    "reward": ("reward/accuracy", "reward/accuracy_low", "reward/ece", "reward/test_pairs"),
    "ppo": ("ppo/proxy_reward", "ppo/kl", "ppo/kl_per_token", "ppo/gold", "ppo/violations"),
    "human_eval": ("human_eval/win_rate", "human_eval/win_rate_low", "human_eval/fleiss_kappa"),
}
"""What the compact table shows; the rest is in the run's `report.md` and in MLflow."""

SIMULATED = "Votes, judges, gold scores and violations are the built-in task's: all of them are simulated."

_STYLES = {
    "failed": "red", "gate_failed": "red", "interrupted": "yellow", "waived": "yellow", "awaiting_labels": "yellow",
    "running": "cyan", "passed": "green", "cached": "green", "not_run": "dim",
}  # fmt: skip
_OUTCOMES = {"FAIL": "red", "WARN": "yellow", "WAIVED": "yellow", "PASS": "green", "OFF": "dim"}


def print_run(console: Console, status: Status, simulated: bool) -> None:
    """Print `status` (as `load_status` gives it) in two tables; `simulated` says so below them."""
    console.print(_stage_table(status))
    gates = [gate for stage in status["stages"] for gate in stage["gates"]]
    if gates:
        console.print(_gate_table(gates))
    if simulated:
        console.print(SIMULATED, style="dim")
    console.print(f"run {status['run']}: ", Text(status["state"], _STYLES[status["state"]]), sep="", highlight=False)


def markdown(status: Status, simulated: bool) -> str:
    """`status` as the Markdown page that is kept with the run: every metric, every gate."""
    lines = [
        f"# Run {status['run']}: {status['state']}",
        "",
        f"Profile {status['profile']}, {status['seconds']:.1f} s.{' ' + SIMULATED if simulated else ''}",
        "",
        "| stage | state | seconds | cached | artifact |",
        "|---|---|---:|---|---|",
    ]
    for stage in status["stages"]:
        cells = (stage["name"], stage["state"], f"{stage['seconds']:.1f}", _cached(stage), f"`{stage['digest'] or ''}`")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Gates", "", "| gate | outcome | metric | value | rule |", "|---|---|---|---:|---|"]
    for gate in (gate for stage in status["stages"] for gate in stage["gates"]):
        cells = (gate["name"], outcome(gate), gate["metric"], number(gate["value"]), rule(gate))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Metrics", "", "| metric | value |", "|---|---:|"]
    for stage in status["stages"]:
        lines += [f"| {name} | {number(value)} |" for name, value in sorted(stage["metrics"].items())]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, status: Status, simulated: bool) -> Path:
    """Write `report.md` into the run's folder."""
    path = folder / "report.md"
    path.write_text(markdown(status, simulated), encoding="utf-8")
    return path


def outcome(gate: Mapping[str, Any]) -> str:
    """One word for a gate: PASS, FAIL, WARN, WAIVED or OFF."""
    if gate["threshold"] is None:
        return "OFF"
    if gate["passed"]:
        return "PASS"
    if gate["waived"]:
        return "WAIVED"
    return "WARN" if GATES[gate["name"]].warn_only else "FAIL"


def rule(gate: Mapping[str, Any]) -> str:
    """A gate's rule in words, `<= 0.05`."""
    threshold = gate["threshold"]
    if threshold is None:
        return "off"
    if isinstance(threshold, Sequence):
        return f"{number(threshold[0])} to {number(threshold[1])}"
    return f"{gate['op']} {number(threshold)}"


def number(value: float | None) -> str:
    """A metric in four digits; `none` where there is none."""
    if value is None:
        return "none"
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def _stage_table(status: Status) -> Table:
    table = Table(
        title=f"{status['profile']}, {status['seconds']:.0f} s", title_justify="left", pad_edge=False, box=None
    )
    for name in ("stage", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("cached", no_wrap=True)
    table.add_column("main metrics", overflow="fold")
    for stage in status["stages"]:
        shown = MAIN_METRICS.get(stage["name"], ())
        metrics = "  ".join(
            f"{n.partition('/')[2]} {number(stage['metrics'][n])}" for n in shown if n in stage["metrics"]
        )
        state = Text(stage["state"], _STYLES[stage["state"]])
        table.add_row(stage["name"], state, f"{stage['seconds']:.1f}", _cached(stage), metrics)
    return table


def _gate_table(gates: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(pad_edge=False, box=None)
    table.add_column("gate", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("", no_wrap=True)
    for gate in gates:
        word = outcome(gate)
        table.add_row(gate["name"], number(gate["value"]), rule(gate), Text(word, _OUTCOMES[word]))
    return table


def _cached(stage: Mapping[str, Any]) -> str:
    return "yes" if stage["cached"] else "no" if stage["digest"] else ""
