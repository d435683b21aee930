"""Which estimator each name of `ppo.advantage` gives, with numbers worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.ppo import models
from components.ppo.config import PpoConfig
from components.ppo.experience import gather_experience
from components.ppo.maths import estimate_advantages
from components.training.terms import aggregated

MASK = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
# Totals of the responses 3, 1, 6, 4: what stands where the mask is False counts for nothing.
REWARDS = torch.tensor([[1.0, 2.0], [1.0, 99.0], [2.0, 4.0], [0.0, 4.0]])
SCORES = torch.tensor([5.0, 2.0, 3.0, 3.0])  # so the KL penalties are -2, -1, 3, 1, and the second group is tied


def of_each(name: str, totals: list[float]) -> None:
    found = estimate_advantages(REWARDS, SCORES, None, MASK, PpoConfig(advantage=name, group_size=2))
    assert found.returns is None and found.unit == 1
    expected = torch.tensor(totals).unsqueeze(1) * MASK
    assert torch.allclose(found.advantages, expected, atol=1e-3), "each token of a response has the response's"


def test_rloo_is_the_return_less_the_others_mean_in_the_rewards_own_unit() -> None:
    of_each("rloo", [2.0, -2.0, 2.0, -2.0])


def test_grpo_divides_the_score_by_the_groups_deviation_and_leaves_kl_as_it_is() -> None:
    half = 1 / math.sqrt(2)  # 3 apart, so the deviation is 3 / sqrt(2)
    of_each("grpo", [half - 1, -half + 1, 2.0, -2.0])


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
def test_in_a_tied_group_of_grpo_advantages_are_as_large_as_beta_and_a_kl_loss_weighs_beta(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, beta: float
) -> None:
    monkeypatch.setattr(models, "score_tokens", lambda model, ids, mask, *_, **__: torch.ones(len(ids)))
    for form in ("reward", "k2", "k3"):
        kl = {"control": "fixed", "coefficient": beta, "form": form}
        job, loaded, samples = load(advantage="grpo", group_size=4, kl=kl, score={"missing_eos": "keep"})
        loaded.reference.model.norm.weight.add_(0.2)
        found = gather_experience(loaded, samples, job, beta)
        assert found.metrics["ppo/tied_groups"] == 1
        k = (found.logprobs - found.passes.reference).sum(1).unflatten(0, (2, 4))
        expected = -beta * 4 / 3 * (k - k.mean(1, keepdim=True)) * (form == "reward")
        assert torch.allclose(found.advantages[:, 0], expected.flatten(), atol=1e-5)
        assert found.kl_weight == (0 if form == "reward" else beta)


def critic(name: str) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    values = torch.tensor([[1.0, 0.5], [2.0, 7.0], [0.0, 1.0], [1.0, 3.0]])
    return estimate_advantages(
        REWARDS, SCORES, values, MASK, PpoConfig(advantage=name, **({"gae_lambda": 0.5} if name == "gae" else {}))
    )


def whitened(tokens: list[float]) -> tuple[list[float], float]:
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1))
    return [(x - mean) / deviation for x in tokens], deviation


def test_gae_is_a_tokens_own_and_sequence_is_that_of_the_first_token_without_a_lambda() -> None:
    # deltas: r + V' - V; the last token's next value is 0. With lambda 1/2 a token adds half of the next one's.
    gae, unit = whitened([0.5 + 0.75, 1.5, -1.0, 3.0 + 1.5, 3.0, 2.0 + 0.5, 1.0])
    found = critic("gae")
    assert found[0][MASK].tolist() == pytest.approx(gae, abs=1e-5) and found[2] == pytest.approx(unit, rel=1e-5)
    assert found[1] is not None and found[1][MASK].tolist() == pytest.approx([2.25, 2, 1, 4.5, 4, 3.5, 4])
    # returns less the value of the prompt: 3 - 1, 1 - 2, 6 - 0, 4 - 1, for each token of the response
    sequence, unit = whitened([2.0, 2.0, -1.0, 6.0, 6.0, 3.0, 3.0])
    found = critic("sequence")
    assert found[0][MASK].tolist() == pytest.approx(sequence, abs=1e-5) and found[2] == pytest.approx(unit, rel=1e-5)
    assert found[1] is not None and found[1][MASK].tolist() == pytest.approx([3, 2, 1, 6, 4, 4, 4])
    assert not critic("gae")[0][~MASK].any()


def test_reinforce_is_a_tokens_rewards_to_come_whitened_over_the_batch() -> None:
    # rewards of each token and of those after it, gamma 1/2: 1 + 2/2, 2; 1; 2 + 4/2, 4; 0 + 4/2, 4
    tokens, unit = whitened([2.0, 2.0, 1.0, 4.0, 4.0, 2.0, 4.0])
    found = estimate_advantages(REWARDS, SCORES, None, MASK, PpoConfig(advantage="reinforce++", discount=0.5))
    assert found.advantages[MASK].tolist() == pytest.approx(tokens, abs=1e-5) and not found.advantages[~MASK].any()
    assert found.returns is None and found.unit == pytest.approx(unit, rel=1e-5)


def test_rloo_is_dr_grpos_advantage_times_a_constant_of_the_group() -> None:
    """Liu et al. 2025 (arXiv 2503.20783, section 3.2) subtract the mean of all G: (G - 1) / G of ours."""
    totals = REWARDS.masked_fill(~MASK, 0).sum(1).unflatten(0, (2, 2))
    dr_grpo = (totals - totals.mean(1, keepdim=True)).flatten().unsqueeze(1) * MASK
    found = estimate_advantages(REWARDS, SCORES, None, MASK, PpoConfig(advantage="rloo", group_size=2))
    assert torch.equal(found.advantages / 2, dr_grpo)
    loss = aggregated(-found.advantages, MASK, "cap", 10)
    assert loss.item() == pytest.approx(-found.advantages.sum().item() / 40), "one divisor for every token"
