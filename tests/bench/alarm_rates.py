"""Records what the monitors see of PPO runs over seeds, and judges the records by today's limits without training.

    python -m tests.bench.alarm_rates record --seeds 0-19 --kinds tethered
    python -m tests.bench.alarm_rates record --seeds 0-4 --kinds cut flattery hedge length template
    python -m tests.bench.alarm_rates judge --seeds 10-19 --kinds tethered cut

Each seed is a pipeline of its own: data, SFT policy and reward model are those of `tether run demo-long --until reward`
with that seed, and PPO trains with demo-long's options in this process, without the held-out evaluations, which change
no weight and no monitor. `cut` has β = 0, no ceiling and no stop, and ends after two batches in a row whose gold is
certainly below SFT's. A planted kind replaces the reward model's score by a feature of the response, in deviations of
the tethered record's SFT responses, and ends once the batch's proxy reward has reached 1.5. Recorded are SFT's
responses that the limits come from, and every batch (texts, tokens, lengths, scores, NLL, entropy, KL, gold), a gzipped
line of JSON an update, in the home's `records`. Finished records are not made again. A seed takes some five minutes of
processor time.
"""

import argparse
import gzip
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from components.data.support_desk.task import task_scores
from components.data.tables.published import read_split
from components.models.runtime import activate
from components.ppo import experience, stage
from components.ppo.config import PpoJob
from components.ppo.monitors import batches
from components.ppo.monitors.alarms import Limits
from components.ppo.monitors.measures import Batch
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tests.bench.thresholds import seed_range
from tests.bench.watching import PLANTED, learned, planted

ARRAYS = ("lengths", "scores", "nll", "entropies", "kl")
LIMITS_OF = Limits.of
"""As it is, which a recording replaces."""
KINDS = ("tethered", "cut", *PLANTED)
CUT = (
    "ppo.kl.control=fixed", "ppo.kl.coefficient=0", "ppo.kl.stop_above=null", "ppo.stop_early=false",
)  # fmt: skip


class Enough(Exception):
    """The recording has all that it is for."""


def as_row(batch: Batch) -> dict[str, Any]:
    """A batch as a JSON object."""
    arrays = {name: [round(x, 6) for x in getattr(batch, name).tolist()] for name in ARRAYS}
    ids = [[int(i) for i in row] for row in batch.token_ids]
    lists = {"prompts": list(batch.prompts), "texts": list(batch.texts), "special": list(batch.special)}
    return {**lists, "token_ids": ids, **arrays}


def as_batch(row: Mapping[str, Any]) -> Batch:
    """The batch that `as_row` wrote."""
    arrays = (np.array(row[name], dtype=np.float64) for name in ARRAYS)
    return Batch(row["prompts"], row["texts"], row["token_ids"], row["special"], *arrays)


def certainly_below(gold: list[float], sft: list[float]) -> bool:
    """Whether the upper 95 % end of a batch's mean gold is below SFT's mean."""
    values = np.array(gold)
    return float(values.mean() + 1.96 * values.std(ddof=1) / math.sqrt(len(values))) < float(np.mean(sft))


class Recorder:
    """Writes a run's batches as they are judged, and says when it is enough."""

    def __init__(self, path: Path, kind: str, data: Path, prompts: int) -> None:
        self.path, self.kind, self.data = path, kind, data
        self.asked = [row["prompt"] for row in read_split(data / "prompts.calibration")[:prompts]]
        self.row: dict[str, Any] = {}
        self.gold: list[float] = []
        self.sft_gold: list[float] = []
        self.below = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a line."""
        with gzip.open(self.path, "at") as file:
            file.write(json.dumps(row) + "\n")

    def limits(self, sft: Batch, rate: float, updates: int, known: Iterable[int]) -> Limits:
        """`Limits.of`, whose batches are recorded."""
        pairs = zip(self.asked, sft.texts, strict=True)
        self.sft_gold = [task_scores(self.data, prompt, text)["gold"] for prompt, text in pairs]
        given = {"rate": rate, "updates": updates, "known": sorted(known)}
        self.write({"update": 0, "gold": self.sft_gold} | given | as_row(sft))
        limits = LIMITS_OF(sft, **given)
        judge = limits.judge

        def recorded(batch: Batch, beta: float | None) -> Any:
            values, alarms = judge(batch, beta)
            self.row = {"beta": beta, "alarms": [alarm.name for alarm in alarms]} | as_row(batch)
            self.gold = []
            return values, alarms

        limits.judge = recorded  # type: ignore[method-assign]
        return limits

    def scores(self, data: Path, prompt: Any, text: str) -> dict[str, float]:
        """`task_scores`, whose gold is recorded."""
        found = task_scores(data, prompt, text)
        self.gold.append(found["gold"])
        return found

    def observe(self, step: int, metrics: Mapping[str, float], total: int | None = None, **_: Any) -> None:
        """Write the update that was recorded.

        Raises:
            Enough: the run has shown what it is for.
        """
        if not self.row or not metrics:
            return
        kept = {name: metrics[name] for name in ("ppo/proxy_reward", "ppo/kl", "ppo/kl_low")}
        self.write({"update": step, "gold": self.gold} | kept | self.row)
        print(f"{self.path.name} {step}: {kept} gold {np.mean(self.gold):.2f} {self.row['alarms']}", flush=True)
        self.row = {}
        self.below = self.below + 1 if certainly_below(self.gold, self.sft_gold) else 0
        if self.kind == "cut" and self.below >= 2:
            raise Enough
        if self.kind in PLANTED and kept["ppo/proxy_reward"] >= 1.5:
            raise Enough


def record(home: Path, seed: int, kind: str) -> None:
    """Train and record, unless it is recorded."""
    kept = home / "records" / f"{kind}-{seed}.jsonl.gz"
    if kept.exists():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    own = home / f"seed-{seed}"
    inputs = learned(own, seed)
    score: Callable[..., Any] | None = None
    if kind in PLANTED:
        sft = next(rows(home / "records" / f"tethered-{seed}.jsonl.gz"))
        before = [{"response": t, "tokens": n} for t, n in zip(sft["texts"], sft["lengths"], strict=True)]
        score = planted(PLANTED[kind], before)
    given = [f"seed={seed}", "runtime.threads=1", "ppo.evaluate=2", "ppo.evaluate_every=null"]
    given += CUT if kind == "cut" else ()
    job = load_config("demo-long", [parse_override(each) for each in given]).resolved().job(PpoJob)
    activate(job.runtime)
    out, partial = own / f"ppo-{kind}", kept.with_suffix(".part")
    shutil.rmtree(out, ignore_errors=True)
    partial.unlink(missing_ok=True)
    recorder = Recorder(partial, kind, inputs["data"], job.ppo.monitors.responses or 0)
    with ExitStack() as patches:
        patches.enter_context(patch.object(batches.Limits, "of", recorder.limits))
        patches.enter_context(patch.object(stage, "task_scores", recorder.scores))
        if score is not None:
            patches.enter_context(patch.object(experience, "frozen_pass", score))
        with suppress(Enough):
            stage.run(job, dict(inputs), out, recorder.observe)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, kept)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record."""
    with gzip.open(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def told(path: Path) -> tuple[dict[str, int], str]:
    """The update of the first alarm of each name by today's limits, and a line with what else the record shows."""
    lines = rows(path)
    sft = next(lines)
    limits = Limits.of(as_batch(sft), sft["rate"], sft["updates"], sft["known"])
    first, gained, fell, last = dict[str, int](), None, None, 0
    for row in lines:
        _, alarms = limits.judge(as_batch(row), row["beta"])
        first = dict.fromkeys((alarm.name for alarm in alarms), row["update"]) | first
        last = row["update"]
        gained = gained or (last if row["ppo/proxy_reward"] >= 1 else None)
        fell = fell or (last if certainly_below(row["gold"], sft["gold"]) else None)
    text = f"{last} updates, proxy reward reached 1 at {gained}, gold certainly below SFT's at {fell}; alarms {first}"
    return first, f"{path.name.removesuffix('.jsonl.gz')}: {text}"


def main() -> None:
    """Record what is asked for, or judge what is recorded."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["record", "judge"])
    options.add_argument("--seeds", type=seed_range, default="0-9", help="pipeline seeds, as 10-19 or 0-4,8")
    options.add_argument("--kinds", nargs="+", default=["tethered"], choices=KINDS)
    options.add_argument("--home", type=Path, default=Path(".tether/bench/alarms"))
    given = options.parse_args()
    home, raised = given.home.resolve(), Counter[str]()
    for kind in given.kinds:
        for seed in given.seeds:
            if given.what == "record":
                record(home, seed, kind)
            elif (path := home / "records" / f"{kind}-{seed}.jsonl.gz").exists():
                first, text = told(path)
                raised[kind] += len(first)
                print(text, flush=True)
    if given.what == "judge":
        print(f"alarms by kind: {dict(raised)}")


if __name__ == "__main__":
    main()
