"""Show a sweep's outcome: a table on the terminal, `sweep.json`, and a page with a chart and samples side by side."""

import base64
import json
import math
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from components.base.files import write_whole
from components.base.text import counted
from components.gates.gate_text import number
from components.keys.code_version import code_version
from components.stats.intervals import Interval
from flows.reports.page import styled, template
from flows.studies.sweep import KIND
from flows.studies.sweep_outcome import Group, Sweep
from tasks.execution.drawing import BLUE, GREY, ORANGE, PURPLE, RED, legend, new_figure, panel, plain, svg
from tasks.execution.stage_progress import cell, say

BRIEF = {
    "policy/kl": "KL", "policy/kl_per_token": "KL/token", "policy/gold_gain": "gold", "policy/judge_gain": "judge",
    "policy/reward_gain": "reward", "policy/response_tokens": "tokens", "policy/distinct_ratio": "diversity",
    "seconds": "s", "memory": "GB", "policy/repetition": "repetition",
}  # fmt: skip
"""Headings of the terminal's table by importance: it has those that fit, and the page has all."""
LONGEST = 24
"""Characters of a line of options or gates in that table."""


def write_outcome(home: Path, sweep: Sweep) -> Path:
    """Write `sweep.json` and `sweep.html` into the sweep's folder, and return the page's path."""
    folder = home / f"{KIND}s" / sweep.name
    write_whole(folder / "sweep.json", json.dumps(sweep.as_json(), indent=1, ensure_ascii=False))
    write_whole(folder / "sweep.html", page(sweep).encode("utf-8", "backslashreplace"))
    return folder / "sweep.html"


def page(sweep: Sweep) -> str:
    """Return the page of a sweep."""
    chart = draw(sweep)
    return template("sweep.html").render(
        sweep=sweep,
        chart=chart and f"data:image/svg+xml;base64,{base64.b64encode(chart).decode()}",
        ranged=ranged,
        failures=failures,
        notes=notes(sweep),
        command=lambda group: " ".join(["tether run", sweep.profile, *_set([*sweep.options, *group.options])]),
        written_by=code_version(),
        **styled(),
    )


def _set(options: list[str]) -> list[str]:
    return [f"--set {shlex.quote(option)}" for option in options]


def print_sweep(console: Console, sweep: Sweep) -> None:
    """Print a row for each group: the median over its seeds, with the lowest and the highest."""
    measures = [name for name in BRIEF if name in sweep.measures]
    rows = {name: [ranged(group.summary.get(name), "\n") for group in sweep.groups] for name in measures}
    options, failed = [group.name for group in sweep.groups], list(map(failures, sweep.groups))
    left = console.width - min(max(map(len, options)), LONGEST) - min(max(map(len, failed)), LONGEST) - 2
    table = Table(Column("options", overflow="fold", max_width=LONGEST), box=None, pad_edge=False, padding=(0, 1, 0, 0))
    fitting = list[str]()
    for name, texts in rows.items():
        width = max(len(line) for text in (BRIEF[name], *texts) for line in text.split("\n")) + 1
        if width <= left:
            left -= width
            fitting.append(name)
            table.add_column(BRIEF[name], justify="right", no_wrap=True)
    table.add_column("failed gates", overflow="fold", max_width=LONGEST)
    for place, name in enumerate(options):
        numbers = (rows[measure][place] for measure in fitting)
        table.add_row(cell(name), *numbers, cell(failed[place], "red"))
    console.print(table)
    for note in notes(sweep):
        say(console, note)



def ranged(interval: Interval | None, gap: str = " ") -> str:
    """Return a number with its interval, such as `2.31 (2.1 to 2.5)`; empty if there is no number."""
    if interval is None:
        return ""
    ends = interval.ends
    return _short(interval.value) + (f"{gap}({_short(ends[0])} to {_short(ends[1])})" if ends else "")


def _short(value: float) -> str:
    return number(float(f"{value:.3g}"))


def failures(group: Group) -> str:
    """Return the gates that stopped some of a group's cells, and how many."""
    return ", ".join(
        name if count == len(group.cells) else f"{name} ({count} of {len(group.cells)})"
        for name, count in group.failed_gates.items()
    )


def notes(sweep: Sweep) -> list[str]:
    """Return sentences on how to read the numbers, on the searches, on what is missing and on the cost."""
    several = any(len(group.cells) > 1 for group in sweep.groups)
    read = "Median of the seeds (lowest to highest; they enclose the median of all seeds with probability "
    sentences = [f"{read}{sweep.coverage:.2f})."] if several else []
    sentences += [f"{group.name}: {group.search}." for group in sweep.groups if group.search]
    if sweep.missing:
        sentences.append(
            f"{counted(sweep.missing, 'cell is', 'cells are')} missing, because the budget ended: "
            f"{'; '.join(f'{group.name} seed {seed}' for group in sweep.groups for seed in group.missing)}. "
            "The same command computes them."
        )
    sentences.append(f"Training the policies took {sweep.seconds:,.0f} s.")
    if sweep.sheet:
        sentences.append(f"Run {sweep.sheet} compares the policies on a blind sheet: `tether status {sweep.sheet}`.")
    return sentences


def draw(sweep: Sweep) -> bytes | None:
    """Draw the gains beside KL, a point for each cell with its intervals over prompts; None without any."""
    kl = next((name for name in ("policy/kl", "policy/kl_per_token") if name in sweep.measures), None)
    gains = [name for name in ("policy/gold_gain", "policy/judge_gain", "policy/reward_gain") if name in sweep.measures]
    if kl is None or not gains:
        return None
    figure = new_figure(0.6 + 2.3 * len(gains))
    axes = figure.subplots(len(gains), 1, sharex=True, squeeze=False)[:, 0]
    for axis, gain in zip(axes, gains, strict=True):
        panel(axis, sweep.measures[gain].partition(",")[0])
        for place, group in enumerate(sweep.groups):
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place // len(COLOURS) % len(MARKERS)]
            for first, measures in enumerate(run.measures for run in group.cells if gain in run.measures):
                label = plain(group.name, 40) if not first else None
                x, y = measures[kl], measures[gain]
                axis.errorbar([x.value], [y.value], xerr=_errors(x), yerr=_errors(y), color=colour, fmt=marker,
                              markersize=5, linewidth=1, label=label)  # fmt: skip
    axes[-1].set_xlabel(sweep.measures[kl])
    legend(axes[0])
    return svg(figure, "Gains beside KL")


COLOURS, MARKERS = (BLUE, RED, ORANGE, PURPLE, GREY), "osD^v"


def _errors(interval: Interval) -> list[list[float]] | None:
    """Return the distances of an interval's ends from its value, as matplotlib takes them; None without ends."""
    ends = interval.ends
    if ends is None or not math.isfinite(interval.value):
        return None
    return [[max(0.0, interval.value - ends[0])], [max(0.0, ends[1] - interval.value)]]
