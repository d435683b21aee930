"""Whether sampling by CUDA graphs gives what the ordinary step gives. Needs nothing but the learning's own packages.

    python -m tests.bench.gpu.graphs_right                    # 30 s on an H200; exit code 1 if a case fails
    python -m tests.bench.gpu.graphs_right tiny --device cpu  # an emulation of graphs (needs pytest)

Llamas with random weights; prompts of different lengths; up to 160 tokens, so that a second window is captured; EOS is
likely enough that rows end early and are dropped. Each case samples without graphs, with them, and with them again, and
prints a line of JSON. In float32 tokens must be equal (`EQUAL`), and log-probabilities within 1e-4; in bfloat16 their
mean difference within 0.005 as long as a row's tokens are equal. The second time must give the same bytes.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from components.models import cache, sampling
from components.models.adapters import Backbone
from components.models.chat.endings import set_endings
from components.models.config import AdapterConfig, GenerationConfig
from components.models.runtime import Runtime, activate
from components.models.sampling import Samples, rollout_engine
from tests.bench.gpu.gpu_speed import SHAPES, llama
from tests.bench.trl.workload import numbers_tokenizer

CASES = {"tiny": ("plain", "stop string", "value head", "LoRA", "three engines"), "135m": ("plain",)}
ROWS, CAP = 48, {"tiny": 160, "135m": 140}
EQUAL = {"tiny": 1.0, "135m": 0.8}
"""Least share of equal responses in float32. Among 49,152 nearly equal probabilities rounding moves a token in a
thousand to its neighbour."""
ENDING = 0.01
"""Probability of EOS at a token, about."""


def make(size: str, device: str) -> Any:
    """Return a model of a shape whose output layer prefers EOS."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(llama(SHAPES[size])).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        head = nn.Linear(SHAPES[size].hidden_size, SHAPES[size].vocabulary).requires_grad_(False)
        nn.init.normal_(head.weight, std=parameter.shape[-1] ** -0.5)
        head.bias.zero_()[1] = math.log(ENDING * SHAPES[size].vocabulary)
    model.set_output_embeddings(head)
    return model


def change(model: Any, step: int) -> None:
    """Train the model's parameters in place, as an optimiser does."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.data.add_(noise, alpha=0.1 * parameter.shape[-1] ** -0.5)


def compare(plain: Samples, captured: Samples, again: Samples, exact: bool, least: float) -> dict[str, Any]:
    """Return what differs, and whether that is little enough. `least`: share of equal responses in float32."""
    width = min(plain.response_ids.shape[1], captured.response_ids.shape[1])
    ids = [samples.response_ids[:, :width] for samples in (plain, captured)]
    equal = (ids[0] == ids[1]).long().cumprod(1).bool() & plain.response_mask[:, :width]
    difference = (plain.logprobs[:, :width] - captured.logprobs[:, :width]).abs()[equal]
    same = sum(map(torch.equal, *(_responses(samples) for samples in (plain, captured)))) / ROWS
    mean, most = float(difference.mean()), float(difference.max())
    twice = all(map(torch.equal, _tensors(captured), _tensors(again)))
    differ = ids[0] != ids[1]
    steps = (ids[0] - ids[1]).abs().gather(1, differ.long().argmax(1, keepdim=True))[differ.any(1)]
    equal_enough = same >= least and int(steps.max() if len(steps) else 0) <= 1
    close = (equal_enough and most <= 1e-4) if exact else mean <= 0.005
    lengths = sorted(plain.response_lengths)
    spread = lengths[ROWS // 2] + 16 < lengths[-1]  # so that rows were dropped
    share = float(equal.sum() / plain.response_mask.sum())
    return {"ok": close and twice and spread, "same_responses": same, "same_tokens": share, "mean": mean, "max": most,
            "twice": twice, "lengths": lengths[:: ROWS // 4]}  # fmt: skip


def _responses(samples: Samples) -> list[Tensor]:
    return [ids[mask] for ids, mask in zip(samples.response_ids, samples.response_mask, strict=True)]


def _tensors(samples: Samples) -> list[Tensor]:
    stats = [] if samples.stats is None else [each for each in samples.stats if each is not None]
    return [samples.response_ids, samples.response_mask, samples.logprobs, samples.ended, *stats]


def run(size: str, name: str, runtime: Runtime) -> dict[str, Any]:
    """Return the findings of a case."""
    model, tokenizer = make(size, runtime.device), numbers_tokenizer(SHAPES[size].vocabulary)
    head: Callable[[Tensor], Tensor] | None = None
    if name == "LoRA":
        model = Backbone(model, runtime.dtype).add("policy", AdapterConfig(rank=4), seed=1).to(runtime.device)
        change(model, 9)
    if name == "stop string":
        set_endings(tokenizer, strings=("777", "1 7"))
    if name == "value head":
        layer = nn.Linear(SHAPES[size].hidden_size, 1, device=runtime.device).requires_grad_(False)
        head = lambda hidden: layer(hidden).squeeze(-1)  # noqa: E731
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, 65, (ROWS,), generator=draw).tolist()
    prompts = [torch.randint(2, 900, (n,), generator=draw).tolist() for n in lengths]
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=CAP[size])
    found: dict[str, Any] = {"ok": True}
    for engine_number in range(3 if name in ("three engines", "LoRA") else 1):
        samples, seconds, replayed = [], [], []
        for graphs in (False, True, True):
            began = time.perf_counter()
            with rollout_engine(model, tokenizer, runtime.model_copy(update={"cuda_graphs": graphs}), head) as engine:
                samples.append(engine.sample(prompts, generation, engine_number))
            float(samples[-1].logprobs.sum())  # waits
            seconds.append(round(time.perf_counter() - began, 2))
            replayed.append(len(engine.graphs.replays) if engine.graphs else 0)
        compared = compare(*samples, exact=runtime.dtype == "float32", least=EQUAL[size])
        if name == "stop string":
            compared["ok"] &= len(samples[1].other_endings) > 3
        used = replayed[0] == 0 < replayed[1] == replayed[2]
        reserved = torch.cuda.memory_reserved() / 1e9 if runtime.device == "cuda" else 0.0
        compared |= {"graphs": replayed, "seconds": seconds, "reserved_gb": round(reserved, 2)}
        found = compared | {"ok": compared["ok"] and found["ok"] and used}
        change(model, engine_number)
    return found


@contextlib.contextmanager
def emulation() -> Iterator[None]:
    """Decode by the emulated graphs of the tests on a CPU."""
    from tests.components.models.test_captured import Recorded

    kept_graphs = sampling._kept_graphs

    def on_gpu(model: Any, runtime: Runtime) -> Any:
        return kept_graphs(model, runtime.model_copy(update={"device": "cuda"}))

    with (
        patch.object(cache, "Captures", lambda: lambda step: Recorded(step).replay),
        patch.object(sampling, "_kept_graphs", on_gpu),
        patch.object(sampling, "packed_weights", lambda *_: contextlib.nullcontext()),  # only a CPU packs them
    ):
        yield


def main() -> None:
    """Run each case in float32 and bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["tiny", "135m"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    failed = 0
    for size in options.sizes:
        for dtype in ("float32", "bfloat16"):
            runtime = Runtime(device=options.device, dtype=dtype, threads=1).resolve()
            activate(runtime)
            for name in CASES[size]:
                with emulation() if options.device == "cpu" else contextlib.nullcontext():
                    found = run(size, name, runtime)
                failed += not found["ok"]
                print(json.dumps({"size": size, "dtype": dtype, "case": name} | found), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
