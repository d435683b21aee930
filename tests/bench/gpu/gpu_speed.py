"""Speed of sampling and of training on one device, against its limits.

Llamas of the shapes of SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B with random weights, in bfloat16. Sampling: prompts
of 16 to 64 tokens. A step of decoding reads the weights (2 bytes each) and the keys and values of all rows once, and
writes the logits (4 bytes each) once: its limit is these bytes over the bandwidth. Training: rows of 128 tokens whose
last 64 are predicted; 6 operations a parameter and token, those of the output layer for predicted tokens alone, without
attention.
"""

import time
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from components.models.config import GenerationConfig
from components.models.logprobs import token_stats
from components.models.runtime import Runtime, activate
from components.models.sampling import rollout_engine
from components.training.loop import clip_gradient, step_and_clear
from components.training.optim import FitConfig, build_optimizer
from flows.planning.shape import KNOWN, ModelShape
from tests.bench.trl.workload import numbers_tokenizer

SHAPES = {
    "tiny": ModelShape(
        vocabulary=1000, hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=2, head_size=16
    ),
    "135m": KNOWN["smollm2-135m"],
    "1.2b": KNOWN["llama-3.2-1b"],
    "8b": KNOWN["llama-3.1-8b"],
}
LENGTH, STEPS = 128, 4
PEAK = 989e12
"""Peak of an H100 and an H200 (SXM) in bfloat16, FLOP/s, from NVIDIA's data sheets."""
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}
"""Memory bandwidth in bytes/s by a part of a GPU's name, from the same."""


def runtime_on(device: str, graphs: bool = False, dtype: str = "bfloat16") -> Runtime:
    """The resolved runtime, with torch set up for it."""
    runtime = Runtime(device=device, dtype=dtype, cuda_graphs=graphs).resolve()
    activate(runtime)
    return runtime


def llama(shape: ModelShape) -> LlamaConfig:
    """The config of a Llama of a shape."""
    return LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


def random_llama(size: str, device: str) -> Any:
    """A Llama with random weights, in evaluation mode."""
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(llama(SHAPES[size])).eval()


def prompts_of(rows: int) -> list[list[int]]:
    """Prompts of 16 to 64 tokens."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 65, (rows,), generator=draw).tolist()
    return [torch.randint(2, 900, (n,), generator=draw).tolist() for n in lengths]


def now(device: str) -> float:
    """The time once the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sampling_limit(size: str, rows: int, new: int, bandwidth: float) -> float:
    """Seconds that a step of decoding takes at least, on average over `new` tokens."""
    shape, context = SHAPES[size], 40 + new / 2
    states = 2 * 2 * shape.layers * shape.kv_heads * shape.head_size * context * rows
    return (2 * SHAPES[size].parameters + states + 4 * rows * shape.vocabulary) / bandwidth


def sample(size: str, model: Any, rows: int, new: tuple[int, ...], runtime: Runtime, bandwidth: float) -> Any:
    """Time of batches with each number of `new` tokens, in a new engine for each as after an update, after one that
    loads the kernels. `ms`: milliseconds a token; `limit`: share of the bandwidth's limit."""
    prompts, tokenizer = prompts_of(rows), numbers_tokenizer(SHAPES[size].vocabulary)
    measured: dict[str, Any] = {"size": size, "rows": rows, "graphs": runtime.cuda_graphs}
    first = [(True, 9), *((True, each) for each in new if runtime.cuda_graphs)]
    for warm, count in [*first, *((False, each) for each in new)]:
        generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=count)
        with rollout_engine(model, tokenizer, runtime) as engine:
            began = now(runtime.device)
            samples = engine.sample(prompts, generation, count)
            seconds = now(runtime.device) - began
        if not warm:
            measured[f"ms at {count}"] = round(1000 * seconds / count, 3)
            measured[f"tokens/s at {count}"] = round(sum(samples.response_lengths) / seconds)
            measured[f"limit at {count}"] = round(sampling_limit(size, rows, count, bandwidth) * count / seconds, 4)
        elif count == new[0]:
            measured["first"] = round(seconds, 3)
    return measured


def launches(size: str, model: Any, rows: int, runtime: Runtime) -> Any:
    """What is launched for each token, by a profile of 16 tokens less one of 8, and how long the device is busy."""
    prompts, tokenizer, counts = prompts_of(rows), numbers_tokenizer(SHAPES[size].vocabulary), []
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if runtime.device == "cuda" else [])]
    for new in (8, 16):
        generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=new)
        with rollout_engine(model, tokenizer, runtime) as engine:
            engine.sample(prompts, generation, 1)
            with profile(activities=kinds) as profiler:
                engine.sample(prompts, generation, 1)
                now(runtime.device)
        count: Counter[str] = Counter()
        for event in profiler.profiler.kineto_results.events() if profiler.profiler is not None else []:
            name, on_device = event.name(), event.device_type() == torch.autograd.DeviceType.CUDA
            count["launches"] += name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
            count["graph launches"] += name.startswith("cudaGraphLaunch")
            count["copies"] += name.startswith("cudaMemcpyAsync")
            count["kernels"] += on_device
            count["sorts"] += on_device and "Sort" in name
            count["busy ms"] += event.duration_ns() / 1e6 if on_device else 0
        counts.append(count)
    per_token = {f"{name} a token": round((counts[1][name] - counts[0][name]) / 8, 3) for name in counts[1]}
    return {"size": size, "rows": rows, "graphs": runtime.cuda_graphs} | per_token


def train(size: str, model: Any, rows: int, runtime: Runtime) -> Any:
    """Time of a training step, share of the peak, and peak memory."""
    optimizer = build_optimizer(model.train(), FitConfig(learning_rate=1e-5))
    ids = torch.randint(2, 900, (rows, LENGTH), device=runtime.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    counts = mask.clone()
    counts[:, : LENGTH // 2] = False
    began = 0.0
    for step in range(STEPS + 2):  # the first two warm up
        began = now(runtime.device) if step == 2 else began
        (-token_stats(model, ids, mask, counts, runtime).logprobs.mean()).backward()
        clip_gradient(model, 1.0)
        step_and_clear(optimizer)
    seconds = (now(runtime.device) - began) / STEPS
    output = SHAPES[size].hidden_size * SHAPES[size].vocabulary
    operations = 6 * rows * ((SHAPES[size].parameters - output) * LENGTH + output * LENGTH / 2)
    memory = torch.cuda.max_memory_allocated() / 1e9 if runtime.device == "cuda" else 0.0
    numbers = {"ms": round(1000 * seconds, 2), "peak": round(operations / seconds / PEAK, 4), "GB": round(memory, 1)}
    return {"size": size, "rows": rows, **numbers}
