"""The classifier that tells texts apart: what chance reaches, and what it finds."""

import random

import pytest
from threadpoolctl import threadpool_limits

from data_contracts.findings import drift

WORDS = "river garden window letter market bridge winter summer forest kitchen teacher doctor village station".split()


def texts(rng, count, words=WORDS):
    return [" ".join(rng.choice(words) for _ in range(rng.randint(6, 20))) for _ in range(count)]


def measured(one, other, seed):
    found = drift.told_apart(one, other, seed)
    assert found is not None
    return found


@pytest.mark.whole
def test_random_halves_of_the_same_texts_exceed_what_chance_reaches_in_5_of_100_draws(monkeypatch):
    monkeypatch.setattr(drift, "RELABELLED", 99)  # as exact as with more, and quicker
    beyond = 0
    for seed in range(200):
        every = texts(random.Random(seed), 40)
        found = measured(every[:20], every[20:], seed)
        beyond += found.value > found.chance
    assert 3 <= beyond <= 18, "10 of 200 expected, standard deviation 3.1"


def test_texts_on_other_subjects_are_told_apart_and_the_threads_change_no_bit():
    rng = random.Random(1)
    one, other = texts(rng, 60), texts(rng, 40, [*WORDS[5:], "engine", "circuit"])
    found = measured(one, other, 7)
    assert found.value > 0.8 > found.chance > 0.5
    with threadpool_limits(2):
        assert measured(one[::-1], other, 7) == found


def test_texts_on_both_sides_are_ties_for_the_value_and_for_chance():
    rng = random.Random(2)
    both, one, other = texts(rng, 50), texts(rng, 25), texts(rng, 25, ["engine", "circuit"])
    alone, mixed = measured(one, other, 3), measured([*both, *one], [*both, *other], 3)
    share = 50 / 75
    assert mixed.value == (1 - share) * alone.value + share * 0.5
    assert mixed.chance == (1 - share) * alone.chance + share * 0.5
    assert measured(both, both, 3) == (0.5, 0.5) and drift.told_apart(both, one[:5], 3) is None
