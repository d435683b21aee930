"""One measurement of the throughput benchmark, in a process of its own: prints one line of JSON.

    python -m tests.bench.trl.throughput_side '{"side": "separate", "size": "7m", "variant": "ragged", ...}'

`throughput.py` starts this and says what stands in the JSON.
"""

import copy
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from components.models.config import GenerationConfig
from components.models.folders import frozen
from components.models.matrices.kernels import by_onednn
from components.models.runtime import Runtime, activate
from components.models.sampling import rollout_engine
from components.ppo.config import PpoJob
from components.ppo.experience import gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Models, SeparateCritic, SharedCritic
from components.reward.scoring import ScoreScale
from tests.bench.tools import memory
from tests.bench.trl.recipe import EPOCHS, ppo_config, trl_config
from tests.bench.trl.workload import (
    CAP,
    PRODUCTS,
    ForcedLengths,
    Workload,
    causal_lm,
    decoding_bytes,
    scalar_model,
    training_flops,
    trunk_parameters,
)

LEARNING_RATE = 1e-6
GENERATION = GenerationConfig(max_new_tokens=CAP)
UNIT = ScoreScale(shift=0.0, scale=1.0, missing_eos_score=-1.0, temperature=1.0, responses=16)


def forget_peak(device: str = "cpu") -> None:
    """Give free memory back and start the peak anew: building the models isn't what is measured."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


Mark = tuple[float, float, float]
"""A moment on the three clocks of `Clock`."""


class Clock:
    """Seconds of each phase of each update: of the clock, and as `rollout cpu` and so on of the processor, all threads.

    Beside other work on the machine the processor's seconds say more. `rollout operations` and so on are the
    floating-point operations of its matrix products and attention, where a counter is given.
    """

    def __init__(self, device: str, counter: FlopCounterMode | None = None) -> None:
        self.device, self.counter = device, counter
        self.updates: list[dict[str, float]] = []

    def now(self) -> Mark:
        """Seconds of both clocks, once the device has done its work, and operations so far."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time(), self.counter.get_total_flops() if self.counter else 0.0

    def update(self, began: Mark, sampling: Mark, sampled: Mark, scored: Mark, ended: Mark) -> None:
        """An update by the moments between its phases; what comes before `sampling` is `other`."""
        phases = {
            "other": (began, sampling), "rollout": (sampling, sampled), "scoring": (sampled, scored),
            "training": (scored, ended), "update": (began, ended),
        }  # fmt: skip
        clocks = enumerate(("", " cpu", " operations"))
        self.updates.append({n + which: b[i] - a[i] for i, which in clocks for n, (a, b) in phases.items()})


def ours(
    work: Workload, critic: str, runtime: Runtime, smollm2: Path, clock: Clock, onednn: bool = True
) -> tuple[Clock, Any]:
    """Tether's update, as `components.ppo.stage.train` does it; returns the clock and the policy.

    Without `onednn` float32 products are `functional.linear`'s, as TRL's are. Rollout is a `rollout_engine` opened and
    asked, scoring is `gather_experience`, training is `Learner.update`.
    """
    config = ppo_config(work.batch, work.updates + 1, LEARNING_RATE, critic)
    job = PpoJob(seed=0, runtime=runtime, generation=GENERATION, ppo=config)
    policy, tokenizer = causal_lm(work.size, smollm2)
    policy = policy.to(runtime.device)
    policy = by_onednn(policy) if onednn else policy
    value: Any = SharedCritic(policy.config.hidden_size).to(runtime.device)
    if critic == "separate":
        value = SeparateCritic(scalar_model(policy, 1), UNIT)
    reference, reward = (frozen(m, runtime) for m in (copy.deepcopy(policy), scalar_model(policy, 2)))
    learner = Learner.start(Models(policy, reference, reward, value, tokenizer, UNIT), job)
    steps = counted_steps(learner.optimizers["policy"])
    lengths = work.lengths()
    prompts = work.prompts(tokenizer, lengths.prompts)
    forget_peak(runtime.device)
    for update in range(work.updates + 1):
        began = clock.now()
        forced = ForcedLengths(lengths.ends[update], tokenizer)
        head = learner.models.value_head()
        with forced.in_our_sampler(update), rollout_engine(policy, tokenizer, runtime, head) as engine:
            samples = engine.sample(prompts, job.generation, update)
        rolled = clock.now()
        experience = gather_experience(learner.models, samples, job, config.kl.coefficient)
        scored = clock.now()
        metrics = learner.update(experience, update)
        clock.update(began, began, rolled, scored, clock.now())
        assert samples.prompt_mask.sum(1).tolist() == lengths.prompts.tolist()
        assert samples.response_mask.sum(1).tolist() == lengths.responses[update].tolist()
        assert metrics["ppo/optimizer_steps"] == EPOCHS and len(steps) == EPOCHS * (update + 1)
    return clock, policy


def counted_steps(optimizer: torch.optim.Optimizer) -> list[None]:
    """A list that grows by one an optimiser step."""
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    return steps


def trl_clock(work: Workload, smollm2: Path, clock: Clock) -> Clock:
    """TRL's update: its own `train()`, timed at calls it makes.

    Rollout is its `batch_generation` (`generate`, and stacking the logits of every step, which take the place of a
    pass for old log-probabilities); scoring is from there to the first micro-batch (reference, values, reward,
    advantages); training is from there to its `on_step_end` (with the sums it logs). The rest is `other`: collecting
    garbage, loading the batch.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.experimental.ppo import PPOTrainer, ppo_trainer

    policy, tokenizer = causal_lm(work.size, smollm2)
    reference, reward, value = copy.deepcopy(policy), scalar_model(policy, 2), scalar_model(policy, 1)
    lengths = work.lengths()
    prompts = work.prompts(tokenizer, lengths.prompts)
    row_of = {tuple(p): i for i, p in enumerate(prompts)}
    data = Dataset.from_dict({"input_ids": prompts})
    times: dict[str, Mark] = {}
    micro_batches: list[None] = []
    generation = ppo_trainer.batch_generation

    def timed_generation(model: Any, queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        times["sampling"] = clock.now()
        rows = [row_of[tuple(q[q != tokenizer.pad_token_id].tolist())] for q in queries]
        ends = lengths.ends[len(clock.updates)][rows]
        with ForcedLengths(ends, tokenizer).in_generate():
            out = generation(model, queries, *rest)
        times["sampled"] = clock.now()
        kept = (out[0][:, queries.shape[1] :] != tokenizer.pad_token_id).sum(1)
        assert kept.tolist() == ends.clamp(max=CAP).tolist() and sorted(rows) == list(range(work.batch))
        times.pop("scored", None)
        return out

    class Ended(TrainerCallback):
        """The end of an update."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended = clock.now()
            clock.update(*(times[name] for name in ("began", "sampling", "sampled", "scored")), ended)
            times["began"] = ended
            assert len(steps) == len(micro_batches) == EPOCHS * len(clock.updates)

    with tempfile.TemporaryDirectory() as folder, patch.object(ppo_trainer, "batch_generation", timed_generation):
        options = trl_config(
            ppo_config(work.batch, work.updates + 1, LEARNING_RATE), GENERATION, folder, seed=0, dtype=work.dtype
        )
        trainer = PPOTrainer(
            args=options, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
            value_model=value, train_dataset=data, eval_dataset=data, callbacks=[Ended()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        mixed = {"float32": "no", "bfloat16": "bf16"}[work.dtype]
        assert trainer.accelerator.mixed_precision == mixed, trainer.accelerator.mixed_precision
        steps, accumulate = counted_steps(trainer.optimizer.optimizer), trainer.accelerator.accumulate

        def counted(*models: Any) -> Any:
            times.setdefault("scored", clock.now())
            micro_batches.append(None)
            return accumulate(*models)

        trainer.accelerator.accumulate = counted
        forget_peak()
        times["began"] = clock.now()
        trainer.train()
    return clock


def rollouts(work: Workload, pairs: int, smollm2: Path, runtime: Runtime, batch: int = 64) -> dict[str, float]:
    """Generated tokens a second of our sampler and of `generate`, in turns in this process; medians over `pairs`.

    `cpu_ratio` is that of processor time, all threads.
    """
    policy, tokenizer = causal_lm(work.size, smollm2)
    generating, policy = copy.deepcopy(policy), by_onednn(policy)
    lengths = work.lengths(batch)
    forced = ForcedLengths(lengths.ends[0], tokenizer)
    prompts, tokens = work.prompts(tokenizer, lengths.prompts), int(lengths.responses[0].sum())
    inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")

    def tether() -> int:
        with forced.in_our_sampler(0), rollout_engine(policy, tokenizer, runtime) as engine:
            return int(engine.sample(prompts, GENERATION, 0).response_mask.sum())

    def generate() -> int:
        with forced.in_generate(), torch.no_grad():
            ids = generating.generate(**inputs, max_new_tokens=CAP, do_sample=True, top_k=0, top_p=1.0, use_cache=True)
        return int((ids[:, inputs["input_ids"].shape[1] :] != tokenizer.pad_token_id).sum())

    def rates(run: Callable[[], int]) -> tuple[float, float]:
        began, before = time.perf_counter(), time.process_time()
        assert run() == tokens
        return tokens / (time.perf_counter() - began), tokens / (time.process_time() - before)

    found = [(rates(tether), rates(generate)) for _ in range(pairs + 1)][1:]
    return {
        "tether": median(a[0] for a, _ in found), "generate": median(b[0] for _, b in found),
        "ratio": median(a[0] / b[0] for a, b in found), "cpu_ratio": median(a[1] / b[1] for a, b in found),
    }  # fmt: skip


def limits(work: Workload, critic: str, seconds: dict[str, float], policy: Any, peaks: dict[str, float]) -> Any:
    """How far decoding is from the device's memory bandwidth and training from its peak of operations."""
    lengths, config, trunk = work.lengths(), policy.config, trunk_parameters(policy)
    prompts, responses = lengths.prompts.tolist(), lengths.responses[work.measured].tolist()
    width, trunks = {"float32": 4, "bfloat16": 2}[work.dtype], {"separate": 2, "shared": 1}[critic]
    read = sum(decoding_bytes(config, trunk, prompts, r, width) for r in responses) / len(responses)
    flops = sum(training_flops(config, trunk, prompts, r, EPOCHS, trunks) for r in responses) / len(responses)
    return {
        "decoded_tokens_per_second": float(lengths.responses[work.measured].float().sum(1).mean()) / seconds["rollout"],
        "bandwidth_share": read / seconds["rollout"] / peaks["bandwidth"],
        "flop_utilisation": flops / seconds["training"] / peaks["flops"],
    }


def main() -> None:
    """Measure what the argument says."""
    given = json.loads(sys.argv[1])
    runtime = Runtime(device=given["device"], dtype=given["dtype"], threads=given["threads"]).resolve()
    work = Workload(given["size"], given["variant"], given["dtype"], given["updates"])
    side, smollm2 = given["side"], Path(given["smollm2"])
    if side == "trl":
        import trl.experimental.ppo  # noqa: F401  what imports take is not counted

        torch.set_num_threads(runtime.threads)
    else:
        activate(runtime)
    on_gpu = runtime.device == "cuda"
    imports = 0 if on_gpu else memory("VmRSS")
    if side == "rollout":
        print(json.dumps(rollouts(work, given["pairs"], smollm2, runtime)))
        return
    counter = FlopCounterMode(display=False, custom_mapping=PRODUCTS) if given["count"] else None
    clock, policy = Clock(runtime.device, counter), None
    with counter or nullcontext():
        if side == "trl":
            trl_clock(work, smollm2, clock)
        else:
            clock, policy = ours(work, side, runtime, smollm2, clock, given["products"] == "onednn")
    measured = clock.updates[work.measured]
    seconds = {name: sum(u[name] for u in measured) / len(measured) for name in measured[0]}
    peak = torch.cuda.max_memory_allocated() if on_gpu else memory("VmHWM") - imports
    out = {"seconds": seconds, "samples_per_second": work.batch / seconds["update"], "peak": peak}
    if policy is not None:
        out |= limits(work, side, seconds, policy, given["peaks"])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
