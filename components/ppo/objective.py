"""The terms of PPO's loss: policy, entropy and KL, and the critic's values. B responses, T tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.ppo.config import PpoJob
from components.ppo.experience import Experience, sampler_drift
from components.ppo.maths import kl_estimates, kl_loss, policy_loss, value_loss
from components.reward.losses import bradley_terry_loss
from components.training.terms import Measure, Term, masked_mean


class Forward(NamedTuple):
    """Some rows of a batch with the trained models' outputs for them, which have a gradient."""

    job: PpoJob
    experience: Experience
    rows: Tensor
    """(B,) indices into the tensors of the experience."""
    mask: Tensor
    """(B, T)"""
    first: bool
    """Whether the policy is still the one that sampled."""
    logprobs: Tensor | None = None
    """(B, T) log π; None in the pass of a separate critic."""
    entropy: Tensor | None = None
    """(B, T) nats; None without an entropy bonus."""
    values: Tensor | None = None
    """(B, T) the critic's values; None in the policy's pass if the critic is a model of its own."""

    def term(self, name: str, losses: Tensor, coefficient: float = 1.0, is_metric: bool = True) -> Term:
        """Return a term of per-token `losses` (B, T) with the config's aggregation; for pairs the mean of the
        responses' means, since micro-batches are then weighted by responses."""
        config, cap = self.job.ppo, self.job.generation.max_new_tokens
        how = config.aggregation if config.pair_labels is None else "sequence"
        return Term(name, losses, self.mask, coefficient, how, cap, is_metric=is_metric)

    def weighted(self, losses: Tensor) -> Tensor:
        """Return `losses` (B, T), an expectation over the sampler's tokens, with the importance weights, if any."""
        weights = self.experience.importance
        return losses if weights is None else weights[self.rows] * losses


def policy_term(forward: Forward) -> Term:
    """Return the clipped policy loss, and measures of how far the policy has moved."""
    config, mask, logprobs = forward.job.ppo, forward.mask, forward.logprobs
    assert logprobs is not None
    old, advantages = forward.experience.logprobs[forward.rows], forward.experience.advantages[forward.rows]
    surrogate = policy_loss(
        logprobs, old, advantages, mask, config.clip_range, config.clip_range_high, config.dual_clip, config.ratio
    )
    measures = moved(forward) | {
        "ppo/clip_fraction": Measure(masked_mean(surrogate.clipped.float(), mask)),
        "ppo/ratio_max": Measure(surrogate.ratio.max(), "largest"),
    }
    if config.clip_range_high is not None:
        above = surrogate.clipped & ~surrogate.floored & (surrogate.ratio > 1)
        measures["ppo/clip_fraction_above"] = Measure(masked_mean(above.float(), mask))
    if config.dual_clip is not None:
        measures["ppo/dual_clip_fraction"] = Measure(masked_mean(surrogate.floored.float(), mask))
    return forward.term("ppo/policy_loss", forward.weighted(surrogate.loss))._replace(measures=measures)


def moved(forward: Forward) -> dict[str, Measure]:
    """Return how far the policy is from the one that sampled, and in the first pass from the sampler itself."""
    assert forward.logprobs is not None
    old, logprobs = forward.experience.logprobs[forward.rows], forward.logprobs.detach()
    measures = {"ppo/approx_kl": Measure(masked_mean(kl_estimates(old, logprobs, forward.mask).k3, forward.mask))}
    if forward.first and forward.experience.samples.stats is not None:
        measures["ppo/sampler_drift"] = Measure(sampler_drift(old, logprobs, forward.mask, forward.job), "largest")
    return measures


def pairs_term(forward: Forward) -> Term:
    """Return the loss of online DPO, and how often implicit rewards order a pair as its scores do.

    It is DPO's loss (Rafailov et al. 2023, equation 7) of the policy's own responses: each two consecutive ones to a
    prompt are a pair, of which σ(s - s') of the votes are for the first (Guo et al. 2024, "Direct language model
    alignment from online AI feedback", arXiv 2402.04792, whose labels are hard). With these soft labels the loss is
    lowest at π_ref exp(s / β), normalised: PPO's optimum.
    """
    experience, mask = forward.experience, forward.mask
    assert forward.logprobs is not None
    log_ratios = (forward.logprobs - experience.passes.reference[forward.rows]).masked_fill(~mask, 0).sum(1)
    difference, better = (-x.unflatten(0, (-1, 2)).diff()[:, 0] for x in (log_ratios, experience.scores[forward.rows]))
    share = torch.sigmoid(better) if forward.job.ppo.pair_labels == "soft" else better.sign() / 2 + 0.5
    losses = bradley_terry_loss(experience.metrics["ppo/beta"] * difference, share).unsqueeze(1)
    agrees = (difference.detach() * better > 0).float().mean()
    measures = {
        "ppo/pair_accuracy": Measure(agrees, "loss"),
        "ppo/pair_margin": Measure(difference.detach().abs().mean(), "loss"),
    }
    mask = torch.ones_like(losses, dtype=torch.bool)
    return Term("ppo/policy_loss", losses, mask, measures=moved(forward) | measures)


def entropy_term(forward: Forward) -> Term:
    """Return the entropy bonus: entropy with a negative coefficient. (`ppo/entropy` is already a metric.)"""
    assert forward.entropy is not None
    return forward.term("ppo/entropy", forward.entropy, -forward.job.ppo.entropy_coefficient, is_metric=False)


def kl_term(forward: Forward) -> Term:
    """Return KL to the reference as a loss. (`ppo/kl` is a metric of the batch already.)"""
    form, experience = forward.job.ppo.kl.form, forward.experience
    assert form != "reward" and forward.logprobs is not None
    old, reference = experience.logprobs[forward.rows], experience.passes.reference[forward.rows]
    losses = forward.weighted(kl_loss(forward.logprobs, old, reference, forward.mask, form))
    return forward.term("ppo/kl_loss", losses, experience.kl_weight, is_metric=False)


def value_term(forward: Forward) -> Term:
    """Return the value loss, clipped around the old values if the config says so. A critic's own pass has nothing else
    in its loss, so its coefficient is 1."""
    experience, config = forward.experience, forward.job.ppo.critic
    assert forward.values is not None and experience.passes.values is not None and experience.returns is not None
    width = None if config.clip_range is None else config.clip_range * experience.returns_deviation
    old, returns = experience.passes.values[forward.rows], experience.returns[forward.rows]
    losses = value_loss(forward.values, old, returns, forward.mask, width)
    return forward.term("ppo/value_loss", losses, config.coefficient if config.kind == "shared" else 1.0)


PolicyTerm = Callable[[Forward], Term]


def policy_terms(job: PpoJob, critic_is_shared: bool) -> Sequence[PolicyTerm]:
    """Return the terms of the policy's loss that the config asks for, in the order in which they are summed."""
    config, terms = job.ppo, [policy_term if job.ppo.pair_labels is None else pairs_term]
    terms += [entropy_term] if config.entropy_coefficient > 0 else []
    terms += [kl_term] if config.kl.form != "reward" else []
    return [*terms, value_term] if critic_is_shared else terms
