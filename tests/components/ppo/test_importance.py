"""A sampler that is not quite the policy: truncated importance weights and what is reported of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.ppo.experience import gather_experience
from components.ppo.learner import Learner
from components.ppo.maths import importance_weights
from tests.components.ppo.test_learner import with_passes

Load = Callable[..., Any]


def test_weights_are_cut_ratios_with_their_share_and_the_largest_by_hand() -> None:
    """Two responses: ratios 3, 1/2 | 1.5, and one under the mask that counts for nothing."""
    mask = torch.tensor([[True, True], [True, False]])
    sampled = torch.tensor([[-1.0, -2.0], [-3.0, -99.0]])
    old = sampled + torch.tensor([[math.log(3.0), math.log(0.5)], [math.log(1.5), 50.0]])
    token = importance_weights(old, sampled, mask, 2.0, "token")
    assert torch.allclose(token.weights, torch.tensor([[2.0, 0.5], [1.5, 1.0]]))
    assert token.truncated.item() == pytest.approx(1 / 3) and token.largest.item() == pytest.approx(3, rel=1e-5)
    whole = importance_weights(old, sampled, mask, 1.4, "sequence")
    assert torch.allclose(whole.weights, torch.tensor([[1.4, 1.4], [1.4, 1.0]]))
    assert whole.truncated.item() == 1 and whole.largest.item() == pytest.approx(1.5, rel=1e-5)


def test_untruncated_weights_turn_a_samplers_mean_into_the_policys_exactly_and_pass_no_gradient() -> None:
    policy = torch.randn(6, generator=torch.Generator().manual_seed(0)).log_softmax(0).requires_grad_()
    sampler = torch.randn(6, generator=torch.Generator().manual_seed(1)).log_softmax(0)
    values, mask = torch.arange(6.0), torch.ones(6, 1, dtype=torch.bool)
    for level in ("token", "sequence"):
        weights = importance_weights(policy.unsqueeze(1), sampler.unsqueeze(1), mask, 1e6, level).weights
        assert not weights.requires_grad
        found = (sampler.exp() * weights.squeeze(1) * values).sum()
        assert found.item() == pytest.approx((policy.exp() * values).sum().item(), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_come_from_both_log_probabilities_and_their_monitors_are_reported(load: Load, level: str) -> None:
    """A sampler that says of every token that it was less likely than the policy says, by 0.05 nats."""
    job, models, samples = load(importance={"level": level, "cap": 1.04})
    shifted = dataclasses.replace(samples, logprobs=samples.logprobs - 0.05 * samples.response_mask, stats=None)
    job = job.model_copy(update={"runtime": job.runtime.model_copy(update={"dtype": "bfloat16"})})
    experience = gather_experience(models, shifted, job, beta=0.1)
    mask, metrics = samples.response_mask, experience.metrics
    assert experience.importance is not None and (experience.importance[mask] == pytest.approx(1.04))
    assert metrics["ppo/sampler_kl"] == pytest.approx(math.exp(0.05) - 1 - 0.05, rel=0.1)
    longest = math.exp(0.05 * mask.sum(1).max().item())
    assert metrics["ppo/importance_max"] == pytest.approx(math.exp(0.05) if level == "token" else longest, rel=0.05)
    assert metrics["ppo/importance_truncated"] == pytest.approx(1, abs=0.05)


def test_policy_and_kl_loss_of_each_token_are_weighed_with_its_weight(load: Load) -> None:
    """Before the first step the ratio is 1, so a token's loss is -w A, and w / 2 of KL to a reference one nat off."""
    job, models, samples = load(kl={"control": "fixed", "coefficient": 0.1, "form": "k2"})
    found = gather_experience(models, samples, job, beta=0.1)
    mask, rows = samples.response_mask, range(len(samples.ended))
    drawn = torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)) * 2
    experience = with_passes(dataclasses.replace(found, importance=drawn), reference=found.logprobs - 1.0)
    learner = Learner.start(models, job)
    loss, metrics = learner._policy_pass(experience, rows, False)
    policy = (drawn * -found.advantages)[mask].mean().item()
    assert metrics["ppo/policy_loss"].value.item() == pytest.approx(policy, rel=1e-4, abs=1e-6)
    tether = found.kl_weight * drawn[mask].mean().item() * 0.5
    assert tether > 1e-2 and loss.item() == pytest.approx(policy + tether, rel=1e-4)


def test_nothing_is_weighed_by_default_in_this_process_though_its_monitors_are_there(load: Load) -> None:
    job, models, samples = load()
    assert job.ppo.importance_level is None
    recomputed = gather_experience(models, dataclasses.replace(samples, stats=None), job, beta=0.1)
    assert recomputed.importance is None
    assert recomputed.metrics["ppo/importance_max"] == pytest.approx(1, abs=1e-4)
    assert 0 <= recomputed.metrics["ppo/sampler_kl"] < 1e-7 and recomputed.metrics["ppo/importance_truncated"] == 0
    kept = gather_experience(models, samples, job, beta=0.1)
    assert "ppo/sampler_kl" not in kept.metrics and kept.importance is None
