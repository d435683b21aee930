"""The comparison of what is learnt: gold at equal KL, the bound over seeds, and the recipe."""

import math
import random

import pytest

from components.training.optim import learning_rate_at
from tests.bench.learning import Compared, Curve, at_equal_kl, judge, median_curve, report, rising
from tests.bench.recipe import BETA, ppo_config


def gained(scale: float, reach: float = 5.0, points: int = 7, noise: float = 0.0, seed: int = 0) -> Curve:
    """A curve whose gold score is that of SFT, 0.5, and `scale` for each nat of KL, plus noise."""
    draw = random.Random(seed)
    kls = [reach * i / (points - 1) for i in range(points)]
    return [(kl, 0.5 + scale * kl + (draw.gauss(0, noise) if kl else 0.0)) for kl in kls]


def test_a_known_gap_is_found_where_both_curves_go() -> None:
    found = at_equal_kl(gained(1.2, reach=8.0, points=5), gained(1.0, reach=4.0))
    assert found == pytest.approx(Compared(gap=0.4, gain=2.0, reach=4.0))


def test_a_curve_that_is_the_same_with_fewer_points_or_less_kl_has_no_gap() -> None:
    assert at_equal_kl(gained(1.0, reach=3.0, points=4), gained(1.0)).gap == pytest.approx(0)


def test_points_over_which_kl_falls_are_one_and_the_order_of_training_stays() -> None:
    curve = [(0.0, 0.5), (1.0, 0.6), (3.0, 0.7), (2.0, 0.9), (1.9, 1.1), (4.0, 1.2)]
    assert rising(curve).tolist() == [[0.0, 0.5], [1.0, 0.6], pytest.approx([2.3, 0.9]), [4.0, 1.2]]


def test_a_late_policy_does_not_stand_in_for_an_early_one_of_the_same_kl() -> None:
    theirs = [(0.0, 0.5), (2.2, 1.0), (1.8, 2.0)]
    assert at_equal_kl([(0.0, 0.5), (2.0, 1.5)], theirs).gap == pytest.approx(0)


def test_curves_that_share_no_kl_are_refused() -> None:
    with pytest.raises(ValueError, match=r"share KL from 0.00 to 0.20 nats only"):
        at_equal_kl(gained(1.0, reach=0.2), gained(1.0))
    with pytest.raises(ValueError, match=r"share KL from 0.00 to -0.50 nats only"):
        at_equal_kl([(0.0, 0.5), (-1.0, 0.4)], gained(1.0))


def test_curves_from_different_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="before the first update differ"):
        at_equal_kl([(0.0, 0.6), *gained(1.0)[1:]], gained(1.0))


def seeds(scale: float, noise: float = 0.05) -> list[Compared]:
    """Sixteen seeds, ours gaining `scale` times as much as TRL."""
    return [at_equal_kl(gained(scale, noise=noise, seed=i), gained(1.0, noise=noise, seed=100 + i)) for i in range(16)]


@pytest.mark.parametrize(("scale", "passes"), [(0.85, False), (0.97, True), (1.0, True), (1.2, True)])
def test_the_verdict_is_that_of_the_share_lost(scale: float, passes: bool) -> None:
    found = judge(seeds(scale))
    assert found.passed is passes
    assert found.gap / found.gain == pytest.approx(scale - 1, abs=0.02)
    assert found.lower < found.gap and found.share == found.lower / found.gain
    assert ("met" if passes else "MISSED") in report("separate", seeds(scale))


def test_the_bound_is_the_one_sided_t_bound_of_paired_gaps() -> None:
    found = judge([Compared(gap, 10.0, 5.0) for gap in (-1.0, 0.0, 1.0, 2.0)])
    deviation = math.sqrt((1.5**2 + 0.5**2 + 0.5**2 + 1.5**2) / 3)
    assert found.lower == pytest.approx(0.5 - 2.353363 * deviation / 2)  # 2.353: a table's t, 95 %, 3 degrees
    assert found.lower < -1.0 and not found.passed, "equal on average, and yet too uncertain"


def test_no_verdict_where_trl_learnt_nothing() -> None:
    with pytest.raises(ValueError, match="learnt nothing"):
        judge([Compared(1.0, -0.1, 5.0), Compared(1.0, 0.1, 5.0)])


def test_a_median_curve_is_that_of_each_update() -> None:
    curves = [gained(scale) for scale in (1.0, 5.0, 2.0)]
    assert median_curve(curves) == [pytest.approx(point) for point in gained(2.0)]


def test_the_recipe_takes_every_step_at_one_rate_and_a_fixed_beta() -> None:
    config = ppo_config(batch=8, updates=3, learning_rate=1e-3)
    rates = [learning_rate_at(update, 3, config) for update in range(3)]
    assert rates == [1e-3] * 3 and config.critic.learning_rate == 1e-3
    assert config.batch_size == config.minibatch_size == 8 and config.stop_epochs_above is None
    assert config.kl.control == "fixed" and config.kl.coefficient == BETA > 0
