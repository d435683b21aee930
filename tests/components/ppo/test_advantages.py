"""Which estimator each name of `ppo.advantage` gives, with numbers worked out by hand."""

import math

import pytest
import torch

from components.ppo.advantages import estimate_advantages
from components.ppo.config import PpoConfig

MASK = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
# Totals of the responses 3, 1, 6, 4: what stands where the mask is False counts for nothing.
REWARDS = torch.tensor([[1.0, 2.0], [1.0, 99.0], [2.0, 4.0], [0.0, 4.0]])


def of_each(name: str, totals: list[float]) -> torch.Tensor:
    found = estimate_advantages(REWARDS, None, MASK, PpoConfig(advantage=name, group_size=2))
    assert found.returns is None
    expected = torch.tensor(totals).unsqueeze(1) * MASK
    assert torch.allclose(found.advantages, expected, atol=1e-3), "each token of a response has the response's"
    return torch.tensor(found.unit)


def test_rloo_is_the_return_less_the_others_mean_in_the_rewards_own_unit() -> None:
    assert of_each("rloo", [2.0, -2.0, 2.0, -2.0]).item() == 1.0


def test_grpo_is_in_deviations_of_the_group_and_its_unit_is_their_root_mean_square() -> None:
    half = 1 / math.sqrt(2)  # both groups are 2 apart, so their deviation is sqrt(2)
    assert of_each("grpo", [half, -half, half, -half]).item() == pytest.approx(math.sqrt(2), rel=1e-4)


def critic(name: str) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    values = torch.tensor([[1.0, 0.5], [2.0, 7.0], [0.0, 1.0], [1.0, 3.0]])
    return estimate_advantages(REWARDS, values, MASK, PpoConfig(advantage=name, gae_lambda=0.5))


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
