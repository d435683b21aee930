"""Who looks after every answer promotes an equal policy no more often than was said, and a better one soon."""

import math

import numpy as np
import pytest
from scipy import stats

from components.stats.betting import always_valid_low, always_valid_low_of_people
from tests.bench.statistics.raters import early_stops


def item_means(random: np.random.Generator, items: int, win_rate: float) -> np.ndarray:
    """Means of three ratings with 15 % ties."""
    won = (random.random((items, 3)) < (win_rate - 0.075) / 0.85).astype(float)
    return np.where(random.random((items, 3)) < 0.15, 0.5, won).mean(axis=1)


def test_looking_at_every_item_promotes_an_equal_policy_in_one_of_forty_at_most() -> None:
    random = np.random.default_rng(0)
    wrong = [(always_valid_low(item_means(random, 256, 0.5)) > 0.5).any() for _ in range(300)]
    assert np.mean(wrong) <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 300)


@pytest.mark.parametrize(("raters", "spread"), [(3, 0.3), (3, 1.0), (8, 1.0)])
def test_looking_at_every_item_does_not_promote_a_policy_that_only_these_raters_happen_to_like(
    raters: int, spread: float
) -> None:
    """With the bound for the raters themselves it was 6 % at a spread of 0.3, and most with a spread of 1."""
    assert early_stops(256, raters, spread, fixed=False, simulations=300) <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / 300)


def test_the_bound_of_all_people_is_the_raters_less_students_margin() -> None:
    random = np.random.default_rng(3)
    ratings = (random.random((200, 4)) < [0.9, 0.8, 0.85, 0.7]).astype(float)
    ratings[np.arange(200), random.integers(0, 4, 200)] = np.nan
    low = always_valid_low(np.nanmean(ratings, axis=1), 0.0125)[-1]
    means = np.nanmean(ratings, axis=0)
    margin = stats.t.ppf(1 - 0.0125, 3) * stats.sem(means)
    found = always_valid_low_of_people(ratings)
    assert found[-1] == pytest.approx(low - margin) and 0.5 < found[-1] < low
    assert (always_valid_low_of_people(ratings[:, :2]) == 0).all(), "two raters bound nothing"
    with pytest.raises(ValueError, match="a rating in each row"):
        always_valid_low_of_people([[1.0, 0.5, 1.0], [np.nan] * 3])


def test_a_better_policy_is_found_before_half_of_what_a_sheet_would_ask() -> None:
    random = np.random.default_rng(1)
    at = [np.argmax(always_valid_low(item_means(random, 300, 0.65)) > 0.5) for _ in range(40)]
    assert 5 < np.median(at) < 60 and min(at) > 0


def test_the_bound_is_that_of_the_capitals_written_out_one_value_at_a_time() -> None:
    values, alpha = [1.0, 0.5, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0], 0.1
    ruled_out: set[int] = set()
    capital = dict.fromkeys(range(1001), 1.0)
    total, squares, variance, bounds = 0.5, 0.25, 0.25, []
    for t, x in enumerate(values, 1):
        bet = math.sqrt(2 * math.log(1 / alpha) / (variance * t * math.log(1 + t)))
        for m in capital:
            capital[m] *= 1 + min(bet, 0.75 / max(m / 1000, 1e-9)) * (x - m / 1000)
            if capital[m] >= 1 / alpha:
                ruled_out.add(m)
        total += x
        squares += (x - total / (t + 1)) ** 2
        variance = squares / (t + 1)
        first = next(m for m in range(1001) if m not in ruled_out)
        bounds.append(max(first - 1, 0) / 1000)
    assert always_valid_low(values, alpha) == pytest.approx(bounds) and bounds[-1] > 0.4


def test_values_beyond_the_unit_interval_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        always_valid_low([0.5, 1.5])
    assert always_valid_low([]).size == 0
