"""One update of PPO: epochs of minibatches over a batch of experience."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor
from torch.optim import AdamW

from components.base.errors import CheckFailed
from components.distributed import ranks
from components.distributed.sharding import reduce_at
from components.ppo.config import PpoJob
from components.ppo.experience import Experience, check_drift, sampler_drift
from components.ppo.maths import explained_variance, kl_estimates, kl_loss, masked_mean, policy_loss, value_loss
from components.ppo.models import Models, Packed, SeparateCritic, SharedCritic, micro_batches, on_device, scatter
from components.training.loop import check_norm, clip_gradient, read, recomputed, seeded, step_and_clear
from components.training.optim import build_optimizer, learning_rate_at, named_rate, set_learning_rate

Loss = tuple[Tensor, dict[str, Tensor]]
"""What is backpropagated, with what to report of it (scalars)."""
Pass = Callable[[Experience, Sequence[int], bool], Loss]
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

    def _minibatches(self, update: int) -> Iterator[list[int]]:
        """The rows of each optimiser step of `update`: every epoch takes all, in an order of its own."""
        size = self.job.ppo.minibatch_size
        for epoch in range(self.job.ppo.epochs):
            order = list(range(self.job.ppo.batch_size))
            seeded(self.job.seed, "ppo", "minibatches", update, epoch).shuffle(order)
            yield from (order[start : start + size] for start in range(0, len(order), size))

    def _step(self, experience: Experience, rows: Sequence[int], first: bool) -> dict[str, float]:
        """One optimiser step on the responses `rows`, in micro-batches weighted by tokens.

        On the `first` of an update the policy is still the one that sampled: where the sampler's log-probabilities were
        kept, they must be those of the training path. What is to be checked and reported is read once for each model
        that is stepped, when its gradient is complete: the host waits for a GPU no more often.
        """
        config, samples, trained = self.job.ppo, experience.samples, self.models.trained()
        counted = {row: samples.response_lengths[row] for row in rows}
        totals: dict[str, float] = defaultdict(float)
        passes, found_norms = self.passes(), dict[str, float]()
        for part, losses in passes.items():
            stepped = trained if len(passes) == 1 else {part: trained[part]}
            unread: list[tuple[float, dict[str, Tensor]]] = []
            micros = list(micro_batches(samples, rows, config.micro_batch_size))
            for i, (micro, counts) in enumerate(micros, 1):
                share = counts * sum(counted[row] for row in micro) / sum(counted.values())
                for model in stepped.values():
                    reduce_at(model.model if isinstance(model, SeparateCritic) else model, last=i == len(micros))
                loss, metrics = losses(experience, micro, first)
                (loss * share).backward()
                unread.append((share, {"loss": loss.detach()} | metrics))
            norms = [clip_gradient(model, config.max_grad_norm) for model in stepped.values()]
            numbers = iter(read([*chain.from_iterable(metrics.values() for _, metrics in unread), *norms]))
            for share, metrics in unread:
                found = {name: next(numbers) for name in metrics}
                if "ppo/sampler_drift" in found:
                    check_drift(found["ppo/sampler_drift"], self.job)
                if not math.isfinite(loss_read := found.pop("loss")):
                    raise CheckFailed(f"ppo: the loss is {loss_read}. Lower ppo.learning_rate or look at the batch.")
                for name, value in found.items():
                    totals[name] = max(totals[name], value) if name in LARGEST else totals[name] + value * share
            for name in stepped:
                norm = check_norm(next(numbers), f"ppo ({name})")
                found_norms["ppo/grad_norm" if name == "policy" else "ppo/critic_grad_norm"] = norm
                step_and_clear(self.optimizers[name])
        return ranks.summed(totals, LARGEST) | found_norms

    def passes(self) -> Mapping[str, Pass]:
        """What is backpropagated and stepped one after the other.

        A separate critic comes when the policy's graph and gradients are gone, and its own take their place. A shared
        trunk has one loss.
        """
        separate = isinstance(self.models.critic, SeparateCritic)
        return {"policy": self._policy_pass} | ({"critic": self._critic_pass} if separate else {})

    def _policy_pass(self, experience: Experience, rows: Sequence[int], first: bool) -> Loss:
        """Policy loss - entropy bonus (+ KL loss), means over the tokens of `rows`; with it that of a shared critic.

        Where the sampler is not the policy, the losses that are expectations over its tokens (the policy's and KL's)
        are weighed with the truncated importance weights.
        """
        config, critic, index = self.job.ppo, self.models.critic, on_device(experience.samples, rows)
        batch, mask = Packed.of(experience.samples, rows), experience.samples.response_mask[index]
        with recomputed(self.models.policy, config):
            stats = batch.stats(self.models.policy, self.job, config.entropy_coefficient > 0)
        logprobs, old = scatter(stats.logprobs, mask, batch.responses), experience.logprobs[index]
        surrogate = policy_loss(logprobs, old, experience.advantages[index], mask, config.clip_range)
        weights = None if experience.importance is None else experience.importance[index]
        policy = masked_mean(surrogate.loss if weights is None else weights * surrogate.loss, mask)
        metrics = {
            "ppo/policy_loss": policy.detach(),
            "ppo/clip_fraction": masked_mean(surrogate.clipped.float(), mask),
            "ppo/approx_kl": masked_mean(kl_estimates(old, logprobs.detach(), mask).k3, mask),
            "ppo/ratio_max": surrogate.ratio.detach().max(),
        }
        if first and experience.samples.seen is not None:
            metrics["ppo/sampler_drift"] = sampler_drift(old, logprobs.detach(), mask, self.job)
        loss = policy if stats.entropy is None else policy - config.entropy_coefficient * stats.entropy.mean()
        if config.kl.form != "reward":
            tether = kl_loss(logprobs, old, experience.reference[index], mask, config.kl.form)
            loss = loss + experience.kl_weight * masked_mean(tether if weights is None else weights * tether, mask)
        if isinstance(critic, SharedCritic):
            value = self._value_loss(experience, index, batch, critic.values(batch, stats.hidden, self.job.runtime))
            loss = loss + config.critic.coefficient * value
            metrics["ppo/value_loss"] = value.detach()
        return loss, metrics

    def _critic_pass(self, experience: Experience, rows: Sequence[int], first: bool) -> Loss:
        """The loss of a separate critic on `rows`."""
        critic, batch = self.models.critic, Packed.of(experience.samples, rows)
        assert isinstance(critic, SeparateCritic)
        with recomputed(critic.model, self.job.ppo):
            values = critic.values(batch, None, self.job.runtime)
        value = self._value_loss(experience, on_device(experience.samples, rows), batch, values)
        return value, {"ppo/value_loss": value.detach()}

    def _value_loss(self, experience: Experience, index: Tensor, batch: Packed, values: Tensor) -> Tensor:
        """Mean value loss over the tokens of the rows at `index`, from the critic's values (K,) of them."""
        assert experience.values is not None and experience.returns is not None
        mask, width = experience.samples.response_mask[index], experience.value_clip
        found = scatter(values, mask, batch.responses)
        errors = value_loss(found, experience.values[index], experience.returns[index], mask, width)
        return masked_mean(errors, mask)
