"""Thresholds from one set of seeds, and how many seeds of another set pass them.

A threshold that was moved until ten seeds passed says nothing about an eleventh: the rate at which a gate stops sound
runs can only be measured on seeds that had no part in choosing it.
"""

import math
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from components.base.jsonl import json_line, read_rows
from components.gates.gate import Gate
from components.gates.judging import GatesConfig, Threshold, judge
from components.gates.table import GATES

LEVEL = 0.99
"""Probability with which one further seed is on the right side of a threshold, were the metric normal over seeds."""
STAGES = ("validate", "sft", "reward", "ppo", "human_eval")
Metrics = Mapping[str, float | None]


def settings(until: str) -> list[str]:
    """`--set` arguments that turn every gate off, so that no metric is missing, and end a run after a stage."""
    off = [f"gates.{gate.name}=null" for gate in GATES.values()]
    if until == STAGES[-1]:
        return off
    extra = f"gates.extra.{until}.end_of_bench"
    return [*off, f"{extra}.metric={MEASURED[until]}", f"{extra}.op=<=", f"{extra}.threshold=-1"]


MEASURED = {"validate": "data/pairs", "sft": "sft/loss", "reward": "reward/test_pairs", "ppo": "policy/evaluated"}
"""A metric of each stage that is never below 0."""


def recorded(path: Path, until: str, code: str) -> dict[int, Metrics]:
    """The metrics by seed of the lines of a JSON Lines file that were measured with this code, up to this stage.

    A last line that was cut short, by a kill, counts as not there.
    """
    if not path.exists():
        return {}
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    rows = [row for row in read_rows(path) if (row["until"], row["code"]) == (until, code)]
    return {row["seed"]: row["metrics"] for row in rows}


def measure(
    path: Path, seeds: Collection[int], until: str, code: str, run: Callable[[int], Metrics]
) -> dict[int, Metrics]:
    """The metrics of each seed: what the file has of them, then those of `run`, each written as soon as it is there."""
    found = recorded(path, until, code)
    for seed in seeds:
        if seed not in found:
            found[seed] = run(seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as out:
                out.write(json_line({"seed": seed, "until": until, "code": code, "metrics": found[seed]}))
    return {seed: found[seed] for seed in seeds}


def code_version() -> str:
    """The commit of the code that runs, `-dirty` where files differ from it."""
    root = Path(__file__).resolve().parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def implied(op: str, values: Sequence[float]) -> float | None:
    """The threshold that the choosing seeds' values imply, for `<=`, `>=` or `>`; None of fewer than three values.

    The one-sided normal prediction limit for one further seed, mean +- t_{n-1, LEVEL} s sqrt(1 + 1 / n) (Hahn and
    Meeker, Statistical Intervals, 1991, section 4.8), or the worst value seen, whichever is looser: a metric that is
    the worst of many slices is skewed, and its normal limit too tight.
    """
    if len(values) < 3 or not all(map(math.isfinite, values)):
        return None
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = float(stats.t.ppf(LEVEL, len(values) - 1)) * spread * math.sqrt(1 + 1 / len(values))
    return max(max(values), mean + reach) if op == "<=" else min(min(values), mean - reach)


def passing(gate: Gate, threshold: Threshold, runs: Collection[Metrics]) -> int:
    """How many runs a gate lets pass; a metric that is missing fails."""
    config = GatesConfig.model_validate({gate.stage: {gate.short: threshold}})
    return sum(not any(verdict.stops for verdict in judge(gate.stage, _known(run), config)) for run in runs)


def rate(passed: int, of: int) -> str:
    """`9 of 10 [0.555, 0.997]`, with Clopper and Pearson's exact 95 % interval."""
    ends = stats.binomtest(passed, of).proportion_ci(0.95, method="exact")
    return f"{passed} of {of} [{ends.low:.3f}, {ends.high:.3f}]"


def report(
    choosing: Mapping[int, Metrics], reporting: Mapping[int, Metrics], thresholds: GatesConfig, until: str
) -> str:
    """A Markdown table of the gates up to a stage, and how many reporting seeds pass all of a profile's thresholds.

    Each line: the range over the choosing seeds, the threshold that they imply, the profile's, and how many of the
    reporting seeds pass either.
    """
    lines = [
        "| gate | choosing seeds | implied | of the reporting seeds pass | profile | of the reporting seeds pass |",
        "|---|---|---|---|---|---|",
    ]
    runs = list(reporting.values())
    for gate, threshold in thresholds.rules():
        if STAGES.index(gate.stage) > STAGES.index(until) or gate.warn_only:
            continue
        values = [value for each in choosing.values() if (value := each.get(gate.metric)) is not None]
        ours = implied(gate.op, values) if gate.op in ("<=", ">=", ">") and len(values) == len(choosing) else None
        seen = f"{min(values):.4g} to {max(values):.4g}" if values else "not measured"
        cells = [
            ("", "") if limit is None or not runs else (_shown(limit), rate(passing(gate, limit, runs), len(runs)))
            for limit in (ours, threshold)
        ]
        lines.append(f"| {gate.name} | {seen} | {' | '.join(' | '.join(each) for each in cells)} |")
    if runs:
        passed = sum(not _stopped(run, thresholds, until) for run in runs)
        lines += [
            "",
            f"Of the reporting seeds, {rate(passed, len(runs))} pass every gate of the profile up to {until}.",
        ]
    for seed, run in reporting.items():
        if stopped := _stopped(run, thresholds, until):
            lines.append(f"Seed {seed} fails {', '.join(stopped)}.")
    return "\n".join(lines)


def _stopped(run: Metrics, thresholds: GatesConfig, until: str) -> list[str]:
    stages = STAGES[: STAGES.index(until) + 1]
    verdicts = [verdict for stage in stages for verdict in judge(stage, _known(run), thresholds)]
    return [f"{verdict.name} ({verdict.value})" for verdict in verdicts if verdict.stops]


def _known(run: Metrics) -> dict[str, float]:
    return {name: value for name, value in run.items() if value is not None}


def _shown(limit: Threshold) -> str:
    return " to ".join(f"{end:.4g}" for end in limit) if isinstance(limit, tuple) else f"{limit:.4g}"
