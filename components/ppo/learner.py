"""One update of PPO: epochs of minibatches over a batch of experience."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import AdamW

from components.base.errors import CheckFailed
from components.distributed import ranks
from components.distributed.sharding import reduce_at
from components.ppo.config import PpoJob
from components.ppo.experience import Experience, check_drift
from components.ppo.maths import explained_variance
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
from components.ppo.objective import Forward, PolicyTerm, policy_terms, value_term
from components.sft.mixed import MixedDemonstrations
from components.training.loop import check_norm, check_resumed, clip_gradient, read, recomputed, seeded, step_and_clear
from components.training.optim import build_optimizer, learning_rate_at, named_rate, set_learning_rate
from components.training.terms import Loss, Measure, total

Pass = Callable[[Experience, Sequence[int], bool], Loss]
"""Returns the loss on some rows of a batch. The last argument says whether the policy is still the one that sampled."""

logger = logging.getLogger(__name__)

Metrics = tuple[dict[str, float], set[str]]
"""Metrics of an optimiser step, and the names of those that are a maximum."""


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
    terms: Sequence[PolicyTerm]
    """The terms of the policy's loss."""
    demonstrations: MixedDemonstrations | None = None
    """The demonstrations of the SFT loss; None without that loss."""
    warming: bool = False
    """Whether only the critic learns in this update; set by `set_rates`."""
    used: Counter[int] = field(default_factory=Counter)
    """How many minibatches of the latest update had each row."""
    broke_off: bool = False
    """Whether `ppo.stop_epochs_above` ended the latest update."""

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
        terms = policy_terms(job, isinstance(models.critic, SharedCritic))
        return cls(models, job, optimizers, terms, demonstrations)

    def set_rates(self, update: int) -> float:
        """Set the learning rates of update `update` (from 0); return the policy's, which is 0 while the critic warms
        up.

        The policy's schedule begins after the critic's warm-up; the critic's covers all updates.
        """
        config = self.job.ppo
        skipped = config.critic.warmup
        self.warming = update < skipped
        policy_rate = 0.0 if self.warming else learning_rate_at(update - skipped, config.updates - skipped, config)
        for name, optimizer in self.optimizers.items():
            rate = policy_rate if name == "policy" else learning_rate_at(update, config.updates, config)
            apart = name == "critic" and not isinstance(self.models.critic, SharedCritic)
            set_learning_rate(
                optimizer, rate * named_rate(config.critic.learning_rate) / config.peak if apart else rate
            )
        return policy_rate

    def check_resumed(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Judge the optimisers by the steps that they have made in the updates of a history's `rows`.

        Raises:
            CheckFailed: as for `training.loop.check_resumed`.
        """
        steps = [int(row["ppo/optimizer_steps"]) for row in rows]
        skipped = self.job.ppo.critic.warmup
        check_resumed(self.optimizers, {n: sum(steps[skipped * (n == "policy") :]) for n in self.optimizers})

    def update(self, experience: Experience, update: int) -> dict[str, float]:
        """Learn from a batch; return metrics averaged over the optimiser steps.

        Raises:
            CheckFailed: a loss or gradient is not finite, or the log-probabilities kept from sampling differ from those
                of the training path.
        """
        config, rate, steps, self.broke_off = self.job.ppo, self.set_rates(update), 0, False
        self.used.clear()
        sums: dict[str, float] = defaultdict(float)
        maxima = set[str]()
        for steps, (number, rows) in enumerate(self._minibatches(update, experience.rules.rows), 1):
            metrics, of_step = self._step(experience, rows, number, first=steps == 1)
            self.used.update(rows)
            maxima |= of_step
            for name, value in metrics.items():
                sums[name] = max(sums[name], value) if name in maxima else sums[name] + value
            if config.stop_epochs_above is not None and metrics["ppo/approx_kl"] > config.stop_epochs_above:
                self.broke_off = True
                break
        means = {name: value if name in maxima else value / steps for name, value in sums.items()}
        values, returns = experience.passes.values, experience.returns
        if not steps:
            logger.warning("update %d: ppo.rules.drop leaves out every response, so no step is made.", update + 1)
        elif values is not None and returns is not None:
            learned = (x[experience.learned] for x in (values, returns, experience.samples.response_mask))
            means["ppo/explained_variance"] = explained_variance(*learned).item()
        return means | {"ppo/learning_rate": rate, "ppo/optimizer_steps": float(steps)}

    def _minibatches(self, update: int, learned: Sequence[int] | None) -> Iterator[tuple[int, list[int]]]:
        """Yield each optimiser step of `update`: its number in the whole run, and its rows.

        Every epoch uses all rows, or those of `learned`, in a new order in which rows that are compared stay together.
        Its minibatches are as few as `minibatch_size` allows, and as equal as possible: AdamW moves the weights as far
        for one response as for many.
        """
        config, together = self.job.ppo, self.job.ppo.together
        size, total = config.minibatch_size, config.batch_size
        rows = range(total) if learned is None else learned
        steps = math.ceil(len(rows) / size)
        for epoch in range(config.epochs):
            groups = list(rows[::together])
            seeded(self.job.seed, "ppo", "minibatches", update, epoch).shuffle(groups)
            for step in range(steps):
                some = groups[len(groups) * step // steps : len(groups) * (step + 1) // steps]
                number = (update * config.epochs + epoch) * (total // size) + step
                yield number, [row for first in some for row in range(first, first + together)]

    def _step(self, experience: Experience, rows: Sequence[int], number: int, first: bool) -> Metrics:
        """Make optimiser step `number` of the run on the responses `rows`, in micro-batches weighted by their share.

        In the `first` step of an update the policy is still the one that sampled, so log-probabilities that were kept
        from sampling must equal those of the training path. Values to check and report are read from the GPU once per
        model, when its gradient is complete, so that the host waits no more often than that.
        """
        sums: dict[str, float] = defaultdict(float)
        passes, norms, maxima = self.passes(), {"ppo/grad_norm": 0.0} if self.warming else {}, set[str]()
        for part, losses in passes.items():
            stepped = self._stepped(part, alone=len(passes) == 1)
            works = self.works(experience, rows, losses, first)
            works += self._mixed_in(number) if "policy" in stepped else []
            unread = self.backward(works, stepped)
            lengths = [clip_gradient(model, self.job.ppo.max_grad_norm) for model in stepped.values()]
            numbers = iter(read([*(measure.value for _, _, measure in unread), *lengths]))
            for work, name, measure in unread:
                value = next(numbers)
                if name == "ppo/sampler_drift":
                    check_drift(value, self.job)
                if name == "loss" and not math.isfinite(value):
                    raise CheckFailed(f"ppo: the loss is {value}. Lower ppo.learning_rate or look at the batch.")
                if measure.over == "largest":
                    maxima.add(name)
                    sums[name] = max(sums[name], value)
                else:
                    sums[name] += value * (work.share if measure.over == "loss" else work.tokens)
            for name in stepped:
                norm = check_norm(next(numbers), f"ppo ({name})")
                norms["ppo/grad_norm" if name == "policy" else "ppo/critic_grad_norm"] = norm
                step_and_clear(self.optimizers[name])
        del sums["loss"]
        return ranks.summed(sums, maxima) | norms, maxima

    def backward(
        self, works: Sequence[MicroBatch], stepped: Mapping[str, nn.Module]
    ) -> list[tuple[MicroBatch, str, Measure]]:
        """Add the gradient of the micro-batches to the `stepped` models; return their measures, unread."""
        unread: list[tuple[MicroBatch, str, Measure]] = []
        for i, work in enumerate(works, 1):
            for model in stepped.values():
                reduce_at(model.model if isinstance(model, SeparateCritic) else model, last=i == len(works))
            with nullcontext() if stepped else torch.no_grad():
                loss, measures = work.compute()
            if stepped:
                (loss * work.share).backward()
            measures = {"loss": Measure(loss.detach())} | measures
            unread += [(work, name, measure) for name, measure in measures.items()]
        return unread

    def _stepped(self, part: str, alone: bool) -> dict[str, nn.Module]:
        """Return the models that part `part` of `passes` steps: all that train if it is the only part (`alone`).

        While the critic warms up the policy is not stepped.
        """
        trained = self.models.trained()
        stepped = trained if alone else {part: trained[part]}
        return {name: model for name, model in stepped.items() if not (self.warming and name == "policy")}

    def works(self, experience: Experience, rows: Sequence[int], losses: Pass, first: bool) -> list[MicroBatch]:
        """Return this rank's micro-batches of `rows`. Their losses are divided by totals over all ranks."""
        samples, config = experience.samples, self.job.ppo
        of_tokens = {row: samples.response_lengths[row] for row in rows}
        by_token = config.aggregation == "token" and config.pair_labels is None
        weights = of_tokens if by_token else dict.fromkeys(rows, 1)

        def share(micro: Sequence[int], of: Mapping[int, int], counts: bool) -> float:
            return counts * sum(of[row] for row in micro) / sum(of.values())

        return [
            MicroBatch(
                partial(losses, experience, micro, first),
                share(micro, weights, counts),
                share(micro, of_tokens, counts),
            )
            for micro, counts in micro_batches(samples, rows, *config.micro_batch, together=config.together)
        ]

    def _mixed_in(self, number: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the demonstrations that optimiser step `number` mixes in."""
        mixed, config = self.demonstrations, self.job.ppo
        if mixed is None:
            return []
        lengths = mixed.minibatch(number)
        tokens, works = mixed.response_tokens(list(lengths)), []
        for micro, counts in shared_runs(lengths, *config.micro_batch):
            share = counts * mixed.response_tokens(micro) / tokens
            works.append(MicroBatch(partial(self._mixed_loss, mixed, micro), share, share))
        return works

    def _mixed_loss(self, mixed: MixedDemonstrations, micro: Sequence[int]) -> Loss:
        """Return γ times the SFT loss of a micro-batch of demonstrations."""
        with recomputed(self.models.policy, self.job.ppo):
            return total([mixed.term(self.models.policy, micro, self.job.runtime, self.job.ppo.ptx.coefficient)])

    def passes(self) -> Mapping[str, Pass]:
        """Return the passes that are backpropagated and stepped one after the other.

        A separate critic's pass comes after the policy's graph and gradients are freed, so that both never need memory
        at once. A shared trunk has a single loss. While the critic warms up, the policy's pass is still made, for its
        metrics and, with a shared trunk, for the hidden states that the critic reads.
        """
        separate = isinstance(self.models.critic, SeparateCritic)
        return {"policy": self._policy_pass} | ({"critic": self._critic_pass} if separate else {})

    def _policy_pass(self, experience: Experience, rows: Sequence[int], first: bool) -> Loss:
        """Return the sum of `terms` on `rows`."""
        critic, batch = self.models.critic, Packed.of(experience.samples, rows)
        forward = self._forward(experience, rows, first)
        with torch.no_grad() if self.warming else recomputed(self.models.policy, self.job.ppo):
            stats = batch.stats(self.models.policy, self.job, self.job.ppo.entropy_coefficient > 0)
        forward = forward._replace(logprobs=scatter(stats.logprobs, forward.mask, batch.responses))
        if stats.entropy is not None:
            forward = forward._replace(entropy=scatter(stats.entropy, forward.mask, batch.responses))
        if isinstance(critic, SharedCritic):
            values = critic.values(batch, stats.hidden, self.job.runtime)
            forward = forward._replace(values=scatter(values, forward.mask, batch.responses))
        return total([term(forward) for term in self.terms])

    def _critic_pass(self, experience: Experience, rows: Sequence[int], first: bool) -> Loss:
        """Return the loss of a separate critic on `rows`."""
        critic, batch = self.models.critic, Packed.of(experience.samples, rows)
        assert isinstance(critic, SeparateCritic)
        with recomputed(critic.model, self.job.ppo):
            values = critic.values(batch, None, self.job.runtime)
        forward = self._forward(experience, rows, first)
        return total([value_term(forward._replace(values=scatter(values, forward.mask, batch.responses)))])

    def _forward(self, experience: Experience, rows: Sequence[int], first: bool) -> Forward:
        index = on_device(experience.samples, rows)
        return Forward(self.job, experience, index, experience.samples.response_mask[index], first)
