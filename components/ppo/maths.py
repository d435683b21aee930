"""The formulas of PPO, as pure functions of tensors.

Legend: B responses, T response tokens; all inputs (B, T) unless said otherwise; a mask is True where a token counts.
Log-probabilities are natural. Inputs have no effect where the mask is False.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from components.ppo.config import PpoConfig
from components.training.terms import masked_mean

Floats = Float[Tensor, "B T"]
Mask = Bool[Tensor, "B T"]
Responses = Float[Tensor, "B"]


def masked_variance(x: Floats, mask: Mask) -> Float[Tensor, ""]:
    """Return the Bessel-corrected variance of `x` over the tokens that count."""
    centred = (x - masked_mean(x, mask)).masked_fill(~mask, 0)
    return centred.square().sum() / (mask.sum() - 1).clamp(min=1)


def whiten(x: Floats, mask: Mask) -> Floats:
    """Shift and scale `x` to mean 0 and standard deviation 1 over the tokens that count; 0 elsewhere."""
    centred = (x - masked_mean(x, mask)).masked_fill(~mask, 0)
    return centred * torch.rsqrt(masked_variance(x, mask) + 1e-8)


def token_rewards(logprobs: Floats, reference: Floats, scores: Responses, mask: Mask, beta: float) -> Floats:
    """Return the reward of each token: -β (log π_old - log π_ref), plus the response's score at its last token.

    This is equation 2 of Ziegler et al. 2019 (arXiv 1909.08593) with its KL term, k1, split over the tokens.
    """
    rewards = (-beta * (logprobs - reference)).masked_fill(~mask, 0)
    last = mask.long().sum(1) - 1
    return rewards.scatter_add(1, last.unsqueeze(1), scores.unsqueeze(1))


def moved_to_tokens(rewards: Floats, parts: Floats, mask: Mask) -> Floats:
    """Move `parts` of the score from the last token to their own tokens; each response's sum of rewards stays.

    The result is r_t + parts_t, minus the sum of the parts at the last token. So the parts change only where the reward
    is given. Its total stays as clipping, a missing EOS and length penalties have left it.
    """
    parts = parts.masked_fill(~mask, 0)
    last = mask.long().sum(1) - 1
    return (rewards.masked_fill(~mask, 0) + parts).scatter_add(1, last.unsqueeze(1), -parts.sum(1, keepdim=True))


def gae(rewards: Floats, values: Floats, mask: Mask, discount: float, gae_lambda: float) -> tuple[Floats, Floats]:
    """Return advantages and returns by generalised advantage estimation (Schulman et al. 2016, equations 11 and 16).

        δ_t = r_t + γ V_{t+1} - V_t,    A_t = δ_t + γ λ A_{t+1},    returns = A + V

    The state after a response's last token is terminal, whether the response ended or reached the cap: its value is 0.
    Both results are 0 where the mask is False.
    """
    device = rewards.device
    if device.type != "cpu":  # a GPU would launch a dozen tiny kernels per token
        inputs = torch.stack([rewards, values, mask.to(rewards.dtype)]).cpu()
        outputs = torch.stack(gae(inputs[0], inputs[1], inputs[2].bool(), discount, gae_lambda))
        advantages, returns = outputs.pin_memory().to(device, non_blocking=True)
        return advantages, returns
    values = values.masked_fill(~mask, 0)
    advantages = torch.zeros_like(rewards)
    carried = torch.zeros_like(rewards[:, 0])
    next_value = torch.zeros_like(carried)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + discount * next_value - values[:, t]
        carried = torch.where(mask[:, t], delta + discount * gae_lambda * carried, torch.zeros_like(carried))
        advantages[:, t] = carried
        next_value = values[:, t]
    return advantages, (advantages + values).masked_fill(~mask, 0)


def leave_one_out(returns: Responses, group_size: int) -> Responses:
    """Return each response's return minus the mean of the others' in its group (RLOO: Ahmadian et al. 2024).

    Each `group_size` consecutive `returns` (B,) form a group.
    """
    groups = returns.unflatten(0, (-1, group_size))
    return (groups - (groups.sum(1, keepdim=True) - groups) / (group_size - 1)).flatten()


TIE = 1e-4
"""Scores within this of each other are tied: rounding alone can make equal texts' scores differ by as much."""


def score_spread(scores: Responses) -> Float[Tensor, ""]:
    """Return the standard deviation of scores (B,), and 0 if all are equal to within `TIE`: rounding is no spread."""
    tied = scores.amax() - scores.amin() <= TIE
    return scores.std(correction=0).masked_fill(tied, 0)


def tied_groups(scores: Responses, group_size: int) -> Bool[Tensor, "G"]:
    """Return which of the G groups have scores (B,) that are all equal to within `TIE`."""
    groups = scores.unflatten(0, (-1, group_size))
    return groups.amax(1) - groups.amin(1) <= TIE


def group_normalised(scores: Responses, group_size: int) -> Responses:
    """Return each response's score normalised within its group (GRPO: Shao et al. 2024, section 4.1.2).

    (s - mean) / (std + 1e-4), with the Bessel-corrected deviation; 0 in a tied group, which ranks nothing. The scores
    must not include KL: in a tied group the divisor would be KL's own spread, and β would cancel.
    """
    groups = scores.unflatten(0, (-1, group_size))
    normalised = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return normalised.masked_fill(tied_groups(scores, group_size).unsqueeze(1), 0).flatten()


class PolicyLoss(NamedTuple):
    """The clipped policy loss, per token, 0 where the mask is False."""

    loss: Floats
    """-min(r A, clip(r, 1-ε, 1+ε_high) A); with a dual clip c, at most -c A where A < 0."""
    ratio: Floats
    """r = π / π_old, or its geometric mean over the response, without a gradient; 1 where the mask is False."""
    clipped: Mask
    """Where clipping removed the gradient."""
    floored: Mask
    """Where it was the dual clip that removed it."""


def policy_loss(
    logprobs: Floats,
    old: Floats,
    advantages: Floats,
    mask: Mask,
    clip_range: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    level: Literal["token", "sequence"] = "token",
) -> PolicyLoss:
    """Return the clipped surrogate loss (Schulman et al. 2017, equation 7). Clipping does not bound the ratio itself.

    Args:
        level: `sequence` takes for the ratio of a token the geometric mean over its response, with the gradient of the
            token's own log-probability (GSPO-token: Zheng et al. 2025, arXiv 2507.18071, equations 13 and 14; with one
            advantage a response its loss and gradient are those of GSPO, equations 5 and 7).
        clip_high: ε above 1 (Yu et al. 2025, arXiv 2503.14476, equation 10); None takes `clip_range`.
        dual_clip: c > 1 (Ye et al. 2020, arXiv 1912.09729, equation 5): where A < 0 the surrogate is
            max(min(r A, clip(r) A), c A), which ends the gradient of a token that has become c times as likely.
    """
    log_ratio = (logprobs - old).masked_fill(~mask, 0)
    if level == "sequence":
        of_response = log_ratio.detach().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio - log_ratio.detach() + of_response).masked_fill(~mask, 0)
    ratio = log_ratio.detach().exp()
    high = clip_range if clip_high is None else clip_high
    free, constant = ratio * advantages, ratio.clamp(1 - clip_range, 1 + high) * advantages
    clipped, floored = constant < free, torch.zeros_like(mask)
    if dual_clip is not None:
        floor = dual_clip * advantages
        floored = (advantages < 0) & (torch.minimum(free, constant) < floor)
        clipped, constant = clipped | floored, torch.where(floored, floor, constant)
    # Without a path to the ratio of tokens that have no gradient: through one that overflows, 0 · inf would be NaN.
    moving = log_ratio.masked_fill(clipped | (advantages == 0), 0).exp()
    surrogate = torch.where(clipped, constant, moving * advantages)
    return PolicyLoss(-surrogate.masked_fill(~mask, 0), ratio, clipped & mask, floored & mask)


def value_loss(values: Floats, old: Floats, returns: Floats, mask: Mask, width: float | None) -> Floats:
    """Return half the squared error to the returns, per token, 0 where the mask is False.

    With `width`, return the larger of this error and that of `values` clipped to `old` ± `width`, as OpenAI's PPO code
    (baselines, `ppo2`) does.
    """
    error = (values - returns).square()
    if width is not None:
        near_old = torch.maximum(torch.minimum(values, old + width), old - width)
        error = torch.maximum(error, (near_old - returns).square())
    return (0.5 * error).masked_fill(~mask, 0)


class ImportanceWeights(NamedTuple):
    """Weights that turn an expectation over the sampler's tokens into one over the policy's."""

    weights: Floats
    """min(π_old / π_sampler, C), 1 where the mask is False; with level `sequence`, one value per response."""
    truncated: Float[Tensor, ""]
    """Share of the tokens that count (`sequence`: of the responses) whose weight was truncated to C."""
    largest: Float[Tensor, ""]
    """The largest weight before truncation."""


def importance_weights(
    old: Floats, sampled: Floats, mask: Mask, cap: float, level: Literal["token", "sequence"]
) -> ImportanceWeights:
    """Return truncated importance weights w = min(π_old / π_sampler, C) between the sampler and the training path.

    `old` and `sampled` are log π_old and log π_sampler of the sampled tokens. E_sampler[w f] equals E_π_old[f] except
    for the truncated part; truncation bounds the variance (Ionides 2008, "Truncated Importance Sampling", Journal of
    Computational and Graphical Statistics 17, 295-311). Level `token` weights each token by itself, as Yao et al. 2025
    do between vLLM and a trainer ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"); it does
    not correct for how earlier tokens changed the state. Level `sequence` weights a response by the product over its
    tokens, whose variance grows with the length. The weights have no gradient.
    """
    log_ratio = (old - sampled).detach().masked_fill(~mask, 0)
    if level == "sequence":
        ratio = log_ratio.sum(1).exp()
        cut, largest = (ratio > cap).float().mean(), ratio.max()
        weights = ratio.clamp(max=cap).unsqueeze(1).expand_as(mask).masked_fill(~mask, 1)
    else:
        ratio = log_ratio.exp()
        cut, largest = masked_mean((ratio > cap).float(), mask), ratio.masked_fill(~mask, 0).max()
        weights = ratio.clamp(max=cap)
    return ImportanceWeights(weights, cut, largest)


class KL(NamedTuple):
    """Monte Carlo estimates of KL(p || q) from tokens drawn from p, per token (B, T), 0 where the mask is False."""

    k1: Floats
    """log p - log q: unbiased."""
    k2: Floats
    """(log p - log q)² / 2."""
    k3: Floats
    """(q/p - 1) - log(q/p): unbiased and never negative."""


def kl_estimates(p: Floats, q: Floats, mask: Mask) -> KL:
    """Return k1, k2 and k3 from log-probabilities (Schulman, "Approximating KL Divergence", 2020)."""
    k1 = (p - q).masked_fill(~mask, 0)
    return KL(k1, k1.square() / 2, torch.expm1(-k1) + k1)


def kl_loss(logprobs: Floats, old: Floats, reference: Floats, mask: Mask, form: Literal["k2", "k3"]) -> Floats:
    """Return KL between policy and reference as a loss, per token, 0 where the mask is False, for tokens from π_old.

    Each estimate is weighted by the detached ratio π / π_old. In the visited states the gradient of the k2 loss is then
    that of KL(π || π_ref), and the gradient of the k3 loss that of KL(π_ref || π) (Schulman 2020's estimators,
    differentiated; k3 is GRPO's KL term: Shao et al. 2024, equation 4). Neither includes a token's effect on the KL of
    later tokens, as KL in the reward does. k1 as a loss has zero gradient on average, and is not offered.
    """
    weight = (logprobs.detach() - old).masked_fill(~mask, 0).exp()
    estimates = kl_estimates(logprobs, reference, mask)
    return weight * (estimates.k2 if form == "k2" else estimates.k3)


def explained_variance(values: Floats, returns: Floats, mask: Mask) -> Float[Tensor, ""]:
    """Return 1 - Var(returns - values) / Var(returns) over the tokens that count; NaN if the returns are constant."""
    residual, target = (returns - values)[mask], returns[mask]
    return 1 - residual.var() / target.var()


class Advantages(NamedTuple):
    """Advantages and returns of a batch, and the unit in which they are."""

    advantages: Tensor
    """(B, T), 0 where the mask is False."""
    returns: Tensor | None
    """(B, T) the critic's targets; None without a critic."""
    unit: float
    """The divisor that whitening applied to score and KL. A KL loss added to the policy loss is divided by it too. 1
    for `rloo` and `grpo`, which do not scale KL."""


def estimate_advantages(
    rewards: Tensor,
    scores: Tensor,
    values: Tensor | None,
    mask: Tensor,
    config: PpoConfig,
) -> Advantages:
    """Return advantages from token rewards (B, T), the scores (B,) that they include, and a critic's values (B, T).

    `gae` and `sequence` subtract the critic's values; `reinforce++` subtracts none: token t has the sum of γ^(i-t) r_i
    over the tokens i from t on (Hu et al. 2025, "REINFORCE++", arXiv 2501.03262, section 3.2). All three are whitened
    over the tokens of the batch.

    Of the others, each `config.group_size` consecutive responses form a group. With R = s - βk the sum of a response's
    rewards, where s is its score and k its summed log π_old / π_ref, a response of group G has the advantage

        rloo    R - mean of the others' R                                     (Ahmadian et al. 2024, arXiv 2402.14740)
        grpo    (s - mean_G s) / std_G s  -  (βk - mean of the others' βk)    (Shao et al. 2024, 4.1.2, for s alone)

    GRPO divides only the score by the group's deviation. So β is in units of that deviation, and a group whose scores
    are tied learns from the KL term alone.
    """
    if not config.in_groups:
        baseline, decay = torch.zeros_like(rewards) if values is None else values, config.gae_lambda
        advantages, returns = gae(rewards, baseline, mask, config.discount, decay if config.advantage == "gae" else 1.0)
        if config.advantage == "sequence":
            advantages = advantages[:, :1].expand_as(mask)
        unit = masked_variance(advantages, mask).add(1e-8).sqrt().item()
        return Advantages(whiten(advantages, mask), None if values is None else returns, unit)
    totals = rewards.masked_fill(~mask, 0).sum(1)
    if config.advantage == "rloo":
        of_response = leave_one_out(totals, config.group_size)
    else:
        of_response = group_normalised(scores, config.group_size) + leave_one_out(totals - scores, config.group_size)
    return Advantages(of_response.unsqueeze(1).expand_as(mask).masked_fill(~mask, 0), None, 1.0)
