"""One reward model of the equivalence test, ours or TRL's, in a process of its own: prints one line of JSON.

    python tests/bench/equivalence_side.py '{"side": "tether", "seed": 0, "data": ..., "sft": ..., ...}'

`equivalence.py` starts this and says what stands in the JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from recipe import train_reward_model, trl_supervised
from torch.optim.lr_scheduler import LambdaLR

from components.data.tables.published import read_split
from components.models.batching import length_buckets
from components.models.folders import load_causal_lm, load_reward_model
from components.models.runtime import Runtime, activate
from components.reward.config import RewardJob
from components.reward.pairs import Pair, encode_pairs
from components.reward.scoring import score_sequences
from components.reward.train import pair_lengths
from components.stats.calibration.measure import correctness, log_loss
from components.training.loop import seeded, torch_seed
from components.training.optim import build_optimizer, learning_rate_at
from flows.config.run_config import load_config


def ours(job: RewardJob, sft: Path, pairs: Sequence[Pair], pad_id: int) -> Any:
    """The model that our reward stage trains."""
    with tempfile.TemporaryDirectory() as folder:
        return train_reward_model(job, sft, pairs, pad_id, Path(folder), lambda *_, **__: None)


def theirs(job: RewardJob, sft: Path, pairs: Sequence[Pair], our_order: bool) -> Any:
    """The model that TRL's `train()` makes of the same first weights, with our AdamW and schedule.

    Args:
        our_order: give it the pairs in our batches, which must then all be full, in place of its own shuffle.
    """
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import RewardTrainer

    config, sampling = job.reward, "random"
    if our_order:
        assert config.epochs == 1 and len(pairs) % config.batch_size == 0
        lengths = pair_lengths(config, pairs)
        batches = length_buckets(lengths, config.batch_size, seeded(job.seed, "reward", "order", 0))
        pairs, sampling = [pairs[i] for batch in batches for i in batch], "sequential"
    model, tokenizer = load_reward_model(sft, job.runtime, seed=torch_seed(job.seed, "reward", "head"))
    optimizer = build_optimizer(model, config)
    steps = config.epochs * -(-len(pairs) // config.batch_size)
    rates = [learning_rate_at(step, steps, config) for step in range(steps)] + [0.0]  # set once more after the last
    schedule = LambdaLR(optimizer, lambda step: rates[step] / config.learning_rate)
    data = Dataset.from_dict({"chosen_ids": [p.chosen for p in pairs], "rejected_ids": [p.rejected for p in pairs]})
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model, trl_supervised(config, folder, job.seed, job.runtime.dtype, train_sampling_strategy=sampling),
            train_dataset=data, processing_class=tokenizer, optimizers=(optimizer, schedule),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert trainer.state.global_step == steps
    return model


def main() -> None:
    """Train what the argument says, judge it on the held-out pairs, print."""
    given = json.loads(sys.argv[1])
    data, sft = Path(given["data"]), Path(given["sft"])
    runtime = Runtime(device="cpu", dtype="float32", threads=given["threads"]).resolve()
    activate(runtime)
    config = load_config("demo-long")
    job = RewardJob(seed=given["seed"], runtime=runtime, generation=config.generation, reward=config.reward)
    _, tokenizer = load_causal_lm(sft, runtime)
    rows = read_split(data / "pairs.train")
    drawn = seeded(job.seed, "equivalence").sample(rows, given["pairs"])
    held_out = read_split(data / "pairs.test")[: given["judged"]]
    pairs, judged = (encode_pairs(tokenizer, some, job.generation) for some in (drawn, held_out))

    def judge(model: Any) -> dict[str, float]:
        with torch.no_grad():
            chosen, rejected = (
                score_sequences(model.eval(), tokenizer.pad_token_id, texts, runtime).double().numpy()
                for texts in ([p.chosen for p in judged], [p.rejected for p in judged])
            )
        margins = chosen - rejected
        return {"accuracy": float(correctness(margins).mean()), "loss": log_loss(margins, temperature=1.0)}

    first = judge(load_reward_model(sft, runtime, seed=torch_seed(job.seed, "reward", "head"))[0])
    began = time.perf_counter()
    if given["side"] == "trl":
        model = theirs(job, sft, pairs, given["our_order"])
    else:
        model = ours(job, sft, pairs, tokenizer.pad_token_id)
    seconds = time.perf_counter() - began
    print(json.dumps({"given": given, **judge(model), "first_loss": first["loss"], "seconds": seconds}))


if __name__ == "__main__":
    main()
