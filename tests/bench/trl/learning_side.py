"""One run of the comparison of what is learnt, ours or TRL's, in a process of its own: prints one line of JSON.

    python -m tests.bench.trl.learning_side '{"side": "separate", "seed": 0, "data": ..., "sft": ..., ...}'

`learning.py` starts this and says what stands in the JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from components.data.tables.published import read_split
from components.models.batching import encode_prompt
from components.models.folders import load_reward_model
from components.models.logprobs import NEVER
from components.models.runtime import Runtime, activate
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.evaluate import respond
from components.ppo.models import Models
from components.ppo.stage import prompts_of, train
from components.reward.scoring import ScoreScale
from flows.config.run_config import load_config
from tests.bench.trl.recipe import trl_config

JUDGED = ("kl", "gold", "score", "tokens", "entropy", "ended", "violations")
"""What `respond` says of a response and is averaged."""


class ScaledHead(nn.Module):
    """The scalar head of a reward model in the unit of our rewards, for TRL, which takes scores as they come."""

    def __init__(self, head: nn.Module, scale: ScoreScale, clip: float | None) -> None:
        super().__init__()
        self.head, self.scale, self.clip = head, scale, clip

    def forward(self, hidden: Tensor) -> Tensor:
        """Scaled scores (..., 1), clipped as rewards are where there is a `clip`, from hidden states (..., D)."""
        scores = self.scale(self.head(hidden))
        return scores if self.clip is None else scores.clamp(-self.clip, self.clip)


def never_pad(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
    """TRL may sample the pad token (id 0); here, as in Tether, it has probability 0."""
    return logits.index_fill(-1, torch.tensor([0]), NEVER)


def judge(models: Models, policy: Any, prompts: list[Any], job: PpoJob, data: Path, update: int) -> dict[str, float]:
    """Means over held-out `prompts` of `policy` after `update` updates: KL to SFT (nats a response), gold score, ..."""
    rows = [row.row() for row in respond(models, policy, prompts, job, data)]
    return {"update": update} | {name: sum(float(r[name]) for r in rows) / len(rows) for name in JUDGED}


def ours(models: Models, job: PpoJob, prompts: list[Any], data: Path, after: Callable[[int], None]) -> None:
    """Tether's own updates, those of the PPO stage; `after` gets the number of each that is done."""
    with tempfile.TemporaryDirectory() as folder:
        train(models, job, prompts, data, Path(folder), lambda step, *_, **__: after(step))


def theirs(models: Models, job: PpoJob, prompts: list[Any], reward: Path, after: Callable[[int], None]) -> None:
    """TRL's own `train()` on `models.policy` against `models.sft`, with the prompts of each of our batches."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.experimental.ppo import PPOTrainer

    config, tokenizer = job.ppo, models.tokenizer
    tokenizer.padding_side = "left"  # of its collator; our own padding doesn't ask the tokenizer
    assert tokenizer.pad_token_id == 0, "TRL puts token 0 where padding is masked, and never_pad thinks so"
    for model in (models.policy, models.sft):
        model.lm_head.register_forward_hook(never_pad)
    judges = [load_reward_model(reward, job.runtime)[0] for _ in range(2)]
    for model, clip in zip(judges, (config.score.clip, None), strict=True):
        model.score = ScaledHead(model.score, models.scale, clip)
    batches = (prompts_of(prompts, config, number + 1, job.seed) for number in range(config.updates))
    encoded = [encode_prompt(tokenizer, p, job.generation.max_prompt_tokens) for batch in batches for p in batch]
    episodes = Dataset.from_dict({"input_ids": encoded})

    class After(TrainerCallback):
        """The end of an update."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            after(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=trl_config(config, job.generation, folder, job.seed, job.runtime.dtype), processing_class=tokenizer,
            model=models.policy, ref_model=models.sft, reward_model=judges[0], value_model=judges[1],
            train_dataset=episodes, eval_dataset=episodes, callbacks=[After()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        # Its own shuffles.
        trainer.dataloader = DataLoader(episodes, config.batch_size, collate_fn=trainer.data_collator)
        trainer.train()


def main() -> None:
    """Run what the argument says and print its curve."""
    given = json.loads(sys.argv[1])
    data, reward = Path(given["data"]), Path(given["reward"])
    runtime = Runtime(device="cpu", dtype="float32", threads=1).resolve()
    activate(runtime)
    generation = load_config("demo-long").generation
    job = PpoJob(seed=given["seed"], runtime=runtime, generation=generation, ppo=PpoConfig(**given["config"]))
    train_prompts, held_out = (
        [row["prompt"] for row in read_split(data / f"prompts.{split}")] for split in ("train", "test")
    )
    models = Models.load(job, {"sft": Path(given["sft"]), "reward": reward})
    judged, spent = [], 0.0

    def after(update: int) -> None:
        nonlocal spent
        if update % given["judge_every"] == 0:
            began = time.perf_counter()
            judged.append(judge(models, models.policy, held_out[: given["judged"]], job, data, update))
            spent += time.perf_counter() - began

    began = time.perf_counter()
    after(0)
    if given["side"] == "trl":
        theirs(models, job, train_prompts, reward, after)
    else:
        ours(models, job, train_prompts, data, after)
    seconds = {"all": time.perf_counter() - began, "judging": spent}
    print(json.dumps({"given": given, "seconds": seconds, "points": judged}))


if __name__ == "__main__":
    main()
