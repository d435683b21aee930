"""Train the policy on preference pairs by a direct method, with the loop of SFT and the reward model."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from components.base.errors import UserError
from components.base.observe import Observe
from components.data.rows import CanonicalRow
from components.data.tables.published import has_split, read_split
from components.direct.config import DirectJob, PolicyConfig
from components.direct.policy_pairs import PolicyPairs, reference_logprobs, response_logprobs
from components.direct.preference_losses import dpo_losses, ipo_losses, kto_baseline, kto_losses, label_shares
from components.direct.training import TrainedPolicy, train
from components.distributed import ranks
from components.models.batching import encode_prompts, onto
from components.ppo.models import Models
from components.reward.losses import weighted_mean
from components.sft.tokenized_demonstrations import Examples, response_losses
from components.training.loop import TrainingExamples, micro_batches
from components.training.updates import Observer, Update

FAR = 1.0
"""Nats a token by which SFT may find the pairs' responses less likely than its own answers without a warning."""
SIDES = ("longer", "shorter")
"""The pairs whose longer response was chosen, and those whose shorter one was."""


class PairBatch(NamedTuple):
    """What a loss reads of m pairs. h = log π(y|x) - log π_ref(y|x), nats; 0 of an empty response."""

    chosen: Tensor
    """(m,) h of the chosen responses."""
    rejected: Tensor
    """(m,) h of the rejected responses."""
    shares: Tensor
    """(m,) share of the votes for the chosen response."""
    margins: Tensor
    """(m,) how much better the chosen one is, in the data's unit."""
    baseline: Tensor
    """z₀ of KTO."""
    sides: Tensor
    """(2, m) 1 for a chosen and a rejected response, 0 for an empty one. Only KTO's batches have empty ones."""


def _dpo(config: PolicyConfig, batch: PairBatch) -> Tensor:
    share = label_shares(batch.shares, config.noise, config.form == "robust")
    return dpo_losses(batch.chosen - batch.rejected, config.beta, share, config.margin * batch.margins)


def _ipo(config: PolicyConfig, batch: PairBatch) -> Tensor:
    share = label_shares(batch.shares, config.noise, config.form == "robust")
    return ipo_losses(batch.chosen - batch.rejected, config.beta, share)


def _kto(config: PolicyConfig, batch: PairBatch) -> Tensor:
    """Return the mean loss of each pair's two single labels, or the loss of its only one."""
    weights = config.desirable_weight, config.undesirable_weight
    desirable = torch.cat([torch.ones_like(batch.chosen), torch.zeros_like(batch.rejected)]).bool()
    ratios = torch.cat([batch.chosen, batch.rejected])
    losses = kto_losses(ratios, desirable, batch.baseline, config.beta, weights).view(2, -1)
    return (losses * batch.sides).sum(0) / batch.sides.sum(0)


LOSSES: dict[str, Callable[[PolicyConfig, PairBatch], Tensor]] = {"dpo": _dpo, "ipo": _ipo, "kto": _kto}
"""Maps a direct method to the loss (m,) of each pair."""


class PartMeans(Observer[Update]):
    """Divides the metrics of parts of a batch by each part's share, and adds the mean accuracy of both sides by length:
    a rule that sees only length has 0.5."""

    def on_update(self, update: Update) -> Update:
        """Remove the shares, and leave out the metrics of parts that the batch does not have."""
        metrics = dict(update.metrics)
        for name in [name.removesuffix("_share") for name in metrics if name.endswith("_share")]:
            value, share = metrics.pop(name), metrics.pop(f"{name}_share")
            metrics |= {name: value / share} if share else {}
        sides = [metrics.pop(f"direct/{side}", None) for side in SIDES]
        if None not in sides:
            metrics["direct/balanced_length_accuracy"] = sum(filter(None, sides)) / 2
        return replace(update, metrics=metrics)


@dataclass
class KtoBaseline:
    """z₀ of each batch, from the batch's prompts with the responses of its next pair (or of its next single label)."""

    models: Models
    job: DirectJob
    pairs: PolicyPairs
    value: Tensor
    scale: float = 1.0
    """A batch's mean weight over that of all pairs and single labels, which are seldom in one batch, as lengths differ:
    `fit` divides the loss by each batch's own weight. 1 without single labels."""

    @torch.no_grad()
    def measure(self, batch: list[int]) -> None:
        """Set `value` and `scale` for the pairs `batch`. All ranks call it."""
        weights, sides = self.pairs.labels[:, 0], self.pairs.sides
        self.scale = 1.0 if sides.all() else float(weights[batch].mean() / weights.mean())
        ratios, place = torch.zeros(2, len(batch), device=self.value.device), {pair: i for i, pair in enumerate(batch)}
        examples, pad_id, following = self.pairs.examples, self.models.tokenizer.pad_token_id, batch[1:] + batch[:1]
        for micro, counts in micro_batches(batch, self.job.policy.micro_batch_size):
            others = [following[place[pair]] for pair in micro]
            rows = zip(self.pairs.rows(micro), self.pairs.rows(others), strict=True)
            mismatched = [(examples[row][0], examples[other][1]) for row, other in rows]
            policy, sft = (
                response_logprobs(model, pad_id, mismatched, self.job.runtime)
                for model in (self.models.policy, self.models.sft)
            )
            if counts:
                places = onto(ratios.device, torch.tensor([place[pair] for pair in micro]))
                ratios.index_copy_(1, places, (policy - sft).view(2, -1))
        there = torch.from_numpy(np.flatnonzero(sides[following].T))
        self.value = kto_baseline(ranks.joined(ratios).flatten()[onto(ratios.device, there)])


def train_on_pairs(
    models: Models, job: DirectJob, inputs: Mapping[str, Path], out: Path, observe: Observe
) -> TrainedPolicy:
    """Train the policy on the training pairs of `inputs["data"]`, KTO also on its single labels. Resumes from
    `out/checkpoint`.

    The policy trains in eval mode, without dropout, as in PPO: its log-ratio to SFT is 0 before the first step.

    Raises:
        UserError: as for `training_pairs`.
    """
    data = inputs["data"]
    pairs = training_pairs(models.tokenizer, job, data, out)
    config, runtime, pad_id = job.policy, job.runtime, models.tokenizer.pad_token_id
    observe(0, {}, doing="computing SFT's log-probabilities")
    file = out / "checkpoint" / "reference" / "pairs"
    reference = torch.tensor(reference_logprobs(models.sft, pad_id, pairs.examples, job, file))
    data_metrics = pair_counts(pairs, config) | likelihoods(models, job, pairs, reference, data)
    zero = torch.zeros((), device=runtime.device)
    baseline = KtoBaseline(models, job, pairs, zero) if config.method == "kto" else None
    models.policy.eval()
    labels, has_singles = torch.from_numpy(np.hstack([pairs.labels, pairs.sides])).float(), not pairs.sides.all()
    gaps = torch.tensor(pairs.examples.responses.lengths.reshape(-1, 2) @ [1, -1])

    def batch_loss(batch: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        rows = pairs.rows(batch)
        logprobs = response_logprobs(models.policy, pad_id, [pairs.examples[i] for i in rows], runtime)
        chosen, rejected = (logprobs - onto(runtime.device, reference[rows])).chunk(2)
        columns = onto(runtime.device, labels[batch].T.contiguous())
        (weights, of_source, shares, margins), sides = columns[:4], columns[4:]
        z0, scale = (zero, 1.0) if baseline is None else (baseline.value, baseline.scale)
        losses = LOSSES[config.method](config, PairBatch(chosen, rejected, shares, margins, z0, sides))
        loss = weighted_mean(of_source * losses, weights)
        mean, gap = partial(weighted_mean, weights=weights), onto(runtime.device, gaps[batch])
        with torch.no_grad():
            right, both, metrics = ((chosen - rejected).sign() + 1) / 2, sides.prod(0), {"loss": loss}
            of_chosen, of_rejected = sides / sides.mean(0)  # a single label has half the weight
            for name, values, part in (
                ("accuracy", right, both), ("margin", chosen - rejected, both),
                ("chosen_log_ratio", chosen, of_chosen), ("rejected_log_ratio", rejected, of_rejected),
                ("longer", right, both * (gap > 0)), ("shorter", right, both * (gap < 0)),
            ):  # fmt: skip
                metrics[name] = mean(part * values)
                metrics |= {f"{name}_share": mean(part)} if has_singles or name in SIDES else {}
            metrics["margin"] = config.beta * metrics["margin"]
            metrics |= {} if baseline is None else {"baseline": z0}
        return loss * scale, {f"direct/{name}": value for name, value in metrics.items()}

    prepare = None if baseline is None else baseline.measure
    examples = TrainingExamples(batch_loss, pairs.lengths, pairs.labels[:, 0], prepare=prepare)
    return train(models, job, examples, inputs, out, observe, data_metrics, parts=PartMeans())


def training_pairs(tokenizer: Any, job: DirectJob, data: Path, folder: Path) -> PolicyPairs:
    """Return the training pairs of `data`, and for KTO its single labels, as tokens, of which `folder` gets a file.

    Raises:
        UserError: no pair is left to train on, or none has the votes or margins that `policy` asks for.
    """
    rows: Sequence[CanonicalRow] = read_split(data / "pairs.train")[: job.policy.max_pairs]
    for option, name in (("soft_labels", "soft_label"), ("margin", "margin")):
        if getattr(job.policy, option) and all(row.get(name) is None for row in rows):
            raise UserError(f"policy.{option}: no training pair has a {name}. Leave the option out.")
    labelled = data / "single_labels.train"
    singles = read_split(labelled) if job.policy.method == "kto" and has_split(labelled) else ()
    pairs = PolicyPairs.encode(tokenizer, rows, job, folder, singles[: job.policy.max_pairs])
    if pairs.alike == len(rows):
        raise UserError(
            f"policy.method={job.policy.method}: none of {len(rows)} training pairs is left, because the two responses "
            f"of {pairs.alike} are the same up to generation.max_new_tokens. Raise it, or give more pairs."
        )
    return pairs


def pair_counts(pairs: PolicyPairs, config: PolicyConfig) -> dict[str, float]:
    """Return the numbers of pairs and single labels, and for KTO λ_D n_D / (λ_U n_U), with the numbers n of desirable
    and undesirable responses, by weight. Warns if that is outside [1, 4/3] (Ethayarajh et al. 2024, section 4.2)."""
    both = float(pairs.sides.all(1).sum())
    metrics = {"direct/pairs": both, "direct/cut": pairs.cut / len(pairs), "direct/alike": float(pairs.alike)}
    metrics |= {"direct/single_labels": len(pairs) - both} if both < len(pairs) else {}
    if config.method != "kto":
        return metrics
    weights = pairs.labels[:, 0] / pairs.sides.mean(1)  # of each response
    desirable, undesirable = (pairs.sides * weights[:, None]).sum(0).tolist()
    ratio = config.desirable_weight * desirable / (config.undesirable_weight * undesirable)
    low, middle, high = 1, (4 / 3) ** 0.5, 4 / 3
    if not low <= ratio <= high:
        name, factor = ("desirable", middle / ratio) if ratio < low else ("undesirable", ratio / middle)
        value = getattr(config, f"{name}_weight") * factor
        warnings.warn(
            f"{desirable:g} desirable and {undesirable:g} undesirable responses have, with their weights, a ratio of "
            f"{ratio:.3g}; KTO's authors advise {low:g} to {high:.3g}. Set policy.{name}_weight={value:.3g}.",
            stacklevel=1,
        )
    return metrics | {"direct/desirable_ratio": ratio}


def likelihoods(models: Models, job: DirectJob, pairs: PolicyPairs, reference: Tensor, data: Path) -> dict[str, float]:
    """Return how likely SFT finds the training pairs' responses, and its own answers, in nats a token.

    Warns if a side of the pairs is `FAR` less likely than its own answers: the pairs are then off its distribution, and
    what a direct method learns from them need not carry over to what the policy says.
    """
    rows = read_split(data / "prompts.calibration")[: len(models.answers.ids)]
    prompts = encode_prompts(models.tokenizer, [row["prompt"] for row in rows], job.generation.max_prompt_tokens)
    answers = Examples.of((prompt, list(ids)) for prompt, ids in zip(prompts, models.answers.ids, strict=True))
    size, lengths = 2 * job.policy.micro_batch_size, torch.from_numpy(pairs.examples.responses.lengths)
    losses = response_losses(models.sft, models.tokenizer.pad_token_id, answers, job.runtime, size)
    metrics = {
        "direct/sft_logprob_of_answers": -sum(losses) / int(answers.responses.lengths.sum()),
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
