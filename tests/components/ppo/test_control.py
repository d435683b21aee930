"""What moves the KL coefficient, and what may not."""

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest

from components.ppo.config import KLConfig, PpoConfig
from components.ppo.control import KLController, KLLimits


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


def test_the_proportional_part_answers_the_mean_error_as_it_is_now_and_starts_where_a_policy_starts() -> None:
    controller = adaptive(proportional=1.5)
    assert controller.beta == pytest.approx(0.1 * math.exp(-1.5)), "KL 0 is one target below the target"
    controller.update(2.0)
    assert controller.holding and controller.beta == pytest.approx(0.1 * math.exp(1.5 * (-1 + 2 / 6 - 1) / 2))
    controller.update(6.0)
    assert controller.beta == pytest.approx(0.1 * math.exp(1.5 * ((-1 - 4 / 6) / 2 + 0) / 2))
    controller.update(60.0)
    assert controller.beta == pytest.approx(0.1 * 1.05 * math.exp(1.5)), "bounded by one target above the target"
    for _ in range(60):
        controller.update(6.0)
    assert controller.beta == pytest.approx(0.1 * 1.05), "at the target it is the coefficient"


@pytest.mark.parametrize(("proportional", "swings"), [(0.0, True), (1.0, False)])
def test_where_kl_follows_beta_late_the_proportional_part_ends_the_swinging(proportional: float, swings: bool) -> None:
    """log KL goes to a - 1.1 log β with a lag of 12 updates, as SmolLM2's did over 75 and 100 updates."""
    controller = KLController.start(KLConfig(coefficient=0.2, target=3, horizon=3, proportional=proportional))
    log_kl, kls = math.log(0.3), []
    for _ in range(200):
        kls.append(math.exp(log_kl))
        controller.update(kls[-1])
        log_kl += (-0.6 - 1.1 * math.log(controller.beta) - log_kl) / 12
    assert (max(kls) > 1.25 * 3) is swings and (abs(kls[-1] - 3) < 0.03 or swings)


def test_the_shortest_horizon_that_is_taken_leaves_the_coefficient_above_0() -> None:
    config = KLConfig(control="adaptive", coefficient=0.1, target=6.0, horizon=math.nextafter(0.2, 1))
    controller = KLController.start(config)
    for kl in (3.0, 0.0):
        controller.update(kl)
        assert controller.beta > 0


def test_a_fixed_coefficient_never_moves() -> None:
    controller = KLController.start(KLConfig(control="fixed", coefficient=0.1, target=6.0, proportional=2))
    for kl in (0.0, 3.0, 6.0, 1e6):
        controller.update(kl)
    assert controller.beta == 0.1


def stopped_at(kls: Iterable[float], ceiling: float = 10.0, width: float = 0.2) -> int | None:
    """The update (from 1) after which a run of these mean KLs stops, each of an interval of ± `width` of itself."""
    limits = KLLimits(PpoConfig(kl=KLConfig(target=6.0, ceiling=ceiling, control="fixed")))
    return next((n for n, kl in enumerate(kls, 1) if limits.is_above_ceiling(kl, kl * (1 - width))), None)


def test_a_policy_that_stays_above_the_ceiling_is_stopped_at_its_fifth_update_there_and_far_beyond_at_once() -> None:
    assert stopped_at([3, 9.9, 10.0] + [10.1] * 9) == 8
    assert stopped_at([10.1] * 4 + [9.9] + [10.1] * 4) is None, "five in a row"
    assert stopped_at([0, 38]) == 2 and stopped_at([0, 37, 9]) is None, "its interval lies above three ceilings"
    assert stopped_at([0, 60], width=0.6) is None, "one response may have made that"
    assert not any(KLLimits(PpoConfig()).is_above_ceiling(1e9, 1e9) for _ in range(9))


def test_a_healthy_demos_swings_stop_nothing_and_a_runaway_is_stopped() -> None:
    """Mean KLs 2.57, 5.63, 1.63 were seen: log-normal about 3, deviation 0.6, also where each resembles the last."""
    chance = np.random.default_rng(0)
    for rho in (0.0, 0.6):
        noise = chance.standard_normal((4000, 30))
        for t in range(1, 30):
            noise[:, t] = rho * noise[:, t - 1] + math.sqrt(1 - rho**2) * noise[:, t]
        stopped = [stopped_at(row, ceiling=9.0) for row in 3 * np.exp(0.6 * noise)]
        assert sum(at is not None for at in stopped) <= 40, "one in a hundred runs of 30 updates"
        growing = 1.3 ** np.arange(30) * np.exp(0.6 * noise)
        assert all(at is not None for at in (stopped_at(row, ceiling=9.0) for row in growing[:500]))


def test_a_ceiling_near_the_target_stops_runs_that_hold_their_target_and_one_at_twice_does_not() -> None:
    """KL about 6, deviation 0.3 of it, each batch half like the last, 100 updates."""
    noise = np.random.default_rng(1).standard_normal((500, 100))
    for t in range(1, 100):
        noise[:, t] = 0.5 * noise[:, t - 1] + math.sqrt(0.75) * noise[:, t]
    share = {
        ratio: np.mean([stopped_at(row, ceiling=6.0 * ratio) is not None for row in 6 * np.exp(0.3 * noise - 0.045)])
        for ratio in (1.2, 1.5, 2.0)
    }
    assert share[1.2] > 0.35 and share[1.5] < 0.06 and share[2.0] == 0


def test_a_checkpoint_holds_all_that_the_tether_remembers() -> None:
    controller, limits = adaptive(proportional=0.5), KLLimits(PpoConfig(kl=KLConfig(ceiling=10.0)))
    for kl in (11.0, 12.0, 11.0, 10.5):
        limits.is_above_ceiling(kl, 0.0)
        controller.update(kl)
    again, same = adaptive(proportional=0.5), KLLimits(limits.config)
    again.restore(json.loads(json.dumps(controller.state())))
    same.restore(json.loads(json.dumps(limits.state())))
    assert again == controller and same == limits and same.is_above_ceiling(11.0, 0.0)


def test_two_batches_in_a_row_above_the_band_stop_the_run() -> None:
    limits = KLLimits(PpoConfig(kl=KLConfig(target=3, band=5.0)))
    assert [limits.is_above_band(low) for low in (5.1, 4.9, 5.1, 5.2, 1.0)] == [False, False, False, True, False]
    assert not any(KLLimits(PpoConfig()).is_above_band(1e9) for _ in range(9)), "no band, nothing to leave"
