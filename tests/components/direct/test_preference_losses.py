"""The losses against TRL's trainers, and their minima where every response can be enumerated."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor
from torch.nn.functional import logsigmoid

from components.direct.preference_losses import dpo_losses, ipo_losses, kto_baseline, kto_losses, label_shares

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden/trl_direct.json").read_text())
BETA, NOISE = GOLDEN["beta"], GOLDEN["noise"]
MASK, REFERENCE, MISMATCHED = (
    torch.tensor(GOLDEN[name], dtype=torch.float64) for name in ("mask", "reference", "mismatched")
)
LENGTHS = MASK.sum(1)


def same(name: str, loss: Callable[[Tensor], Tensor]) -> None:
    """Compare a loss of the tokens' log-ratios (8, 9) with TRL's, and its gradient."""
    tokens = torch.tensor(GOLDEN["policy"], dtype=torch.float64, requires_grad=True)
    value = loss((tokens - REFERENCE) * MASK)
    value.backward()
    assert value.item() == pytest.approx(GOLDEN[name]["loss"], abs=1e-6, rel=0)
    assert tokens.grad is not None
    expected = torch.tensor(GOLDEN[name]["gradient"], dtype=torch.float64)
    torch.testing.assert_close(tokens.grad, expected, atol=1e-6, rtol=0)
    assert expected.abs().max() > 0.01


def difference(ratios: Tensor) -> Tensor:
    chosen, rejected = ratios.sum(1).chunk(2)
    return chosen - rejected


def test_dpo_is_trls() -> None:
    same("sigmoid", lambda ratios: dpo_losses(difference(ratios), BETA).mean())


def test_robust_dpo_is_trls() -> None:
    share = label_shares(torch.ones(4, dtype=torch.float64), NOISE, robust=True)
    same("robust", lambda ratios: dpo_losses(difference(ratios), BETA, share).mean())


def test_ipo_of_means_is_trls() -> None:
    same("ipo", lambda ratios: ipo_losses(difference(ratios / LENGTHS[:, None]), BETA).mean())


@pytest.mark.parametrize("name", ["kto", "kto_clamped"])
def test_kto_is_trls(name: str) -> None:
    baseline = kto_baseline(-torch.full_like(MISMATCHED, GOLDEN[name]["shift"]))
    assert (baseline == 0) == (name == "kto_clamped")
    desirable, weights = torch.tensor(GOLDEN["labels"]), tuple(GOLDEN["weights"])
    same(name, lambda ratios: kto_losses(ratios.sum(1), desirable, baseline, BETA, weights).mean())


def test_the_baseline_has_no_gradient() -> None:
    assert not kto_baseline(torch.ones(3, requires_grad=True)).requires_grad


@given(st.floats(-20, 20), st.floats(0, 0.49), st.booleans())
def test_smoothing_is_a_soft_label(d: float, noise: float, robust: bool) -> None:
    gap = torch.tensor(d, dtype=torch.float64)
    share = label_shares(torch.ones((), dtype=torch.float64), noise, robust)
    plus, minus = -logsigmoid(0.5 * gap), -logsigmoid(-0.5 * gap)
    smooth = (1 - noise) * plus + noise * minus
    unbiased = ((1 - noise) * plus - noise * minus) / (1 - 2 * noise)
    expected = unbiased if robust else smooth
    assert dpo_losses(gap, 0.5, share).item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)


@given(st.floats(0.5, 1), st.floats(0, 0.45))
def test_robust_shares_undo_the_flips(share: float, noise: float) -> None:
    flipped = label_shares(torch.tensor(share, dtype=torch.float64), noise, robust=False)
    assert label_shares(flipped, noise, robust=True).item() == pytest.approx(share, abs=1e-9)


def test_a_margin_shifts_the_difference() -> None:
    d, margin = torch.linspace(-3, 3, 7, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    torch.testing.assert_close(dpo_losses(d, 0.5, 1.0, margin), -logsigmoid(0.5 * d - 0.7))


# A bandit: twelve responses to one prompt, a policy of free logits, and rewards; every expectation is exact.

GENERATOR = torch.Generator().manual_seed(7)
PRIOR = torch.randn(12, generator=GENERATOR, dtype=torch.float64).log_softmax(0)
REWARD = torch.linspace(-1, 1, 12, dtype=torch.float64)[torch.randperm(12, generator=GENERATOR)]
FIRST, SECOND = torch.triu_indices(12, 12, 1)
"""Every pair of responses once."""


def minimised(loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Log-probabilities (12,) that minimise a loss of the log-ratios h (12,)."""
    logits = PRIOR.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(logits.log_softmax(0) - PRIOR)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[arg-type]
    return logits.detach().log_softmax(0)


def kl(policy: Tensor, optimum: Tensor) -> float:
    return float((policy.exp() * (policy - optimum)).sum())


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_reaches_the_tethered_optimum(beta: float) -> None:
    share = (REWARD[FIRST] - REWARD[SECOND]).sigmoid()
    policy = minimised(lambda h: dpo_losses(h[FIRST] - h[SECOND], beta, share).mean())
    assert kl(policy, (PRIOR + REWARD / beta).log_softmax(0)) < 1e-3


def test_robust_dpo_reaches_it_from_flipped_labels() -> None:
    """Labels of which 30 % are flipped; the plain loss ends elsewhere."""
    beta, noise = 0.5, 0.3
    truth = (REWARD[FIRST] - REWARD[SECOND]).sigmoid()
    seen = label_shares(truth, noise, robust=False)
    optimum = (PRIOR + REWARD / beta).log_softmax(0)
    plain, robust = (
        minimised(lambda h, p=p: dpo_losses(h[FIRST] - h[SECOND], beta, p).mean())  # type: ignore[misc]
        for p in (seen, label_shares(seen, noise, robust=True))
    )
    assert kl(robust, optimum) < 1e-3 < 0.05 < kl(plain, optimum)


def test_ipo_reaches_its_fixed_point() -> None:
    """Over all pairs with the same weight, d = (p - 1/2) / τ is fitted by least squares: h = mean_y' (p - 1/2) / τ, up
    to a constant. So π is proportional to π_ref exp(E_y'[p(y > y')] / τ) with y' uniform (Azar et al., theorem 2)."""
    tau = 0.2
    share = (REWARD[:, None] - REWARD[None, :]).sigmoid()
    policy = minimised(lambda h: ipo_losses(h[FIRST] - h[SECOND], tau, share[FIRST, SECOND]).mean())
    assert kl(policy, (PRIOR + share.mean(1) / tau).log_softmax(0)) < 1e-3


def test_kto_reaches_its_fixed_point() -> None:
    """Responses come from π_ref, and y is desirable with probability q(y) > 1/2; λ is 1. E_ref[h] <= 0, so z₀ is 0.

    The loss is E_ref[-c σ(β h)] up to a constant with c = 2 q - 1, so that with logits as parameters a stationary
    policy has c σ'(β h) = S exp(h) for every y, with S such that π sums to 1.
    """
    beta, q = 0.4, 0.55 + 0.2 * (REWARD + 1)
    weight, prior = 2 * q - 1, PRIOR.exp()

    def loss(h: Tensor) -> Tensor:
        baseline = kto_baseline((prior * h).sum().reshape(1))
        sides = (kto_losses(h, torch.full((12,), side), baseline, beta) for side in (True, False))
        wanted, unwanted = sides
        return (prior * (q * wanted + (1 - q) * unwanted)).sum()

    def ratio(c: float, s: float) -> float:
        return brentq(lambda h: math.log(c) + _log_slope(beta * h) - h - s, -60, 60)

    def excess(s: float) -> float:
        return sum(p * math.exp(ratio(c, s)) for p, c in zip(prior.tolist(), weight.tolist(), strict=True)) - 1

    s = brentq(excess, -20, 5, xtol=1e-12)
    expected = PRIOR + torch.tensor([ratio(c, s) for c in weight.tolist()], dtype=torch.float64)
    assert kl(minimised(loss), expected) < 1e-3
    assert kl(PRIOR, expected) > 0.01


def _log_slope(x: float) -> float:
    """log of σ'(x)."""
    return -abs(x) - 2 * math.log1p(math.exp(-abs(x)))
