"""The policy's stage with a direct method: train on preference pairs, then evaluate and publish as PPO does."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from components.base.errors import CheckFailed, UserError
from components.base.hashing import hash8
from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.data.rows import CanonicalRow
from components.data.tables.published import read_split
from components.direct.config import DirectJob
from components.direct.pair_training import TrainedPolicy, train
from components.direct.policy_pairs import PolicyPairs, all_logprobs
from components.distributed import ranks
from components.models.batching import encode_prompts
from components.models.runtime import release_memory
from components.ppo.evaluate import evaluate, evaluate_last
from components.ppo.models import Models, weights_digest
from components.ppo.stage import frozen_models, save_policy, with_rules, with_sources
from components.reward.evaluation.length import balanced_length_accuracy
from components.reward.scoring import ScoreScale
from components.rewards.weighted import check_waits
from components.stats.intervals import clustered_mean, clustered_proportion
from components.training.trained_weights import put_weights

FAR = 1.0
"""Nats a token by which SFT may find the pairs' responses less likely than its own answers without a warning."""


def run(job: DirectJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Train the policy of `inputs["sft"]` on the training pairs of `inputs["data"]`, and publish as PPO does.

    The reward model `inputs["reward"]`, the sources of `ppo.rewards` and the judge are used in evaluations only.

    Raises:
        UserError: no pair is left to train on, none has the votes or margins that `policy` asks for, or a source may
            take longer than `runtime.rank_timeout`.
        CheckFailed: a check during training failed.
    """
    measured, data = job.measured, inputs["data"]
    at_once = max(measured.ppo.batch_size, ScoreScale.read(inputs["reward"]).responses)
    check_waits(measured.ppo.rewards or (), job.runtime, at_once)
    models = Models.load(measured, inputs)
    rows: Sequence[CanonicalRow] = read_split(data / "pairs.train")[: job.policy.max_pairs]
    for option, name in (("soft_labels", "soft_label"), ("margin", "margin")):
        if getattr(job.policy, option) and all(row.get(name) is None for row in rows):
            raise UserError(f"policy.{option}: no training pair has a {name}. Leave the option out.")
    pairs = PolicyPairs.encode(models.tokenizer, rows, job, out)
    if not len(pairs):
        raise UserError(
            f"policy.method={job.policy.method}: none of {len(rows)} training pairs is left, because the two responses "
            f"of {pairs.alike} are the same up to generation.max_new_tokens. Raise it, or give more pairs."
        )
    with with_rules(models, measured, data), with_sources(models, measured, inputs, out):
        digests = {name: weights_digest(model) for name, model in frozen_models(models).items()}
        trained = train(models, job, pairs, data, out, observe)
        release_memory(job.runtime.device)
        models.gather()
        ranks.go_on_alone()
        for name, model in frozen_models(models).items():
            if weights_digest(model) != digests[name]:
                raise CheckFailed(f"the {name} changed during training: it must be the artifact it was loaded from.")
        return _published(models, job, pairs, trained, data, out, observe)


def _published(
    models: Models, job: DirectJob, pairs: PolicyPairs, trained: TrainedPolicy, data: Path, out: Path, observe: Observe
) -> dict[str, float]:
    """Write the artifact, and return the final metrics."""
    artifact, measured, history = out / "artifact", job.measured, trained.history
    updates = len(history.rows)
    number, reason = trained.evaluations.choose(updates, None)
    models.policy.eval()
    metrics = {} if number == updates else evaluate_last(models, measured, data, out, observe)
    if number != updates:
        save_policy(models, artifact / "last")
        put_weights(models.policy, trained.evaluations.checkpoints.weights)
    save_policy(models, artifact)
    write_rows(artifact / "history.jsonl", history.rows)
    write_rows(artifact / "samples.jsonl", trained.samples.rows)
    about = {"published_update": number, "reason": f"{reason} Trained by {job.policy.method} (policy.method)."}
    about |= {"last_update": updates, "evaluations": trained.evaluations.checkpoints.evaluations}
    write_json(artifact / "metadata.json", about)
    metrics |= evaluate(models, measured, data, out, observe)
    metrics |= pair_metrics(models, job, read_split(data / "pairs.test"))
    metrics |= likelihoods(models, job, pairs, trained.reference, data)
    metrics |= {
        "direct/pairs": float(len(pairs)), "direct/cut": pairs.cut / len(pairs), "direct/alike": float(pairs.alike),
        "direct/updates": float(updates), "direct/published_update": float(number),
    }  # fmt: skip
    if measured.ppo.can_break and trained.evaluations.checkpoints.evaluations:
        metrics["ppo/stopped"] = float(history.failed)
    write_json(artifact / "metrics.json", metrics)
    return metrics


def pair_metrics(models: Models, job: DirectJob, rows: Sequence[CanonicalRow]) -> dict[str, float]:
    """Return what the policy has learned of pairs of the test split (`rows`), by its log-ratios to SFT.

    `policy/chosen_log_ratio` and `policy/rejected_log_ratio` are the mean of log π(y|x) - log π_SFT(y|x), nats a
    response: a direct method raises their difference, and may let both fall. `policy/pair_accuracy` is the share of
    pairs whose chosen response has the larger one, and `policy/balanced_length_accuracy` the same with as much weight
    on the pairs whose longer response was chosen as on the others. Each with its interval, clustered by prompt.
    """
    pairs = PolicyPairs.encode(models.tokenizer, rows[: job.ppo.evaluate], job)
    if not len(pairs):
        return {}
    pad_id, size = models.tokenizer.pad_token_id, 2 * job.policy.micro_batch_size
    policy, sft = (
        all_logprobs(model, pad_id, pairs.examples, job.runtime, size) for model in (models.policy, models.sft)
    )
    ratios = (policy - sft).double().view(-1, 2)
    clusters = [hash8(str(pairs.examples[2 * i][0])) for i in range(len(pairs))]
    right = torch.where(ratios[:, 0] == ratios[:, 1], 0.5, (ratios[:, 0] > ratios[:, 1]).double()).tolist()
    gaps = pairs.examples.responses.lengths.reshape(-1, 2) @ [1, -1]
    balanced = balanced_length_accuracy(right, gaps, clusters)["balanced"]
    return {
        **clustered_mean(ratios[:, 0].tolist(), clusters).metrics("policy/chosen_log_ratio"),
        **clustered_mean(ratios[:, 1].tolist(), clusters).metrics("policy/rejected_log_ratio"),
        **clustered_proportion(right, clusters).metrics("policy/pair_accuracy"),
        **balanced.metrics("policy/balanced_length_accuracy"),
    }


def likelihoods(models: Models, job: DirectJob, pairs: PolicyPairs, reference: Tensor, data: Path) -> dict[str, float]:
    """Return how likely SFT finds the training pairs' responses, and its own answers, in nats a token.

    Warns if a side of the pairs is `FAR` less likely than its own answers: the pairs are then off its distribution, and
    what a direct method learns from them need not carry over to what the policy says.
    """
    rows = read_split(data / "prompts.calibration")[: len(models.answers.ids)]
    prompts = encode_prompts(models.tokenizer, [row["prompt"] for row in rows], job.generation.max_prompt_tokens)
    answers = [(prompt, list(ids)) for prompt, ids in zip(prompts, models.answers.ids, strict=True)]
    size, lengths = 2 * job.policy.micro_batch_size, torch.from_numpy(pairs.examples.responses.lengths)
    of_answers = all_logprobs(models.sft, models.tokenizer.pad_token_id, answers, job.runtime, size)
    metrics = {
        "direct/sft_logprob_of_answers": float(of_answers.sum()) / sum(len(ids) for _, ids in answers),
        "direct/sft_logprob_of_chosen": float(reference[::2].double().sum() / lengths[::2].sum()),
        "direct/sft_logprob_of_rejected": float(reference[1::2].double().sum() / lengths[1::2].sum()),
    }
    least, *sides = metrics.values()
    if min(sides) < least - FAR:
        warnings.warn(
            f"the pairs are far from what SFT says: it gives a token of the chosen responses {sides[0]:.2f} nats, of "
            f"the rejected ones {sides[1]:.2f}, and of its own answers {least:.2f}. Train SFT on the chosen responses, "
            "or collect pairs of its own answers.",
            stacklevel=1,
        )
    return metrics
