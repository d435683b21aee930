"""What PPO's watch publishes and names: runs without a tether, and runs with a planted reward, one after the other.

    python -m tests.bench.watching --seeds 100,101 --cut
    python -m tests.bench.watching --seeds 100 --planted flattery length template --updates 16

Each seed's data, SFT policy and reward model are those of `tether run demo --until reward` in the home, which are hits
the second time; PPO runs in this process with the demo's options. `--cut` has β = 0 and no ceiling: what is published
is compared with SFT and with the last policy. With `--planted NAME` the reward model's score is replaced by a feature
of the response, in standard deviations of SFT's responses: printed is the update of the first alarm of that name, and
the batch's proxy reward then.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from components.base.jsonl import read_rows
from components.models.runtime import activate
from components.ppo import experience, stage
from components.ppo.config import PpoJob
from components.ppo.models import frozen_pass
from components.ppo.monitors.measures import PHRASES
from components.store.store import ArtifactStore
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tests.bench.runs import tether
from tests.bench.thresholds import seed_range

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


def inputs_of(home: Path, seed: int, threads: int) -> dict[str, Path]:
    """The artifacts that PPO reads, of a seed."""
    done = tether(
        home, "run", "demo", "--until", "reward", "--set", f"seed={seed}", "--set", f"runtime.threads={threads}"
    )
    if done.returncode not in (0, 3):
        raise SystemExit(f"seed {seed}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    stages = {each["name"]: each for each in json.loads(tether(home, "status", "--json").stdout)["stages"]}
    store = ArtifactStore(home)
    names = {"data": "validate", "sft": "sft", "reward": "reward"}
    return {name: store.path(stages[of]["digest"]) for name, of in names.items()}


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


def run(inputs: Mapping[str, Path], out: Path, given: list[str], score: Any = None) -> dict[str, Any]:
    """PPO with the demo's options and `given`; its metrics, `metadata.json`, history and processor seconds."""
    job = load_config("demo", [parse_override(each) for each in given]).resolved().job(PpoJob)
    activate(job.runtime)
    speed: list[Mapping[str, float]] = []
    with ExitStack() as patches:
        if score is not None:
            patches.enter_context(patch.object(experience, "frozen_pass", score))
        began = time.process_time()
        metrics = stage.run(job, dict(inputs), out, lambda step, found, total=None, **_: speed.append(found))
    about = json.loads((out / "artifact" / "metadata.json").read_text())
    watched = sum(found.get("ppo/watched_seconds", 0.0) for found in speed)
    batch = job.ppo.batch_size
    updates = sum(batch / found["ppo/samples_per_second"] for found in speed if "ppo/samples_per_second" in found)
    history = read_rows(out / "artifact" / "history.jsonl")
    return {"metrics": metrics, "about": about, "history": history, "share": watched / updates,
            "cpu": time.process_time() - began}  # fmt: skip


def main() -> None:
    """Run what is asked for and print a line a run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=seed_range, default="100-101", help="pipeline seeds, as 10-19 or 0-4,8")
    options.add_argument("--cut", action="store_true", help="without a tether")
    options.add_argument("--planted", nargs="*", default=[], choices=list(PLANTED))
    options.add_argument("--updates", type=int, default=60)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--home", type=Path, default=Path(".tether/bench/watching"))
    given = options.parse_args()
    home = given.home.resolve()
    for seed in given.seeds:
        inputs = inputs_of(home, seed, given.threads)
        common = [f"seed={seed}", f"runtime.threads={given.threads}", f"ppo.updates={given.updates}"]
        if given.cut:
            print(f"seed {seed}, cut: {told_of_cut(run(inputs, home / f'cut-{seed}', [*common, *CUT]))}", flush=True)
        if given.planted:
            alone = [*common, "ppo.updates=1", "ppo.kl.control=fixed"]
            run(inputs, home / f"sft-{seed}", alone)
            sft = [row["sft"] for row in read_rows(home / f"sft-{seed}" / "artifact" / "evaluation.jsonl")]
        for name in given.planted:
            score = planted(PLANTED[name], sft)
            found = run(inputs, home / f"{name}-{seed}", [*common, "ppo.kl.control=fixed"], score)
            print(f"seed {seed}, {name}: {told_of_planted(found, name)}", flush=True)


def told_of_cut(found: Mapping[str, Any]) -> str:
    """A run without a tether, for people."""
    m, about = found["metrics"], found["about"]
    last = m.get("ppo/last_gold", m["ppo/gold"])
    raised = [(row["update"], row["name"]) for row in about["alarms"]]
    return (
        f"{about['reason']} Reward gain's lower end {m['ppo/reward_gain_low']:.2f}, gold {m['ppo/gold']:.2f} (SFT "
        f"{m['ppo/sft_gold']:.2f}, last {last:.2f}); {m['ppo/updates']:.0f} updates; evaluations took "
        f"{found['share']:.0%} of the updates' time; alarms {raised}"
    )


def told_of_planted(found: Mapping[str, Any], name: str) -> str:
    """A run with a planted reward, for people."""
    raised = {row["name"]: row["update"] for row in found["about"]["alarms"]}
    proxy = {row["update"]: row["ppo/proxy_reward"] for row in found["history"]}
    first = next((update for update, value in proxy.items() if value >= 1), None)
    then = f" (proxy reward {proxy[raised[name]]:.2f})" if name in raised else ""
    return f"alarm at update {raised.get(name)}{then}; proxy reward reached 1 at update {first}; all alarms {raised}"


if __name__ == "__main__":
    main()
