"""Best of n: fine-tune the policy on the reward model's choice of several of its own responses to each prompt."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.base.observe import Observe
from components.base.text import counted
from components.data.tables.published import SplitColumn, read_split
from components.direct.config import DirectJob
from components.direct.training import TrainedPolicy, train
from components.distributed import ranks
from components.models.batching import encode_prompt
from components.models.sampling import SftAnswers
from components.ppo.experience import rewarded_scores, sampled_batches
from components.ppo.models import Models
from components.sft.tokenized_demonstrations import Examples, token_losses
from components.training.chunks import in_chunks
from components.training.loop import TrainingExamples, torch_seed

Row = dict[str, Any]

AT_ONCE = 64
"""Number of prompts whose choices are computed between two writes."""


def train_on_best(
    models: Models, job: DirectJob, inputs: Mapping[str, Path], out: Path, observe: Observe
) -> TrainedPolicy:
    """Sample, choose and train in `policy.rounds`; return the last round's training, with the history of all. Resumes
    from `out`.

    A round that has failed, because KL left its limits, is the last.

    This is rejection sampling (Touvron et al. 2023, "Llama 2", section 3.2.3; RAFT: Dong et al. 2023, arXiv
    2304.06767): SFT's loss on the chosen responses, so that the policy learns to say at once what it otherwise needs n
    attempts for.

    Raises:
        UserError: no chosen response to any prompt has ended.
    """
    prompts = SplitColumn(read_split(inputs["data"] / "prompts.train"), "prompt")[: job.policy.max_prompts]
    history = list[Row]()
    models.policy.eval()
    for number in range(1, job.policy.rounds + 1):
        rows = _chosen(models, job, prompts, number, out, observe)
        if ranks.is_first():
            write_rows(out / "artifact" / f"best_of_n-{number}.jsonl", rows)
        chosen = [row for row in rows if row["ended"]]
        if not chosen:
            raise UserError(
                f"policy.method=best_of_n: none of {counted(len(rows), 'chosen response')} has ended within "
                f"generation.max_new_tokens ({job.generation.max_new_tokens}). Raise it, or train SFT to end."
            )
        metrics = {
            "direct/best_of_n_gain": fmean(row["score"] - row["mean_score"] for row in rows),
            "direct/best_of_n_ended": len(chosen) / len(rows),
        }
        most = job.generation.max_prompt_tokens
        examples = Examples.of((encode_prompt(models.tokenizer, row["prompt"], most), row["ids"]) for row in chosen)
        batch_loss = partial(_batch_loss, models, job, examples)
        batches = TrainingExamples(batch_loss, examples.lengths, examples.responses.lengths)
        of_round, part = _after(len(history), observe), number if number > 1 else None
        trained = train(models, job, batches, inputs, out, of_round, metrics, part)
        trained.count_from(history)
        history = trained.history.rows
        if trained.history.failed:
            break
    return trained


def _batch_loss(
    models: Models, job: DirectJob, examples: Examples, batch: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    some = [examples[i] for i in batch]
    loss = token_losses(models.policy, models.tokenizer.pad_token_id, some, job.runtime).mean()
    return loss, {"direct/loss": loss}


def _after(updates: int, observe: Observe) -> Observe:
    """Return an `observe` for the rounds after so many updates."""

    def of_round(step: int, metrics: Mapping[str, float], total: int | None = None, **further: Any) -> None:
        observe(step + updates, metrics, None if total is None else total + updates, **further)

    return of_round


def _chosen(
    models: Models, job: DirectJob, prompts: Sequence[Any], number: int, out: Path, observe: Observe
) -> list[Row]:
    """Return `best_of_n` of all prompts for round `number`. What was computed before an interruption is kept."""
    doing = f"choosing among {job.policy.n} responses to {counted(len(prompts), 'prompt')}"

    def done(count: int) -> None:
        observe(count, {}, total=len(prompts), doing=doing)

    done(0)
    file = out / "checkpoint" / f"best_of_n-{number}"
    return in_chunks(prompts, AT_ONCE, file, lambda some, start: best_of_n(models, job, some, number, start), done)


@torch.no_grad()
def best_of_n(models: Models, job: DirectJob, prompts: Sequence[Any], number: int, first: int = 0) -> list[Row]:
    """Sample `policy.n` responses of the policy to each prompt; return for each the one with the highest reward.

    A row has `prompt`, `response`, its `ids` with EOS, its `score` as PPO would reward it, the `mean_score` of all n,
    and whether it `ended`. Of equal scores the first counts. All ranks call it, and share the work.

    Args:
        number: the round.
        first: the number of the first of `prompts`; each prompt's random numbers depend on its own number alone.
    """
    measured, n = job.measured, job.policy.n
    repeated = [prompt for prompt in prompts for _ in range(n)]
    rows = list[Row]()
    seed = torch_seed(job.seed, "ppo", f"best of n {number}")
    streams = SftAnswers(seed, range(first * n, first * n + len(repeated)))
    for batch, samples, passes in sampled_batches(models, models.policy, repeated, measured, streams):
        texts, raw = samples.texts(models.tokenizer), passes.raw_scores
        if models.rewards is not None:
            raw, *_ = models.rewards.score(raw, batch, texts, ended=samples.ended.tolist())
        scores = rewarded_scores(raw, samples, models.scale, measured.ppo.score).tolist()
        for i, (prompt, text, ended) in enumerate(zip(batch, texts, samples.ended.tolist(), strict=True)):
            row = {"prompt": prompt, "response": text, "ids": samples.reward_ids(i), "ended": ended}
            rows.append(row | {"score": scores[i]})
    of_prompts = (rows[start : start + n] for start in range(0, len(rows), n))
    return [
        max(of_prompt, key=itemgetter("score")) | {"mean_score": fmean(row["score"] for row in of_prompt)}
        for of_prompt in of_prompts
    ]
