"""One update of PPO: epochs of minibatches over a batch of experience."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from components.base.errors import CheckFailed
from components.distributed import ranks
from components.distributed.sharding import reduce_at
from components.ppo.config import PpoJob
from components.ppo.experience import Experience, check_sampler
from components.ppo.maths import explained_variance, kl_estimates, kl_loss, masked_mean, policy_loss, value_loss
from components.ppo.models import Models, Packed, SeparateCritic, SharedCritic, micro_batches, scatter
from components.training.loop import clip_and_step, recomputed, seeded
from components.training.optim import build_optimizer, learning_rate_at, named_rate, set_learning_rate

Loss = tuple[Tensor, dict[str, float]]
"""What is backpropagated, with what to report of it."""
Pass = Callable[[Experience, Tensor, bool], Loss]
"""Gives the loss on some rows of a batch; told whether the policy is still the one that sampled."""
LARGEST = ("ppo/ratio_max", "ppo/sampler_drift")
"""Metrics of an update that are the largest value met, not a mean."""


@dataclass
class Learner:
    """The policy and critic with their optimisers."""

    models: Models
    job: PpoJob
    optimizers: dict[str, AdamW]
    """Of the `policy`, and of the `critic` where there is one."""

    @classmethod
    def start(cls, models: Models, job: PpoJob) -> "Learner":
        """Optimisers over what trains: AdamW on the policy, and on the critic at its own rate."""
        optimizers = {n: build_optimizer(m.requires_grad_(True), job.ppo) for n, m in models.trained().items()}
        return cls(models, job, optimizers)

    def set_rates(self, update: int) -> float:
        """Set the learning rates of update `update` (from 0); returns the policy's."""
        config = self.job.ppo
        rate = learning_rate_at(update, config.updates, config)
        for name, optimizer in self.optimizers.items():
            own = name == "critic" and not isinstance(self.models.critic, SharedCritic)
            set_learning_rate(optimizer, rate * named_rate(config.critic.learning_rate) / config.peak if own else rate)
        return rate

    def update(self, experience: Experience, update: int) -> dict[str, float]:
        """Learn from a batch; returns metrics averaged over the optimiser steps taken.

        Raises:
            CheckFailed: a loss or gradient isn't finite, or the log-probabilities kept from sampling aren't those of
                the training path.
        """
        config, rate = self.job.ppo, self.set_rates(update)
        sums: dict[str, float] = defaultdict(float)
        for steps, rows in enumerate(self._minibatches(update), 1):
            metrics = self._step(experience, rows, first=steps == 1)
            for name, value in metrics.items():
                sums[name] = max(sums[name], value) if name in LARGEST else sums[name] + value
            if config.stop_epochs_above is not None and metrics["ppo/approx_kl"] > config.stop_epochs_above:
                break
        means = {name: value if name in LARGEST else value / steps for name, value in sums.items()}
        mask = experience.samples.response_mask
        if experience.values is not None and experience.returns is not None:
            explained = explained_variance(experience.values, experience.returns, mask)
            means["ppo/explained_variance"] = explained.item()
        return means | {"ppo/learning_rate": rate, "ppo/optimizer_steps": float(steps)}

    def _minibatches(self, update: int) -> Iterator[Tensor]:
        """The rows of each optimiser step of `update`: every epoch takes all, in an order of its own."""
        for epoch in range(self.job.ppo.epochs):
            order = list(range(self.job.ppo.batch_size))
            seeded(self.job.seed, "ppo", "minibatches", update, epoch).shuffle(order)
            yield from torch.tensor(order).split(self.job.ppo.minibatch_size)

    def _step(self, experience: Experience, rows: Tensor, first: bool) -> dict[str, float]:
        """One optimiser step on the responses `rows`, in micro-batches weighted by tokens.

        On the `first` of an update the policy is still the one that sampled: where the sampler's log-probabilities were
        kept, they must be those of the training path.
        """
        config, mask, trained = self.job.ppo, experience.samples.response_mask, self.models.trained()
        totals: dict[str, float] = defaultdict(float)
        passes, norms = self.passes(), dict[str, float]()
        for part, losses in passes.items():
            stepped = trained if len(passes) == 1 else {part: trained[part]}
            micros = list(micro_batches(experience.samples, rows, config.micro_batch_size))
            for i, (micro, counts) in enumerate(micros, 1):
                share = counts * mask[micro].sum() / mask[rows].sum()
                for model in stepped.values():
                    reduce_at(model.model if isinstance(model, SeparateCritic) else model, last=i == len(micros))
                loss, metrics = losses(experience, micro, first)
                if not torch.isfinite(loss):
                    raise CheckFailed(f"ppo: the loss is {loss.item()}. Lower ppo.learning_rate or look at the batch.")
                (loss * share).backward()
                for name, value in metrics.items():
                    totals[name] = max(totals[name], value) if name in LARGEST else totals[name] + value * share.item()
            for name, model in stepped.items():
                norm = clip_and_step(model, self.optimizers[name], config.max_grad_norm, f"ppo ({name})")
                norms["ppo/grad_norm" if name == "policy" else "ppo/critic_grad_norm"] = norm
        return ranks.summed(totals, LARGEST) | norms

    def passes(self) -> Mapping[str, Pass]:
        """What is backpropagated and stepped one after the other.

        A separate critic comes when the policy's graph and gradients are gone, and its own take their place. A shared
        trunk has one loss.
        """
        separate = isinstance(self.models.critic, SeparateCritic)
        return {"policy": self._policy_pass} | ({"critic": self._critic_pass} if separate else {})

    def _policy_pass(self, experience: Experience, rows: Tensor, first: bool) -> Loss:
        """Policy loss - entropy bonus (+ KL loss), means over the tokens of `rows`; with it that of a shared critic.

        Where the sampler is not the policy, the losses that are expectations over its tokens (the policy's and KL's)
        are weighed with the truncated importance weights.
        """
        config, mask, critic = self.job.ppo, experience.samples.response_mask[rows], self.models.critic
        batch = Packed.of(experience.samples, rows)
        with recomputed(self.models.policy, config):
            stats = batch.stats(self.models.policy, self.job, config.entropy_coefficient > 0)
        logprobs, old = scatter(stats.logprobs, mask), experience.logprobs[rows]
        surrogate = policy_loss(logprobs, old, experience.advantages[rows], mask, config.clip_range)
        weights = None if experience.importance is None else experience.importance[rows]
        policy = masked_mean(surrogate.loss if weights is None else weights * surrogate.loss, mask)
        metrics = {
            "ppo/policy_loss": policy.item(),
            "ppo/clip_fraction": masked_mean(surrogate.clipped.float(), mask).item(),
            "ppo/approx_kl": masked_mean(kl_estimates(old, logprobs.detach(), mask).k3, mask).item(),
            "ppo/ratio_max": surrogate.ratio.max().item(),
        }
        if first and experience.samples.seen is not None:
            metrics["ppo/sampler_drift"] = check_sampler(old, logprobs.detach(), mask, self.job)
        loss = policy if stats.entropy is None else policy - config.entropy_coefficient * stats.entropy.mean()
        if config.kl.form != "reward":
            tether = kl_loss(logprobs, old, experience.reference[rows], mask, config.kl.form)
            loss = loss + experience.kl_weight * masked_mean(tether if weights is None else weights * tether, mask)
        if isinstance(critic, SharedCritic):
            value = self._value_loss(experience, rows, critic.values(batch, stats.hidden, self.job.runtime))
            loss = loss + config.critic.coefficient * value
            metrics["ppo/value_loss"] = value.item()
        return loss, metrics

    def _critic_pass(self, experience: Experience, rows: Tensor, first: bool) -> Loss:
        """The loss of a separate critic on `rows`."""
        critic = self.models.critic
        assert isinstance(critic, SeparateCritic)
        with recomputed(critic.model, self.job.ppo):
            values = critic.values(Packed.of(experience.samples, rows), None, self.job.runtime)
        value = self._value_loss(experience, rows, values)
        return value, {"ppo/value_loss": value.item()}

    def _value_loss(self, experience: Experience, rows: Tensor, values: Tensor) -> Tensor:
        """Mean value loss over the tokens of `rows`, from the critic's values (K,) of them."""
        assert experience.values is not None and experience.returns is not None
        mask, width = experience.samples.response_mask[rows], experience.value_clip
        errors = value_loss(scatter(values, mask), experience.values[rows], experience.returns[rows], mask, width)
        return masked_mean(errors, mask)
