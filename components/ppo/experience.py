"""Turn sampled responses into the data of an update: scores, rewards and advantages, with checks."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from components.base.errors import CheckFailed, UserError
from components.base.jsonl import Message
from components.distributed import ranks
from components.models.batching import encode_prompt, onto
from components.models.config import GenerationConfig
from components.models.sampling import Samples, SftAnswers, rollout_engine
from components.models.tokenizers import token_of_character
from components.ppo.config import BY_TOKEN, PpoConfig, PpoJob, ScoreConfig
from components.ppo.maths import (
    Advantages,
    estimate_advantages,
    importance_weights,
    kl_estimates,
    masked_variance,
    moved_to_tokens,
    score_spread,
    tied_groups,
    token_rewards,
)
from components.ppo.models import FrozenPass, Models, frozen_pass
from components.reward.scoring import ScoreScale
from components.rewards.rules import NO_RULES, RuleActions, Rules
from components.rewards.source import Parts
from components.rewards.weighted import WeightedScores, source_metrics
from components.rollouts.engine import largest_kl
from components.stats.intervals import clustered_mean, clustered_ratio
from components.training.loop import read, torch_seed
from components.training.terms import masked_mean
from components.training.updates import Update

SAMPLER_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.01}
"""Largest allowed disagreement of the sampler's and the training path's log-probabilities at temperature 1. A server's
is `largest_kl`.

In float32: the largest absolute difference. Its standard deviation is 7.7e-6 per token for a model of 135 M, a
thirteenth of the limit. In bfloat16, where the sampler's log-probabilities are not used: the mean KL between the two
(k3) in nats per token. Rounding gives such a model a mean |difference| of 0.05, in either direction, which is a KL of
0.003; a wrong prompt gives several nats."""


@dataclass(frozen=True)
class Experience:
    """A batch of responses with everything that stays fixed during its update. B responses, T tokens."""

    samples: Samples
    passes: FrozenPass
    scores: Tensor
    """(B,) scores as rewarded: scaled, clipped, and with the penalties for a missing EOS and for length."""
    scaled_scores: Tensor
    """(B,) scores that are only shifted and scaled."""
    advantages: Tensor
    """(B, T), 0 where the mask is False."""
    returns: Tensor | None
    """(B, T) the critic's targets; None without a critic."""
    kl_weight: float
    """Weight of the KL loss added to the policy loss, for these advantages; 0 if KL is in the reward."""
    metrics: dict[str, float]
    """Metrics of the batch before the update."""
    importance: Tensor | None = None
    """(B, T) truncated importance weights between sampler and training path; None without such weights."""
    rules: RuleActions = NO_RULES
    """What `ppo.rules` counted and did. Advantages and returns of responses that it leaves out are 0."""

    @property
    def learned(self) -> slice | Tensor:
        """Return the index of the responses from which the update learns."""
        return slice(None) if self.rules.rows is None else onto(self.scores.device, torch.tensor(self.rules.rows))

    @property
    def logprobs(self) -> Tensor:
        """Return log π_old (B, T)."""
        return self.passes.policy

    @cached_property
    def returns_deviation(self) -> float:
        """Return the standard deviation of the returns over the tokens that the update learns from."""
        assert self.returns is not None
        return masked_variance(self.returns[self.learned], self.samples.response_mask[self.learned]).sqrt().item()


@dataclass(frozen=True, kw_only=True)
class PpoUpdate(Update):
    """An update of PPO, with the batch from which the policy learned."""

    prompts: Sequence[Sequence[Message]]
    """(B,) the prompt of each response, as messages."""
    texts: Sequence[str]
    """(B,) the responses, as `Samples.texts` returns them."""
    experience: Experience

    @property
    def samples(self) -> Samples:
        """Return the responses as tokens."""
        return self.experience.samples

    @property
    def beta(self) -> float:
        """Return the KL coefficient of the batch's rewards."""
        return self.metrics["ppo/beta"]

    def is_sampled(self, every: int) -> bool:
        """Return whether a table of samples has it: every `every`-th update, from the first, and the last."""
        return (self.number - 1) % every == 0 or self.last


def sampled_batches(
    models: Models, model: Any, prompts: Sequence[Any], job: PpoJob, stream: str | SftAnswers,
    generation: GenerationConfig | None = None, by_judge: bool = False,
) -> Iterator[tuple[Sequence[Any], Samples, FrozenPass]]:  # fmt: skip
    """Yield prompts in batches of `ppo.batch_size`, with a response of `model` to each and their `frozen_pass`.

    Models with the same `stream` get the same random numbers.

    Args:
        stream: the name of a random stream; or SFT's answers to these prompts, whose random numbers `model` then gets.
            SFT itself is then not sampled again.
        generation: how to sample; None takes the job's. Stored answers ignore it. The frozen pass is always at the
            job's temperature.
        by_judge: also ask the independent judge, if there is one.
    """
    encoded = [encode_prompt(models.tokenizer, p, job.generation.max_prompt_tokens) for p in prompts]
    sampler = Models(model, models.sft, models.reward_model, None, models.tokenizer, models.scale)
    sampler.judge = models.judge
    answers, size = stream, job.ppo.batch_size
    if isinstance(answers, str):
        answers = SftAnswers(torch_seed(job.seed, "ppo", answers), range(len(prompts)))
    is_stored = model is models.sft and bool(answers.ids)
    with nullcontext() if is_stored else rollout_engine(model, models.tokenizer, job.runtime) as engine:
        for start in range(0, len(prompts), size):
            batch = slice(start, min(start + size, len(prompts)))
            if is_stored:
                samples = answers.samples(batch, encoded[batch], models.tokenizer, job.runtime.device)
            else:
                assert engine is not None
                numbers = answers.numbers[batch]
                samples = engine.sample(encoded[batch], generation or job.generation, answers.seed, numbers)
            # Drop the sampler's log-probabilities: the KL that is judged comes from the training path.
            yield prompts[batch], samples, frozen_pass(sampler, replace(samples, stats=None), job, by_judge=by_judge)


def rewarded_scores(raw: Tensor, samples: Samples, scale: ScoreScale, config: ScoreConfig) -> Tensor:
    """Turn raw scores (B,) into rewards: shift and scale, clip, missing EOS, length penalty, in this order."""
    scores = scale(raw).clamp(-config.clip, config.clip)
    if config.missing_eos == "replace":
        scores = torch.where(samples.ended, scores, torch.full_like(scores, scale.missing_eos_score))
    elif config.missing_eos == "subtract":
        scores = torch.where(samples.ended, scores, scores - config.missing_eos_penalty)
    return scores - config.length_penalty * samples.response_mask.sum(1)


def placed(tokenizer: Any, responses: Sequence[Sequence[int]], row: int, parts: Parts) -> list[tuple[int, float]]:
    """Return (token, part) for the parts of response `row`'s score; `responses` are token ids without the final EOS."""
    return [(token_of_character(tokenizer, responses[row], offset), value) for offset, value in parts]


def gather_experience(
    models: Models, samples: Samples, job: PpoJob, beta: float, prompts: Sequence[Sequence[Message]] = (),
    first_drift: float | None = None,
) -> Experience:  # fmt: skip
    """Score `samples` and compute rewards, advantages and returns at KL coefficient `beta`.

    Args:
        prompts: the prompts of the samples, as messages; used only by `ppo.rules` and the sources of `ppo.rewards`.
        first_drift: `ppo/sampler_drift` of the first update, which limits that of later ones; None in the first.

    Raises:
        CheckFailed: a score is not finite, or the sampler and the training path disagree on log-probabilities. (If the
            sampler's are kept, the first step of the update checks that instead.)
    """
    mask, config = samples.response_mask, job.ppo
    passes = frozen_pass(models, samples, job)
    raw, by_source, parts = score(models, samples, job, passes.raw_scores, prompts)
    scaled_scores, scores = models.scale(raw), rewarded_scores(raw, samples, models.scale, config.score)
    rules = rule_actions(models, samples, config, prompts)
    if any(rules.penalties):
        scores = scores - onto(scores.device, torch.tensor(rules.penalties, dtype=scores.dtype))
    in_reward = config.kl.form == "reward"
    rewards = token_rewards(passes.policy, passes.reference, scores, mask, beta if in_reward else 0.0)
    if parts is not None:
        rewards = moved_to_tokens(rewards, parts / models.scale.scale, mask)
    advantages, returns, unit = advantages_of(rules.rows, rewards, scores, passes.values, mask, config)
    metrics, importance = measure(models, samples, job, passes, scaled_scores, scores, first_drift)
    metrics |= source_metrics(by_source, "ppo") | {"ppo/beta": beta, **rules.metrics}
    # Whitening divided the rewards, with the score in them, by the unit, so a KL loss is divided by it too.
    weight = 0.0 if in_reward else beta / unit
    return Experience(samples, passes, scores, scaled_scores, advantages, returns, weight, metrics, importance, rules)


def rule_actions(
    models: Models, samples: Samples, config: PpoConfig, prompts: Sequence[Sequence[Message]]
) -> RuleActions:
    """Return on every rank what `ppo.rules`, which the first rank counts, does to the samples."""
    if config.rules is None:
        return NO_RULES
    texts = samples.texts(models.tokenizer)
    counts = ranks.result_of_first(lambda: cast(Rules, models.rules).count(prompts, texts))
    return RuleActions.of(config.rules, counts, config.group_size if config.in_groups else 1)


def advantages_of(
    rows: Sequence[int] | None, rewards: Tensor, scores: Tensor, values: Tensor | None, mask: Tensor, config: PpoConfig
) -> Advantages:
    """Return `estimate_advantages` of the responses `rows` alone, as in a batch that has no others; 0 elsewhere.

    A response is compared with those of its group that are among `rows`, at least one besides itself.
    """
    if rows is None:
        return estimate_advantages(rewards, scores, values, mask, config)
    advantages, unit = torch.zeros_like(rewards), 1.0
    returns = None if values is None else torch.zeros_like(rewards)
    together = config.group_size if config.in_groups else config.batch_size
    for _, group in groupby(rows, lambda row: row // together):
        part = onto(mask.device, torch.tensor(list(group)))
        config, some = config.model_copy(update={"group_size": len(part)}), None if values is None else values[part]
        advantages[part], of_part, unit = estimate_advantages(rewards[part], scores[part], some, mask[part], config)
        if returns is not None and of_part is not None:
            returns[part] = of_part
    return Advantages(advantages, returns, unit)


def score(
    models: Models, samples: Samples, job: PpoJob, raw: Tensor, prompts: Sequence[Sequence[Message]]
) -> WeightedScores:
    """Return the scores of responses: the reward model's `raw` scores (B,), or those of the sources of `ppo.rewards`.

    Raises:
        UserError: a source scores parts of a response, and the advantages are of whole responses.
    """
    if models.rewards is None:
        return WeightedScores(raw, {}, None)
    place, texts = functools.partial(placed, models.tokenizer, samples.text_ids), samples.texts(models.tokenizer)
    tokens, ended = samples.response_mask.shape[1], samples.ended.tolist()
    scores = models.rewards.score(raw, prompts, texts, False, place, tokens, ended)
    if scores.parts is not None and job.ppo.advantage not in BY_TOKEN:
        raise UserError(
            f"ppo.rewards: a source scores parts of a response, and ppo.advantage={job.ppo.advantage} gives a "
            "whole response one advantage, which would ignore the parts. Set ppo.advantage=gae, or return one "
            "number for each response."
        )
    return scores


def measure(
    models: Models, samples: Samples, job: PpoJob, passes: FrozenPass, scaled_scores: Tensor, scores: Tensor,
    first_drift: float | None,
) -> tuple[dict[str, float], Tensor | None]:  # fmt: skip
    """Return the metrics of a batch before its update, and the importance weights (B, T), if there are any.

    Raises:
        CheckFailed: as for `gather_experience`.
    """
    mask, config, old = samples.response_mask, job.ppo, passes.policy
    kl = kl_estimates(old, passes.sft, mask)
    # Unless T is 1 this is not a KL, since the tokens were drawn at T. The evaluation samples at 1 for
    # `policy/kl_at_temperature_1`.
    at_1 = (passes.policy_at_1 - passes.sft_at_1).masked_fill(~mask, 0)
    unread = {
        "scores are finite": torch.isfinite(scaled_scores).all(),
        "log-probabilities are finite": torch.isfinite(kl.k1).all(),
        "ppo/proxy_reward": scaled_scores.mean(),
        "ppo/rewarded_score": scores.mean(),
        "ppo/kl": kl.k1.sum(1).mean(),
        "ppo/kl_k2": kl.k2.sum(1).mean(),
        "ppo/kl_k3": kl.k3.sum(1).mean(),
        "ppo/log_ratio_at_temperature_1": at_1.sum(1).mean(),
        "ppo/kl_per_token": masked_mean(kl.k1, mask),
        "ppo/entropy": masked_mean(passes.entropy, mask),
        "ppo/response_tokens": mask.sum(1).float().mean(),
        "ppo/ended": samples.ended.float().mean(),
        "ppo/score_spread": score_spread(scores),
    }
    if config.score.missing_eos == "replace":
        unread["ppo/replaced"] = 1 - unread["ppo/ended"]
    if config.in_groups:
        unread["ppo/tied_groups"] = tied_groups(scores, config.group_size).float().mean()
    importance = None
    if samples.stats is None:
        unread["ppo/sampler_drift"] = sampler_drift(samples.logprobs, old, mask, job)
        level, cap = config.importance_level, config.importance.cap
        weights = importance_weights(old, samples.logprobs, mask, cap, level or "token")
        importance = None if level is None else weights.weights
        unread |= {
            "ppo/sampler_kl": masked_mean(kl_estimates(samples.logprobs, old, mask).k3, mask),
            "ppo/importance_truncated": weights.truncated,
            "ppo/importance_max": weights.largest,
        }
    if models.sft is not models.reference:
        unread["ppo/kl_to_reference"] = kl_estimates(old, passes.reference, mask).k1.sum(1).mean()
    metrics = dict(zip(unread, read(list(unread.values())), strict=True))
    if not metrics.pop("scores are finite"):
        raise CheckFailed("the reward model gave a score that isn't finite.")
    if not metrics.pop("log-probabilities are finite"):
        raise CheckFailed("a log-probability isn't finite, so KL to the reference is unknown. Lower ppo.learning_rate.")
    if samples.stats is None:
        check_drift(metrics["ppo/sampler_drift"], job, first_drift)
    return metrics | lower_ends(kl.k1.sum(1), samples), importance


def lower_ends(kl: Tensor, samples: Samples) -> dict[str, float]:
    """Return the lower ends of the 95 % intervals of a batch's mean KL, from its responses' summed k1 `kl` (B,).

    Clustered by prompt; empty if all responses are to one prompt, since that says nothing about other prompts.
    """
    prompts = [tuple(ids) for ids in samples.prompt_ids.tolist()]
    sums = kl.tolist()
    whole, a_token = clustered_mean(sums, prompts), clustered_ratio(sums, samples.response_lengths, prompts)
    low_ends = {"ppo/kl_low": whole.low, "ppo/kl_per_token_low": a_token.low}
    return {name: low for name, low in low_ends.items() if math.isfinite(low)}


def sampler_tolerance(dtype: str, temperature: float) -> float:
    """Return how far the sampler and the training path may disagree, in the units of `SAMPLER_TOLERANCE`.

    A logit x is divided by T, and so is its rounding error. So a difference of log-probabilities grows as 1 / T, and a
    KL, which is of second order in it, as 1 / T². Above T = 1 the rounding of the log-probability itself dominates, so
    the tolerance does not shrink.
    """
    growth = max(1.0, 1 / temperature)
    return SAMPLER_TOLERANCE[dtype] * (growth if dtype == "float32" else growth**2)


def sampler_drift(sampled: Tensor, recomputed: Tensor, mask: Tensor, job: PpoJob) -> Tensor:
    """Return how far the sampler's log-probabilities are from `recomputed` (B, T), in the units of `SAMPLER_TOLERANCE`.

    A server uses different kernels in any format, so for a server it is the mean KL, as in bfloat16.
    """
    if job.runtime.dtype == "float32" and not job.ppo.rollout.by_server:
        return (sampled - recomputed).abs().masked_fill(~mask, 0).max()
    return masked_mean(kl_estimates(sampled, recomputed, mask).k3, mask)


def check_drift(drift: float, job: PpoJob, first: float | None = None) -> None:
    """Check that sampler and training path agree; `drift` comes from `sampler_drift`, `first` from the first update.

    Raises:
        CheckFailed: it exceeds the `sampler_tolerance` of the job's dtype and temperature, or a server's `largest_kl`.
    """
    dtype, temperature, rollout = job.runtime.dtype, job.generation.temperature, job.ppo.rollout
    where, hint = f"in {dtype}", "Check that dropout is off and that both truncate prompts alike."
    if rollout.by_server:
        allowed, where = largest_kl(rollout, job.runtime, temperature, first), f"with a server in {rollout.dtype}"
        where += "" if first is None else f", where the first update had {first:.2g},"
        hint = "Check whether the server quantises, or holds earlier weights or another format."
    else:
        allowed = sampler_tolerance(dtype, temperature)
    if not drift <= allowed:
        is_largest = dtype == "float32" and not rollout.by_server
        raise CheckFailed(
            f"the sampler and the training path disagree on log-probabilities by {drift:.2g} nats "
            f"({'largest' if is_largest else 'mean KL'}; {allowed:.2g} is allowed {where} at temperature "
            f"{temperature:g}): the ratios of PPO would be wrong. {hint}"
        )


def check_start(experience: Experience, job: PpoJob) -> None:
    """Check that before the first update the policy is the reference: log-probabilities agree up to rounding.

    The sum of N rounding errors grows as the square root of N. So the mean over B responses of the summed k1 may differ
    from 0 by tol · max(1, 1 / T) · sqrt(N) / B, with tol = `SAMPLER_TOLERANCE`. At 7.7e-6 per token that is thirteen
    standard deviations, for any length and batch. (A fixed limit of 1e-4 for the sum stopped a quarter of the runs with
    8 responses of 1,000 tokens.)

    Raises:
        CheckFailed: they do not agree, so KL would not be measured against the start of the training.
    """
    kl, lengths = abs(experience.metrics["ppo/kl"]), experience.samples.response_lengths
    growth = max(1.0, 1 / job.generation.temperature)
    allowed = SAMPLER_TOLERANCE[job.runtime.dtype] * growth * math.sqrt(sum(lengths)) / len(lengths)
    if not kl <= allowed:
        raise CheckFailed(
            f"KL to the reference is {kl:.2g} nats before the first update, where it must be 0 (rounding is allowed "
            f"{allowed:.2g}): the policy did not start as the reference. Check that dropout is off."
        )
