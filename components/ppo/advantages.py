"""Advantages of a batch by the estimator that the config names. B responses, T tokens."""

from typing import NamedTuple

from torch import Tensor

from components.ppo.config import PpoConfig
from components.ppo.maths import gae, group_normalised, leave_one_out, masked_variance, whiten


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

    Each `config.group_size` consecutive responses form a group. With R = s - βk the sum of a response's rewards, where
    s is its score and k its summed log π_old / π_ref, a response of group G has the advantage

        rloo    R - mean of the others' R                                     (Ahmadian et al. 2024, arXiv 2402.14740)
        grpo    (s - mean_G s) / std_G s  -  (βk - mean of the others' βk)    (Shao et al. 2024, 4.1.2, for s alone)

    GRPO divides only the score by the group's deviation. So β is in units of that deviation, and a group whose scores
    are tied learns from the KL term alone.
    """
    if values is not None:
        token_level = config.advantage == "gae"
        advantages, returns = gae(rewards, values, mask, config.discount, config.gae_lambda if token_level else 1.0)
        if not token_level:
            advantages = advantages[:, :1].expand_as(mask)
        unit = masked_variance(advantages, mask).add(1e-8).sqrt().item()
        return Advantages(whiten(advantages, mask), returns, unit)
    totals = rewards.masked_fill(~mask, 0).sum(1)
    if config.advantage == "rloo":
        of_response = leave_one_out(totals, config.group_size)
    else:
        of_response = group_normalised(scores, config.group_size) + leave_one_out(totals - scores, config.group_size)
    return Advantages(of_response.unsqueeze(1).expand_as(mask).masked_fill(~mask, 0), None, 1.0)
