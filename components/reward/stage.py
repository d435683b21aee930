"""The reward stage: Bradley-Terry training, calibration on pairs it never saw, and the unit of the scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from components.adapters import AdapterView, Backbone, save_adapter
from components.batching import encode_prompt, encode_response, pad
from components.data.jsonl import read_rows, write_json
from components.errors import CheckFailed
from components.generation import GenerationConfig
from components.models import frozen, load_causal_lm, load_reward_model, save_model
from components.ppo.rollout import generate_responses
from components.reward.calibration import (
    calibration_report,
    chosen_shown_first,
    correctness,
    fit_temperature,
    length_baseline,
    majority_baseline,
)
from components.reward.config import RewardJob
from components.reward.scoring import ScoreScale, invariance, score_sequences, score_tokens
from components.stats import clustered_mean
from components.training import Report, fit, torch_seed


class Pair(NamedTuple):
    """Token ids of prompt and response, the chosen and the rejected, and the margin asked for."""

    chosen: list[int]
    rejected: list[int]
    margin: float


def run(job: RewardJob, inputs: Mapping[str, Path], out: Path, report: Report) -> dict[str, float]:
    """Train a scalar head and body on `inputs["data"]` from `inputs["sft"]`; publish model, scale and calibration.

    With `reward.lora` the body is an adapter, published beside the whole model.
    """
    model, tokenizer = load_reward_model(inputs["sft"], job.runtime, seed=torch_seed(job.seed, "reward", "head"))
    if job.reward.lora is not None:
        model = Backbone(model).add("reward", job.reward.lora, torch_seed(job.seed, "reward", "adapter"), model.score)
    splits = {s: read_rows(inputs["data"] / f"pairs.{s}.jsonl") for s in ("train", "calibration", "test")}
    splits["train"] = splits["train"][: job.reward.max_pairs]
    pairs = {s: encode_pairs(tokenizer, rows, job.generation) for s, rows in splits.items()}
    train, pad_id = pairs["train"], tokenizer.pad_token_id

    def batch_loss(batch: list[int]) -> tuple[Tensor, dict[str, float]]:
        rows = [train[i] for i in batch]
        ids, mask = pad([p.chosen for p in rows] + [p.rejected for p in rows], pad_id)
        scores = score_tokens(model, ids.to(job.runtime.device), mask.to(job.runtime.device), job.runtime)
        chosen, rejected = scores.chunk(2)
        margin = torch.tensor([p.margin for p in rows], device=scores.device) if job.reward.use_margin else 0.0
        loss = bradley_terry_loss(chosen, rejected, margin)
        accuracy = (chosen > rejected).float().mean()
        return loss, {"reward/train_loss": loss.item(), "reward/train_accuracy": accuracy.item()}

    model.requires_grad_(True).train()
    fit(
        model, batch_loss, [max(len(p.chosen), len(p.rejected)) for p in train],
        epochs=job.reward.epochs, batch_size=job.reward.batch_size, micro_batch_size=job.reward.micro_batch_size,
        optimizer_config=job.reward, seed=job.seed, group="reward", out=out,
        checkpoint_every=job.reward.checkpoint_every, report=report,
    )  # fmt: skip
    model = frozen(model)
    save_model(model, tokenizer, out / "artifact" / "model")
    if isinstance(model, AdapterView):
        save_adapter(model, out / "artifact" / "adapter")
    calibration = _calibrate(job, model, pad_id, splits, pairs)
    write_json(out / "artifact" / "calibration.json", calibration)
    scale = _measure_scale(job, inputs, model, tokenizer, calibration["temperature"])
    write_json(out / "artifact" / "reward.json", scale.model_dump())
    metrics = {f"reward/{name}": float(calibration[name]) for name in _REPORTED} | {
        "reward/test_pairs": float(len(pairs["test"])),
        "reward/invariance": invariance(model, pad_id, [p.chosen for p in pairs["test"][:32]], job.runtime),
        "reward/shift": scale.shift,
        "reward/scale": scale.scale,
    }
    write_json(out / "artifact" / "metrics.json", metrics)
    return metrics


_REPORTED = (
    "accuracy", "accuracy_low", "accuracy_high", "ece", "ece_null_95", "calibration_slope", "brier", "log_loss",
    "temperature", "length_accuracy", "length_gain_low", "majority_accuracy",
)  # fmt: skip


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected - margin), scores (N,), in nats a pair (Ouyang et al. 2022, equation 1;
    the margin as in Llama 2, equation 2)."""
    return -logsigmoid(chosen - rejected - margin).mean()


def encode_pairs(tokenizer: Any, rows: Sequence[Mapping[str, Any]], generation: GenerationConfig) -> list[Pair]:
    """Token ids of pairs, cut to the lengths of `generation`."""
    out = []
    for row in rows:
        prompt = encode_prompt(tokenizer, row["prompt"], generation.max_prompt_tokens)
        chosen, rejected = (
            prompt + encode_response(tokenizer, row[k], generation.max_new_tokens) for k in ("chosen", "rejected")
        )
        out.append(Pair(chosen, rejected, row.get("margin") or 0.0))
    return out


def _calibrate(
    job: RewardJob, model: Any, pad_id: int, splits: Mapping[str, list[dict[str, Any]]], pairs: Mapping[str, list[Pair]]
) -> dict[str, Any]:
    """Fit the temperature on the calibration split, report everything on the test split, baselines beside it."""

    def margins(split: str) -> np.ndarray:
        chosen = score_sequences(model, pad_id, [p.chosen for p in pairs[split]], job.runtime)
        rejected = score_sequences(model, pad_id, [p.rejected for p in pairs[split]], job.runtime)
        return (chosen - rejected).double().numpy()

    test = splits["test"]
    clusters = [str(row["prompt"]) for row in test]
    found = margins("test")
    temperature = fit_temperature(margins("calibration"))
    report = calibration_report(found, clusters, temperature, job.seed, job.reward.calibration_bins)
    gaps = {s: [len(r["chosen"]) - len(r["rejected"]) for r in splits[s]] for s in ("train", "test")}
    by_length, rule = length_baseline(gaps["train"], gaps["test"])
    first = {
        s: chosen_shown_first(*([str(r[k]) for r in splits[s]] for k in ("prompt", "chosen", "rejected")))
        for s in ("train", "test")
    }
    return report | {
        "length_rule": rule,
        "length_accuracy": float(by_length.mean()),
        "length_gain_low": clustered_mean(correctness(found) - by_length, clusters).low,
        "majority_accuracy": float(majority_baseline(first["train"], first["test"]).mean()),
    }


def _measure_scale(
    job: RewardJob, inputs: Mapping[str, Path], model: Any, tokenizer: Any, temperature: float
) -> ScoreScale:
    """Score SFT responses to prompts of the calibration split: they get mean 0 and standard deviation 1."""
    rows = read_rows(inputs["data"] / "prompts.calibration.jsonl")[: job.reward.scale_responses]
    policy, _ = load_causal_lm(inputs["sft"], job.runtime)
    prompts = [row["prompt"] for row in rows]
    seed = torch_seed(job.seed, "reward", "scale")
    responses = generate_responses(policy, tokenizer, prompts, job.generation, seed, job.runtime)
    encoded = [encode_prompt(tokenizer, p, job.generation.max_prompt_tokens) for p in prompts]
    raw = score_sequences(
        model, tokenizer.pad_token_id, [p + r.token_ids for p, r in zip(encoded, responses, strict=True)], job.runtime
    ).double()
    shift, scale = float(raw.mean()), float(raw.std())
    if not scale > 0:
        raise CheckFailed("every SFT response has the same score: the reward model tells nothing apart.")
    first_percentile = float(((raw - shift) / scale).quantile(0.01))
    return ScoreScale(
        shift=shift, scale=scale, missing_eos_score=first_percentile, temperature=temperature, responses=len(raw)
    )
