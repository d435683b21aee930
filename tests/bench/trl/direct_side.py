"""One measurement of the benchmark of DPO, in a process of its own: prints one line of JSON.

    python -m tests.bench.trl.direct_side '{"side": "tether", "folder": "...", "dtype": "float32", ...}'

`direct.py` starts this and says what stands in the JSON.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from components.data.tables.published import read_split
from components.direct import pair_training, training
from components.direct.config import DirectJob
from components.direct.policy_pairs import PolicyPairs
from components.models.config import GenerationConfig
from components.models.folders import load_causal_lm
from components.models.runtime import Runtime, activate
from components.ppo.models import Models
from tests.bench.tools import memory

RATE, BETA = 1e-6, 0.1


class Timed:
    """Seconds of a training, of the clock and of the processor (all threads), once a GPU has done its work."""

    seconds = cpu = 0.0

    def __init__(self, device: str) -> None:
        """`device`: as torch names it."""
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Time this block."""
        self.wait()
        began, before = time.perf_counter(), time.process_time()
        yield
        self.wait()
        self.seconds, self.cpu = time.perf_counter() - began, time.process_time() - before


def job_of(given: dict[str, Any], runtime: Runtime) -> DirectJob:
    """The stage's job: DPO without evaluations during training."""
    return DirectJob(
        seed=0, runtime=runtime, ppo={},
        generation=GenerationConfig(max_prompt_tokens=given["prompt"], max_new_tokens=given["response"]),
        policy={
            "method": "dpo", "beta": BETA, "batch_size": given["batch"], "micro_batch_size": given["batch"],
            "learning_rate": RATE, "warmup": 0, "decay": "none", "gradient_checkpointing": given["recompute"],
            "checkpoint_every": 10**6, "checkpoint_minutes": None,
        },
    )  # fmt: skip


def ours(job: DirectJob, folder: Path, timed: Timed) -> tuple[int, float]:
    """Train as the stage does; return the number of pairs and the mean log-probability of SFT."""
    inputs = {name: folder / name for name in ("data", "sft", "reward")}
    fit, reference_logprobs, references = training.fit, pair_training.reference_logprobs, list[float]()

    def timed_fit(*args: Any, **options: Any) -> int:
        with timed.measure():
            return fit(*args, **options)

    def kept(*args: Any) -> list[float]:
        references.extend(reference_logprobs(*args))
        return references

    with (
        tempfile.TemporaryDirectory() as out, patch.object(training, "fit", timed_fit),
        patch.object(pair_training, "reference_logprobs", kept),
        patch("components.training.loop.Loop.save"),  # TRL writes no checkpoint here
    ):  # fmt: skip
        models = Models.load(job.measured, inputs)
        trained = pair_training.train_on_pairs(models, job, inputs, Path(out), lambda *_, **__: None)
    return int(trained.metrics["direct/pairs"]), sum(references) / len(references)


def trls(job: DirectJob, folder: Path, timed: Timed) -> tuple[int, float]:
    """Train by TRL's trainer on the same tokens; the same returned."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl import DPOConfig, DPOTrainer

    disable_progress_bars()
    _, tokenizer = load_causal_lm(folder / "sft", job.runtime)
    model = AutoModelForCausalLM.from_pretrained(folder / "sft" / "model", dtype=torch.float32)
    pairs = PolicyPairs.encode(tokenizer, read_split(folder / "data" / "pairs.train"), job)
    of_pair = [(*pairs.examples[2 * i], pairs.examples[2 * i + 1][1]) for i in range(len(pairs))]
    columns = dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), zip(*of_pair, strict=True), strict=True))
    config = job.policy
    with tempfile.TemporaryDirectory() as out, patch.object(DPOTrainer, "_prepare_dataset", lambda _, rows, *__: rows):
        options = DPOConfig(
            output_dir=out, report_to="none", use_cpu=job.runtime.device == "cpu",
            bf16=job.runtime.dtype == "bfloat16", disable_tqdm=True,
            save_strategy="no", logging_strategy="epoch", seed=0, num_train_epochs=1,
            per_device_train_batch_size=config.batch_size, gradient_accumulation_steps=1, beta=BETA,
            gradient_checkpointing=config.gradient_checkpointing, precompute_ref_log_probs=True, max_length=None,
            learning_rate=config.peak, lr_scheduler_type="constant", adam_beta2=config.beta2,
            adam_epsilon=config.epsilon, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = DPOTrainer(
            model=model, args=options, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({name: list(column) for name, column in columns.items()}),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        mixed = {"float32": "no", "bfloat16": "bf16"}[job.runtime.dtype]
        assert trainer.accelerator.mixed_precision == mixed, trainer.accelerator.mixed_precision
        with timed.measure():
            trainer.train()
        references = [x for side in ("chosen", "rejected") for x in trainer.train_dataset[f"ref_{side}_logps"]]
    assert trainer.state.global_step == -(-len(pairs) // config.batch_size)
    return len(pairs), sum(references) / len(references)


def main() -> None:
    """Measure what the argument says."""
    given = json.loads(sys.argv[1])
    runtime = Runtime(device=given["device"], dtype=given["dtype"], threads=given["threads"]).resolve()
    if given["side"] == "trl":
        import trl.trainer.dpo_trainer  # noqa: F401  what imports take is not counted

        torch.set_num_threads(runtime.threads)
    else:
        activate(runtime)
    on_gpu, timed = runtime.device == "cuda", Timed(runtime.device)
    imports = memory("VmRSS")
    train = trls if given["side"] == "trl" else ours
    pairs, reference = train(job_of(given, runtime), Path(given["folder"]), timed)
    whole = memory("VmHWM")
    peak = whole - imports
    if on_gpu:
        peak, whole = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    speeds = {"pairs_per_second": pairs / timed.seconds, "pairs_per_cpu_second": pairs / timed.cpu}
    print(json.dumps({**speeds, "peak": peak, "whole": whole, "reference": reference}))


if __name__ == "__main__":
    main()
