"""From sampled responses to what one update learns from: scores, rewards, advantages, and the checks on the way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from components.base.errors import CheckFailed
from components.models.sampling import Samples
from components.ppo.advantages import estimate_advantages
from components.ppo.config import PpoJob, ScoreConfig
from components.ppo.maths import kl_estimates, masked_mean, masked_variance, tied_groups, token_rewards
from components.ppo.models import Models, frozen_pass
from components.reward.scoring import ScoreScale

SAMPLER_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.01}
"""Agreement of the sampler's log-probs with the training path's: in float32 the largest difference; in bfloat16,
where the sampler's are not used, the mean KL between the two (k3) in nats per token. (Rounding alone makes the mean
|difference| 0.05 for a model of 135 M, in either direction: a KL of 0.003; another prompt makes it whole nats.)"""


@dataclass(frozen=True)
class Experience:
    """A batch of responses and all that is fixed about them. B responses, T tokens."""

    samples: Samples
    logprobs: Tensor
    """(B, T) log π_old."""
    values: Tensor | None
    """(B, T) the critic's values before the update; None where there is no critic."""
    scores: Tensor
    """(B,) scores as rewarded: scaled, clipped, missing EOS and length counted."""
    advantages: Tensor
    """(B, T), 0 where the mask is False."""
    returns: Tensor | None
    """(B, T) what the critic is fitted to; None where there is no critic."""
    value_clip: float | None
    """How far from the old values the value loss clips, in the unit of the returns; None where it doesn't."""
    reference: Tensor
    """(B, T) log π_ref."""
    kl_weight: float
    """Weight of the KL loss beside the policy loss on these advantages; 0 where KL is in the reward."""
    metrics: dict[str, float]
    """What is known of the batch before the update."""


def rewarded_scores(raw: Tensor, samples: Samples, scale: ScoreScale, config: ScoreConfig) -> Tensor:
    """Raw scores (B,) to rewards: shift and scale, clip, missing EOS, length penalty, in this order."""
    scores = scale(raw).clamp(-config.clip, config.clip)
    if config.missing_eos == "replace":
        scores = torch.where(samples.ended, scores, torch.full_like(scores, scale.missing_eos_score))
    elif config.missing_eos == "subtract":
        scores = torch.where(samples.ended, scores, scores - config.missing_eos_penalty)
    return scores - config.length_penalty * samples.response_mask.sum(1)


def gather_experience(models: Models, samples: Samples, job: PpoJob, beta: float) -> Experience:
    """Score `samples` and compute rewards, advantages and returns at KL coefficient `beta`.

    Raises:
        CheckFailed: a score isn't finite, or the sampler and the training path disagree on log-probabilities. (Where
            the sampler's are kept, the first step of the update checks that.)
    """
    mask, config = samples.response_mask, job.ppo
    found = frozen_pass(models, samples, job)
    if not torch.isfinite(found["raw_scores"]).all():
        raise CheckFailed("the reward model gave a score that isn't finite.")
    old, reference, sft, values = found["policy"], found["reference"], found["sft"], found.get("values")
    scores = rewarded_scores(found["raw_scores"], samples, models.scale, config.score)
    in_reward = config.kl.form == "reward"
    rewards = token_rewards(old, reference, scores, mask, beta if in_reward else 0.0)
    advantages, returns, unit = estimate_advantages(rewards, scores, values, mask, config)
    value_clip = None
    if returns is not None and config.critic.clip_range is not None:
        value_clip = config.critic.clip_range * masked_variance(returns, mask).sqrt().item()
    kl = kl_estimates(old, sft, mask)
    at_1 = kl_estimates(found["policy_at_1"], found["sft_at_1"], mask)
    metrics = {
        "ppo/proxy_reward": scores.mean().item(),
        "ppo/scaled_score": models.scale(found["raw_scores"]).mean().item(),
        "ppo/kl": kl.k1.sum(1).mean().item(),
        "ppo/kl_k2": kl.k2.sum(1).mean().item(),
        "ppo/kl_k3": kl.k3.sum(1).mean().item(),
        "ppo/kl_at_temperature_1": at_1.k1.sum(1).mean().item(),
        "ppo/kl_per_token": masked_mean(kl.k1, mask).item(),
        "ppo/beta": beta,
        "ppo/entropy": masked_mean(found["entropy"], mask).item(),
        "ppo/response_tokens": mask.sum(1).float().mean().item(),
        "ppo/ended": samples.ended.float().mean().item(),
    }
    if not config.has_critic:
        metrics["ppo/tied_groups"] = tied_groups(scores, config.group_size).float().mean().item()
    if samples.seen is None:
        metrics["ppo/sampler_drift"] = check_sampler(samples.logprobs, old, mask, job.runtime.dtype)
    if models.sft is not models.reference:
        metrics["ppo/kl_to_reference"] = kl_estimates(old, reference, mask).k1.sum(1).mean().item()
    # Whitening divided the rewards, and in them the score, by the unit: a KL beside them is divided likewise.
    kl_weight = 0.0 if in_reward else beta / unit
    return Experience(samples, old, values, scores, advantages, returns, value_clip, reference, kl_weight, metrics)


def check_sampler(sampled: Tensor, recomputed: Tensor, mask: Tensor, dtype: str) -> float:
    """Compare the sampler's log-probabilities with `recomputed` (B, T); returns the difference that is judged.

    Raises:
        CheckFailed: it exceeds the tolerance of `dtype`.
    """
    if dtype == "float32":
        drift = (sampled - recomputed).abs()[mask].max().item()
    else:
        drift = masked_mean(kl_estimates(sampled, recomputed, mask).k3, mask).item()
    if not drift <= SAMPLER_TOLERANCE[dtype]:
        raise CheckFailed(
            f"the sampler and the training path disagree on log-probabilities by {drift:.2g} nats "
            f"({'largest' if dtype == 'float32' else 'mean KL'}; {SAMPLER_TOLERANCE[dtype]:g} is allowed in {dtype}): "
            "the ratios of PPO would be wrong. Is dropout on, or the prompt truncated differently?"
        )
    return drift
