"""Speed of sampling and of training on one GPU, against its limits. Needs nothing but the learning's own packages.

    python -m tests.bench.gpu.gpu_speed [135m 1.2b]     # half a minute on an H200
    python -m tests.bench.gpu.gpu_speed tiny --device cpu   # shows that it runs
    python -m tests.bench.gpu.gpu_speed --no-cuda-graphs    # launches each kernel of a decoding step

Llamas of the shapes of SmolLM2-135M and Llama-3.2-1B with random weights, in bfloat16. Sampling: prompts of 16 to 64
tokens, 64 new tokens; its limit is one reading of the weights (2 bytes each) a step. Training: rows of 128 tokens whose
last 64 are predicted; 6 operations a parameter and token, those of the output layer for predicted tokens alone, without
attention. A profile of 9 sampled tokens follows at the smallest number of rows.
"""

import argparse
import os
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from components.models.config import GenerationConfig
from components.models.logprobs import token_stats
from components.models.runtime import Runtime, activate
from components.models.sampling import rollout_engine
from components.planning.shape import KNOWN, ModelShape
from components.training.loop import clip_gradient, step_and_clear
from components.training.optim import FitConfig, build_optimizer
from tests.bench.tools import argument_parser
from tests.bench.trl.workload import numbers_tokenizer

SHAPES = {
    "tiny": ModelShape(
        vocabulary=1000, hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=2, head_size=16
    ),
    "135m": KNOWN["smollm2-135m"],
    "1.2b": KNOWN["llama-3.2-1b"],
}
SAMPLED = {"tiny": [4], "135m": [8, 128, 512], "1.2b": [8, 128, 512]}
TRAINED = {"tiny": [4], "135m": [32, 256], "1.2b": [32, 64]}
"""Rows by size."""
NEW, LENGTH, STEPS = 64, 128, 4


def llama(shape: ModelShape) -> LlamaConfig:
    """The config of a Llama of a shape."""
    return LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


def wait(device: str) -> float:
    """The time once the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sample(size: str, model: Any, rows: int, runtime: Runtime, bandwidth: float, profiled: bool) -> None:
    """Measure and print sampling."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 65, (rows,), generator=draw).tolist()
    prompts = [torch.randint(2, 900, (n,), generator=draw).tolist() for n in lengths]
    short, long = (GenerationConfig(max_prompt_tokens=64, max_new_tokens=new) for new in (9, NEW))
    with rollout_engine(model, numbers_tokenizer(SHAPES[size].vocabulary), runtime) as engine:
        engine.sample(prompts, short, 0)
        began = wait(runtime.device)
        samples = engine.sample(prompts, long, 1)
        seconds = wait(runtime.device) - began
        if profiled:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if runtime.device == "cuda" else [])]
            with profile(activities=kinds) as found:
                engine.sample(prompts, short, 2)
                wait(runtime.device)
            print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))
    limit = bandwidth / (2 * sum(each.numel() for each in model.parameters()))
    print(
        f"{size}, sampling, {rows} rows: {1000 * seconds / NEW:.1f} ms a step, "
        f"{sum(samples.response_lengths) / seconds:.0f} tokens/s, {NEW / seconds / limit:.1%} of the limit"
    )


def train(size: str, model: Any, rows: int, runtime: Runtime, peak: float) -> None:
    """Measure and print training."""
    optimizer = build_optimizer(model.train(), FitConfig(learning_rate=1e-5))
    ids = torch.randint(2, 900, (rows, LENGTH), device=runtime.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    counts = mask.clone()
    counts[:, : LENGTH // 2] = False
    began = 0.0
    for step in range(STEPS + 1):  # the first warms up
        began = wait(runtime.device) if step == 1 else began
        (-token_stats(model, ids, mask, counts, runtime).logprobs.mean()).backward()
        clip_gradient(model, 1.0)
        step_and_clear(optimizer)
    seconds = (wait(runtime.device) - began) / STEPS
    output = SHAPES[size].hidden_size * SHAPES[size].vocabulary
    body = sum(each.numel() for each in model.parameters()) - output
    operations = 6 * rows * (body * LENGTH + output * LENGTH / 2)
    memory = torch.cuda.max_memory_allocated() / 1e9 if runtime.device == "cuda" else 0.0
    print(f"{size}, training, {rows} rows: {1000 * seconds:.1f} ms a step, {rows * LENGTH / seconds:.0f} tokens/s, "
          f"{operations / seconds / peak:.1%} of the peak, {memory:.1f} GB at most so far")  # fmt: skip


def main() -> None:
    """Measure size after size and print as they come."""
    parser = argument_parser(__doc__)
    parser.add_argument("sizes", nargs="*", default=["135m", "1.2b"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    # NVIDIA's data sheet of the H200 SXM, as in throughput.py.
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="the device's memory bandwidth, bytes/s")
    parser.add_argument("--peak-flops", type=float, default=989e12, help="the device's peak in bfloat16, FLOP/s")
    parser.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="runtime.cuda_graphs"
    )
    options = parser.parse_args()
    runtime = Runtime(device=options.device, dtype="bfloat16", cuda_graphs=options.cuda_graphs).resolve()
    activate(runtime)
    for size in options.sizes:
        torch.manual_seed(0)
        with torch.device(runtime.device):
            config = llama(SHAPES[size])
            model = LlamaForCausalLM(config).eval()
        for rows in SAMPLED[size]:
            sample(size, model, rows, runtime, options.bandwidth, profiled=rows == SAMPLED[size][0])
        for rows in TRAINED[size]:
            train(size, model, rows, runtime, options.peak_flops)
        del model


if __name__ == "__main__":
    main()
