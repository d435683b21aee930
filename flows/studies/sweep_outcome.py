"""The outcome of a sweep: the numbers of each cell's policy, with intervals over prompts and over seeds."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from components.base.hashing import canonical_json
from components.stats.intervals import Interval
from flows.config.run_config import RunConfig
from flows.reports.run_facts import Document, StageFacts
from flows.studies.level_kl import Trial
from tasks.runs.status import RunStatus

PROMPTS = 8
"""Number of prompts whose responses are shown side by side."""
MEASURES = {
    "policy/kl": "KL to SFT, nats a response",
    "policy/kl_per_token": "KL to SFT, nats a token",
    "policy/reward_gain": "reward gain, SFT deviations",
    "policy/judge_gain": "judge's gain, its SFT deviations",
    "policy/gold_gain": "gold gain (simulated)",
    "policy/distinct_ratio": "diversity, of SFT's distinct 4-grams",
    "policy/repetition": "repetition",
    "policy/response_tokens": "response, tokens",
    "seconds": "training, s",
    "memory": "peak memory, GB",
}
"""Maps what is compared to its heading; the differences to SFT are on the same held-out prompts."""
NO_ENDS = (math.nan, math.nan)


class Cell(NamedTuple):
    """A run of the sweep that has ended."""

    seed: int
    run: str
    state: str
    failed_gates: Sequence[str]
    measures: Mapping[str, Interval]
    """By name of `MEASURES`; the interval is over prompts, and its ends are NaN if there is none."""


class Group(NamedTuple):
    """The cells that differ by their seed only."""

    name: str
    options: Sequence[str]
    """What sets them apart from the profile, as `--set` takes it."""
    cells: Sequence[Cell]
    missing: Sequence[int] = ()
    """Seeds that the budget left out."""
    trials: Sequence[Trial] = ()
    """The runs of the search for its strength; empty without `--level-kl`."""
    search: str = ""
    """How the search ended; empty without one."""

    @property
    def summary(self) -> dict[str, Interval]:
        """Return each measure's median over the seeds, with the lowest and the highest."""
        by_name = {name: [cell.measures[name].value for cell in self.cells if name in cell.measures]
                   for name in MEASURES}  # fmt: skip
        return {name: over_seeds(values) for name, values in by_name.items() if values}

    @property
    def failed_gates(self) -> dict[str, int]:
        """Return how many of its cells each gate stopped."""
        return dict(Counter(gate for cell in self.cells for gate in cell.failed_gates))


class Sweep(NamedTuple):
    """The outcome of a sweep."""

    name: str
    profile: str
    options: Sequence[str]
    """The options that all cells have, as `--set` takes them."""
    groups: Sequence[Group]
    seconds: float
    """What training the policies took, trials of the search included."""
    samples: Sequence[Document] = ()
    """For each prompt: `prompt`, and `responses`, SFT's and that of each group's first seed, by name."""
    sheet: str = ""
    """The run that compares the policies on a blind sheet; empty without one."""

    @property
    def measures(self) -> dict[str, str]:
        """Return those of `MEASURES` that some cell has."""
        present = {name for group in self.groups for name in group.summary}
        return {name: words for name, words in MEASURES.items() if name in present}

    @property
    def missing(self) -> int:
        """Return the number of cells that the budget left out."""
        return sum(len(group.missing) for group in self.groups)

    @property
    def coverage(self) -> float:
        """Return the probability with which the range over the seeds holds the median of all seeds."""
        return range_coverage(max((len(group.cells) for group in self.groups), default=0))

    def as_json(self) -> dict[str, object]:
        """Return what `tether sweep --json` prints and `sweep.json` holds."""

        def named(measures: Mapping[str, Interval]) -> dict[str, object]:
            return {name: dict(zip(("value", "low", "high"), interval.named("x").values(), strict=True))
                    for name, interval in measures.items()}  # fmt: skip

        groups = [
            group._asdict()
            | {
                "cells": [cell._asdict() | {"measures": named(cell.measures)} for cell in group.cells],
                "trials": [trial._asdict() for trial in group.trials],
                "over_seeds": named(group.summary),
                "failed_gates": group.failed_gates,
            }
            for group in self.groups
        ]
        return {"sweep": self.name, "missing": self.missing, **self._asdict(), "groups": groups}


def over_seeds(values: Sequence[float]) -> Interval:
    """Return the median, the lowest and the highest of the values of n seeds; one seed has no interval."""
    return Interval(median(values), *((min(values), max(values)) if len(values) > 1 else NO_ENDS))


def range_coverage(seeds: int) -> float:
    """Return the probability that the lowest and highest of n seeds enclose the median of all seeds: 1 - 2^(1 - n),
    whatever the distribution (David and Nagaraja 2003, Order Statistics, section 7.1)."""
    return 1 - 2.0 ** (1 - seeds) if seeds else 0.0


def cell_of(home: Path, seed: int, status: RunStatus, config: RunConfig) -> Cell:
    """Return the numbers of a run; those of the policy are missing if a gate stopped the run before."""
    policy = StageFacts.of(home, status.run, status.stage("ppo"))
    values = {name: value for name, value in policy.metrics.items() if value is not None}
    if "policy/gold" in values:
        values["policy/gold_gain"] = values["policy/gold"] - values["policy/sft_gold"]
    if policy.record is not None:
        values["seconds"] = policy.record.seconds
        values |= {} if (memory := policy.speed["memory"]) is None else {"memory": memory}
    other = "policy/kl_per_token" if config.ppo.kl.unit == "response" else "policy/kl"
    measures = {
        name: Interval(values[name], values.get(f"{name}_low", math.nan), values.get(f"{name}_high", math.nan))
        for name in MEASURES
        if name in values and name != other
    }
    failed = [gate.name for stage in status.stages for gate in stage.gates if gate.stops]
    return Cell(seed, status.run, status.state, failed, measures)


def samples_of(home: Path, runs: Mapping[str, RunStatus], hidden: Collection[str] = ()) -> list[Document]:
    """Return the responses of several runs' policies to the same held-out prompts, and SFT's.

    Args:
        runs: a run by the name under which its responses are shown.
        hidden: prompts (`canonical_json`) that raters are judging now.
    """
    by_run = {}
    for name, status in runs.items():
        rows = StageFacts.of(home, status.run, status.stage("ppo")).rows("evaluation.jsonl")
        by_run[name] = {canonical_json(row["prompt"]): row for row in rows}
    first = next(iter(by_run.values()), {})
    shared = [prompt for prompt in first if prompt not in hidden and all(prompt in rows for rows in by_run.values())]
    samples = list[Document]()
    for prompt in shared[:PROMPTS]:
        responses = {name: rows[prompt]["policy"] for name, rows in by_run.items()}
        samples.append({"prompt": first[prompt]["prompt"], "responses": {"SFT": first[prompt]["sft"]} | responses})
    return samples
