"""The reward stage: Bradley-Terry training, calibration on held-out pairs, and the scale of the scores."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.base.hashing import hash8
from components.base.jsonl import write_json
from components.base.observe import Observe
from components.base.text import counted
from components.data.splits import SPLITS
from components.data.support_desk.task import task_name
from components.data.tables.published import read_split
from components.distributed.ranks import go_on_alone, is_first
from components.models.adapters import AdapterView, save_adapter
from components.models.batching import encode_prompt
from components.models.folders import frozen, load_causal_lm, on_host, save_model
from components.models.sampling import ANSWERS_STREAM, SftAnswers, generate_responses
from components.reward.config import BINS, EnsembleConfig, RewardJob
from components.reward.evaluation.baselines import chosen_shown_first, length_baseline, majority_baseline
from components.reward.evaluation.length import response_tokens
from components.reward.evaluation.model_checks import check_model
from components.reward.evaluation.probes import ProbeTexts, robustness_metrics, robustness_report
from components.reward.evaluation.slices import ScoredPairs, character_gaps, slice_report
from components.reward.pair_scores import score_pairs
from components.reward.refresh.compare import Refresh
from components.reward.refresh.people_agreement import agreement_metrics
from components.reward.scoring import ScoreScale, as_one, invariance, member_folder, score_sequences, with_one_head
from components.reward.suites.evaluation import suite_metrics
from components.reward.suites.scorer import RewardScorer
from components.reward.train import HeldPairs, train_models
from components.reward.training_pairs import Pairs, PreferencePair, check_votes, encode_pairs
from components.stats.calibration.calibration_metrics import calibration, correctness, fit_temperature
from components.stats.calibration.nulls import Judgements
from components.stats.intervals import FloatArray, Numbers, cluster_codes, gain_in_shares
from components.training.loop import torch_seed


def run(job: RewardJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Train a reward model on `inputs["data"]` from `inputs["sft"]`; publish model, scale and calibration.

    With `reward.lora` an adapter is trained, and published beside the merged model. With `reward.objectives` the
    published model has a head for each; scoring code uses their weighted sum as one head. With `reward.refresh`
    training starts from `inputs["previous_reward"]` and replays pairs of `inputs["previous_data"]`, on whose test pairs
    both models are compared. The finished model also scores each suite of `inputs["suites/NAME"]`.

    Raises:
        UserError: the training pairs have none of the votes that the config trains on, or the model to refresh does not
            fit this run.
    """
    data = {s: read_split(inputs["data"] / f"pairs.{s}") for s in SPLITS}
    splits: Mapping[str, Sequence[PreferencePair]] = data | {"train": data["train"][: job.reward.max_pairs]}
    check_votes(splits["train"], job.reward, "pairs.train")
    refresh = None
    if job.reward.refresh is not None:
        refresh = Refresh.begin(job, job.reward.refresh, inputs, splits)
        splits = refresh.splits
    return train_on(splits, job, inputs, out, observe, refresh)


def train_on(
    splits: Mapping[str, Sequence[PreferencePair]], job: RewardJob, inputs: Mapping[str, Path], out: Path,
    observe: Observe, refresh: Refresh | None = None,
) -> dict[str, float]:  # fmt: skip
    """Train on the pairs of `splits["train"]` and publish as `run` does; return the metrics.

    Args:
        splits: pairs by split. The temperature is fitted on `calibration`; everything is reported on `test`.
        inputs: as for `run`; the scale is measured on prompts of `data`.
        refresh: the earlier model to start from and to compare with; None starts from SFT.
    """
    tokenizer = load_causal_lm(inputs["sft"], on_host(job.runtime))[1]  # the model itself is freed at once
    train = Pairs(tokenizer, splits["train"], job.generation, job.reward, out)
    pad_id, members = tokenizer.pad_token_id, []
    # Only a few calibration pairs are evaluated during training; the rest are encoded afterwards, like the test split.
    watching = splits["calibration"][: job.reward.watch.examples if job.reward.evaluate_every is not None else 0]
    held_out = HeldPairs.choose(
        job.reward, splits["calibration"], encode_pairs(tokenizer, watching, job.generation, job.reward, out),
        partial(_save, tokenizer, out / "artifact" / "last"),
    )  # fmt: skip
    models = train_models(job, inputs["sft"], splits["train"], train, pad_id, out, observe,
                          inputs.get("previous_reward"), held_out)  # fmt: skip
    for member, model in enumerate(models):
        _save(tokenizer, out / "artifact", model, member)
        members.append(frozen(with_one_head(model, job.reward.objectives)))
    observe(0, {}, doing="sampling and scoring SFT responses, for the scale")
    sft_samples = sample_sft(job, inputs, tokenizer, out / "artifact")
    go_on_alone()
    pairs = {s: encode_pairs(tokenizer, splits[s], job.generation, job.reward, out) for s in ("calibration", "test")}
    sft_scores = torch.stack([score_sequences(m, pad_id, sft_samples.ids, job.runtime).double() for m in members])
    write_json(out / "artifact" / "sft_scores.json", sft_scores.tolist())
    whole, combined = as_one(members, sft_scores, EnsembleConfig())
    temperature, calibrated, margins = _calibrate(job, whole, tokenizer, splits, pairs, out / "artifact", observe)
    scale = ScoreScale.measure(combined, temperature)
    scale.write(out / "artifact", job.reward.objectives)
    observe(0, {}, doing="probing the scores with changed texts")
    task = task_name(inputs["data"])
    robustness = robustness_report(job, whole, members, tokenizer, splits["test"], sft_samples, scale.scale, task)
    write_json(out / "artifact" / "robustness.json", robustness)
    metrics = {f"reward/{n}": float(value) for n in _REPORTED if (value := calibrated[n]) is not None} | {
        "reward/test_pairs": float(len(pairs["test"])),
        "reward/invariance": invariance(whole, pad_id, list(pairs["test"].chosen[:32]), job.runtime),
        "reward/shift": scale.shift,
        "reward/scale": scale.scale,
        **robustness_metrics(robustness),
    }
    check_model(whole, tokenizer, job, inputs, splits["test"], out, margins, metrics)
    if len(members) > 1:
        centred = sft_scores - sft_scores.mean(1, keepdim=True)
        metrics["reward/disagreement"] = float(centred.std(0).mean()) / scale.scale
    if refresh is not None:
        observe(0, {}, doing="comparing with the earlier reward model")
        metrics |= refresh.compare(job, whole, tokenizer, sft_samples, scale, out / "artifact")
    if held_out is not None:
        metrics |= held_out.metrics()
        write_json(out / "artifact" / "metadata.json", held_out.document())
    metrics |= agreement_metrics(job, inputs, splits["test"], whole, tokenizer)
    metrics |= suite_metrics(inputs, RewardScorer(whole, tokenizer, job.runtime, temperature), out, observe)
    write_json(out / "artifact" / "metrics.json", metrics)
    return metrics


def _save(tokenizer: Any, artifact: Path, model: Any, member: int) -> None:
    folder = member_folder(artifact, member)
    if is_first():
        save_model(model, tokenizer, folder / "model")
        if isinstance(model, AdapterView):
            save_adapter(model, folder / "adapter")


_REPORTED = (
    "accuracy", "accuracy_low", "accuracy_high", "ece", "ece_null_95", "calibration_slope", "slope_null_low",
    "slope_null_high", "brier", "brier_high", "log_loss", "log_loss_high", "temperature", "temperature_at_end",
    "length_accuracy", "length_gain_low", "majority_accuracy", "majority_gain_low", "ece_width",
    "ece_width_null_95", "brier_before", "log_loss_before", "slices_judged", "slice_accuracy_low",
    "slice_ece_excess", "accuracy_chosen_longer", "accuracy_chosen_shorter", "balanced_length_accuracy",
    "balanced_length_accuracy_low", "length_partial_correlation", "length_partial_correlation_low",
    "length_partial_correlation_high",
)  # fmt: skip


def _calibrate(
    job: RewardJob, model: Any, tokenizer: Any, splits: Mapping[str, Sequence[PreferencePair]],
    pairs: Mapping[str, Pairs], artifact: Path, observe: Observe,
) -> tuple[float, Numbers, dict[str, FloatArray]]:  # fmt: skip
    """Fit the temperature on the calibration split, and measure calibration and baselines on the test split.

    Returns the temperature, the numbers of `calibration.json`, which is written to `artifact`, and the splits' margins.
    """

    test, most = splits["test"], job.generation.max_new_tokens
    clusters = cluster_codes(hash8(str(row["prompt"])) for row in test).tolist()
    observe(0, {}, doing=f"scoring {counted(len(test) + len(splits['calibration']), 'held-out pair')}")
    on_test, on_calibration = (
        score_pairs(model, tokenizer.pad_token_id, pairs[split], job.runtime) for split in ("test", "calibration")
    )
    margins, of_calibration = on_test[0] - on_test[1], np.subtract(*on_calibration)
    temperature = fit_temperature(of_calibration)
    observe(0, {}, doing="measuring calibration, slices and baselines")
    judgements = Judgements.of(test, clusters)
    calibrated = calibration(margins, clusters, temperature, job.seed, BINS, judgements=judgements)
    tokens = np.stack(
        [response_tokens(tokenizer, (row[side] for row in test), most) for side in ("chosen", "rejected")]
    )
    by_slice = slice_report(ScoredPairs(test, tokens, on_test), clusters, temperature, job.seed, judgements=judgements)
    by_length, rule = length_baseline(character_gaps(splits["train"]), character_gaps(test))
    by_majority = majority_baseline(chosen_shown_first(splits["train"]), chosen_shown_first(test))
    baselines: Numbers = {
        "length_accuracy": float(by_length.mean()),
        "length_gain_low": gain_in_shares(correctness(margins), by_length, clusters).low,
        "majority_accuracy": float(by_majority.mean()),
        "majority_gain_low": gain_in_shares(correctness(margins), by_majority, clusters).low,
    }
    document = calibrated.document() | by_slice.document() | baselines | {"length_rule": rule}
    write_json(artifact / "calibration.json", document)
    numbers = calibrated.numbers | by_slice.numbers | baselines
    return temperature, numbers, {"calibration": of_calibration, "test": margins}


def sample_sft(job: RewardJob, inputs: Mapping[str, Path], tokenizer: Any, artifact: Path) -> ProbeTexts:
    """Sample SFT responses to prompts of the calibration split, which the ranks share, and write them to `artifact`."""
    rows = read_split(inputs["data"] / "prompts.calibration")[: job.reward.scale_responses]
    policy = frozen(load_causal_lm(inputs["sft"], on_host(job.runtime))[0], job.runtime)
    prompts = [row["prompt"] for row in rows]
    seed = torch_seed(job.seed, *ANSWERS_STREAM)
    responses = generate_responses(policy, tokenizer, prompts, job.generation, seed, job.runtime)
    if is_first():
        SftAnswers.of(responses, seed).write(artifact)
    encoded = [encode_prompt(tokenizer, p, job.generation.max_prompt_tokens) for p in prompts]
    return ProbeTexts([p + r.token_ids for p, r in zip(encoded, responses, strict=True)], [len(p) for p in encoded])
