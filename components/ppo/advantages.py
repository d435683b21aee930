"""Advantages of a batch, by the estimator that the config names. B responses, T tokens."""

from typing import NamedTuple

from torch import Tensor

from components.ppo.config import PpoConfig
from components.ppo.maths import gae, group_deviations, group_normalised, leave_one_out, masked_variance, whiten


class Advantages(NamedTuple):
    """What an update learns from, and the unit it is in."""

    advantages: Tensor
    """(B, T), 0 where the mask is False."""
    returns: Tensor | None
    """(B, T) what the critic is fitted to; None where there is none."""
    unit: float
    """What rewards were divided by on the way: a KL loss beside these advantages is divided by it too."""


def estimate_advantages(rewards: Tensor, values: Tensor | None, mask: Tensor, config: PpoConfig) -> Advantages:
    """Advantages from token rewards (B, T) and, where there is a critic, its values (B, T).

    Groups of `config.group_size` responses stand together.
    """
    if values is not None:
        token_level = config.advantage == "gae"
        advantages, returns = gae(rewards, values, mask, config.discount, config.gae_lambda if token_level else 1.0)
        if not token_level:
            advantages = advantages[:, :1].expand_as(mask)
        return Advantages(whiten(advantages, mask), returns, masked_variance(advantages, mask).add(1e-8).sqrt().item())
    totals = rewards.masked_fill(~mask, 0).sum(1)
    if config.advantage == "rloo":
        of_response, unit = leave_one_out(totals, config.group_size), 1.0
    else:
        of_response = group_normalised(totals, config.group_size)
        unit = group_deviations(totals, config.group_size).square().mean().add(1e-8).sqrt().item()
    return Advantages(of_response.unsqueeze(1).expand_as(mask).masked_fill(~mask, 0), None, unit)
