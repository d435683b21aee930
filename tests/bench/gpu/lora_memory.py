"""Peak memory of a PPO update with LoRA, four models on one backbone, against LoRA training of one model.

    OMP_WAIT_POLICY=PASSIVE python -m tests.bench.gpu.lora_memory [--model .tether/models/smollm2]

Each side runs in a process of its own on the same base model, batch (B responses to B prompts, random tokens, all of
one length), micro-batch and adapter. `one` loads one model and minimises -mean log-probability of the responses: two
steps of forward, backward, AdamW. `ppo` loads four models, computes scores, KL, values and advantages of the batch, and
makes an update of two epochs. What is printed is the process's peak resident memory (VmHWM, from after the weights are
loaded) less what it held after its imports: weights, activations, gradients, moments. On a GPU it is the peak that
torch allocated there. The bar is a ratio of 1.4.
"""

import argparse
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.tools import argument_parser, memory


def samples(policy: Any, runtime: Any, options: argparse.Namespace) -> Any:
    """A batch of random prompts and responses with the log-probabilities that the policy gives them."""
    import torch

    from components.models.logprobs import token_stats
    from components.models.sampling import Samples
    from components.ppo.models import Packed, scatter

    torch.manual_seed(0)
    sizes = (options.batch, options.prompt), (options.batch, options.response)
    device = runtime.device
    prompt, response = (torch.randint(100, 40_000, size).to(device) for size in sizes)
    unscored = Samples(
        prompt, torch.ones(sizes[0], device=device).bool(), response, torch.ones(sizes[1], device=device).bool(),
        torch.zeros(sizes[1], device=device), torch.zeros(options.batch, device=device).bool(),
    )  # fmt: skip
    logprobs = torch.zeros(sizes[1], device=device)
    with torch.no_grad():
        for start in range(0, options.batch, options.micro_batch):
            rows = range(start, min(start + options.micro_batch, options.batch))
            batch = Packed.of(unscored, rows)
            stats = token_stats(policy, batch.ids, batch.mask, batch.counts, runtime)
            logprobs[rows.start : rows.stop] = scatter(stats.logprobs, unscored.response_mask[rows.start : rows.stop])
    return replace(unscored, logprobs=logprobs)


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Print the peak of one side; `folder` holds the SFT model and the reward adapter as a run's artifacts would."""
    import peft.tuners.lora  # noqa: F401 (or importing it were counted)
    import torch

    from components.models.adapters import Backbone
    from components.models.config import GenerationConfig
    from components.models.folders import load_causal_lm
    from components.models.logprobs import token_stats
    from components.models.runtime import Runtime
    from components.ppo.config import PpoConfig, PpoJob
    from components.ppo.experience import gather_experience
    from components.ppo.learner import Learner
    from components.ppo.models import Models, Packed
    from components.training.loop import clip_gradient, step_and_clear
    from components.training.optim import build_optimizer

    runtime = Runtime(device=options.device, dtype="float32", threads=2).resolve()
    torch.set_num_threads(runtime.threads)
    on_gpu = runtime.device == "cuda"
    after_imports = 0 if on_gpu else memory("VmRSS")
    config = PpoConfig(
        batch_size=options.batch, minibatch_size=options.batch, micro_batch_size=options.micro_batch, epochs=2,
        learning_rate=3e-4, critic={"learning_rate": 1e-3}, stop_epochs_above=None,
        kl={"control": "fixed"}, lora={"rank": options.rank},
    )  # fmt: skip
    job = PpoJob(seed=0, runtime=runtime, generation=GenerationConfig(), ppo=config)
    if options.side == "ppo":
        models = Models.load(job, {"sft": folder / "sft", "reward": folder / "reward"})
        policy = models.policy
    else:
        policy = Backbone(load_causal_lm(folder / "sft", runtime)[0]).add("policy", config.lora, seed=0)
    batch = samples(policy, runtime, options)
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again, at what is held now
    if options.side == "ppo":
        learner = Learner.start(models, job)
        learner.update(gather_experience(models, batch, job, 0.1), 0)
    else:
        optimizer = build_optimizer(policy, config)
        for _ in range(2):
            for start in range(0, options.batch, options.micro_batch):
                rows = range(start, min(start + options.micro_batch, options.batch))
                packed = Packed.of(batch, rows)
                # Nothing else is kept of the statistics: one that trains has no use for the entropy's graph.
                logprobs = token_stats(policy, packed.ids, packed.mask, packed.counts, runtime).logprobs
                (-logprobs.mean() * len(rows) / options.batch).backward()
            clip_gradient(policy, 1.0)
            step_and_clear(optimizer)
    print(torch.cuda.max_memory_allocated() if on_gpu else memory("VmHWM") - after_imports)


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """What a run's SFT and reward stages would leave: the base model, and an adapter with a head on it."""
    import torch

    from components.base.jsonl import write_json
    from components.models.adapters import Backbone, save_adapter
    from components.models.config import AdapterConfig
    from components.models.folders import load_base, save_model
    from components.reward.scoring import ScoreScale

    model, tokenizer = load_base(options.model)
    save_model(model, tokenizer, folder / "sft" / "model")
    head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    view = Backbone(model).add("reward", AdapterConfig(rank=options.rank), seed=1, score=head)
    save_adapter(view, folder / "reward" / "adapter")
    scale = ScoreScale(shift=0.0, scale=1.0, missing_eos_score=-1.0, temperature=1.0, responses=16)
    write_json(folder / "reward" / "reward.json", scale.model_dump())
    write_json(folder / "reward" / "sft_scores.json", [[-1.0, 0.0, 1.0]])


def main() -> None:
    """Measure both sides and print their ratio."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path(".tether/models/smollm2"))
    for name, default in (("batch", 8), ("micro-batch", 8), ("prompt", 64), ("response", 64), ("rank", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--side", choices=["ppo", "one"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure(options.folder, options)
        return
    with TemporaryDirectory() as folder:
        prepare(Path(folder), options)
        command = [sys.executable, "-m", "tests.bench.gpu.lora_memory", *sys.argv[1:], "--folder", folder]
        # glibc keeps what was freed, by chance hundreds of MB of it, unless each tensor is mapped by itself.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        peaks = {
            side: int(subprocess.check_output([*command, "--side", side], env=environment, text=True))
            for side in ("one", "ppo")
        }
    mib = {side: f"{peak / 2**20:.0f} MiB" for side, peak in peaks.items()}
    print(f"B={options.batch} T={options.prompt}+{options.response} micro-batch={options.micro_batch}: "
          f"one {mib['one']}, PPO {mib['ppo']}, ratio {peaks['ppo'] / peaks['one']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
