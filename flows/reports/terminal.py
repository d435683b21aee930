"""Print the end of a run: its stages with their main metrics, and its gates with value, rule and verdict."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pydantic import JsonValue
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from components.base.nested import group
from components.base.text import counted, line
from components.base.text import markdown as words
from components.data.support_desk.task import SIMULATED
from components.gates.gate_text import number, outcome, rule
from components.gates.table import OF_SOURCE, brief_metrics
from flows.reports.report_links import Link
from flows.reports.verdict import RunVerdict
from tasks.execution.stage_progress import cell
from tasks.runs.status import RunStatus, StageStatus

STYLES = {
    "failed": "red", "gate_failed": "red", "interrupted": "yellow", "waived": "yellow", "awaiting_labels": "yellow",
    "running": "cyan", "passed": "green", "cached": "green", "skipped": "yellow", "not_run": "dim",
}  # fmt: skip
SIMULATED_DATA = "Votes, gold scores and violations come from the built-in task and are simulated. People judge."
NAMED = 8
"""The largest number of gates that the line of gates that are off names."""
_OUTCOMES = {"FAIL": "red", "WARN": "yellow", "WAIVED": "yellow", "SKIPPED": "yellow", "PASS": "green", "OFF": "dim"}


def simulated_note(config: Mapping[str, JsonValue]) -> str:
    """Return the sentence on what is simulated in a run of `config`: generated data, and judges unless people judge;
    empty if nothing is."""
    if group(config, "data").get("preferences", "") is not None:
        return ""
    return SIMULATED_DATA if group(config, "human_eval").get("judges") == "people" else SIMULATED


def model_votes_note(metrics: Mapping[str, float | None]) -> str:
    """Return the sentence on preferences that models voted on, from the metrics of `validate`; empty if people cast all
    votes.

    The metric exists only if models voted.
    """
    share, alone = metrics.get("data/model_votes"), metrics.get("data/model_pairs")
    if not share:
        return ""
    of = f"data/model_votes{OF_SOURCE}"
    names = ", ".join(sorted(name.removeprefix(of) for name in metrics if name.startswith(of)))
    only_models = f"; on {alone:.0%} of the pairs no person voted" if alone else ""
    return f"Models ({names}) cast {share:.0%} of the votes on the preference pairs{only_models}."


def model_votes_of(status: RunStatus) -> str:
    """Return the sentence of `model_votes_note` for a run's data."""
    return next((model_votes_note(stage.metrics) for stage in status.stages if stage.name == "validate"), "")


def print_run(console: Console, status: RunStatus, simulated: str = "", watched: Sequence[str] = ()) -> None:
    """Print `status` in two tables, then the lines of `watched` (PPO's alarms and KL) and the sentence `simulated`.

    Gates that are off share one line.
    """
    console.print(_stage_table(status))
    gates = [gate for stage in status.stages for gate in stage.gates]
    off = [gate.name for gate in gates if outcome(gate) == "OFF"]
    if judged_gates := [gate for gate in gates if gate.name not in off]:
        table = Table(*_columns("gate", "value", "rule", ""), pad_edge=False, box=None)
        for gate in judged_gates:
            word = outcome(gate)
            by = f" by {gate.user}" if gate.waived and gate.user else ""
            table.add_row(cell(gate.name), number(gate.value), cell(rule(gate)), cell(f"{word}{by}", _OUTCOMES[word]))
        console.print(table)
    if off:
        console.print(cell(_off(off), "dim"), highlight=False)
    for text in watched:
        console.print(cell(text), highlight=False)
    if simulated:
        console.print(simulated, style="dim")
    if voted := model_votes_of(status):
        console.print(cell(voted, "yellow"), highlight=False)
    if status.user:
        console.print(cell(f"Started by {status.user}.", "dim"), highlight=False)
    if until := ends_after(status):
        console.print(cell(until, "dim"), highlight=False)
    console.print(cell(f"run {status.run}:"), cell(status.state, STYLES[status.state]), highlight=False)


def markdown(status: RunStatus, simulated: str = "", links: Mapping[str, Sequence[Link]] = MappingProxyType({})) -> str:
    """Return `status` as the Markdown page that is stored with the run: every metric and gate. `links` is as in
    `RunFacts`, `simulated` as in `simulated_note`."""
    linked, priced = any(links.values()), status.cost is not None
    lines = [
        f"# Run {words(status.run)}: {status.state}",
        "",
        ", ".join([*map(words, _called(status)), f"profile {words(status.profile)}", f"{status.seconds:.1f} s"])
        + f"{', ' + cost(status, status.currency) if priced else ''}"
        f"{', started by ' + words(status.user) if status.user else ''}.{' ' + simulated if simulated else ''}"
        + f"{' ' + words(voted) if (voted := model_votes_of(status)) else ''}"
        + f"{' ' + words(ends_after(status)) if status.until else ''}",
        "",
        *([f"This run: {_pages(links[''])}", ""] if links.get("") else []),
        f"| stage | state |{' pages |' if linked else ''} seconds |{' cost |' if priced else ''} cached | artifact |",
        f"|---|---|{'---|' if linked else ''}---:|{'---:|' if priced else ''}---|---|",
    ]
    for stage in status.stages:
        pages = f" {_pages(links.get(stage.name, []))} |" if linked else ""
        paid = f" {cost(stage, status.currency)} |" if priced else ""
        made = f"{stage.seconds:.1f} |{paid} {_cached(stage)} | `{stage.digest or ''}`"
        by = words(by_another(stage, status))
        lines.append(f"| {words(status.title(stage.name))} | {stage.state}{by and f' {by}'} |{pages} {made} |")
    lines += ["", "## Gates", "", "| gate | outcome | metric | value | rule |", "|---|---|---|---:|---|"]
    for gate in (gate for stage in status.stages for gate in stage.gates):
        by = f" by {words(gate.user)}: {words(gate.reason or '')}" if gate.waived and gate.user else ""
        named = f"| {words(gate.name)} | {outcome(gate)}{by} | {words(gate.metric)} |"
        lines.append(f"{named} {number(gate.value)} | {rule(gate)} |")
    lines += ["", "## Metrics", "", "| metric | value |", "|---|---:|"]
    for stage in status.stages:
        lines += [f"| {words(name)} | {number(value)} |" for name, value in sorted(stage.metrics.items())]
    return "\n".join(lines) + "\n"


def ends_after(status: RunStatus) -> str:
    """Return the sentence on stages that did not run because of `--until`; empty if it was not given."""
    if not status.until:
        return ""
    names = [stage.name for stage in status.stages]
    later = names[names.index(status.until) + 1 :] if status.until in names else []
    return f"The run was asked to end after {status.until}; not run: {', '.join(later)}."


def _pages(links: Sequence[Link]) -> str:
    return " · ".join(f"[{link.server}]({link.url})" for link in links)


def print_steps(console: Console, verdict: RunVerdict) -> None:
    """Print what to do next. Each command is on its own unbroken line, so that it can be copied."""
    for step in verdict.steps:
        console.print(Text(step.text.replace("`", "")))
        if step.command:
            console.print(Text(f"    {step.command}"), soft_wrap=True, style="bold")


def _stage_table(status: RunStatus) -> Table:
    priced = status.cost is not None
    paid = [cost(status, status.currency)] if priced else []
    title = cell(", ".join([*_called(status), status.profile, f"{status.seconds:.0f} s", *paid]))
    names = ("stage", "state", "seconds", *(["cost"] if priced else []), "cached")
    columns = (*_columns(*names), Column("main metrics", overflow="fold"))
    table = Table(*columns, title=title, title_justify="left", pad_edge=False, box=None)
    for stage in status.stages:
        main = brief_metrics(stage.name, stage.metrics)
        metrics = Text("  ".join(f"{line(name.partition('/')[2])} {number(stage.metrics[name])}" for name in main))
        state = cell(f"{stage.state}{by_another(stage, status)}", STYLES[stage.state])
        paid = [cost(stage, status.currency)] if priced else []
        table.add_row(cell(status.title(stage.name)), state, f"{stage.seconds:.1f}", *paid, _cached(stage), metrics)
    return table


def by_another(stage: StageStatus, status: RunStatus) -> str:
    """Return who had a stage computed or scored, such as ` by ada`, if it was not the user who started the run."""
    return f" by {stage.user}" if stage.user and stage.user != status.user else ""


def price(amount: float | None, currency: str) -> str:
    """Return an amount of money as text, such as `0.42 USD`; empty for None."""
    if amount is None:
        return ""
    return f"{amount:,.2f} {currency}" if amount >= 0.01 or not amount else f"{amount:.2g} {currency}"


def cost(of: RunStatus | StageStatus, currency: str) -> str:
    """Return what a run or a stage cost and what its reused results saved, such as `0.42 USD, saved 1.10 USD`; empty if
    unknown."""
    saved = f"saved {price(of.saved, currency)}" if of.saved else ""
    return ", ".join(part for part in (price(of.cost, currency) if of.cost or not saved else "", saved) if part)


def _called(status: RunStatus) -> list[str]:
    return [part for part in (status.name, " ".join(status.label.written)) if part]


def _off(names: Sequence[str]) -> str:
    are, listed = counted(len(names), "gate is off", "gates are off"), ", ".join(names[:NAMED])
    if len(names) <= NAMED:
        return f"{are}: {listed}."
    return f"{are} (the report lists them): {listed} and {len(names) - NAMED} more."


def _columns(*names: str) -> list[Column]:
    """Return a table's columns. On a narrow terminal a gate's rule wraps, so that no outcome is cut off."""
    return [
        Column(name, no_wrap=name != "rule", justify="right" if name in ("seconds", "cost", "value") else "left")
        for name in names
    ]


def _cached(stage: StageStatus) -> str:
    return "yes" if stage.cached else "no" if stage.digest else ""
