"""The reward model's loss by hand-computed numbers, its gradient by the formula, and what each term is there for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from components.reward.losses import bradley_terry_loss, pair_losses, weighted_mean

DIFFERENCES = st.floats(-30, 30)
NOBODY = math.nan


def test_bradley_terry_of_scores_1_and_1_and_a_half() -> None:
    difference = torch.tensor([-0.5, 0.5])
    assert torch.sigmoid(difference)[0].item() == pytest.approx(0.3775, abs=5e-5)
    assert bradley_terry_loss(difference).tolist() == pytest.approx([0.9741, 0.4741], abs=5e-5)


def test_a_majoritys_label_is_the_plain_loss_to_the_bit() -> None:
    difference = torch.linspace(-90, 90, 181, requires_grad=True)
    ours, plain = bradley_terry_loss(difference, torch.ones(181)), -logsigmoid(difference)
    assert torch.equal(ours, plain)
    (gradient,) = torch.autograd.grad(ours.sum(), difference)
    assert torch.equal(gradient, *torch.autograd.grad(plain.sum(), difference))


def test_shares_of_votes_by_hand() -> None:
    """d = log 3, so sigmoid(d) = 3/4 and sigmoid(-d) = 1/4."""
    found = bradley_terry_loss(torch.full((3,), math.log(3)), torch.tensor([0.8, 0.5, 0.0]))
    expected = [0.8 * math.log(4 / 3) + 0.2 * math.log(4), 0.5 * math.log(16 / 3), math.log(4)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert found.tolist() == pytest.approx([0.5074047, 0.8369882, 1.3862944], abs=1e-6)


@given(d=DIFFERENCES, p=st.floats(0, 1))
def test_its_gradient_is_the_probability_less_the_share(d: float, p: float) -> None:
    difference = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    bradley_terry_loss(difference, p).backward()
    assert difference.grad is not None
    assert difference.grad.item() == pytest.approx(1 / (1 + math.exp(-d)) - p, abs=1e-9)


@given(d=DIFFERENCES, p=st.floats(0, 1))
def test_it_does_not_matter_which_response_is_called_the_chosen_one(d: float, p: float) -> None:
    difference = torch.tensor(d, dtype=torch.float64)
    assert bradley_terry_loss(difference, p).item() == pytest.approx(
        bradley_terry_loss(-difference, 1 - p).item(), abs=1e-9
    )


def test_a_hopeless_pair_has_a_finite_loss_and_gradient() -> None:
    difference = torch.tensor([-2e4], requires_grad=True)
    loss = bradley_terry_loss(difference)
    loss.backward()
    assert loss.item() == pytest.approx(2e4) and difference.grad is not None
    assert difference.grad.item() == pytest.approx(-1)


def test_the_heads_of_a_pair_add_up_and_one_without_votes_is_left_out() -> None:
    chosen = torch.tensor([[math.log(3), 7.0], [1.0, 0.0]], requires_grad=True)
    rejected = torch.tensor([[0.0, -1e4], [1.0, math.log(3)]])
    losses = pair_losses(chosen, rejected, torch.tensor([[1.0, NOBODY], [0.5, 0.25]]))
    assert losses.tolist() == pytest.approx([
        math.log(4 / 3), math.log(2) + 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    ])  # fmt: skip
    losses.sum().backward()
    assert chosen.grad is not None and chosen.grad[0, 1] == 0
    assert chosen.grad[:, 0].tolist() == pytest.approx([-0.25, 0.0])


def test_weights_count_a_pair_so_many_times() -> None:
    values, weights = torch.tensor([1.0, 4.0, 10.0]), torch.tensor([1.0, 0.5, 0.25])
    assert weighted_mean(values, weights).item() == pytest.approx((4 * 1 + 2 * 4 + 10) / 7)
    assert torch.equal(weighted_mean(values, torch.ones(3)), values.mean())
