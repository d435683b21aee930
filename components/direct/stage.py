"""The policy's stage with a direct method: train without PPO's updates, then evaluate and publish as PPO does."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from components.base.hashing import hash8
from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.data.rows import CanonicalRow
from components.data.tables.published import read_split
from components.direct.best_of_n import train_on_best
from components.direct.config import DirectJob
from components.direct.pair_training import train_on_pairs
from components.direct.policy_pairs import PolicyPairs
from components.direct.training import TrainedPolicy
from components.distributed import ranks
from components.gates.self_checks import SelfChecks
from components.models.runtime import release_memory
from components.ppo.evaluate import evaluate
from components.ppo.models import Models
from components.ppo.monitors.boundaries import check_end, check_inputs
from components.ppo.stage import frozen_unchanged, ignored_labels, put_and_save, with_rules, with_sources
from components.reward.evaluation.length import balanced_length_accuracy
from components.reward.scoring import ScoreScale
from components.rewards.weighted import check_waits
from components.sft.tokenized_demonstrations import response_losses
from components.stats.intervals import clustered_mean, clustered_proportion


def run(job: DirectJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Train the policy of `inputs["sft"]` by `policy.method` on `inputs["data"]`, and publish as PPO does.

    The judge is used in evaluations only; so are the reward model `inputs["reward"]` and the sources of `ppo.rewards`,
    but for best of n, which chooses by them.

    Raises:
        UserError: as for `train_on_pairs` and `train_on_best`, or a source may take longer than `runtime.rank_timeout`.
        CheckFailed: a check during training failed.
    """
    measured, data = job.measured, inputs["data"]
    at_once = max(measured.ppo.batch_size, ScoreScale.read(inputs["reward"]).responses)
    check_waits(measured.ppo.asked, job.runtime, at_once)
    models, checks = Models.load(measured, inputs), SelfChecks()
    check_inputs(checks, models, measured, inputs)
    with with_rules(models, measured, data), with_sources(models, measured, inputs, out):
        with frozen_unchanged(models):
            train = train_on_best if job.policy.method == "best_of_n" else train_on_pairs
            trained = train(models, job, inputs, out, observe)
            release_memory(job.runtime.device)
        metrics = _published(models, job, trained, data, out, observe)
    if ranks.is_first():
        check_end(checks, models, measured, inputs, out, metrics)
        checks.write(out)
    return metrics


def _published(
    models: Models, job: DirectJob, trained: TrainedPolicy, data: Path, out: Path, observe: Observe
) -> dict[str, float]:
    """Write the artifact, and return the final metrics. All ranks sample and score, as in PPO's stage."""
    artifact, measured, evaluations = out / "artifact", job.measured, trained.evaluations
    last = len(trained.history.rows)
    number, reason = evaluations.choose(last, None)
    models.policy.eval()
    metrics = trained.metrics | put_and_save(models, measured, data, out, observe, evaluations, number, last)
    metrics |= pair_metrics(models, job, read_split(data / "pairs.test"))
    metrics |= evaluate(models, measured, data, out, observe)  # from here on only the first rank
    write_rows(artifact / "history.jsonl", trained.history.rows)
    write_rows(artifact / "samples.jsonl", trained.samples.rows)
    reason += f" Trained by {job.policy.method} (policy.method)."
    reason += "" if job.policy.method == "kto" else ignored_labels(data)
    evaluated = evaluations.checkpoints.evaluations
    about = {"published_update": number, "reason": reason, "last_update": last, "evaluations": evaluated}
    write_json(artifact / "metadata.json", about)
    metrics |= {"direct/updates": float(last), "direct/published_update": float(number)}
    limited = measured.ppo.kl.ceiling is not None or measured.ppo.kl.band is not None
    if job.policy.stop_on_alarm or (limited and evaluated):
        metrics["ppo/stopped"] = float(trained.history.failed)
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
        torch.tensor(response_losses(model, pad_id, pairs.examples, job.runtime, size), dtype=torch.float64)
        for model in (models.policy, models.sft)
    )
    ratios = (sft - policy).view(-1, 2)
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
