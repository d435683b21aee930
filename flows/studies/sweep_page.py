"""Show a sweep's outcome: a table on the terminal, `sweep.json`, and a page with a chart and samples side by side."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from components.base.files import write_whole
from components.base.text import counted
from components.gates.gate_text import number
from flows.reports.page import picture, rendered
from flows.studies.sweep import MEASURES, CellGroup, Sweep
from tasks.execution.drawing import BLUE, GREY, ORANGE, PURPLE, RED, legend, new_figure, panel, plain, svg
from tasks.execution.stage_progress import cell, say

COLOURS, MARKERS = (BLUE, RED, ORANGE, PURPLE, GREY), "osD^v"
WORDS, NUMBERS = 22, 11
"""Characters of the first column on the terminal, and at least of the others."""


def write_page(folder: Path, sweep: Sweep) -> Path:
    """Write `sweep.json` and `sweep.html` into the sweep's folder, and return the page's path."""
    outcome = {"sweep": sweep.name, **asdict(sweep), "notes": notes(sweep)}
    for written, group in zip(outcome["groups"], sweep.groups, strict=True):
        written |= {"name": group.name, "over_seeds": group.over_seeds, "failures": failures(group)}
    chart = draw(sweep)
    text = rendered(
        "sweep.html", sweep=sweep, measures=measures_of(sweep), notes=notes(sweep), ranged=ranged, failures=failures,
        chart=chart and picture(chart),
    )  # fmt: skip
    write_whole(folder / "sweep.json", json.dumps(outcome, indent=1))
    write_whole(folder / "sweep.html", text.encode("utf-8", "backslashreplace"))
    return folder / "sweep.html"


def measures_of(sweep: Sweep) -> dict[str, str]:
    """Return those of `MEASURES` that some cell has."""
    present = {name for group in sweep.groups for name in group.over_seeds}
    return {name: words for name, words in MEASURES.items() if name in present}


def print_sweep(console: Console, sweep: Sweep) -> None:
    """Print a column for each group: its options, and the medians over its seeds, with the lowest and the highest.
    Groups that do not fit beside the others have a table of their own."""
    groups, most = [group for group in sweep.groups if group.cells], max(1, (console.width - WORDS) // NUMBERS)
    for first in range(0, len(groups), most):
        columns = groups[first : first + most]
        table = Table(Column(width=WORDS), box=None, pad_edge=False, show_header=False)
        for _ in columns:
            table.add_column(justify="right", overflow="fold")
        chosen = [dict(text.split("=", 1) for text in group.options) for group in columns]
        for option in dict.fromkeys(option for options in chosen for option in options):
            table.add_row(cell(option), *(cell(options.get(option, "")) for options in chosen))
        for name, words in measures_of(sweep).items():
            table.add_row(words, *(cell(ranged(group.over_seeds, name)) for group in columns))
        table.add_row("seeds", *(str(len(group.cells)) for group in columns))
        console.print(table, "")
    for group in filter(failures, groups):
        say(console, f"{group.name}: failed gates: {failures(group)}")
    for note in notes(sweep):
        say(console, note)


def ranged(measures: Mapping[str, float], name: str) -> str:
    """Return a measure with its interval, such as `2.31 (2.1 to 2.5)`; empty if there is none."""
    value, low, high = (number(float(f"{measures[end]:.3g}")) if end in measures else ""
                        for end in (name, f"{name}_low", f"{name}_high"))  # fmt: skip
    return f"{value} ({low} to {high})" if low and high else value


def failures(group: CellGroup) -> str:
    """Return the gates that stopped some of a group's cells, and how many."""
    gates = [gate for run in group.cells for gate in run.failed_gates]
    return ", ".join(f"{gate} ({gates.count(gate)} of {len(group.cells)})" for gate in dict.fromkeys(gates))


def notes(sweep: Sweep) -> list[str]:
    """Return sentences on how to read the numbers, on the searches, on what is missing and on the cost.

    The lowest and highest of n seeds enclose the median of all seeds with probability 1 - 2^(1 - n), whatever the
    distribution (David and Nagaraja 2003, Order Statistics, section 7.1).
    """
    groups = sweep.groups
    sentences = [f"{group.name}: {group.search.rstrip('.')}." for group in groups if group.search]
    if len(sweep.models("sft")) > 1:
        sentences.append("The SFT models differ: KL and gains are relative to each cell's own, and no responses of SFT "
                         "are shown.")  # fmt: skip
    if len(sweep.models("reward")) > 1:
        sentences.append("The reward models differ, so the reward gains of different models cannot be compared.")
    if counts := sorted({len(group.cells) for group in groups} - {0, 1}):
        chances = " or ".join(f"{1 - 2.0 ** (1 - count):g} ({count} seeds)" for count in counts)
        sentences.append("Medians over the seeds, with the lowest and the highest, which enclose the median of all "
                         f"seeds with probability {chances}.")  # fmt: skip
    searched = [group for group in groups if group.trials or not group.search]  # others have no strength
    if missing := [f"{group.name} seed {seed}" for group in searched for seed in range(sweep.seeds)
                   if all(run.seed != seed for run in group.cells)]:  # fmt: skip
        are = counted(len(missing), "cell is", "cells are")
        sentences.append(f"{are} missing: {'; '.join(missing)}. The same command computes them.")
    spent = {run.run: run.measures.get("seconds", 0.0) for group in groups for run in group.cells}
    spent |= {trial.run: trial.seconds for group in groups for trial in group.trials}
    sentences.append(f"Training the policies took {sum(spent.values()):,.0f} s.")
    if sweep.sheet:
        sentences.append(f"Run {sweep.sheet} compares the policies on a blind sheet.")
    return sentences


def draw(sweep: Sweep) -> bytes | None:
    """Draw the gains beside KL, a point for each cell with its intervals over prompts; None without any."""
    measures = measures_of(sweep)
    kl = "policy/kl_per_token" if "policy/kl" not in measures else "policy/kl"
    gains = [name for name in ("policy/gold_gain", "policy/judge_gain", "policy/reward_gain") if name in measures]
    if kl not in measures or not gains:
        return None
    figure = new_figure(0.6 + 2.3 * len(gains))
    axes = figure.subplots(len(gains), 1, sharex=True, squeeze=False)[:, 0]
    for axis, gain in zip(axes, gains, strict=True):
        panel(axis, measures[gain].partition(",")[0])
        for place, group in enumerate(group for group in sweep.groups if group.cells):
            runs = [run.measures for run in group.cells if {kl, gain} <= run.measures.keys()]
            x, y = ([run[name] for run in runs] for name in (kl, gain))
            marks = {"color": COLOURS[place % 5], "fmt": MARKERS[place // 5 % 5], "markersize": 5, "linewidth": 1}
            axis.errorbar(x, y, xerr=_errors(runs, kl), yerr=_errors(runs, gain), label=plain(group.name, 40), **marks)
    axes[-1].set_xlabel(measures[kl])
    legend(axes[0])
    return svg(figure, "Gains beside KL")


def _errors(runs: list[dict[str, float]], name: str) -> list[list[float]]:
    """Return the distances of the lower and upper ends of intervals from their values; 0 without an interval."""
    ends = ([abs(run.get(f"{name}_{end}", run[name]) - run[name]) for run in runs] for end in ("low", "high"))
    return list(ends)
