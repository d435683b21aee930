"""Intervals of a series: they widen where a value resembles the one before, and cover as they say."""

import math

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from components.stats.series import series_mean, series_rise


def series(rho: float, n: int, count: int, seed: int = 0) -> np.ndarray:
    """(count, n) standard normal AR(1) series, stationary from the first value."""
    out = np.random.default_rng(seed).standard_normal((count, n))
    for t in range(1, n):
        out[:, t] = rho * out[:, t - 1] + math.sqrt(1 - rho**2) * out[:, t]
    return out


@pytest.mark.parametrize("n", [7, 20, 60])
@pytest.mark.parametrize(("rho", "most"), [(0.0, 0.06), (0.3, 0.1), (0.6, 0.15)])
def test_noise_without_a_trend_rarely_shows_one_even_where_it_is_autocorrelated(
    n: int, rho: float, most: float
) -> None:
    rows = series(rho, n, 1000)
    for measured in (series_mean, series_rise):
        found = [measured(row) for row in rows]
        assert np.mean([not i.low <= 0 <= i.high for i in found]) <= most, measured.__name__


def test_numbers_are_those_of_santer_and_others_worked_out_by_other_code() -> None:
    y = np.array([1.0, 1.4, 1.3, 1.4, 2.2, 2.3, 2.1, 2.3, 3.0, 3.3])
    fit = stats.linregress(range(10), y)
    errors = y - fit.intercept - fit.slope * np.arange(10)
    r = errors[1:] @ errors[:-1] / (errors @ errors)
    r = max(0.0, r + (2 + 4 * r) / 10)
    worth = 10 * (1 - r) / (1 + r)
    error = fit.stderr * math.sqrt(8 / (worth - 2))
    half = 9 * error * stats.t.ppf(0.975, worth - 2)
    assert r > 0 and series_rise(y) == pytest.approx((9 * fit.slope, 9 * fit.slope - half, 9 * fit.slope + half))


def test_an_exact_line_has_no_width_and_a_series_of_four_no_interval() -> None:
    assert series_rise(np.arange(6) * 0.5) == pytest.approx((2.5, 2.5, 2.5))
    assert series_mean([2.0] * 5) == (2.0, 2.0, 2.0)
    for values in ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, math.nan]):
        with pytest.raises(ValueError, match="at least 5 values, all finite"):
            series_rise(values)


def test_a_rise_at_equal_values_of_another_series_is_that_of_a_regression_on_both() -> None:
    kl, noise = np.random.default_rng(1).standard_normal((2, 30))
    y = 2 * kl + 0.01 * np.arange(30) + 0.1 * noise
    both = sm.OLS(y, np.column_stack([np.ones(30), kl, np.arange(30)])).fit()
    found = series_rise(y, covariate=kl)
    assert found.value == pytest.approx(29 * both.params[2])
    assert found.low > 0, "the other series hides the rise no longer"
    assert series_rise(y).low < 0
    for given in (kl[1:], np.ones(30), [*kl[1:], math.inf]):
        with pytest.raises(ValueError, match="the other series needs as many values"):
            series_rise(y, covariate=given)


def test_at_equal_values_of_another_series_noise_without_a_trend_rarely_shows_one() -> None:
    pairs = zip(series(0.3, 50, 600), series(0.6, 50, 600, 1), strict=True)
    found = [series_rise(y + x, covariate=x) for y, x in pairs]
    assert np.mean([not i.low <= 0 <= i.high for i in found]) <= 0.08
