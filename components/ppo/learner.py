"""One update of PPO: epochs of minibatches over a batch of experience."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.errors import CheckFailed
from components.optim import build_optimizer, learning_rate_at, set_learning_rate
from components.ppo.config import PpoJob
from components.ppo.experience import Experience
from components.ppo.maths import explained_variance, kl_estimates, kl_loss, masked_mean, policy_loss, value_loss
from components.ppo.models import Models, Packed, SharedCritic, scatter
from components.training import clip_and_step, seeded


@dataclass
class Learner:
    """The policy and critic with their optimisers."""

    models: Models
    job: PpoJob
    policy_optimizer: Any
    critic_optimizer: Any

    @classmethod
    def start(cls, models: Models, job: PpoJob) -> "Learner":
        """Optimisers over what trains: AdamW on the policy, and on the critic at its own rate."""
        models.policy.requires_grad_(True)
        models.critic.requires_grad_(True)
        return cls(models, job, build_optimizer(models.policy, job.ppo), build_optimizer(models.critic, job.ppo))

    def set_rates(self, update: int) -> float:
        """Set the learning rates of update `update` (from 0); returns the policy's."""
        config = self.job.ppo
        rate = learning_rate_at(update, config.updates, config)
        set_learning_rate(self.policy_optimizer, rate)
        shared = isinstance(self.models.critic, SharedCritic)
        set_learning_rate(
            self.critic_optimizer, rate if shared else rate * config.critic.learning_rate / config.learning_rate
        )
        return rate

    def update(self, experience: Experience, update: int) -> dict[str, float]:
        """Learn from a batch; returns metrics averaged over the optimiser steps taken.

        Raises:
            CheckFailed: a loss or gradient isn't finite.
        """
        config, rate = self.job.ppo, self.set_rates(update)
        sums: dict[str, float] = defaultdict(float)
        steps, stopped = 0, False
        for epoch in range(config.epochs):
            order = list(range(config.batch_size))
            seeded(self.job.seed, "ppo", "minibatches", update, epoch).shuffle(order)
            for start in range(0, config.batch_size, config.minibatch_size):
                metrics = self._step(experience, torch.tensor(order[start : start + config.minibatch_size]))
                steps += 1
                for name, value in metrics.items():
                    sums[name] = max(sums[name], value) if name == "ppo/ratio_max" else sums[name] + value
                limit = config.stop_epochs_above
                stopped = limit is not None and metrics["ppo/approx_kl"] > limit
                if stopped:
                    break
            if stopped:
                break
        means = {name: value if name == "ppo/ratio_max" else value / steps for name, value in sums.items()}
        mask = experience.samples.response_mask
        return means | {
            "ppo/explained_variance": explained_variance(experience.values, experience.returns, mask).item(),
            "ppo/learning_rate": rate,
            "ppo/optimizer_steps": float(steps),
        }

    def _step(self, experience: Experience, rows: Tensor) -> dict[str, float]:
        """One optimiser step on the responses `rows`, in micro-batches weighted by tokens."""
        config, mask = self.job.ppo, experience.samples.response_mask[rows]
        tokens = mask.sum()
        totals: dict[str, float] = defaultdict(float)
        by_length = rows[experience.samples.mask[rows].sum(1).argsort(stable=True)]
        for micro in by_length.split(config.micro_batch_size):
            loss, metrics = self._losses(experience, micro)
            share = experience.samples.response_mask[micro].sum() / tokens
            if not torch.isfinite(loss):
                raise CheckFailed(f"ppo: the loss is {loss.item()}. Lower ppo.learning_rate or look at the batch.")
            (loss * share).backward()
            for name, value in metrics.items():
                totals[name] = (
                    max(totals[name], value) if name == "ppo/ratio_max" else totals[name] + value * share.item()
                )
        totals["ppo/grad_norm"] = clip_and_step(
            self.models.policy, self.policy_optimizer, config.max_grad_norm, "ppo (policy)"
        )
        totals["ppo/critic_grad_norm"] = clip_and_step(
            self.models.critic, self.critic_optimizer, config.max_grad_norm, "ppo (critic)"
        )
        return totals

    def _losses(self, experience: Experience, rows: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Policy loss + weighted value loss - entropy bonus (+ KL loss), each a mean over the tokens of `rows`."""
        config, mask = self.job.ppo, experience.samples.response_mask[rows]
        stats, flat_values = self.models.policy_and_values(
            Packed.of(experience.samples, rows), self.job.runtime, self.job.generation.temperature
        )
        logprobs, values = scatter(stats.logprobs, mask), scatter(flat_values, mask)
        old = experience.logprobs[rows]
        surrogate = policy_loss(logprobs, old, experience.advantages[rows], mask, config.clip_range)
        errors = value_loss(values, experience.values[rows], experience.returns[rows], mask, config.critic.clip_range)
        policy, value, entropy = masked_mean(surrogate.loss, mask), masked_mean(errors, mask), stats.entropy.mean()
        weight = config.critic.coefficient if isinstance(self.models.critic, SharedCritic) else 1.0
        loss = policy + weight * value - config.entropy_coefficient * entropy
        if config.kl.form != "reward":
            tether = kl_loss(logprobs, old, experience.reference[rows], mask, config.kl.form)
            loss = loss + experience.kl_weight * masked_mean(tether, mask)
        approx_kl = masked_mean(kl_estimates(old, logprobs.detach(), mask).k3, mask)
        return loss, {
            "ppo/policy_loss": policy.item(),
            "ppo/value_loss": value.item(),
            "ppo/clip_fraction": masked_mean(surrogate.clipped.float(), mask).item(),
            "ppo/approx_kl": approx_kl.item(),
            "ppo/ratio_max": surrogate.ratio.max().item(),
        }
