"""The policy against the SFT policy on held-out prompts: what the gates judge."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.batching import encode_prompt
from components.data.jsonl import read_rows, write_rows
from components.data.task import task_scores
from components.ppo.config import PpoJob
from components.ppo.experience import rewarded_scores
from components.ppo.maths import kl_estimates
from components.ppo.models import Models, frozen_pass
from components.ppo.rollout import rollout_engine
from components.ppo.text import echo, repetition
from components.sft.demonstrations import encode_demonstrations, mean_loss
from components.stats import clustered_mean
from components.training import torch_seed


def evaluate(models: Models, job: PpoJob, data: Path, out: Path) -> dict[str, float]:
    """Sample a response of each policy to held-out prompts; write `evaluation.jsonl`, return the stage's metrics."""
    prompts = [row["prompt"] for row in read_rows(data / "prompts.test.jsonl")[: job.ppo.evaluate]]
    policy = respond(models, models.policy, prompts, job, data)
    sft = respond(models, models.sft, prompts, job, data)
    write_rows(
        out / "artifact" / "evaluation.jsonl",
        ({"prompt": p, "policy": a, "sft": b} for p, a, b in zip(prompts, policy, sft, strict=True)),
    )
    clusters = [str(p) for p in prompts]
    kl = clustered_mean([r["kl"] for r in policy], clusters)
    gain = clustered_mean([a["score"] - b["score"] for a, b in zip(policy, sft, strict=True)], clusters)
    metrics = {
        "ppo/evaluated": float(len(prompts)),
        "ppo/kl": kl.value,
        "ppo/kl_high": kl.high,
        "ppo/kl_per_token": sum(r["kl"] for r in policy) / sum(r["tokens"] for r in policy),
        "ppo/proxy_reward": _mean(policy, "score"),
        "ppo/reward_gain": gain.value,
        "ppo/reward_gain_low": gain.low,
        "ppo/entropy": _mean(policy, "entropy"),
        "ppo/response_tokens": _mean(policy, "tokens"),
        "ppo/length_ratio": _mean(policy, "tokens") / _mean(sft, "tokens"),
        "ppo/ended": _mean(policy, "ended"),
        "ppo/repetition": _mean(policy, "repetition"),
        "ppo/echo": _mean(policy, "echo"),
        "ppo/distinct": len({r["response"] for r in policy}) / len(policy),
        "ppo/sft_distinct": len({r["response"] for r in sft}) / len(sft),
        "ppo/demonstration_perplexity_ratio": _forgetting(models, job, data),
    }
    if "gold" in policy[0]:
        gold = clustered_mean([a["gold"] - b["gold"] for a, b in zip(policy, sft, strict=True)], clusters)
        metrics |= {
            "ppo/gold": _mean(policy, "gold"),
            "ppo/sft_gold": _mean(sft, "gold"),
            "ppo/gold_gain_low": gold.low,
            "ppo/gold_gain_high": gold.high,
            "ppo/violations": _mean(policy, "violations"),
            "ppo/sft_violations": _mean(sft, "violations"),
            "ppo/violations_excess": _mean(policy, "violations") - _mean(sft, "violations"),
            "ppo/echoes": _mean(policy, "echoes"),
        }
    return metrics | (best_of(models, prompts, job, data, job.ppo.best_of) if job.ppo.best_of else {})


def best_of(models: Models, prompts: Sequence[Any], job: PpoJob, data: Path, n: int) -> dict[str, float]:
    """The baseline that trains nothing: of `n` SFT responses to each prompt, the one the reward model likes best.

    Its KL to SFT is at most log n - (n - 1) / n nats a response (Stiennon et al. 2020, G.3; Beirami et al. 2024).
    """
    rows = respond(models, models.sft, [p for p in prompts for _ in range(n)], job, data, stream="best of n")
    best = [max(rows[i : i + n], key=lambda row: row["score"]) for i in range(0, len(rows), n)]
    metrics = {
        "ppo/best_of_kl_bound": math.log(n) - (n - 1) / n,
        "ppo/best_of_proxy_reward": _mean(best, "score"),
        "ppo/best_of_response_tokens": _mean(best, "tokens"),
    }
    return metrics | ({"ppo/best_of_gold": _mean(best, "gold")} if "gold" in best[0] else {})


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def respond(
    models: Models, model: Any, prompts: Sequence[Any], job: PpoJob, data: Path, stream: str = "evaluation"
) -> list[dict[str, Any]]:
    """One response of `model` to each prompt, with its score, KL to SFT (summed k1, nats) and texture.

    Two models that share a `stream` share its random numbers.
    """
    encoded = [encode_prompt(models.tokenizer, p, job.generation.max_prompt_tokens) for p in prompts]
    asked = Models(model, models.sft, models.reward_model, None, models.tokenizer, models.scale)
    generator = torch.Generator().manual_seed(torch_seed(job.seed, "ppo", stream))
    rows: list[dict[str, Any]] = []
    with rollout_engine(model, models.tokenizer, job.runtime) as engine:
        for start in range(0, len(prompts), job.ppo.batch_size):
            batch = slice(start, start + job.ppo.batch_size)
            samples = engine.sample(encoded[batch], job.generation, generator)
            found = frozen_pass(asked, replace(samples, seen=None), job)  # the judged KL is the training path's
            mask = samples.response_mask
            kl = kl_estimates(found["policy"], found["sft"], mask).k1.sum(1)
            scores = rewarded_scores(found["raw_scores"], samples, models.scale, job.ppo.score)
            lengths = mask.sum(1)
            for i, (prompt, text) in enumerate(zip(prompts[batch], samples.texts(models.tokenizer), strict=True)):
                rows.append(
                    {
                        "response": text, "score": scores[i].item(), "kl": kl[i].item(), "tokens": int(lengths[i]),
                        "entropy": found["entropy"][i].sum().item() / int(lengths[i]), "ended": bool(samples.ended[i]),
                        "repetition": repetition(text), "echo": echo(prompt[-1]["content"], text),
                    }
                    | task_scores(data, prompt, text)
                )  # fmt: skip
    return rows


def _forgetting(models: Models, job: PpoJob, data: Path) -> float:
    """Perplexity of held-out demonstrations under the policy over that under SFT: 1 is nothing lost."""
    rows = read_rows(data / "demonstrations.heldout.jsonl")[: job.ppo.evaluate]
    examples = encode_demonstrations(models.tokenizer, rows, job.generation)
    losses = [mean_loss(m, models.tokenizer, examples, job.runtime) for m in (models.policy, models.sft)]
    return math.exp(losses[0] - losses[1])
