import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from components.stats.intervals import (
    Interval,
    at_least_of_shares,
    cluster_codes,
    clustered_auroc,
    clustered_mean,
    clustered_proportion,
    clustered_ratio,
    gain_in_shares,
    jackknifed_ratio,
    paired_gain,
)


def test_an_interval_names_both_ends_or_neither() -> None:
    assert Interval(1.0, 0.5, 1.5).ends == [0.5, 1.5]
    assert Interval(1.0, float("nan"), 1.5).ends is None and Interval(1.0, 0.5, float("inf")).ends is None
    assert Interval(1.0, float("nan"), 1.5).named("x") == {"x": 1.0, "x_low": None, "x_high": 1.5}


@pytest.mark.parametrize("interval_of", [clustered_mean, clustered_proportion])
@pytest.mark.parametrize(("clusters", "rate"), [(40, 0.7), (150, 0.9)])
def test_95_percent_intervals_cover_the_truth_where_rows_of_a_cluster_depend(interval_of, clusters, rate) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(3)
    codes = np.repeat(np.arange(clusters), 1 + np.arange(clusters) % 5)
    covered, naive = 0, 0
    for _ in range(600):
        own = rng.beta(2 * rate, 2 * (1 - rate), size=clusters)  # intra-cluster correlation 1/3
        values = (rng.random(codes.size) < own[codes]).astype(float)
        interval = interval_of(values, codes)
        covered += interval.low <= rate <= interval.high
        half = 1.96 * values.std() / np.sqrt(values.size)
        naive += abs(values.mean() - rate) <= half
    assert 0.92 <= covered / 600 <= 0.98
    assert naive / 600 < 0.91, "the simulation must be one that unclustered intervals fail"


def test_a_perfect_score_on_few_prompts_is_not_certain() -> None:
    interval = clustered_proportion([1.0] * 20, range(20))
    assert interval.value == 1.0 and interval.high == 1.0
    assert 0.75 < interval.low < 0.9
    assert clustered_proportion([1.0] * 20, [i // 10 for i in range(20)]).low < 0.1
    ties = clustered_proportion([0.5] * 20, range(20))
    assert ties.low < 0.35 and ties.high > 0.65


def test_one_cluster_gives_no_interval_a_gate_would_pass() -> None:
    interval = clustered_mean([1.0, 2.0], ["p", "p"])
    assert interval.value == 1.5 and np.isnan(interval.low) and np.isnan(interval.high)
    assert clustered_proportion([1.0, 1.0], ["p", "p"]) == (1.0, 0.0, 1.0)


def test_pairing_removes_what_both_measurements_share() -> None:
    rng = np.random.default_rng(4)
    shared = rng.normal(size=400) * 10
    gain = paired_gain(shared + 1 + rng.normal(size=400), shared, range(400))
    assert gain.low > 0.8 and gain.high < 1.2
    with pytest.raises(ValueError, match="shape"):
        paired_gain([1.0], [1.0, 2.0], range(2))


@pytest.mark.parametrize("rows", [5, 20, 200])
def test_a_model_that_lost_accuracy_on_few_rows_is_not_certain_to_have_kept_it(rows: int) -> None:
    """It loses a fifth of the rows and gains none; the interval of a mean ends above -0.2 in a third of five rows."""
    rng, found = np.random.default_rng(rows), []
    for _ in range(1000):
        kept = (rng.random(rows) > 0.2).astype(float)
        ones = np.ones(rows)
        found.append((gain_in_shares(kept, ones, range(rows)), paired_gain(kept, ones, range(rows))))
    above, plainly = np.mean([[each.low > -0.2 + 1e-9 for each in pair] for pair in found], axis=0)
    assert above <= 0.035 < plainly
    assert all(wide.low <= narrow.low and wide.high >= narrow.high for wide, narrow in found)


def test_rows_that_do_not_differ_leave_room_for_a_difference_and_many_that_do_change_no_interval() -> None:
    t2 = stats.t.ppf(0.975, 9) ** 2
    for same in (np.ones(10), np.full(10, 0.5)):
        assert gain_in_shares(same, same, range(10)) == pytest.approx((0, -t2 / (10 + t2), t2 / (10 + t2)))
    assert np.isnan(gain_in_shares([1.0, 1.0], [1.0, 0.0], ["p", "p"]).low)
    rng = np.random.default_rng(6)
    a, b = (rng.random((2, 2000)) < [[0.7], [0.6]]).astype(float)
    assert gain_in_shares(a, b, range(2000)) == pytest.approx(paired_gain(a, b, range(2000)), abs=3e-4)
    one = Interval(0.5, 0.1, 0.8)
    assert at_least_of_shares(Interval(-0.2, -0.2, -0.2), ((-1.0, one), (2.0, Interval(0.15, 0.15, 0.2)))) == (
        pytest.approx((-0.2, -0.2 - 0.3, -0.2 + np.hypot(0.4, 0.1)))
    )


@pytest.mark.parametrize(
    ("values", "clusters", "message"),
    [([], [], "non-empty"), ([1.0], [1, 2], "1 values and 2 clusters"), ([float("nan"), 1.0], [1, 2], "finite")],
)
def test_unusable_values_are_refused(values: list[float], clusters: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clustered_mean(values, clusters)
    with pytest.raises(ValueError, match="between 0 and 1"):
        clustered_proportion([0.2, 2.0], [1, 2])


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), min_size=2))
def test_intervals_hold_their_estimate_and_ignore_the_order_of_rows(rows: list[tuple[float, int]]) -> None:
    values, clusters = zip(*rows, strict=True)
    one = clustered_proportion(values, clusters)
    other = clustered_proportion(values[::-1], clusters[::-1])
    assert 0.0 <= one.low <= one.value <= one.high <= 1.0
    assert one == pytest.approx(other, abs=1e-6)


def test_clusters_may_be_any_hashable_or_an_array() -> None:
    assert cluster_codes(["x", "y", "x"]).tolist() == [0, 1, 0]
    assert clustered_mean([1.0, 0.0], np.array(["x", "y"])) == clustered_mean([1.0, 0.0], [("x",), ("y",)])


def test_auroc_is_scikit_learns_and_its_interval_covers_95_percent_of_the_time() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(7)
    truth, covered = stats.norm.cdf(1 / np.sqrt(2)), []
    for _ in range(400):
        positive, negative = rng.normal(1, 1, 80), rng.normal(0, 1, 120)
        found = clustered_auroc(positive, negative, range(80), range(100, 220))
        covered.append(found.low <= truth <= found.high)
    labels = np.repeat([1, 0], [80, 120])
    assert found.value == pytest.approx(roc_auc_score(labels, np.concatenate([positive, negative])), abs=1e-12)
    tied = clustered_auroc(np.round(positive), np.round(negative), range(80), range(120))
    expected = roc_auc_score(labels, np.round(np.concatenate([positive, negative])))
    assert tied.value == pytest.approx(expected, abs=1e-12)
    assert 0.92 <= np.mean(covered) <= 0.98


def test_auroc_of_values_copied_within_a_cluster_is_no_surer_and_perfect_separation_keeps_a_width() -> None:
    rng = np.random.default_rng(8)
    positive, negative = rng.normal(1, 1, 60), rng.normal(0, 1, 60)
    once = clustered_auroc(positive, negative, range(60), range(60))
    copied = clustered_auroc(np.repeat(positive, 5), np.repeat(negative, 5), *[np.repeat(np.arange(60), 5)] * 2)
    assert copied == pytest.approx(once, abs=1e-12)
    apart = clustered_auroc([2.0, 3.0, 4.0], [0.0, 1.0, 1.5], range(3), range(3))
    assert apart.value == 1.0 == apart.high and apart.low < 0.6


def test_a_ratios_interval_is_that_of_a_regression_through_the_origin_and_covers_the_truth() -> None:
    found = clustered_ratio([2, 4, 3, 9], [1, 2, 3, 3], ["a", "a", "b", "c"])
    residuals = np.array([(2 - 2) + (4 - 4), 3 - 6, 9 - 6])  # R = 18 / 9, by cluster
    half = stats.t.ppf(0.975, 2) * np.sqrt(3 / 2 * np.square(residuals).sum()) / 9
    assert found == pytest.approx((2.0, 2 - half, 2 + half))
    assert np.isnan(clustered_ratio([1, 2], [1, 1], [0, 0])[1:]).all()
    with pytest.raises(ValueError, match="differ in shape"):
        clustered_ratio([1, 2], [1], [0, 1])
    rng, covered = np.random.default_rng(0), []
    for _ in range(500):
        a, b = rng.gamma(2, 3, 120), rng.gamma(3, 4, 120)
        covered.append(clustered_ratio(a, b, range(120))[1] <= 0.5 <= clustered_ratio(a, b, range(120))[2])
    assert 0.92 <= np.mean(covered) <= 0.98


def test_the_jackknife_of_a_ratio_of_means_is_the_linearised_one_and_unknown_where_a_statistic_vanishes() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.gamma(20, 1, 300), rng.gamma(30, 1, 300)
    without = [(each.sum() - each) / 299 for each in (a, b)]
    found, expected = jackknifed_ratio(a.mean(), b.mean(), *without), clustered_ratio(a, b, range(300))
    assert found == pytest.approx(expected, rel=2e-3) and found.low * found.high == pytest.approx(found.value**2)
    assert jackknifed_ratio(0.0, 0.5, [0, 0], [0.5, 0.5]) == (0, 0, 0), "nothing is left: no gate on a share passes"
    assert np.isnan(jackknifed_ratio(0.5, 0.0, [1, 1], [0, 0])).all()
    for left, right in (([1.0, 0.0], [1, 1]), ([1, 1], [np.nan, 1]), ([1.0], [1.0])):
        unknown = jackknifed_ratio(0.5, 1.0, left, right)
        assert unknown.value == 0.5 and np.isnan(unknown[1:]).all()
        assert unknown.metrics("x") == {"x": 0.5}, "a gate on an end that is unknown finds no metric, and fails"
    with pytest.raises(ValueError, match="differ in shape"):
        jackknifed_ratio(1, 1, [1, 2], [1])
