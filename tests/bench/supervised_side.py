"""One measurement of SFT or of reward training, ours or TRL's, in a process of its own: prints one line of JSON.

    python tests/bench/supervised_side.py '{"stage": "reward", "side": "tether", "size": "7m", ...}'

`supervised.py` starts this and says what stands in the JSON.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from recipe import reward_training, train_reward_model, trl_supervised
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from workload import causal_lm, ragged_examples

from components.models.config import GenerationConfig
from components.models.folders import load_causal_lm, load_reward_model, save_model
from components.models.runtime import Runtime, activate
from components.reward import pair_scores
from components.reward.config import RewardConfig, RewardJob
from components.reward.pairs import Pair
from components.sft import demonstrations
from components.sft import stage as sft_stage
from components.sft.config import SftConfig, SftJob
from components.training import loop
from components.training.loop import torch_seed

LEARNING_RATE = 1e-6
"""So low that an epoch's mean loss is that of the first weights, and so the same on both sides."""
WARM_UP = 2
"""Optimiser steps before the measured ones, in a training of their own."""

Examples = list[tuple[list[int], ...]]
"""Prompt and response of SFT; prompt, chosen and rejected of reward training."""


class Meter:
    """Seconds of the whole training and of its phases, and what it trained on.

    Phases: `data` makes padded batches, `backward` and `optimizer` are those calls; `forward and the rest` is what is
    left: losses, clipping, logging, the trainer's own work.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.losses: list[float] = []

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function with its seconds added to `name`."""

        def timing(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timing

    def count(self, mask: Tensor) -> None:
        """Add a padded batch by its mask: `tokens` that count and `slots` that are computed."""
        self.counts += Counter(tokens=int(mask.sum()), slots=mask.numel())

    @contextmanager
    def running(self) -> Iterator[None]:
        """The measured training; its clock stands still outside."""
        began, before = time.perf_counter(), time.process_time()
        yield
        self.seconds["all"] = time.perf_counter() - began
        self.seconds["all cpu"] = time.process_time() - before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time backward passes and optimiser steps, and count the latter."""
        began = [0.0]

        def before(*_: Any) -> None:
            began[0] = time.perf_counter()

        def after(*_: Any) -> None:
            self.seconds["optimizer"] += time.perf_counter() - began[0]
            self.counts["steps"] += 1

        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        with patch.object(Tensor, "backward", self.timed("backward", Tensor.backward)):
            yield
        for hook in hooks:
            hook.remove()

    def result(self) -> dict[str, Any]:
        """What is printed."""
        phases = ("data", "backward", "optimizer")
        rest = self.seconds["all"] - sum(self.seconds[p] for p in phases)
        return {
            "seconds": {**self.seconds, "forward and the rest": rest}, "counts": dict(self.counts),
            "loss": sum(self.losses) / len(self.losses),
        }  # fmt: skip


def settings(given: dict[str, Any], runtime: Runtime) -> SftJob | RewardJob:
    """An epoch at a constant rate; checkpoints are never due."""
    same: dict[str, Any] = {
        "learning_rate": LEARNING_RATE, "warmup": 0, "decay": "none", "epochs": 1, "batch_size": given["batch"],
        "micro_batch_size": given["micro"], "checkpoint_every": 10**9, "checkpoint_minutes": None,
    }  # fmt: skip
    shared: dict[str, Any] = {"seed": 0, "runtime": runtime, "generation": GenerationConfig()}
    if given["stage"] == "sft":
        return SftJob(**shared, sft=SftConfig(**same))
    return RewardJob(**shared, reward=RewardConfig(**same))


def ours(job: SftJob | RewardJob, base: Path, examples: Examples) -> Meter:
    """Our stage's own training; nothing is written, as on TRL's side."""
    meter, stage = Meter(), sft_stage if isinstance(job, SftJob) else reward_training
    name = "sft/train_loss" if isinstance(job, SftJob) else "reward/train_loss"

    def padded(*args: Any) -> tuple[Tensor, Tensor]:
        ids, mask = pad(*args)
        meter.counts["slots"] += mask.numel()
        if isinstance(job, SftJob):
            meter.counts["tokens"] += int(mask.sum())
        return ids, mask

    def fitted(*args: Any, **options: Any) -> int:
        meter.counts.clear()
        with meter.running():
            return loop.fit(*args, **options)

    def losses(*args: Any) -> Tensor:
        found = demonstrations.token_losses(*args)
        meter.counts["loss tokens"] += len(found)
        return found

    def observe(step: int, metrics: Any, total: int | None = None, **_: Any) -> None:
        meter.losses.append(metrics[name])

    def scores(model: Any, pairs: list[Pair], *args: Any) -> tuple[Tensor, Tensor]:
        # Of each sequence, as TRL counts them; the prompt that a pair shares is computed once here.
        meter.counts["tokens"] += sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
        return pair_scores.packed_scores(model, pairs, *args)

    pads = demonstrations if isinstance(job, SftJob) else pair_scores
    pad = meter.timed("data", pads.pad)
    with ExitStack() as patched, tempfile.TemporaryDirectory() as folder:
        for where, what, new in (
            (pads, "pad", padded), (stage, "fit", fitted), (loop, "save_state", lambda *_: None),
        ):  # fmt: skip
            patched.enter_context(patch.object(where, what, new))
        patched.enter_context(meter.watching())
        out = Path(folder)
        if isinstance(job, SftJob):
            patched.enter_context(patch.object(sft_stage, "token_losses", losses))
            model, tokenizer = load_causal_lm(base, job.runtime)
            sft_stage.fine_tune(job, model, tokenizer.pad_token_id, demonstrations.Examples.of(examples), out, observe)
        else:
            pairs = [Pair(p + chosen, p + rejected) for p, chosen, rejected in examples]
            _, tokenizer = load_causal_lm(base, job.runtime)
            patched.enter_context(patch.object(reward_training, "packed_scores", scores))
            train_reward_model(job, base, pairs, tokenizer.pad_token_id, out, observe)
    return meter


def theirs(job: SftJob | RewardJob, base: Path, examples: Examples, padding_free: bool) -> Meter:
    """TRL's own `train()`, from its first step to its last, on examples that are tokenised already."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import RewardTrainer, SFTTrainer

    meter, dtype = Meter(), job.runtime.dtype

    class Window(TrainerCallback):
        """The measured part of `train()`."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.window = meter.running()
            self.window.__enter__()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.window.__exit__(None, None, None)

    with tempfile.TemporaryDirectory() as folder:
        trainer: Any
        if isinstance(job, SftJob):
            model, tokenizer = load_causal_lm(base, job.runtime)
            data = Dataset.from_dict({
                "input_ids": [p + r for p, r in examples],
                "completion_mask": [[0] * len(p) + [1] * len(r) for p, r in examples],
            })  # fmt: skip
            options = trl_supervised(job.sft, folder, job.seed, dtype, padding_free=padding_free)
            trainer = SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer, callbacks=[Window()])
        else:
            model, tokenizer = load_reward_model(base, job.runtime, seed=torch_seed(job.seed, "reward", "head"))
            pairs = {"chosen_ids": [p + c for p, c, _ in examples], "rejected_ids": [p + r for p, _, r in examples]}
            options = trl_supervised(job.reward, folder, job.seed, dtype)
            trainer = RewardTrainer(
                model, options, train_dataset=Dataset.from_dict(pairs), processing_class=tokenizer,
                callbacks=[Window()],
            )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        mixed = {"float32": "no", "bfloat16": "bf16"}[dtype]
        assert trainer.accelerator.mixed_precision == mixed, trainer.accelerator.mixed_precision
        collate = meter.timed("data", trainer.data_collator)

        def counted(rows: Any) -> Any:
            batch = collate(rows)
            meter.count(batch.get("attention_mask", torch.ones_like(batch["input_ids"])))
            if "labels" in batch:
                meter.counts["loss tokens"] += int((batch["labels"] != -100).sum())
            return batch

        trainer.data_collator = counted
        with meter.watching():
            meter.losses.append(trainer.train().training_loss)
    return meter


def main() -> None:
    """Warm up, measure what the argument says, print."""
    given = json.loads(sys.argv[1])
    runtime = Runtime(device="cpu", dtype=given["dtype"], threads=given["threads"]).resolve()
    if given["side"] == "trl":
        torch.set_num_threads(runtime.threads)
    else:
        activate(runtime)
    job, responses = settings(given, runtime), 1 if given["stage"] == "sft" else 2
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = causal_lm(given["size"], Path(given["smollm2"]))
        save_model(model, tokenizer, base := Path(folder))
        examples = ragged_examples(tokenizer, given["batches"] * given["batch"], responses)

        def run(examples: Examples) -> Meter:
            if given["side"] == "trl":
                return theirs(job, base, examples, given["padding_free"])
            return ours(job, base, examples)

        run(examples[: WARM_UP * given["batch"]])
        print(json.dumps(run(examples).result()))


if __name__ == "__main__":
    main()
