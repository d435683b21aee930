"""Strengths of models by comparisons of two: Bradley-Terry with Davidson's ties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.stats.paired import Inseparable, PairedScore, davidson, strengths, tallies


def drawn(
    s: list[float], nu: float, n: int, seed: int, prompts: int | None = None
) -> tuple[list[PairedScore], list[int]]:
    """Comparisons of random pairs of models of strengths `s`, and the prompt of each."""
    random, made = np.random.default_rng(seed), []
    for _ in range(n):
        i, j = random.choice(len(s), 2, replace=False)
        parts = np.exp([(s[i] - s[j]) / 2, (s[j] - s[i]) / 2, math.log(nu) if nu else -np.inf])
        made.append(PairedScore(int(i), int(j), float(random.choice([1, 0, 0.5], p=parts / parts.sum()))))
    return made, random.integers(0, prompts or n, n).tolist()


@settings(max_examples=15)
@given(st.permutations(range(4)), st.integers(0, 1000), st.sampled_from([0.0, 0.4, 1.5]))
def test_neither_the_order_of_models_nor_of_a_pairs_sides_changes_a_strength(
    order: list[int], seed: int, nu: float
) -> None:
    made, _ = drawn([0, 0.5, -0.4, 0.2], nu, 160, seed)
    try:
        values, tie, likelihood = davidson(tallies(made, 4))
    except Inseparable:
        return
    turned = [PairedScore(order[c.second], order[c.first], 1 - c.score) for c in reversed(made)]
    again, again_tie, again_likelihood = davidson(tallies(turned, 4))
    assert again[order] == pytest.approx(values, abs=1e-5)
    assert (again_tie, again_likelihood) == pytest.approx((tie, likelihood), abs=1e-5)


def test_the_likelihood_is_davidsons_and_a_constant_on_all_strengths_changes_nothing() -> None:
    made, _ = drawn([0, 0.7, -0.3], 0.8, 300, 3)
    values, nu, likelihood = davidson(tallies(made, 3))

    def by_the_paper(shift: float) -> float:
        pi, total = np.exp(values + shift), 0.0
        for first, second, score in made:
            tie = nu * math.sqrt(pi[first] * pi[second])
            chance = {1.0: pi[first], 0.0: pi[second], 0.5: tie}[score] / (pi[first] + pi[second] + tie)
            total += math.log(chance)
        return total

    assert by_the_paper(0) == pytest.approx(likelihood) == by_the_paper(3.7)
    assert values.mean() == pytest.approx(0, abs=1e-12)


def test_strengths_and_ties_are_recovered_within_their_intervals_of_a_baseline() -> None:
    true, nu, held = [0.0, 0.6, -0.5, 0.1], 0.7, 0
    for seed in range(4):
        made, prompts = drawn(true, nu, 400, seed)
        found = strengths(made, 4, prompts, baseline=2, draws=40, seed=seed)
        assert found.strength[2] == (0, 0, 0)
        inside = [each.low <= true[i] - true[2] <= each.high for i, each in enumerate(found.strength)]
        held += sum(inside) - 1 + (found.tie.low <= nu <= found.tie.high)
    assert held >= 13, f"95 % of 16 intervals should hold the truth, {held} do"


def test_an_interval_over_prompts_is_wider_where_a_prompts_comparisons_agree() -> None:
    made, prompts = drawn([0, 0.4], 0.3, 60, 1)
    alone = strengths(made, 2, prompts, draws=60).strength[1]
    five_times = strengths(made * 5, 2, prompts * 5, draws=60).strength[1]
    as_if_new = strengths(made * 5, 2, range(300), draws=60).strength[1]
    assert five_times.high - five_times.low == pytest.approx(alone.high - alone.low, rel=0.3)
    assert as_if_new.high - as_if_new.low < 0.65 * (five_times.high - five_times.low)


def test_an_interval_over_raters_too_is_wider_where_they_differ() -> None:
    random, made, raters = np.random.default_rng(0), [], []
    taste = random.normal(0, 1.5, 10)
    for n in range(600):
        made.append(PairedScore(0, 1, float(random.random() < 1 / (1 + math.exp(-taste[n % 10])))))
        raters.append(n % 10)
    alone = strengths(made, 2, range(600), draws=60).strength[1]
    both = strengths(made, 2, range(600), raters, draws=60).strength[1]
    assert both.high - both.low > 2 * (alone.high - alone.low)


def test_a_model_that_always_wins_is_said_to_and_gets_no_number() -> None:
    made = [PairedScore(0, 1, 1), PairedScore(1, 0, 1), PairedScore(2, 0, 1), PairedScore(2, 1, 1)]
    with pytest.raises(Inseparable, match="won every comparison") as found:
        davidson(tallies(made, 3))
    assert (found.value.better, found.value.worse) == ([2], [0, 1])
    davidson(tallies([*made, PairedScore(0, 2, 0.5)], 3))  # a tie is half a point, and makes it finite


def test_models_that_nobody_compared_and_ties_alone_have_no_strength() -> None:
    with pytest.raises(Inseparable, match="no comparison joins") as found:
        davidson(tallies([PairedScore(0, 1, 1), PairedScore(1, 0, 1), PairedScore(2, 3, 0.5)], 4))
    assert (found.value.better, found.value.worse) == ([0, 1], [2, 3])
    with pytest.raises(Inseparable, match="every comparison is a tie"):
        davidson(tallies([PairedScore(0, 1, 0.5)], 2))


def test_an_interval_is_not_given_where_most_resamples_have_no_estimate() -> None:
    made = [PairedScore(0, 1, 1)] * 9 + [PairedScore(0, 1, 0)]
    found = strengths(made, 2, range(10), draws=60).strength[1]
    assert found.value == pytest.approx(-math.log(9), abs=1e-4) and math.isnan(found.low) and math.isnan(found.high)
