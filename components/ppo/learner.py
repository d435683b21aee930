"""One update of PPO: epochs of minibatches over a batch of experience."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from components.base.errors import CheckFailed
from components.distributed import ranks
from components.distributed.sharding import reduce_at
from components.ppo.config import PpoJob
from components.ppo.experience import Experience, check_drift, sampler_drift
from components.ppo.maths import (
    aggregated,
    explained_variance,
    kl_estimates,
    kl_loss,
    masked_mean,
    policy_loss,
    value_loss,
)
from components.ppo.models import (
    Models,
    Packed,
    SeparateCritic,
    SharedCritic,
    micro_batches,
    on_device,
    scatter,
    shared_runs,
)
from components.sft.mixed import MixedDemonstrations
from components.training.loop import check_norm, clip_gradient, read, recomputed, seeded, step_and_clear
from components.training.optim import build_optimizer, learning_rate_at, named_rate, set_learning_rate

Loss = tuple[Tensor, dict[str, Tensor]]
"""The loss to backpropagate, and scalar metrics of it."""
Pass = Callable[[Experience, Sequence[int], bool], Loss]
"""Returns the loss on some rows of a batch. The last argument says whether the policy is still the one that sampled."""
LARGEST = ("ppo/ratio_max", "ppo/sampler_drift")
"""Metrics of an update that are a maximum, not a mean."""
LOSSES = ("ppo/policy_loss", "ppo/value_loss", "ppo/ptx_loss")
"""Metrics that are summed over micro-batches like the losses; all others are means over tokens."""


class MicroBatch(NamedTuple):
    """One micro-batch of an optimiser step."""

    compute: Callable[[], Loss]
    share: float
    """Its share of the step's loss."""
    tokens: float
    """Its share of the step's tokens."""


@dataclass
class Learner:
    """The policy and critic with their optimisers."""

    models: Models
    job: PpoJob
    optimizers: dict[str, AdamW]
    """The optimiser of the `policy`, and of a separate `critic`."""
    demonstrations: MixedDemonstrations | None = None
    """The demonstrations of the SFT loss; None without that loss."""
    warming: bool = False
    """Whether only the critic learns in this update; set by `set_rates`."""

    @classmethod
    def start(cls, models: Models, job: PpoJob, data: Path | None = None, folder: Path | None = None) -> "Learner":
        """Create AdamW optimisers for the policy, and for a separate critic at its own learning rate.

        Args:
            data: the artifact whose demonstrations `ppo.ptx` mixes in.
            folder: where to write a file of their tokens; None keeps them in memory.

        Raises:
            UserError: as for `MixedDemonstrations.read`.
        """
        config, demonstrations = job.ppo, None
        optimizers = {n: build_optimizer(m.requires_grad_(True), config) for n, m in models.trained().items()}
        if config.ptx.coefficient and data is not None:
            demonstrations = MixedDemonstrations.read(
                data, models.tokenizer, job.generation, config.ptx.batch_size, job.seed, folder
            )
        return cls(models, job, optimizers, demonstrations)

    def set_rates(self, update: int) -> float:
        """Set the learning rates of update `update` (from 0); return the policy's, which is 0 while the critic warms
        up.

        The policy's schedule begins after the critic's warm-up; the critic's covers all updates.
        """
        config = self.job.ppo
        skipped = config.critic.warmup
        self.warming = update < skipped
        own = 0.0 if self.warming else learning_rate_at(update - skipped, config.updates - skipped, config)
        for name, optimizer in self.optimizers.items():
            rate = own if name == "policy" else learning_rate_at(update, config.updates, config)
            apart = name == "critic" and not isinstance(self.models.critic, SharedCritic)
            set_learning_rate(
                optimizer, rate * named_rate(config.critic.learning_rate) / config.peak if apart else rate
            )
        return own

    def update(self, experience: Experience, update: int) -> dict[str, float]:
        """Learn from a batch; return metrics averaged over the optimiser steps.

        Raises:
            CheckFailed: a loss or gradient is not finite, or the log-probabilities kept from sampling differ from those
                of the training path.
        """
        config, rate, steps = self.job.ppo, self.set_rates(update), 0
        sums: dict[str, float] = defaultdict(float)
        for steps, (number, rows) in enumerate(self._minibatches(update), 1):
            metrics = self._step(experience, rows, number, first=steps == 1)
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

    def _minibatches(self, update: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each optimiser step of `update`: its number in the whole run, and its rows.

        Every epoch uses all rows, in a new order.
        """
        config = self.job.ppo
        size, total = config.minibatch_size, config.batch_size
        for epoch in range(config.epochs):
            order = list(range(total))
            seeded(self.job.seed, "ppo", "minibatches", update, epoch).shuffle(order)
            for start in range(0, total, size):
                number = ((update * config.epochs + epoch) * total + start) // size
                yield number, order[start : start + size]

    def _step(self, experience: Experience, rows: Sequence[int], number: int, first: bool) -> dict[str, float]:
        """Make optimiser step `number` of the run on the responses `rows`, in micro-batches weighted by their share.

        In the `first` step of an update the policy is still the one that sampled, so log-probabilities that were kept
        from sampling must equal those of the training path. Values to check and report are read from the GPU once per
        model, when its gradient is complete, so that the host waits no more often than that.
        """
        totals: dict[str, float] = defaultdict(float)
        passes, found_norms = self.passes(), dict[str, float]()
        for part, losses in passes.items():
            stepped = self._stepped(part, alone=len(passes) == 1)
            unread: list[tuple[MicroBatch, dict[str, Tensor]]] = []
            works = self._works(experience, rows, losses, first)
            works += self._mixed_in(number) if "policy" in stepped else []
            for i, work in enumerate(works, 1):
                for model in stepped.values():
                    reduce_at(model.model if isinstance(model, SeparateCritic) else model, last=i == len(works))
                with nullcontext() if stepped else torch.no_grad():
                    loss, metrics = work.compute()
                if stepped:
                    (loss * work.share).backward()
                unread.append((work, {"loss": loss.detach()} | metrics))
            norms = [clip_gradient(model, self.job.ppo.max_grad_norm) for model in stepped.values()]
            numbers = iter(read([*chain.from_iterable(metrics.values() for _, metrics in unread), *norms]))
            for work, metrics in unread:
                found = {name: next(numbers) for name in metrics}
                if "ppo/sampler_drift" in found:
                    check_drift(found["ppo/sampler_drift"], self.job)
                if not math.isfinite(loss_read := found.pop("loss")):
                    raise CheckFailed(f"ppo: the loss is {loss_read}. Lower ppo.learning_rate or look at the batch.")
                for name, value in found.items():
                    share = work.share if name in LOSSES else work.tokens
                    totals[name] = max(totals[name], value) if name in LARGEST else totals[name] + value * share
            for name in stepped:
                norm = check_norm(next(numbers), f"ppo ({name})")
                found_norms["ppo/grad_norm" if name == "policy" else "ppo/critic_grad_norm"] = norm
                step_and_clear(self.optimizers[name])
        return ranks.summed(totals, LARGEST) | ({"ppo/grad_norm": 0.0} if self.warming else {}) | found_norms

    def _stepped(self, part: str, alone: bool) -> dict[str, nn.Module]:
        """Return the models that part `part` of `passes` steps: all that train if it is the only part (`alone`).

        While the critic warms up the policy is not stepped.
        """
        trained = self.models.trained()
        stepped = trained if alone else {part: trained[part]}
        return {name: model for name, model in stepped.items() if not (self.warming and name == "policy")}

    def _works(self, experience: Experience, rows: Sequence[int], losses: Pass, first: bool) -> list[MicroBatch]:
        """Return this rank's micro-batches of `rows`. Their losses are divided by totals over all ranks."""
        samples, config = experience.samples, self.job.ppo
        of_tokens = {row: samples.response_lengths[row] for row in rows}
        weights = of_tokens if config.aggregation == "token" else dict.fromkeys(rows, 1)

        def share(micro: Sequence[int], of: Mapping[int, int], counts: bool) -> float:
            return counts * sum(of[row] for row in micro) / sum(of.values())

        return [
            MicroBatch(
                partial(losses, experience, micro, first),
                share(micro, weights, counts),
                share(micro, of_tokens, counts),
            )
            for micro, counts in micro_batches(samples, rows, *config.micro_batch)
        ]

    def _mixed_in(self, number: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the demonstrations that optimiser step `number` mixes in."""
        mixed, config = self.demonstrations, self.job.ppo
        if mixed is None:
            return []
        lengths = mixed.minibatch(number)
        total, found = mixed.response_tokens(list(lengths)), []
        for micro, counts in shared_runs(lengths, *config.micro_batch):
            share = counts * mixed.response_tokens(micro) / total
            found.append(MicroBatch(partial(self._mixed_loss, mixed, micro), share, share))
        return found

    def _mixed_loss(self, mixed: MixedDemonstrations, micro: Sequence[int]) -> Loss:
        """Return γ times the SFT loss of a micro-batch of demonstrations."""
        with recomputed(self.models.policy, self.job.ppo):
            loss = mixed.loss(self.models.policy, micro, self.job.runtime)
        return self.job.ppo.ptx.coefficient * loss, {"ppo/ptx_loss": loss.detach()}

    def passes(self) -> Mapping[str, Pass]:
        """Return the passes that are backpropagated and stepped one after the other.

        A separate critic's pass comes after the policy's graph and gradients are freed, so that both never need memory
        at once. A shared trunk has a single loss. While the critic warms up, the policy's pass is still made, for its
        metrics and, with a shared trunk, for the hidden states that the critic reads.
        """
        separate = isinstance(self.models.critic, SeparateCritic)
        return {"policy": self._policy_pass} | ({"critic": self._critic_pass} if separate else {})

    def _policy_pass(self, experience: Experience, rows: Sequence[int], first: bool) -> Loss:
        """Return policy loss - entropy bonus (+ KL loss, + value loss of a shared critic) of `rows`.

        If the sampler differs from the policy, the losses that are expectations over its tokens (the policy's and KL's)
        are weighted with the truncated importance weights.
        """
        config, critic, index = self.job.ppo, self.models.critic, on_device(experience.samples, rows)
        batch, mask = Packed.of(experience.samples, rows), experience.samples.response_mask[index]
        with torch.no_grad() if self.warming else recomputed(self.models.policy, config):
            stats = batch.stats(self.models.policy, self.job, config.entropy_coefficient > 0)
        logprobs, old = scatter(stats.logprobs, mask, batch.responses), experience.logprobs[index]
        clips = config.clip_range, config.clip_range_high, config.dual_clip
        surrogate = policy_loss(logprobs, old, experience.advantages[index], mask, *clips)
        weights = None if experience.importance is None else experience.importance[index]
        policy = self._aggregated(surrogate.loss if weights is None else weights * surrogate.loss, mask)
        metrics = {
            "ppo/policy_loss": policy.detach(),
            "ppo/clip_fraction": masked_mean(surrogate.clipped.float(), mask),
            "ppo/approx_kl": masked_mean(kl_estimates(old, logprobs.detach(), mask).k3, mask),
            "ppo/ratio_max": surrogate.ratio.detach().max(),
        }
        if config.clip_range_high is not None:
            above = surrogate.clipped & ~surrogate.floored & (surrogate.ratio > 1)
            metrics["ppo/clip_fraction_above"] = masked_mean(above.float(), mask)
        if config.dual_clip is not None:
            metrics["ppo/dual_clip_fraction"] = masked_mean(surrogate.floored.float(), mask)
        if first and experience.samples.seen is not None:
            metrics["ppo/sampler_drift"] = sampler_drift(old, logprobs.detach(), mask, self.job)
        loss = policy
        if stats.entropy is not None:
            entropy = self._aggregated(scatter(stats.entropy, mask, batch.responses), mask)
            loss = policy - config.entropy_coefficient * entropy
        if config.kl.form != "reward":
            tether = kl_loss(logprobs, old, experience.reference[index], mask, config.kl.form)
            loss = loss + experience.kl_weight * self._aggregated(tether if weights is None else weights * tether, mask)
        if isinstance(critic, SharedCritic):
            value = self._value_loss(experience, index, batch, critic.values(batch, stats.hidden, self.job.runtime))
            loss = loss + config.critic.coefficient * value
            metrics["ppo/value_loss"] = value.detach()
        return loss, metrics

    def _critic_pass(self, experience: Experience, rows: Sequence[int], first: bool) -> Loss:
        """Return the loss of a separate critic on `rows`."""
        critic, batch = self.models.critic, Packed.of(experience.samples, rows)
        assert isinstance(critic, SeparateCritic)
        with recomputed(critic.model, self.job.ppo):
            values = critic.values(batch, None, self.job.runtime)
        value = self._value_loss(experience, on_device(experience.samples, rows), batch, values)
        return value, {"ppo/value_loss": value.detach()}

    def _value_loss(self, experience: Experience, index: Tensor, batch: Packed, values: Tensor) -> Tensor:
        """Return the value loss of the rows at `index`, by `aggregation`, from the critic's values (K,) of their
        tokens."""
        assert experience.values is not None and experience.returns is not None
        mask, width = experience.samples.response_mask[index], experience.value_clip
        found = scatter(values, mask, batch.responses)
        errors = value_loss(found, experience.values[index], experience.returns[index], mask, width)
        return self._aggregated(errors, mask)

    def _aggregated(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Reduce losses (B, T) to one number by the config's `aggregation`."""
        return aggregated(losses, mask, self.job.ppo.aggregation, self.job.generation.max_new_tokens)
