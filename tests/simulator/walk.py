"""Run stages on the pretended GPU and print what was found, as JSON. It comes before torch, so in its own process.

    python -m tests.simulator.walk FOLDER '[{"name": "sft", "stage": "sft"}, ...]'

A case has a `name`, a `stage`, and where it needs them a `dtype`, `options` of the stage, `generation` options, the
names of the cases whose artifacts it takes as `sft` and `reward`, `graphs` to decode with them, and a `fault` to plant.
"""

from tests.simulator import device  # before torch

# isort: split

import collections
import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from components.direct.config import DirectJob, PolicyConfig
from components.models import cache, sampling
from components.models import runtime as machine
from components.models.config import GenerationConfig, ScratchModel
from components.models.runtime import Runtime, activate
from components.ppo.config import PpoConfig, PpoJob
from components.reward.config import RewardConfig, RewardJob
from components.sft.config import SftConfig, SftJob
from tests.support_desk_data import make_data

SHOWN = 12
"""Lines that wait most, of each case."""


def make_job(case: dict[str, Any]) -> Any:
    """The job of a case: tiny options of its stage, and over them its own."""
    stage, options = case["stage"], dict(case.get("options", {}))
    generation = GenerationConfig(**{"max_prompt_tokens": 64, "max_new_tokens": 16} | case.get("generation", {}))
    dtype, graphs = case.get("dtype", "float32"), case.get("graphs", False)
    runtime = Runtime(device="cuda", dtype=dtype, threads=1, cuda_graphs=graphs).resolve()
    common: dict[str, Any] = {"seed": 0, "runtime": runtime, "generation": generation}
    if stage == "sft":
        scratch = ScratchModel(hidden_size=16, layers=2, heads=2)
        tiny: dict[str, Any] = {"scratch": scratch, "learning_rate": 1e-2, "evaluate": 8, "overlong": "cut"}
        return SftJob(**common, sft=SftConfig(**tiny | {"batch_size": 32, "micro_batch_size": 16} | options))
    if stage == "reward":
        tiny = {"scale_responses": 16, "batch_size": 16, "micro_batch_size": 8, "learning_rate": 5e-4}
        return RewardJob(**common, reward=RewardConfig(**tiny | options))
    if stage == "direct":
        tiny = {"method": "dpo", "learning_rate": 1e-3, "batch_size": 8, "micro_batch_size": 8}
        measures = {"evaluate": 8, "watch": {"prompts": 8}, "repeats": {"prompts": 4, "samples": 2}}
        return DirectJob(**common, ppo=measures, policy=PolicyConfig(**tiny | options))
    tiny = {"updates": 2, "batch_size": 8, "minibatch_size": 4, "micro_batch_size": 2, "learning_rate": 1e-3}
    tiny |= {"kl": {"control": "fixed", "coefficient": 0.1}, "sample_every": 1}
    options["critic"] = {"learning_rate": 1e-3} | options.get("critic", {})
    return PpoJob(**common, ppo=PpoConfig(**tiny | options))


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Break one thing in the sampler that a GPU would mind."""
    choose, last_hidden = sampling._choose, cache._last_hidden
    table = torch.arange(5000)

    def mixed(probabilities: Any, uniform: Any) -> Any:
        tokens = choose(probabilities, uniform)
        return torch.where(tokens > 10**6, table[: len(tokens)], tokens)

    def reading(probabilities: Any, uniform: Any) -> Any:
        assert float(probabilities.sum()) >= 0
        return choose(probabilities, uniform)

    def of_floats(probabilities: Any, uniform: Any) -> Any:
        probabilities.cumsum(1)
        return choose(probabilities, uniform)

    def shifted(model: Any, ids: Any, mask: Any, *given: Any) -> Any:
        if mask is not None and mask.dtype != torch.bool:
            width = mask.shape[-1]
            mask = torch.nn.functional.pad(mask, (1, -(width + 1) % 8))[..., 1 : width + 1]
        return last_hidden(model, ids, mask, *given)

    def asking(model: Any, ids: Any, *given: Any) -> Any:
        assert ids.shape[1] > 1 or int(ids[0, 0]) >= 0
        return last_hidden(model, ids, *given)

    faults = {"mixed devices": mixed, "a wait a token": reading, "a cumulative sum of floats": of_floats}
    passes = {"a misaligned mask": shifted, "a wait in a captured step": asking}.get(fault or "", last_hidden)
    with (
        patch.object(sampling, "_choose", faults.get(fault or "", choose)),
        patch.object(cache, "_last_hidden", passes),
    ):
        yield


def captures(gpu: device.Gpu) -> Callable[[], Any]:
    """CUDA graphs of the pretended device: they call the step again, in which the host must not wait."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            before = gpu.waits.total()
            step()
            if gpu.waits.total() > before:
                gpu.alerts["a wait in a captured step"] += 1

        return replay

    return lambda: capture


def walk(case: dict[str, Any], folder: Path, artifacts: dict[str, Path]) -> dict[str, Any]:
    """Run a case on the device; its findings."""
    job, out = make_job(case), folder / case["name"]
    needed = {"sft": [], "reward": ["sft"], "ppo": ["sft", "reward"], "direct": ["sft", "reward"]}[case["stage"]]
    inputs = {"data": artifacts["data"]} | {name: artifacts[case.get(name, name)] for name in needed}
    tokens, steps, error = [0], [0], None
    with device.Gpu() as gpu, planted(case.get("fault")):
        choose, step = sampling._choose, torch.optim.AdamW.step

        def counted_choice(*given: Any) -> Any:
            tokens[0] += 1
            return choose(*given)

        def counted_step(*given: Any) -> Any:
            steps[0] += 1
            return step(*given)

        with (
            patch.object(sampling, "_choose", counted_choice),
            patch.object(torch.optim.AdamW, "step", counted_step),
            patch.object(cache, "Captures", captures(gpu)),
        ):
            try:
                activate(job.runtime)
                module = importlib.import_module(f"components.{case['stage']}.stage")
                module.run(job, inputs, out, lambda *_, **__: None)
            except device.MixedDevices as refused:
                error = str(refused)
    artifacts[case["name"]] = out / "artifact"
    places: dict[str, collections.Counter[str]] = {part: collections.Counter() for part in ("sampling", "training")}
    for (part, _, where), n in gpu.waits.items():
        if part in places:
            places[part][re.sub(r":\d+", "", where.partition(" < ")[0])] += n
    return {
        "name": case["name"], "error": error, "alerts": dict(gpu.alerts), "waits": places,
        "tokens": tokens[0], "steps": steps[0],
        "most": [f"{n} {' | '.join(what)}" for what, n in gpu.waits.most_common(SHOWN)],
    }  # fmt: skip


def main(folder: Path, cases: list[dict[str, Any]]) -> None:
    """Walk the cases in their order and print a JSON line of each."""
    gpus = machine.Gpus((machine.Gpu("Pretended", (9, 0)),), "13.0", "the simulator pretends a GPU")
    artifacts = {"data": make_data(folder / "data")}
    with patch.object(machine, "usable_gpus", lambda: gpus):
        for case in cases:
            print(json.dumps(walk(case, folder, artifacts)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
