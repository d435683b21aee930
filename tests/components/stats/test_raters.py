"""Intervals over prompts and raters cover where people differ, and what a plan promises is found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from components.stats.intervals import clustered_proportion
from components.stats.raters import (
    FEWEST_RATERS,
    crossed_agreement,
    crossed_proportion,
    power,
    smallest_found,
    too_few_raters,
)


def ratings(
    random: np.random.Generator, items: int, raters: int, per_item: int, spread: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Wins, ties and losses of items of logit SD 1 by raters of logit SD `spread`: values, items, raters."""
    item = np.repeat(np.arange(items), per_item)
    rater = np.concatenate([random.permutation(raters)[:per_item] for _ in range(items)])
    logit = 0.3 + random.standard_normal(items)[item] + spread * random.standard_normal(raters)[rater]
    won = random.random(item.size) < special.expit(logit)
    return np.where(random.random(item.size) < 0.15, 0.5, won), item, rater


def truth(spread: float) -> float:
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    share = weights @ special.expit(0.3 + np.hypot(1, spread) * nodes) / weights.sum()
    return float(0.85 * share + 0.075)


@pytest.mark.parametrize(("raters", "per_item"), [(8, 8), (8, 3), (20, 3)])
@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_the_interval_covers_other_people_than_those_who_rated(raters: int, per_item: int, spread: float) -> None:
    random, found = np.random.default_rng(0), []
    for _ in range(250):
        values, items, who = ratings(random, 96, raters, per_item, spread)
        low, high = crossed_proportion(values, items.tolist(), who.tolist())[1:]
        found.append(low <= truth(spread) <= high)
    assert 0.92 <= np.mean(found) <= 0.985, "95 %, give or take the simulation's own 1.4 points"


def test_numbers_are_cameron_gelbach_and_millers_worked_out_by_other_code() -> None:
    values, items, raters = [1, 0, 0.5, 1, 1, 0, 0, 0.5], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 2, 2, 0, 0, 1]
    mean = np.mean(values)
    u = (np.array(values) - mean) / 8
    prompts = 4 / 3 * sum(sum(x for x, i in zip(u, items, strict=True) if i == k) ** 2 for k in range(4))
    people = 3 / 2 * sum(sum(x for x, r in zip(u, raters, strict=True) if r == k) ** 2 for k in range(3))
    cells = float(u @ u)
    variance = prompts + people - cells
    assert variance < max(prompts, people)  # here the larger of the two counts
    freedom = max(prompts, people) ** 2 / (prompts**2 / 3 + people**2 / 2)
    t2 = stats.t.ppf(0.975, freedom) ** 2
    n = mean * (1 - mean) / max(prompts, people)
    centre, half = mean + t2 / (2 * n), np.sqrt(t2 * (mean * (1 - mean) / n + t2 / (4 * n * n)))
    expected = (mean, max(0.0, (centre - half) / (1 + t2 / n)), min(1.0, (centre + half) / (1 + t2 / n)))
    assert crossed_proportion(values, items, raters) == pytest.approx(expected)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([0, 0.5, 1]), st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=40))
def test_neither_order_nor_names_nor_sides_change_the_interval(rows: list[tuple[float, int, int]]) -> None:
    values, items, raters = zip(*rows, strict=True)
    value, low, high = crossed_proportion(values, items, raters)
    assert 0 <= low <= value <= high <= 1
    again = crossed_proportion(values[::-1], [f"i{i}" for i in items[::-1]], [f"r{r}" for r in raters[::-1]])
    assert again == pytest.approx((value, low, high))
    assert crossed_proportion([1 - v for v in values], items, raters) == pytest.approx((1 - value, 1 - high, 1 - low))


def test_one_rater_says_nothing_of_other_people() -> None:
    assert crossed_proportion([1, 0, 1, 1], [0, 1, 2, 3], [0] * 4)[1:] == (0, 1)
    assert "1 rater is too few" in (too_few_raters(1) or "") and too_few_raters(FEWEST_RATERS) is None


def test_the_plans_power_is_that_of_the_interval_over_independent_raters_of_its_own_model() -> None:
    """Recomputed from ratings drawn by other code than the plan's."""
    random, found = np.random.default_rng(5), []
    for _ in range(600):
        values, items, who = ratings(random, 96, 10, 3, 0.5)
        found.append(crossed_proportion(values, items.tolist(), who.tolist()).low > 0.5)
    planned = power(96, 10, 3, truth(0.5), rater_spread=0.5, draws=600)
    assert abs(planned - np.mean(found)) < 0.08, "each side's simulation error is 2 points"
    assert power(96, 10, 3, 0.5, draws=400) <= 0.05 < power(96, 10, 3, 0.65, draws=100)
    with pytest.raises(ValueError, match="4 ratings of each item by 3 raters"):
        power(10, 3, 4, 0.6)
    with pytest.raises(ValueError, match=r"a win rate of 0\.9"):
        power(10, 3, 3, 0.9, ties=0.4)


@pytest.mark.parametrize(("items", "low"), [(12, 0.35), (48, 0.7), (512, 0.95)])
def test_a_policy_that_wins_everything_is_not_held_for_worse_than_one_that_loses_a_few(items: int, low: float) -> None:
    found = crossed_proportion(np.ones(items * 3), np.repeat(np.arange(items), 3).tolist(), [0, 1, 2] * items)
    assert found.value == found.high == 1 and found.low > low


def test_the_smallest_win_rate_found_is_where_power_reaches_the_chance() -> None:
    smallest = smallest_found(96, 10, 3, draws=100)
    assert smallest is not None
    assert power(96, 10, 3, smallest, draws=100) >= 0.8 > power(96, 10, 3, smallest - 0.01, draws=100)
    assert smallest_found(48, 1, 1, draws=20) is None, "one rater does not tell how people differ"


def judged(random: np.random.Generator, items: int, raters: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Votes (I, R), three an item, of raters who differ in their liking of a side; and a model that sees the items."""
    item = random.standard_normal(items)
    asked = np.argsort(random.random((items, raters)), axis=1) < 3
    chance = special.expit(0.4 + item[:, None] + spread * random.standard_normal(raters))
    votes = np.where(random.random((items, raters)) < chance, 1.0, -1.0)
    votes[random.random((items, raters)) < 0.15] = 0
    return np.where(asked, votes, np.nan), item + random.standard_normal(items) + 0.5


def agreed(votes: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    lead = np.nansum(votes, axis=1)
    return (np.sign(lead) == np.sign(predicted))[lead != 0].astype(float)


@pytest.mark.parametrize("raters", [3, 8])
def test_the_interval_of_the_agreement_with_majorities_covers_other_people(raters: int) -> None:
    random = np.random.default_rng(raters)
    drawn = [judged(random, 400, raters, 1.0) for _ in range(200)]
    expected = np.mean(np.concatenate([agreed(*each) for each in drawn]))
    found = [crossed_agreement(*each, range(400)) for each in drawn]
    alone = [clustered_proportion(agreed(*each), range(agreed(*each).size)) for each in drawn]
    covers = [np.mean([low <= expected <= high for _, low, high in each]) for each in (found, alone)]
    assert covers[0] >= 0.93 and covers[1] < 0.9, "over prompts alone it holds for these raters only"


def test_copies_of_one_rater_are_no_wider_than_prompts_alone_and_one_rater_tells_nothing_of_people() -> None:
    random = np.random.default_rng(0)
    votes, predicted = random.choice([1.0, -1.0], 60), random.standard_normal(60)
    prompts = [i // 2 for i in range(60)]
    found = crossed_agreement(np.stack([votes] * 8, axis=1), predicted, prompts)
    alone = clustered_proportion(agreed(votes[:, None], predicted), prompts)
    assert found.value == alone.value and found.low == pytest.approx(alone.low, abs=1e-9)
    assert crossed_agreement(votes[:, None], predicted, prompts)[1:] == (0.0, 1.0)
    with_idle = np.column_stack([votes, votes, np.full(60, np.nan)])
    assert crossed_agreement(with_idle, predicted, prompts) == crossed_agreement(with_idle[:, :2], predicted, prompts)
    with pytest.raises(ValueError, match="no item is decided"):
        crossed_agreement(np.zeros((4, 3)), np.ones(4), range(4))
