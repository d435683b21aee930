"""PPO's self-checks of an update: a few numbers of its batch computed again, one response at a time.

Nothing here is packed, padded, cached or vectorised: loops in Python, and the forward pass of transformers. B responses
of T tokens; log-probabilities are natural.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, compress, islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from components.data.tables.published import read_split
from components.distributed import ranks
from components.distributed.sharding import is_spread
from components.gates.self_checks import SelfChecks
from components.models.adapters import AdapterView
from components.models.chat.endings import endings_of
from components.models.chat.templates import FIXED
from components.models.runtime import Runtime, autocast
from components.models.sampling import Samples
from components.ppo.config import BY_TOKEN, KLConfig, PpoConfig, PpoJob
from components.ppo.experience import Experience
from components.ppo.learner import Learner
from components.ppo.models import Models, SeparateCritic
from components.ppo.objective import policy_term, value_term
from components.reward.scoring import score_sequences
from components.training.training_checks import check_cleared

ROWS = 8
"""Most responses whose prompts, scores and gradients are computed again."""
SLOW = 1e-7
"""A model with a lower learning rate need not move in float32."""
SHIFTS = 0.0137, 0.4637, -0.5371, -1.4519
"""What is added, token after token, to log π_old and the old values when gradients are compared: ratios, and values in
deviations of the returns, then lie on both sides of what is clipped."""
SAMPLED, LARGEST, CUT, ENOUGH, MANY = 2048, 2**26, 5.0, 25.0, 100.0
"""Tokens, of whole responses, that are compared with the policy's distribution, and most probabilities of a response;
nats at which a surprise is cut; and the least variance that is judged, of a sum of surprises and of products of two."""
DOUBTFUL, WRONG, ALIKE, SAME, CERTAIN = 4.0, 6.0, 12.0, 8.0, 20.0
"""Standard errors of a sampler's surprises that are in doubt, or wrong; those of the likeness of a batch's responses
and of two batches that are in doubt, and wrong: sums of products have long tails. Healthy ones reached 2.6, 3.2 and 3.8
in 32 batches of the demo; a temperature of 0.7 in place of 1 has 7, and the same random numbers have 10 to 400."""
Numbers = list[float]


def is_judged(number: int) -> bool:
    """Return whether the batch of update `number` (from 1) is checked: 1, 2, 4, 8, 16 and so on."""
    return number & (number - 1) == 0


def is_exact(job: PpoJob) -> bool:
    """Return whether all models compute in float32 to the last digits: not in bfloat16, TF32 or 4 bits."""
    quantized = job.ppo.lora is not None and job.ppo.lora.quantize is not None
    return job.runtime.dtype == "float32" and not job.runtime.tf32 and not quantized


def plain_logits(model: Any, ids: Sequence[int], runtime: Runtime) -> Tensor:
    """Return the float32 logits (L, V) of one sequence, from the forward pass of transformers."""
    whole = model
    if isinstance(model, AdapterView):
        model.backbone.activate(model.name)
        whole = model.backbone.model
    with autocast(runtime):
        logits = whole(input_ids=torch.tensor([ids], device=runtime.device), use_cache=False).logits[0].float()
    never = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    never[model.config.pad_token_id] = True  # the pad token is never sampled
    return logits.masked_fill(never, -math.inf)


def plain_distributions(
    model: Any, prompt: Sequence[int], response: Sequence[int], job: PpoJob, temperature: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return log π (T, V) where each token of `response` was chosen, and of that token (T,).

    The temperature is by default that of the job.
    """
    logits = plain_logits(model, [*prompt, *response], job.runtime)[len(prompt) - 1 : -1]
    logprobs = (logits / (temperature or job.generation.temperature)).log_softmax(-1)
    return logprobs, logprobs.gather(1, torch.tensor(response, device=logits.device).unsqueeze(1)).squeeze(1)


def plain_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], job: PpoJob) -> Tensor:
    """Return the log-probability (T,) of each token of `response` after `prompt`, at the temperature of the job."""
    return plain_distributions(model, prompt, response, job)[1]


def plain_values(models: Models, prompt: Sequence[int], response: Sequence[int], job: PpoJob) -> Tensor:
    """Return the critic's value (T,) of each state in which a token of `response` was chosen."""
    critic, ids = models.critic, torch.tensor([[*prompt, *response]], device=job.runtime.device)
    model = critic.model if isinstance(critic, SeparateCritic) else models.policy
    with autocast(job.runtime):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    if isinstance(critic, SeparateCritic):
        return critic.scale(model.score(hidden.float()).squeeze(-1))
    assert critic is not None
    return critic(hidden.float()).squeeze(-1)


class Surprises(NamedTuple):
    """How surprising the tokens of some responses (R, T) are to a policy π, 0 after their ends."""

    values: Tensor
    """log π of each token, cut at -`CUT` nats, less its expectation: of mean 0, and uncorrelated, in samples of π."""
    variances: Tensor
    """Their variances."""

    @classmethod
    def of(cls, model: Any, samples: Samples, job: PpoJob, temperature: float | None = None) -> "Surprises":
        """Return those of the first responses."""
        values, variances = list[Tensor](), list[Tensor]()
        for row, tokens in enumerate(accumulate(samples.response_lengths)):
            if (values and tokens > SAMPLED) or samples.response_lengths[row] * model.config.vocab_size > LARGEST:
                break
            with torch.no_grad():
                logprobs, chosen = plain_distributions(model, *tokens_of(samples, row), job, temperature)
            cut, probabilities = logprobs.clamp(min=-CUT), logprobs.exp()
            mean = (probabilities * cut).sum(1)
            values.append((chosen.clamp(min=-CUT) - mean).double().cpu())
            variances.append(((probabilities * cut.square()).sum(1) - mean.square()).double().cpu())
        none = [torch.zeros(1, dtype=torch.float64)]
        return cls(*(pad_sequence(some or none, batch_first=True) for some in (values, variances)))

    def alike(self) -> float | None:
        """Return the standard errors of the covariance of all pairs of responses, 0 if they are drawn independently."""
        values, variances = ((x.sum(0).square() - x.square().sum(0)) / 2 for x in self)
        return _errors(values, variances, MANY)

    def likeness(self, other: "Surprises") -> float | None:
        """Return the standard errors of the covariance of values in the same places of two batches."""
        rows, tokens = (min(sizes) for sizes in zip(self.values.shape, other.values.shape, strict=True))
        values, variances = (x[:rows, :tokens] * y[:rows, :tokens] for x, y in zip(self, other, strict=True))
        return _errors(values, variances, MANY)


def _errors(values: Tensor, variances: Tensor, least: float) -> float | None:
    """Return the sum of `values` in standard errors; None if their variance is below `least`."""
    total = float(variances.sum())
    return float(values.sum()) / math.sqrt(total) if total >= least else None


def check_sampled(checks: SelfChecks, what: str, seen: Sequence[Surprises], exact: bool) -> None:
    """Judge whether sampled tokens are as likely as samples of the policy, and responses independent of each other.

    Args:
        what: where the tokens are from, for the message.
        seen: of one batch after another, each to the policy that sampled it.
        exact: whether sampler and training path compute in float32.

    Raises:
        CheckFailed: the tokens are not samples of the policy, or responses share random numbers.
    """
    values, variances = (torch.cat([some.flatten() for some in parts]) for parts in zip(*seen, strict=True))
    excess, alike = _errors(values, variances, ENOUGH), seen[-1].alike()
    if excess is None:
        checks.skip("ppo.sampled", "the policy is nearly certain of its tokens, or they are too few")
        return
    unit = 1 if exact else 2
    numbers = f"the tokens of {what} are {abs(excess):.1f} standard errors {'more' if excess > 0 else 'less'} likely"
    numbers += f" than samples of the training path's distribution and temperature ({DOUBTFUL * unit:g} are allowed)"
    if alike is not None:
        numbers += f", and responses are alike by {alike:.1f} ({ALIKE * unit:g})"
        checks.judge("ppo.sampled", alike <= ALIKE * unit, numbers, fails=alike > CERTAIN * unit)
    checks.judge("ppo.sampled", abs(excess) <= DOUBTFUL * unit, numbers, fails=abs(excess) > WRONG * unit)


def tokens_of(samples: Samples, row: int) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt and the response of `row`, without padding."""
    sides = (samples.prompt_ids, samples.prompt_mask), (samples.response_ids, samples.response_mask)
    prompt, response = ([*compress(ids[row].tolist(), mask[row].tolist())] for ids, mask in sides)
    return prompt, response


def check_batch(
    checks: SelfChecks, models: Models, experience: Experience, job: PpoJob, beta: float, prompts: Sequence[Any],
    data: Path, number: int,
) -> None:  # fmt: skip
    """Judge the batch of update `number` before the policy learns from it. All ranks call it.

    Raises:
        CheckFailed: a number of it is not what its definition gives.
    """
    if number == 1:
        _check_prompts(checks, models, experience.samples, job, prompts, data)
        _check_scores(checks, models, experience, job)
        _check_first_scores(checks, models, experience, job, len(read_split(data / "prompts.train")))
    _check_endings(checks, models, experience.samples, job)
    _check_rewarded(checks, models, experience, job)
    _check_advantages(checks, models, experience, job, beta)


def _check_prompts(
    checks: SelfChecks, models: Models, samples: Samples, job: PpoJob, prompts: Sequence[Any], data: Path
) -> None:
    """Render the first prompts by the tokenizer's own template, and look for them in the file of training prompts."""
    rows, tokenizer, most = range(min(ROWS, len(prompts))), models.tokenizer, job.generation.max_prompt_tokens
    others = list[str]()
    for row in rows:
        text = tokenizer.apply_chat_template(list(prompts[row]), tokenize=False, add_generation_prompt=True, **FIXED)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= most and ids != tokens_of(samples, row)[0]:
            others.append(f"{tokenizer.decode(tokens_of(samples, row)[0])[-40:]!r} was asked, not {text[-40:]!r}")
    file, left = read_split(data / "prompts.train"), {str(prompts[row]) for row in rows}
    if len(file) <= 100_000:
        left -= {str(row["prompt"]) for row in islice(file, len(file))}
        others += [f"{prompt[-80:]!r} is not in prompts.train" for prompt in sorted(left)]
    numbers = f"{len(rows)} prompts of the first update are those of prompts.train in the tokenizer's chat template"
    checks.judge("ppo.prompts", not others, "; ".join(others[:2]) or numbers)


def _check_endings(checks: SelfChecks, models: Models, samples: Samples, job: PpoJob) -> None:
    """A response that ended has an ending as its last counted token and nowhere before; one that did not has none."""
    endings, wrong = {*endings_of(models.tokenizer).ids}, 0
    for row, ended in enumerate(samples.ended.tolist()):
        _, response = tokens_of(samples, row)
        at = [place for place, token in enumerate(response) if token in endings]
        by_string = ended and row in samples.other_endings and not at
        wrong += not by_string and at != ([len(response) - 1] if ended else [])
        wrong += not ended and len(response) != job.generation.max_new_tokens
    numbers = f"{wrong} of {len(samples.ended)} responses have their ending elsewhere than at their last counted token"
    checks.judge("ppo.endings", not wrong, numbers)


def _check_scores(checks: SelfChecks, models: Models, experience: Experience, job: PpoJob) -> None:
    """Score a few responses alone, and compare with the batch's raw scores."""
    samples, raw = experience.samples, experience.passes.raw_scores.tolist()
    rows = range(min(ROWS, len(raw)))
    sequences = [tokens_of(samples, row)[0] + samples.reward_ids(row) for row in rows]
    pad_id = models.tokenizer.pad_token_id
    alone = [float(score_sequences(models.reward_model, pad_id, [s], job.runtime)[0]) for s in sequences]
    unit = max(stdev(raw), 1e-3) if len(raw) > 1 else 1.0
    differences = [abs(score - raw[row]) / unit for row, score in zip(rows, alone, strict=True)]
    allowed = 0.01 if is_exact(job) else 0.5
    wrong = sum(difference > allowed for difference in differences)
    numbers = f"{wrong} of {len(rows)} responses score otherwise alone, by up to {max(differences):.2g} deviations"
    checks.judge("ppo.scores", not wrong, numbers)


def _check_first_scores(checks: SelfChecks, models: Models, experience: Experience, job: PpoJob, prompts: int) -> None:
    """SFT's own responses have the mean 0 on the scale that was measured on SFT: within 4.5 standard errors.

    The prompts are others than those of the scale. So it only warns if they are a part of the training prompts.
    """
    name, scores, config = "ppo.first_scores", experience.scaled_scores.tolist(), job.ppo
    if models.rewards is not None:
        checks.skip(name, "the scale of `ppo.rewards` may be set by hand, and its scores may be rare")
        return
    prompts_asked = {str(tokens_of(experience.samples, row)[0]) for row in range(len(scores))}
    if min(len(prompts_asked), models.scale.responses) < 32:
        counts = f"{len(prompts_asked)} prompts here and {models.scale.responses} responses of the scale"
        checks.skip(name, f"{counts} are too few to tell a mean from 0")
        return
    allowed = 4.5 * math.sqrt(1 / len(prompts_asked) + 1 / models.scale.responses)
    deviation = stdev(scores)
    part = config.balance is not None or (config.max_prompts is not None and config.max_prompts < prompts)
    numbers = (
        f"{len(scores)} responses of SFT score {fmean(scores):.2f} ± {deviation:.2f} (0 ± 1; {allowed:.2f} is allowed)"
    )
    holds = abs(fmean(scores)) <= allowed and 0.25 < deviation < 4
    checks.judge(name, holds, numbers, fails=not part)


def _check_rewarded(checks: SelfChecks, models: Models, experience: Experience, job: PpoJob) -> None:
    """Compute each rewarded score from the scaled one: clipped, then missing EOS, length and rules, in this order."""
    config, samples = job.ppo.score, experience.samples
    scaled, rewarded = experience.scaled_scores.tolist(), experience.scores.tolist()
    penalties = list(experience.rules.penalties) or [0.0] * len(scaled)
    if models.rewards is None:
        scaled_again = [
            (raw - models.scale.shift) / models.scale.scale for raw in experience.passes.raw_scores.tolist()
        ]
    else:
        scaled_again = scaled
    worst = 0.0
    for row, ended in enumerate(samples.ended.tolist()):
        score = min(max(scaled_again[row], -config.clip), config.clip)
        if not ended and config.missing_eos == "replace":
            score = models.scale.missing_eos_score
        elif not ended and config.missing_eos == "subtract":
            score -= config.missing_eos_penalty
        score -= config.length_penalty * len(tokens_of(samples, row)[1]) + penalties[row]
        worst = max(worst, abs(score - rewarded[row]), abs(scaled_again[row] - scaled[row]))
    allowed = 1e-3 * max(1.0, *map(abs, rewarded), *map(abs, scaled))
    numbers = f"rewarded scores differ by up to {worst:.2g} deviations from shifted, scaled, clipped and penalised ones"
    checks.judge("ppo.rewarded", worst <= allowed, numbers)


def book_rewards(experience: Experience, beta: float) -> list[Numbers]:
    """Return the reward of each token of each response: -β (log π_old - log π_ref), and the score at the last one."""
    old, reference = experience.passes.policy.tolist(), experience.passes.reference.tolist()
    rewards = []
    masks, scores = experience.samples.response_mask.tolist(), experience.scores.tolist()
    for row, (mask, score) in enumerate(zip(masks, scores, strict=True)):
        some = [-beta * (old[row][t] - reference[row][t]) for t, counts in enumerate(mask) if counts]
        rewards.append([*some[:-1], some[-1] + score])
    return rewards


def book_advantages(
    rewards: Sequence[Numbers], scores: Numbers, values: Sequence[Numbers] | None, config: PpoConfig
) -> tuple[list[Numbers], list[Numbers], float]:
    """Return advantages and returns of each response's tokens, and their unit, from the definitions.

    GAE: A_t = Σ_l (γ λ)^l δ_{t+l}, with δ_t = r_t + γ V_{t+1} - V_t (Schulman et al. 2016, equation 16). RLOO: a
    response's return less the mean of the others' of its group. GRPO: its score less the group's mean, by its
    deviation, and KL as RLOO.
    """
    if config.in_groups:
        size = config.group_size
        advantages = list[Numbers]()
        for row, some in enumerate(rewards):
            group = range(row // size * size, row // size * size + size)
            others = [other for other in group if other != row]
            if config.advantage == "rloo":
                value = sum(some) - fmean(sum(rewards[other]) for other in others)
            else:
                of_group = [scores[other] for other in group]
                tied = max(of_group) - min(of_group) <= 1e-4
                value = 0.0 if tied else (scores[row] - fmean(of_group)) / (stdev(of_group) + 1e-4)
                kl = {other: sum(rewards[other]) - scores[other] for other in group}
                value += kl[row] - fmean(kl[other] for other in others)
            advantages.append([value] * len(some))
        return advantages, [], 1.0
    decay = config.discount * (config.gae_lambda if config.advantage == "gae" else 1.0)
    raw, returns = list[Numbers](), list[Numbers]()
    for row, some in enumerate(rewards):
        of_critic = values[row] if values is not None else [0.0] * len(some)
        deltas = [
            r + config.discount * (of_critic[t + 1] if t + 1 < len(some) else 0.0) - of_critic[t]
            for t, r in enumerate(some)
        ]
        carried = [0.0]
        for delta in reversed(deltas):
            carried.append(delta + decay * carried[-1])
        of_row = carried[:0:-1]
        returns.append([a + v for a, v in zip(of_row, of_critic, strict=True)])
        raw.append([of_row[0]] * len(some) if config.advantage == "sequence" else of_row)
    flat = [a for some in raw for a in some]
    mean, unit = fmean(flat), math.sqrt((stdev(flat) if len(flat) > 1 else 0.0) ** 2 + 1e-8)
    return [[(a - mean) / unit for a in some] for some in raw], returns, unit


def _check_advantages(checks: SelfChecks, models: Models, experience: Experience, job: PpoJob, beta: float) -> None:
    """Compute advantages and returns of the whole batch by loops."""
    name, config = "ppo.advantages", job.ppo
    if experience.rules.rows is not None or (models.rewards is not None and config.advantage in BY_TOKEN):
        checks.skip(name, "`ppo.rules` may leave responses out, or `ppo.rewards` may score parts of responses")
        return
    lengths = [len(tokens_of(experience.samples, row)[1]) for row in range(len(experience.scores))]

    def counted(tensor: Tensor) -> list[Numbers]:
        return [some[:length] for some, length in zip(tensor.tolist(), lengths, strict=True)]

    values = None if experience.passes.values is None else counted(experience.passes.values)
    rewards = book_rewards(experience, beta if config.kl.form == "reward" else 0.0)
    advantages, returns, unit = book_advantages(rewards, experience.scores.tolist(), values, config)
    pairs = zip([*chain(*advantages)], [*chain(*counted(experience.advantages))], strict=True)
    worst = max(abs(book - mine) for book, mine in pairs)
    numbers = f"the advantages of {len(rewards)} responses differ by up to {worst:.2g}"
    holds = worst <= 2e-3 + 1e-4 / unit
    if experience.returns is not None and values is not None:
        pairs = zip([*chain(*returns)], [*chain(*counted(experience.returns))], strict=True)
        of_returns = max(abs(book - mine) for book, mine in pairs)
        numbers += f", their returns by up to {of_returns:.2g}"
        largest = max(map(abs, [*chain(*returns)]))
        holds = holds and of_returns <= 1e-4 * max(1.0, largest)
    checks.judge(name, holds, numbers)


def book_beta(config: KLConfig, kl: Sequence[float]) -> float:
    """Return β after updates with the mean KL `kl`, in the config's unit, by the formula of `KLController.update`."""
    c, m, waits = config.coefficient, -1.0, True
    if config.control == "fixed":
        return c
    for value in kl:
        error, waits = value / config.target - 1, waits and value < config.target / 2
        m = (m + error) / 2
        c *= 1.0 if waits else 1 + max(-0.2, min(0.2, error)) / config.horizon
    return c * math.exp(config.proportional * max(-1.0, min(1.0, m)))


def check_gradient(checks: SelfChecks, learner: Learner, experience: Experience) -> None:
    """Compare the gradients of policy and critic on a few responses with PPO's by the book, before the first update.

    Old log-probabilities and values are moved by `SHIFTS`, so that clipping takes part. It needs memory for the
    gradients, and leaves none behind.

    Raises:
        CheckFailed: they differ.
    """
    name, job, trained = "ppo.gradient", learner.job, learner.models.trained()
    config = job.ppo
    plain = {*learner.terms} <= {policy_term, value_term} and config.aggregation == "token" and config.ratio == "token"
    if not plain or experience.importance is not None or experience.rules.rows is not None:
        checks.skip(name, "the loss has other terms or another weighting than PPO's")
        return
    parameters = {part: [p for p in model.parameters() if p.requires_grad] for part, model in trained.items()}
    if ranks.size() > 1 or any(is_spread(p) for p in chain(*parameters.values())):
        checks.skip(name, "several ranks share the batch")
        return
    rows = list(range(min(ROWS, len(experience.scores))))
    small = {"micro_batch_size": max(1, len(rows) // 2), "micro_batch_tokens": None}
    passes, n = experience.passes, experience.logprobs.shape[1]
    shifts = torch.tensor(SHIFTS, device=experience.logprobs.device).repeat(n)[:n]
    passes = passes._replace(policy=passes.policy + shifts)
    if passes.values is not None:
        passes = passes._replace(values=passes.values + shifts * experience.returns_deviation)
    moved = replace(experience, passes=passes)
    parts = replace(learner, job=job.model_copy(update={"ppo": config.model_copy(update=small)}))
    losses = parts.passes()
    for part, of_part in losses.items():
        stepped = {part: trained[part]} if len(losses) > 1 else trained
        parts.backward(parts.works(moved, rows, of_part, False), stepped)
    norms = {part: _norm(some) for part, some in parameters.items()}
    total = sum(experience.samples.response_lengths[row] for row in rows)
    for row in rows:
        (-book_loss(learner.models, job, moved, row) / total).backward()  # so that the two gradients cancel
    left = {part: _norm(some) for part, some in parameters.items()}
    for parameter in chain(*parameters.values()):
        parameter.grad = None
    if not float(experience.advantages[: len(rows)].abs().max()) > 0:
        checks.skip(name, "all of the responses have the advantage 0")
        return
    shares = {part: left[part] / max(norm, 1e-30) for part, norm in norms.items()}
    numbers = " and ".join(f"that of the {part} by {share:.2g}" for part, share in shares.items())
    numbers = f"the gradient of {len(rows)} responses differs from PPO by the book, {numbers} of its norm"
    # Where rounding moves a ratio, it may be clipped in one of the two alone.
    checks.judge(name, max(shares.values()) <= (1e-4 if is_exact(job) else 0.3), numbers, fails=is_exact(job))


def book_loss(models: Models, job: PpoJob, experience: Experience, row: int) -> Tensor:
    """Return the sum over a response's tokens of what PPO minimises: -A r, with r = π / π_old, and the value loss.

    r has no gradient beyond the clip (Schulman et al. 2017, equation 7), nor above the dual clip where A < 0 (Ye et al.
    2020, equation 5). The value loss is half the larger of (V - R)² and that of V clipped to its old value.
    """
    config, (prompt, response) = job.ppo, tokens_of(experience.samples, row)
    n, high = len(response), config.clip_range if config.clip_range_high is None else config.clip_range_high
    advantages, old = experience.advantages[row, :n], experience.logprobs[row, :n]
    ratios = (plain_logprobs(models.policy, prompt, response, job) - old).exp()
    above, most = advantages > 0, math.inf if config.dual_clip is None else config.dual_clip
    free = torch.where(above, ratios <= 1 + high, (ratios >= 1 - config.clip_range) & (ratios <= most))
    loss = -(advantages * ratios)[free].sum()
    if models.critic is None:
        return loss
    assert experience.returns is not None and experience.passes.values is not None
    returns, before = experience.returns[row, :n], experience.passes.values[row, :n]
    values, critic = plain_values(models, prompt, response, job), config.critic
    width = math.inf if critic.clip_range is None else critic.clip_range * experience.returns_deviation
    errors = (values - returns).square()
    clipped = (torch.minimum(torch.maximum(values, before - width), before + width) - returns).square()
    weight = critic.coefficient if critic.kind == "shared" else 1.0
    return loss + weight * 0.5 * torch.maximum(errors, clipped).sum()


class UpdateChecks:
    """Judges the updates of a training: 1, 2, 4, 8 and so on."""

    def __init__(self, checks: SelfChecks, learner: Learner, prompts: int, data: Path) -> None:
        """
        Args:
            prompts: number of the training prompts.
            data: the artifact from which they come.
        """
        self._checks, self._learner, self._prompts, self._data = checks, learner, prompts, data
        self._first = True
        """Whether no update was seen yet."""
        self._earlier: tuple[Sequence[Any], Samples] | None = None
        self._seen = list[Surprises]()
        """Those of the first two updates."""
        self._weights: dict[str, Tensor] = {}
        self._learned_from = 0.0
        """The share of the responses with an advantage that is not 0."""
        self._rows: Sequence[int] = ()
        """The rows that are learnt from."""
        self._critic_errs = False
        """Whether a return differs from its value, so that the critic has something to learn."""

    def before(
        self, number: int, experience: Experience, beta: float, prompts: Sequence[Any],
        history: Sequence[Mapping[str, float]],
    ) -> None:  # fmt: skip
        """Judge the batch of update `number` before the policy learns from it. All ranks call it.

        Args:
            history: the metrics of all updates before.

        Raises:
            CheckFailed: a number of it is not what its definition gives.
        """
        models, job, first, self._first = self._learner.models, self._learner.job, self._first, False
        if first or is_judged(number):
            of_book = book_beta(job.ppo.kl, [row[f"ppo/{job.ppo.kl.measure}"] for row in history])
            numbers = f"β of update {number} is {beta:.4g}, and by the KL of the {number - 1} before it {of_book:.4g}"
            if number > 1 and first:
                made = f"update {number} begins, and the history has {len(history)}"
                self._checks.judge("training.resumed", len(history) == number - 1, made)
            self._checks.judge("ppo.beta", math.isclose(beta, of_book, rel_tol=1e-6), numbers)
        self._weights = {}
        if not is_judged(number) or not bool(experience.advantages.isfinite().all()):
            return  # a loss that is not finite has a check of its own
        check_cleared(models.trained().values(), self._checks)
        check_batch(self._checks, models, experience, job, beta, prompts, self._data, number)
        if number <= 2 and not any(is_spread(parameter) for parameter in models.policy.parameters()):
            self._seen.append(Surprises.of(models.policy, experience.samples, job))
            exact = is_exact(job) and not job.ppo.rollout.by_server
            check_sampled(self._checks, "the first updates", self._seen, exact)
        if number == 1:
            check_gradient(self._checks, self._learner, experience)
            self._earlier = prompts, experience.samples
        elif number == 2:
            self._check_fresh(prompts, experience.samples)
        self._weights = self._sums()
        self._learned_from = float(experience.advantages.any(1).float().mean())
        values, returns, rows = experience.passes.values, experience.returns, experience.rules.rows
        self._critic_errs = values is not None and returns is not None and not torch.equal(values, returns)
        self._rows = range(len(experience.scores)) if rows is None else rows

    def _sums(self) -> dict[str, Tensor]:
        """Return the sum of each trained tensor that is whole on this rank, by model."""
        named = ((name, model.parameters()) for name, model in self._learner.models.trained().items())
        sums_of = {
            name: [p.detach().sum(dtype=torch.float64) for p in some if p.requires_grad and not is_spread(p)]
            for name, some in named
        }
        return {name: torch.stack(sums) for name, sums in sums_of.items() if sums}

    def _check_fresh(self, prompts: Sequence[Any], samples: Samples) -> None:
        """The second batch asks other prompts than the first, and is answered otherwise."""
        if self._earlier is None or len(prompts) >= self._prompts:
            reason = "the training was resumed" if self._earlier is None else "a batch has all prompts"
            self._checks.skip("ppo.fresh", reason)
            return
        earlier, answers = self._earlier
        same = {str(prompt) for prompt in prompts} == {str(prompt) for prompt in earlier}
        alike = answers.response_ids.shape == samples.response_ids.shape
        alike = alike and torch.equal(answers.response_ids, samples.response_ids)
        numbers = (
            f"prompts {'are the same' if same else 'differ'} and its responses {'are the same' if alike else 'differ'}"
        )
        likeness = self._seen[0].likeness(self._seen[1]) if self._seen else None
        if likeness is not None:
            numbers += f"; its random numbers are like the first's by {likeness:.1f} standard errors ({SAME:g})"
        enough = sum(samples.response_lengths) >= 64  # short answers to few prompts may be alike by chance
        certain = same or alike or (likeness or 0.0) > CERTAIN
        holds = not certain and (likeness or 0.0) <= SAME
        self._checks.judge("ppo.fresh", holds, f"its {numbers}", fails=enough and certain)
        self._earlier = None

    def after(self, number: int, metrics: Mapping[str, float]) -> None:
        """Judge what update `number`, with its `metrics`, has changed.

        Raises:
            CheckFailed: a model has not moved, or rows were left out.
        """
        if not self._weights:
            return
        steps, wrong = metrics["ppo/optimizer_steps"], list[str]()
        moves = {name: optimizer.param_groups[0]["lr"] > SLOW for name, optimizer in self._learner.optimizers.items()}
        moves["policy"] = moves["policy"] and not self._learner.warming and self._learned_from > 0
        moves["critic"] = moves.get("critic", False) and self._critic_errs
        for name, sums in self._sums().items():
            if steps and moves[name] and torch.equal(sums, self._weights[name]):
                wrong.append(f"every weight of the {name} is the same after {steps:g} steps")
        config, used = self._learner.job.ppo, self._learner.used
        others = {row: used[row] for row in self._rows if used[row] != config.epochs}
        if others and not self._learner.broke_off:
            counts = f"{min(others.values())} to {max(others.values())} minibatches and not in {config.epochs}"
            wrong.append(f"{len(others)} of {len(self._rows)} rows were in {counts}")
        if metrics.get("ppo/critic_grad_norm", 1.0) == 0 and self._critic_errs:
            wrong.append("the norm of the critic's gradient is exactly 0")
        numbers = f"update {number} has changed {' and '.join(self._weights)}"
        self._checks.judge("ppo.learned", not wrong, "; ".join(wrong) or numbers)


def _norm(parameters: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
