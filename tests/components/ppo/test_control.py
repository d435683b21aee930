"""What moves the KL coefficient, and what may not."""

import math

import pytest

from components.ppo.config import KLConfig
from components.ppo.control import KLController


def adaptive(**options: float) -> KLController:
    return KLController.start(KLConfig(control="adaptive", coefficient=0.1, target=6.0, horizon=4.0, **options))


def test_the_adaptive_coefficient_follows_the_published_formula() -> None:
    controller = adaptive()
    expected = 0.1
    for kl in (3.6, 5.4, 6.0, 6.6, 7.0):
        controller.update(kl)
        expected *= 1 + min(max(kl / 6 - 1, -0.2), 0.2) / 4
        assert controller.beta == pytest.approx(expected)
    controller = adaptive()
    controller.update(6.6)
    assert controller.beta == pytest.approx(0.1 * (1 + 0.1 / 4))


@pytest.mark.parametrize(("kl", "factor"), [(1e9, 1.05), (7.2, 1.05), (4.8, 0.95), (3.1, 0.95), (6.0, 1.0)])
def test_the_error_is_clipped_to_a_fifth_either_way(kl: float, factor: float) -> None:
    controller = adaptive()
    controller.update(kl)
    assert controller.beta == pytest.approx(0.1 * factor)


def test_the_coefficient_holds_until_kl_first_reaches_half_the_target_and_never_again() -> None:
    controller = adaptive()
    for kl in (0.0, 1.0, 2.9):
        controller.update(kl)
        assert controller.beta == 0.1 and controller.holding
    controller.update(3.0)
    assert controller.beta == pytest.approx(0.095) and not controller.holding
    controller.update(0.5)
    assert controller.beta == pytest.approx(0.095 * 0.95), "once there, a KL under half the target loosens the tether"


def test_the_shortest_horizon_that_is_taken_leaves_the_coefficient_above_0() -> None:
    config = KLConfig(control="adaptive", coefficient=0.1, target=6.0, horizon=math.nextafter(0.2, 1))
    controller = KLController.start(config)
    for kl in (3.0, 0.0):
        controller.update(kl)
        assert controller.beta > 0


def test_a_fixed_coefficient_never_moves() -> None:
    controller = KLController.start(KLConfig(control="fixed", coefficient=0.1, target=6.0))
    for kl in (0.0, 3.0, 6.0, 1e6):
        controller.update(kl)
    assert controller.beta == 0.1


def test_the_hard_ceiling_stops_above_it_only_and_only_where_there_is_one() -> None:
    controller = adaptive(stop_above=10.0)
    assert [controller.stops(kl) for kl in (9.9, 10.0, 10.1)] == [False, False, True]
    assert not adaptive().stops(1e9)
