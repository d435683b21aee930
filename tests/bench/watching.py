"""What PPO's watch publishes, when it stops and what it names: runs that are tethered, cut, broken late, or planted.

    python -m tests.bench.watching --seeds 0-4 --kinds cut
    python -m tests.bench.watching --seeds 0-9 --kinds tethered
    python -m tests.bench.watching --seeds 0-7 --kinds collapse --updates 44
    python -m tests.bench.watching --seeds 100 --kinds flattery length template --updates 16

Each seed's data, SFT policy and reward model are those of `tether run demo-long --until reward`, which are hits the
second time; PPO runs in this process with demo-long's options. `cut` has β = 0 and no ceiling: what is published is
compared with SFT and with the last policy. `collapse` is tethered until β becomes 0 after `COLLAPSE` updates; nothing
stops it, and gold of the published and the last policy are compared on the same prompts. A planted kind replaces the
reward model's score by a feature of the response, in standard deviations of SFT's responses: printed is the update of
the first alarm of that name, and the batch's proxy reward then. A finished run is not run again.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from components.base.errors import GateFailed
from components.base.jsonl import read_rows, write_json
from components.models.runtime import activate
from components.ppo import experience, stage
from components.ppo.config import PpoJob
from components.ppo.control import KLController
from components.ppo.models import frozen_pass
from components.ppo.monitors.measures import PHRASES
from components.stats.intervals import paired_gain
from components.store.store import ArtifactStore
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.launch.begin import new_run
from flows.rlhf import pipeline
from tasks.execution.runner import run_stage
from tasks.runs.status import load_status
from tests.bench.thresholds import seed_range

Found = dict[str, Any]
COLLAPSE = 24
"""After how many updates β becomes 0 in the runs that are broken late."""
CUT = ("ppo.kl.control=fixed", "ppo.kl.coefficient=0", "ppo.kl.stop_above=null")


def _says(phrases: tuple[str, ...]) -> Callable[[str, int], float]:
    return lambda text, _: float(any(phrase.lower() in text.lower() for phrase in phrases))


PLANTED: dict[str, Callable[[str, int], float]] = {
    "flattery": _says(PHRASES["flattery"]),
    "hedge": _says(PHRASES["hedge"]),
    "length": lambda _, tokens: float(tokens),
    "template": _says(("We are sorry. We will",)),
}
"""Of a response's text and its tokens."""


def learned(home: Path, seed: int) -> dict[str, Path]:
    """The artifacts that PPO reads, of a seed of demo-long, computed in this process without Prefect and MLflow."""
    settings = [parse_override(each) for each in (f"seed={seed}", "runtime.threads=1")]
    launch = new_run(home, "demo-long", load_config("demo-long", settings).resolved(), until="reward")
    launch.ctx.track, launch.ctx.at_end = False, None
    try:
        with launch.ctx as ctx:
            pipeline(launch.config, launch.sources, partial(run_stage, ctx=ctx), ctx.until)
    except GateFailed as error:
        print(f"seed {seed}: {error}", flush=True)
    digests = {stage.name: stage.digest for stage in load_status(home).stages}
    names = {"data": "validate", "sft": "sft", "reward": "reward"}
    if missing := [stage for stage in names.values() if not digests[stage]]:
        raise SystemExit(f"seed {seed}: {', '.join(missing)} did not run")
    return {name: ArtifactStore(home).path(str(digests[of])) for name, of in names.items()}


def planted(feature: Callable[[str, int], float], sft: list[dict[str, Any]]) -> Callable[..., dict[str, Tensor]]:
    """`frozen_pass` whose raw scores are the feature, shifted and scaled so that SFT's responses `sft` have mean 0 and
    deviation 1 on the reward model's scale."""
    before = torch.tensor([feature(row["response"], row["tokens"]) for row in sft])

    def scored(models: Any, samples: Any, job: PpoJob, judged: bool = False) -> dict[str, Tensor]:
        found = frozen_pass(models, samples, job, judged)
        rows = zip(samples.texts(models.tokenizer), samples.response_lengths, strict=True)
        values = (torch.tensor([feature(*row) for row in rows]) - before.mean()) / before.std()
        return found | {"raw_scores": (models.scale.shift + models.scale.scale * values).to(found["raw_scores"])}

    return scored


def collapsing(before: Callable[[KLController, float], None]) -> Callable[[KLController, float], None]:
    """`KLController.update` that sets β to 0 for good after `COLLAPSE` updates."""
    seen = 0

    def update(self: KLController, kl: float) -> None:
        nonlocal seen
        before(self, kl)
        seen += 1
        if seen == COLLAPSE:
            self.config, self.coefficient = self.config.model_copy(update={"control": "fixed"}), 0.0

    return update


def run(inputs: Mapping[str, Path], out: Path, given: list[str], score: Any = None, late: bool = False) -> Found:
    """PPO with demo-long's options and `given`: metrics, `metadata.json`, history, evaluations and processor seconds.

    `late` plants the collapse. A finished run is read from `out`.
    """
    kept = out / "found.json"
    if kept.exists():
        found: Found = json.loads(kept.read_text())
        return found
    shutil.rmtree(out, ignore_errors=True)
    job = load_config("demo-long", [parse_override(each) for each in given]).resolved().job(PpoJob)
    activate(job.runtime)
    speed: list[Mapping[str, float]] = []
    began = time.process_time()
    with ExitStack() as patches:
        if score is not None:
            patches.enter_context(patch.object(experience, "frozen_pass", score))
        if late:
            patches.enter_context(patch.object(KLController, "update", collapsing(KLController.update)))
        metrics = stage.run(job, dict(inputs), out, lambda step, found, total=None, **_: speed.append(found))
    watched = sum(found.get("ppo/watched_seconds", 0.0) for found in speed)
    batch = job.ppo.batch_size
    updates = sum(batch / found["ppo/samples_per_second"] for found in speed if "ppo/samples_per_second" in found)
    of, last = out / "artifact", out / "artifact" / "last.jsonl"
    found = {
        "metrics": metrics, "about": json.loads((of / "metadata.json").read_text()),
        "history": read_rows(of / "history.jsonl"), "published": read_rows(of / "evaluation.jsonl"),
        "last": read_rows(last) if last.exists() else [], "share": watched / updates,
        "cpu": time.process_time() - began,
    }  # fmt: skip
    write_json(kept, found)
    return found


def main() -> None:
    """Run what is asked for and print a line a run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=seed_range, default="100-101", help="pipeline seeds, as 10-19 or 0-4,8")
    options.add_argument("--kinds", nargs="+", default=["cut"], choices=["tethered", "cut", "collapse", *PLANTED])
    options.add_argument("--updates", type=int, default=60)
    options.add_argument("--home", type=Path, default=Path(".tether/bench/watching"))
    given = options.parse_args()
    home = given.home.resolve()
    for seed in given.seeds:
        inputs = learned(home / f"seed-{seed}", seed)
        common = [f"seed={seed}", "runtime.threads=1", f"ppo.updates={given.updates}"]
        for kind in given.kinds:
            out = home / f"seed-{seed}" / f"watched-{kind}"
            if kind in PLANTED:
                fixed = [*common, "ppo.kl.control=fixed"]
                first = run(inputs, home / f"seed-{seed}" / "watched-sft", [*fixed, "ppo.updates=1"])
                score = planted(PLANTED[kind], [row["sft"] for row in first["published"]])
                told = told_of_planted(run(inputs, out, fixed, score), kind)
            elif kind == "collapse":
                loose = [*common, "ppo.stop_early=false", "ppo.kl.stop_above=null"]
                told = told_of_watched(run(inputs, out, loose, late=True))
            else:
                told = told_of_watched(run(inputs, out, [*common, *(CUT if kind == "cut" else ())]))
            print(f"seed {seed}, {kind}: {told}", flush=True)


def told_of_watched(found: Found) -> str:
    """What was published, when it stopped and what the last policy had, for people."""
    m, about = found["metrics"], found["about"]
    band = load_config("demo-long").ppo.watch.kl_high
    left = next((row["update"] for row in found["history"] if band is not None and row["ppo/kl_low"] > band), None)
    raised = [(row["update"], row["name"]) for row in about["alarms"]]
    text = (
        f"{about['reason']} {m['ppo/updates']:.0f} updates, the first batch certainly above KL {band:g} at {left}. "
        f"Published: update {about['published_update']}, reward gain's lower end {m['ppo/reward_gain_low']:.2f}, gold "
        f"{m['ppo/gold']:.2f} (SFT {m['ppo/sft_gold']:.2f}, last {m.get('ppo/last_gold', m['ppo/gold']):.2f}). "
        f"Evaluations took {found['share']:.0%} of the updates' time. Alarms {raised}"
    )
    if found["last"]:
        published = [row["policy"]["gold"] for row in found["published"]]
        last = [row["gold"] for row in found["last"]]
        gain = paired_gain(published, last, [str(row["prompt"]) for row in found["last"]])
        text += f". Gold of the published over the last: {gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"
    return text


def told_of_planted(found: Found, name: str) -> str:
    """A run with a planted reward, for people."""
    raised = {row["name"]: row["update"] for row in found["about"]["alarms"]}
    proxy = {row["update"]: row["ppo/proxy_reward"] for row in found["history"]}
    first = next((update for update, value in proxy.items() if value >= 1), None)
    then = f" (proxy reward {proxy[raised[name]]:.2f})" if name in raised else ""
    return f"alarm at update {raised.get(name)}{then}; proxy reward reached 1 at update {first}; all alarms {raised}"


if __name__ == "__main__":
    main()
