"""The formulas of PPO against worked values, and against what may not matter: content under the mask."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.ppo import maths
from components.training import terms

ON = torch.ones(1, 1, dtype=torch.bool)


def rows(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_the_shapes_stated_in_maths_are_checked_here() -> None:
    with pytest.raises(Exception, match=r"(?i)type-check"):
        terms.masked_mean(torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "clipped"),
    [(1.5, 0.4, 0.48, True), (0.6, -0.3, -0.24, True), (3, 4, 4.8, True), (1.3, -3, -3.9, False), (0.7, 2, 1.4, False)],
)
def test_the_surrogate_is_the_smaller_of_free_and_clipped_for_either_sign(
    ratio: float, advantage: float, surrogate: float, clipped: bool
) -> None:
    logprobs = rows([math.log(ratio) - 1.0]).requires_grad_()
    out = maths.policy_loss(logprobs, rows([-1.0]), rows([advantage]), ON, 0.2)
    assert out.loss.item() == pytest.approx(-surrogate, rel=1e-5)
    assert out.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert out.clipped.item() is clipped
    out.loss.sum().backward()
    assert (logprobs.grad.item() == 0) is clipped, "clipping is what removes the gradient, and nothing else does"


@pytest.mark.parametrize(
    ("advantage", "dual", "loss", "gradient"),
    [(1.0, None, -1.2, 0), (-1.0, 3.0, 3.0, 0), (0.0, None, 0, 0), (-1.0, None, math.inf, math.inf)],
)
def test_a_ratio_that_overflows_has_no_nan_in_its_gradient(
    advantage: float, dual: float | None, loss: float, gradient: float
) -> None:
    logprobs = rows([-1.0]).requires_grad_()
    out = maths.policy_loss(logprobs, rows([-100.0]), rows([advantage]), ON, 0.2, None, dual)
    assert out.ratio.item() == math.inf and out.loss.item() == pytest.approx(loss)
    out.loss.sum().backward()
    assert logprobs.grad.item() == gradient


def test_gae_equals_a_sum_by_hand() -> None:
    # discount 0.9, lambda 0.5; deltas: 1 + 0.9*0.4 - 0.5 = 0.86; 0 + 0.9*0.2 - 0.4 = -0.22; 2 - 0.2 = 1.8
    # A3 = 1.8; A2 = -0.22 + 0.45*1.8 = 0.59; A1 = 0.86 + 0.45*0.59 = 1.1255
    mask = torch.tensor([[True, True, True, False]])
    advantages, returns = maths.gae(rows([1, 0, 2, 9]), rows([0.5, 0.4, 0.2, 7]), mask, 0.9, 0.5)
    assert torch.allclose(advantages, rows([1.1255, 0.59, 1.8, 0]), atol=1e-6)
    assert torch.allclose(returns, rows([1.6255, 0.99, 2.0, 0]), atol=1e-6)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.floats(0.5, 1), st.integers(0, 99))
def test_at_lambda_1_returns_are_the_discounted_sums_of_what_comes(
    lengths: list[int], discount: float, seed: int
) -> None:
    mask, generator = _mask(lengths), torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(mask.shape, generator=generator) for _ in range(2))
    _, returns = maths.gae(rewards, values, mask, discount, 1.0)
    for row, length in enumerate(lengths):
        for t in range(length):
            expected = sum(discount ** (u - t) * rewards[row, u].item() for u in range(t, length))
            assert returns[row, t].item() == pytest.approx(expected, abs=1e-4)


def _mask(lengths: list[int], width: int = 6) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)


def test_the_cap_is_terminal_nothing_is_bootstrapped_past_the_last_token() -> None:
    advantages, _ = maths.gae(rows([0, 1.0]), rows([0, 0.25]), torch.ones(1, 2, dtype=torch.bool), 1.0, 1.0)
    assert torch.allclose(advantages, rows([1.0, 0.75]))


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=12).filter(lambda x: max(x) - min(x) > 0.1),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=12, max_size=12),
)
def test_whitened_values_have_unit_bessel_corrected_deviation_whatever_stands_under_the_mask(
    values: list[float], garbage: list[float]
) -> None:
    mask = torch.arange(24).reshape(2, 12) % 12 < len(values)
    mask[1] = False
    x = torch.tensor([values + garbage[len(values) :], garbage])
    white = maths.whiten(x, mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-3)
    assert white[mask].std().item() == pytest.approx(1, rel=1e-3)  # torch's std is Bessel-corrected
    assert not white[~mask].any()
    assert torch.equal(white, maths.whiten(x.masked_fill(~mask, 0), mask))


def test_the_three_kl_estimates_against_the_exact_kl_of_two_categoricals() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.4, 0.2, 0.3, 0.1]).double()
    exact = (p * (p / q).log()).sum().item()
    k = maths.kl_estimates(
        p.log().float().unsqueeze(0), q.log().float().unsqueeze(0), torch.ones(1, 4, dtype=torch.bool)
    )
    expected = [(p * x[0].double()).sum().item() for x in k]
    assert expected[0] == pytest.approx(exact, rel=1e-5), "k1 is unbiased"
    assert expected[2] == pytest.approx(exact, rel=1e-5), "k3 is unbiased"
    assert expected[1] == pytest.approx((p * (p / q).log().square()).sum().item() / 2, rel=1e-5)
    assert (k.k3 >= 0).all() and (k.k1 < 0).any(), "k3 is never negative, k1 may be"


@pytest.mark.parametrize("form", ["k2", "k3"])
def test_a_kl_loss_has_the_gradient_of_the_kl_it_is_named_for_on_policy_and_off(form: str) -> None:
    """In expectation over π_old, by enumeration of ten tokens: k2 that of KL(π || π_ref), k3 that of KL(π_ref || π)."""
    generator = torch.Generator().manual_seed(4)
    here, old, reference = torch.randn(3, 10, generator=generator, dtype=torch.float64).log_softmax(-1).float()
    for start in (here, old):
        logits = here.clone().requires_grad_()
        p = logits.log_softmax(-1)
        every = torch.ones(1, 10, dtype=torch.bool)
        loss = maths.kl_loss(p.unsqueeze(0), start.unsqueeze(0), reference.unsqueeze(0), every, form)
        (found,) = torch.autograd.grad((start.exp() * loss[0]).sum(), logits, retain_graph=True)
        exact = (p.exp() * (p - reference)).sum() if form == "k2" else (reference.exp() * (reference - p)).sum()
        (expected,) = torch.autograd.grad(exact, logits)
        assert torch.allclose(found, expected, atol=1e-6)


def test_the_score_stands_at_the_last_counted_token_and_kl_at_every_one() -> None:
    mask = _mask([3, 1], 4)
    policy, reference = rows([-1, -2, -3, 50], [-1, 60, 70, 80]), rows([-2, -2, -1, 0], [-1.5, 0, 0, 0])
    rewards = maths.token_rewards(policy, reference, torch.tensor([5.0, -7.0]), mask, 0.1)
    assert torch.allclose(rewards, rows([-0.1, 0, 0.2 + 5, 0], [-0.05 - 7, 0, 0, 0]))


def test_value_clipping_takes_the_larger_error() -> None:
    returns = rows([0.0, 2.0, 4.0])
    old, values = rows([1.0, 1.0, 1.0]), rows([0.5, 1.5, 1.1])
    mask = torch.ones(1, 3, dtype=torch.bool)
    free = maths.value_loss(values, old, returns, mask, None)
    assert torch.allclose(free, rows([0.125, 0.125, 0.5 * 2.9**2]))
    assert maths.value_loss(values, old, returns, torch.tensor([[True, False, False]]), None).tolist() == [
        [0.125, 0, 0]
    ]
    held = maths.value_loss(values, old, returns, mask, 0.2)
    assert torch.allclose(held, rows([0.5 * 0.8**2, 0.5 * 0.8**2, 0.5 * 2.9**2]))


def test_explained_variance_is_1_for_true_values_0_for_a_constant_and_negative_for_worse() -> None:
    mask = torch.tensor([[True, True, True, False]])
    returns = rows([1.0, 2.0, 4.0, 99.0])
    assert maths.explained_variance(returns, returns, mask).item() == pytest.approx(1)
    assert maths.explained_variance(rows([3.0, 3, 3, 0]), returns, mask).item() == pytest.approx(0)
    assert maths.explained_variance(rows([1.5, 2.0, 3.0, -9]), returns, mask).item() == pytest.approx(0.75)
    assert maths.explained_variance(-returns, returns, mask).item() == pytest.approx(-3)


def test_masked_mean_is_over_tokens_not_over_rows() -> None:
    assert terms.masked_mean(rows([1, 1, 1], [5, 0, 0]), _mask([3, 1], 3)).item() == pytest.approx(2)


def _with_a_gradient(found: Any, x: Tensor, mask: Tensor) -> list[Tensor]:
    """What passes no gradient, beside something that does: the test asks for gradients."""
    return [*found, terms.masked_mean(x, mask)]


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "masked_mean": lambda a, b, c, m: terms.masked_mean(a, m),
    "masked_variance": lambda a, b, c, m: maths.masked_variance(a, m),
    "kl_loss": lambda a, b, c, m: (maths.kl_loss(a, b, c, m, "k2"),),
    "whiten": lambda a, b, c, m: maths.whiten(a, m),
    "token_rewards": lambda a, b, c, m: maths.token_rewards(a, b, torch.ones(len(a)), m, 0.3),
    "moved_to_tokens": lambda a, b, c, m: maths.moved_to_tokens(a, b, m),
    "gae": lambda a, b, c, m: maths.gae(a, b, m, 0.9, 0.8),
    "policy_loss": lambda a, b, c, m: maths.policy_loss(a, b, c, m, 0.2),
    "policy_loss_dual": lambda a, b, c, m: maths.policy_loss(a, b, c, m, 0.2, 0.3, 3.0),
    "aggregated": lambda a, b, c, m: (terms.aggregated(a, m, "token", 9),),
    "aggregated_sequence": lambda a, b, c, m: (terms.aggregated(a, m, "sequence", 9),),
    "aggregated_cap": lambda a, b, c, m: (terms.aggregated(a, m, "cap", 9),),
    "value_loss": lambda a, b, c, m: (maths.value_loss(a, b, c, m, None),),
    "value_loss_clipped": lambda a, b, c, m: (maths.value_loss(a, b, c, m, 0.5),),
    "kl_estimates": lambda a, b, c, m: maths.kl_estimates(a, b, m),
    "importance_weights": lambda a, b, c, m: _with_a_gradient(maths.importance_weights(a, b, m, 2.0, "token"), c, m),
    "importance_weights_clipped": lambda a, b, c, m: _with_a_gradient(
        maths.importance_weights(a, b, m, 1.1, "sequence"), c, m
    ),
    "explained_variance": lambda a, b, c, m: maths.explained_variance(a, b, m),
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.floats(-1e4, 1e4, width=32), st.integers(0, 99))
def test_what_stands_under_the_mask_changes_no_formula_and_gets_no_gradient(
    name: str, lengths: list[int], garbage: float, seed: int
) -> None:
    mask, generator = _mask(lengths), torch.Generator().manual_seed(seed)
    clean = [torch.randn(mask.shape, generator=generator).masked_fill(~mask, 0) for _ in range(3)]
    dirty = [x.masked_fill(~mask, garbage * (i + 1)).requires_grad_() for i, x in enumerate(clean)]
    expected, found = (FORMULAS[name](*x, mask) for x in (clean, dirty))
    expected, found = ([x] if isinstance(x, Tensor) else list(x) for x in (expected, found))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other.detach())
    total = sum(x.sum() for x in found if x.is_floating_point())
    gradients = torch.autograd.grad(total, dirty, allow_unused=True)
    assert all(g is None or not g[~mask].any() for g in gradients)


def test_every_formula_of_maths_stands_in_the_table_of_masks() -> None:
    modules = (maths, terms)
    public = {n for m in modules for n, f in vars(m).items() if callable(f) and f.__module__ == m.__name__}
    functions = {n for n in public if n.islower()}
    unmasked = {"leave_one_out", "tied_groups", "score_spread", "group_normalised", "total"}
    unmasked.add("estimate_advantages")  # takes a config too: tests/components/ppo/test_advantages.py
    forms = ("_clipped", "_dual", "_sequence", "_cap")
    assert functions - unmasked == {next((n.removesuffix(f) for f in forms if n.endswith(f)), n) for n in FORMULAS}


def test_group_baselines_equal_sums_by_hand() -> None:
    # groups (1, 2, 6) and (4, 4, 4): others' means 4, 3.5, 1.5; mean 3, deviation sqrt((4 + 1 + 9) / 2) = 2.6458
    returns = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 4.0])
    assert torch.allclose(maths.leave_one_out(returns, 3), torch.tensor([-3.0, -1.5, 4.5, 0, 0, 0]))
    assert maths.tied_groups(returns, 3).tolist() == [False, True]
    expected = torch.tensor([-2.0, -1.0, 3.0, 0, 0, 0]) / math.sqrt(7)
    assert torch.allclose(maths.group_normalised(returns, 3), expected, atol=1e-4)


def test_scores_that_differ_by_rounding_alone_are_tied_and_rank_nothing() -> None:
    scores = torch.tensor([0.7, 0.7 + 4e-5, 0.7 - 4e-5, 0.7, 0.7, 0.702])
    assert maths.tied_groups(scores, 3).tolist() == [True, False]
    assert maths.group_normalised(scores, 3)[:3].tolist() == [0, 0, 0]
    assert maths.group_normalised(scores, 3)[5].item() == pytest.approx(2 / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize("score", [-2.3, 0.1, 3.3])
def test_equal_scores_have_no_spread_whatever_their_rounding(score: float) -> None:
    rounding = 1e-6 * torch.randn(128, generator=torch.Generator().manual_seed(0))
    for scores in (torch.full((128,), score), score + rounding):
        assert scores.std(correction=0) > 0 or score == -2.3
        assert maths.score_spread(scores) == 0, "the gate ppo.score_spread_min asks for more than 0"
    apart = torch.full((128,), score)
    apart[0] += 1
    assert maths.score_spread(apart).item() == pytest.approx(math.sqrt(127) / 128, rel=1e-4)


@given(st.integers(2, 5), st.integers(1, 4), st.floats(-10, 10), st.integers(0, 99))
def test_a_groups_level_changes_no_advantage_and_advantages_of_a_group_sum_to_0(
    group_size: int, groups: int, level: float, seed: int
) -> None:
    returns = torch.randn(groups * group_size, generator=torch.Generator().manual_seed(seed))
    shift = torch.zeros_like(returns)
    shift[:group_size] = level
    for baseline in (maths.leave_one_out, maths.group_normalised):
        found = baseline(returns, group_size)
        assert torch.allclose(found, baseline(returns + shift, group_size), atol=1e-3)
        assert torch.allclose(found.unflatten(0, (-1, group_size)).sum(1), torch.zeros(groups), atol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_sum_of_token_rewards_is_the_score_minus_beta_times_summed_k1(beta: float) -> None:
    generator = torch.Generator().manual_seed(5)
    mask = _mask([2, 6, 4])
    policy, reference = (torch.randn(mask.shape, generator=generator) for _ in range(2))
    scores = torch.tensor([1.0, -2.0, 0.5])
    rewards = maths.token_rewards(policy, reference, scores, mask, beta)
    k1 = maths.kl_estimates(policy, reference, mask).k1.sum(1)
    assert torch.allclose(rewards.sum(1), scores - beta * k1, atol=1e-5)
    assert not rewards[~mask].any()
