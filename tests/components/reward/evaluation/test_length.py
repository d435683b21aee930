"""Length: what a model gets right against it, and what of its scores is length and not the label."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.reward.evaluation.length import balanced_length_accuracy, length_partial_correlation, response_tokens


def test_length_alone_gives_a_half_however_often_the_longer_wins() -> None:
    gap = np.where(np.random.default_rng(0).random(3000) < 0.8, 7, -7)
    found = balanced_length_accuracy(gap > 0, gap, range(3000))
    assert (found["chosen_longer"].value, found["chosen_shorter"].value) == (1.0, 0.0)
    assert found["balanced"].value == 0.5 and np.mean(gap > 0) > 0.78


def test_pairs_of_equal_length_are_left_out_and_a_side_without_pairs_is_unknown() -> None:
    found = balanced_length_accuracy([1, 0, 1, 0.5, 0], [3, 2, -1, -9, 0], range(5))
    assert found["chosen_longer"].value == 0.5 and found["chosen_shorter"].value == 0.75
    assert found["balanced"].value == 0.625
    assert np.isnan(balanced_length_accuracy([1, 1], [3, 2], range(2))["balanced"].value)


def test_the_balanced_intervals_cover_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(400):
        gap = np.where(rng.random(250) < 0.7, 1, -1)
        right = rng.random(250) < np.where(gap > 0, 0.9, 0.6)
        found = balanced_length_accuracy(right, gap, range(250))["balanced"]
        covered.append(found.low <= 0.75 <= found.high)
    assert 0.92 <= np.mean(covered) <= 0.98


@pytest.mark.parametrize("few", [1, 2, 3, 5])
def test_a_side_of_few_pairs_does_not_pass_for_sure(few: int) -> None:
    """Right in 85 % where the longer won and in 30 % where the shorter did: one pair that is right shows no spread."""
    rng, gap = np.random.default_rng(few), np.append(np.ones(200), -np.ones(few))
    rates = np.where(gap > 0, 0.85, 0.3)
    found = [balanced_length_accuracy(rng.random(gap.size) < rates, gap, range(gap.size))["balanced"]
             for _ in range(600)]  # fmt: skip
    assert np.mean([each.low > 0.575 for each in found]) <= 0.04
    alone = balanced_length_accuracy([1, 1], [1, -1], range(2))["balanced"]
    assert alone.value == 1 and alone.low < 0.3 and alone.high == 1


def test_with_a_pair_a_prompt_it_is_the_correlation_of_the_gaps() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(5, 60, size=(2, 300))
    scores = rng.normal(size=(2, 300)) + 0.03 * lengths + np.array([[1.0], [0.0]])
    found = length_partial_correlation(scores, lengths, range(300))
    gaps = scores[0] - scores[1], lengths[0] - lengths[1]
    assert found.value == pytest.approx(np.corrcoef(*gaps)[0, 1], abs=1e-12)


def test_length_that_goes_with_the_label_alone_is_no_taste_for_length() -> None:
    """A score that sees only the label, where the chosen are longer: correlated with length, not given the label."""
    rng = np.random.default_rng(3)
    longer = rng.normal(20, 5, size=(2, 4000)) + np.array([[15.0], [0.0]])
    scores = rng.normal(size=(2, 4000)) + np.array([[2.0], [0.0]])
    assert np.corrcoef(scores.ravel(), longer.ravel())[0, 1] > 0.5
    found = length_partial_correlation(scores, longer, range(4000))
    assert found.low < 0 < found.high and found.high - found.low < 0.1


def test_its_interval_covers_95_percent_of_the_time_also_where_pairs_share_a_prompt() -> None:
    rng = np.random.default_rng(4)
    for pairs in (1, 3):
        covered = []
        for _ in range(300):
            length = rng.normal(size=(2, 150))
            scores = 0.75 * length + rng.normal(size=(2, 150))  # correlation 0.6 whatever is taken off per prompt
            found = length_partial_correlation(scores, length, np.arange(150) // pairs)
            covered.append(found.low <= 0.6 <= found.high)
        assert 0.91 <= np.mean(covered) <= 0.985


@given(st.floats(0.1, 100), st.floats(-50, 50), st.integers(0, 1000))
def test_the_unit_and_level_of_scores_change_nothing(unit: float, level: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, lengths = rng.normal(size=(2, 30)), rng.integers(1, 40, size=(2, 30))
    found = length_partial_correlation(scores, lengths, range(30))
    assert length_partial_correlation(level + unit * scores, lengths, range(30)) == pytest.approx(found, abs=1e-6)
    assert -1 <= found.low <= found.value <= found.high <= 1


def test_what_does_not_vary_has_no_correlation() -> None:
    same = np.full((2, 10), 12)
    assert np.isnan(length_partial_correlation(np.random.default_rng(0).normal(size=(2, 10)), same, range(10)).value)


def test_tokens_count_eos_and_stop_at_the_cut(language: object) -> None:
    tokenizer = language.tokenizer  # type: ignore[attr-defined]
    assert response_tokens(tokenizer, ["Goodbye.", "Best wishes. Goodbye. Hello."], 6).tolist() == [3, 6]
