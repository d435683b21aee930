import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import cohen_kappa_score

from components.stats.annotator_votes import (
    EQUAL,
    FIRST,
    NONE,
    SECOND,
    Votes,
    annotator_agreement,
    fleiss_kappa,
    krippendorff_alpha,
    pairwise_agreement,
    plurality,
    raw_agreement,
)
from components.stats.dawid_skene import dawid_skene
from components.stats.intervals import cluster_codes

# 10 subjects, 14 raters, 5 categories: the worked example of Wikipedia's "Fleiss' kappa", stated there as 0.210.
WIKIPEDIA = [
    [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
    [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
]  # fmt: skip
# Fleiss 1971, table 1: 30 patients, 6 psychiatrists, 5 diagnoses; the paper's kappa is 0.430.
FLEISS_1971 = [
    [0, 0, 0, 6, 0], [0, 3, 0, 0, 3], [0, 1, 4, 0, 1], [0, 0, 0, 0, 6], [0, 3, 0, 3, 0], [2, 0, 4, 0, 0],
    [0, 0, 4, 0, 2], [2, 0, 3, 1, 0], [2, 0, 0, 4, 0], [0, 0, 0, 0, 6], [1, 0, 0, 5, 0], [1, 1, 0, 4, 0],
    [0, 3, 3, 0, 0], [1, 0, 0, 5, 0], [0, 2, 0, 3, 1], [0, 0, 5, 0, 1], [3, 0, 0, 1, 2], [5, 1, 0, 0, 0],
    [0, 2, 0, 4, 0], [1, 0, 2, 0, 3], [0, 0, 0, 0, 6], [0, 1, 0, 5, 0], [0, 2, 0, 1, 3], [2, 0, 0, 4, 0],
    [1, 0, 0, 4, 1], [0, 5, 0, 1, 0], [4, 0, 0, 0, 2], [0, 2, 0, 4, 0], [1, 0, 5, 0, 0], [0, 0, 0, 0, 6],
]  # fmt: skip
DATA = Path(os.environ.get("TETHER_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
COUNTS = arrays(np.int64, st.tuples(st.integers(1, 12), st.just(3)), elements=st.integers(0, 4))


def counted(*observers: str) -> np.ndarray:
    """Counts of ratings, a string an observer, a dot where they gave none."""
    values = sorted(set("".join(observers)) - {"."})
    return np.array([[unit.count(value) for value in values] for unit in zip(*observers, strict=True)])


def both_orders(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([counts, counts[:, [SECOND, FIRST, EQUAL]]])


# ---------------------------------------------------------------------------------------------------- input


# ---------------------------------------------------------------------------------------------------- agreement


def test_kappa_is_the_published_value_of_both_worked_examples() -> None:
    assert fleiss_kappa(WIKIPEDIA).value == pytest.approx(0.210, abs=5e-4)
    assert fleiss_kappa(FLEISS_1971).value == pytest.approx(0.430, abs=5e-4)


def test_kappa_is_1_for_agreement_0_for_coin_flips_and_nan_where_undefined() -> None:
    assert fleiss_kappa([[3, 0], [0, 3], [3, 0]]).value == 1.0
    coins = np.random.default_rng(0).binomial(5, 0.5, size=20_000)
    assert fleiss_kappa(np.stack([coins, 5 - coins], 1)).value == pytest.approx(0.0, abs=0.01)
    assert np.isnan(fleiss_kappa([[3, 0], [3, 0]]).value)
    assert np.isnan(fleiss_kappa([[1, 0], [0, 1]]).value)
    assert np.isnan(fleiss_kappa(np.zeros((0, 2))).value)
    with pytest.raises(ValueError, match="whole numbers"):
        fleiss_kappa([[1.5, 0.5]])


def test_items_with_missing_ratings_keep_kappa_and_unrated_items_change_nothing() -> None:
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 2, size=6000)
    votes = np.where(rng.random((6000, 5)) < 0.8, truth[:, None], 1 - truth[:, None])
    present = rng.random((6000, 5)) < 0.7
    full = np.stack([(votes == 0).sum(1), (votes == 1).sum(1)], 1)
    thinned = np.stack([((votes == 0) & present).sum(1), ((votes == 1) & present).sum(1)], 1)
    assert fleiss_kappa(thinned).value == pytest.approx(fleiss_kappa(full).value, abs=0.03)
    assert fleiss_kappa([*WIKIPEDIA, [0] * 5]).value == fleiss_kappa(WIKIPEDIA).value


@given(COUNTS)
@pytest.mark.parametrize("coefficient", [fleiss_kappa, krippendorff_alpha])
def test_symmetric_agreement_is_that_of_each_item_in_both_orders(coefficient, counts: np.ndarray) -> None:  # type: ignore[no-untyped-def]
    symmetric = coefficient(counts, symmetric=True).value
    assert symmetric == pytest.approx(coefficient(both_orders(counts)).value, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    ("observers", "alpha"),
    [
        (("0100000010", "1110010000"), 0.095),  # section A: Meg and Owen
        (("aabbdcccedda", "babbbccceddd"), 0.692),  # section B: Ben and Gerry
        (("123321412...", "1233224125.3", ".3332342251.", "12332441251."), 0.743),  # section C: four with gaps
    ],
)
def test_alpha_is_the_published_value_of_krippendorffs_examples(observers: tuple[str, ...], alpha: float) -> None:
    # Krippendorff 2011, Computing Krippendorff's Alpha-Reliability.
    assert krippendorff_alpha(counted(*observers)).value == pytest.approx(alpha, abs=5e-4)


def clustered_counts(prompts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of 3 to 5 votes on 1 to 6 items a prompt; how well people agree is the prompt's own."""
    rng = np.random.default_rng(seed)
    codes = np.repeat(np.arange(prompts), 1 + np.arange(prompts) % 6)
    care = rng.beta(2, 2, prompts)[codes]
    truth = rng.choice(3, codes.size, p=[0.4, 0.4, 0.2])
    chances = care[:, None] * np.eye(3)[truth] + (1 - care[:, None]) / 3
    return rng.multinomial(rng.integers(3, 6, codes.size), chances), codes


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("coefficient", [fleiss_kappa, krippendorff_alpha])
def test_the_jackknifes_interval_is_the_percentile_bootstraps(coefficient, clustered: bool, symmetric: bool) -> None:  # type: ignore[no-untyped-def]
    counts, codes = clustered_counts(120, 0)
    codes = codes if clustered else np.arange(len(counts))
    interval = coefficient(counts, codes if clustered else None, symmetric)
    rng, draws = np.random.default_rng(1), codes.max() + 1

    def redrawn() -> float:
        times = np.bincount(rng.integers(0, draws, draws), minlength=draws)
        drawn = np.repeat(counts, times[codes], axis=0)
        return coefficient(both_orders(drawn) if symmetric else drawn).value

    low, high = np.quantile([redrawn() for _ in range(800)], [0.025, 0.975])
    assert interval.low == pytest.approx(low, abs=0.06 * (high - low))
    assert interval.high == pytest.approx(high, abs=0.06 * (high - low))


@pytest.mark.parametrize("coefficient", [fleiss_kappa, krippendorff_alpha])
def test_95_percent_intervals_cover_the_truth_where_items_of_a_prompt_depend(coefficient) -> None:  # type: ignore[no-untyped-def]
    truth = coefficient(clustered_counts(60_000, 1)[0], symmetric=True).value
    covered, naive = 0, 0
    for seed in range(400):
        counts, codes = clustered_counts(30, 10 + seed)
        clustered, alone = coefficient(counts, codes, symmetric=True), coefficient(counts, symmetric=True)
        covered += clustered.low <= truth <= clustered.high
        naive += alone.low <= truth <= alone.high
    assert 0.92 <= covered / 400 <= 0.98
    assert naive < covered - 10, "the simulation must be one that unclustered intervals fail"


@pytest.mark.parametrize("coefficient", [fleiss_kappa, krippendorff_alpha])
def test_perfect_agreement_on_few_items_is_not_certain(coefficient) -> None:  # type: ignore[no-untyped-def]
    counts = np.array([[3, 0, 0], [0, 3, 0]] * 10)
    few, clustered = coefficient(counts), coefficient(counts, np.arange(20) // 5)
    assert few.value == few.high == clustered.high == pytest.approx(1.0)
    assert 0.5 < few.low < 0.8 and clustered.low < few.low - 0.3
    lone = coefficient(np.concatenate([counts, [[1, 0, 0], [0, 1, 0]] * 50]))  # votes nobody could differ from
    assert lone.value == pytest.approx(1.0) and lone.low < few.low + 0.05
    assert coefficient([[3, 0, 0]] * 200 + [[0, 3, 0]] * 2, [0] * 100 + [1] * 100 + [2, 3]).low == -1.0


@pytest.mark.parametrize("coefficient", [fleiss_kappa, krippendorff_alpha])
def test_agreement_that_is_undefined_has_ends_no_gate_passes(coefficient) -> None:  # type: ignore[no-untyped-def]
    for undefined in (np.zeros((0, 3)), np.zeros((2, 3)), [[1, 0, 0], [0, 1, 0]], [[3, 0, 0], [3, 0, 0]]):
        interval = coefficient(undefined)
        assert np.isnan(interval.value) and np.isnan(interval.low)
    one = coefficient([[2, 1, 0], [0, 3, 0]], ["p", "p"])
    assert not np.isnan(one.value) and np.isnan(one.low) and np.isnan(one.high)
    two = coefficient([[2, 1, 0], [3, 0, 0]])  # without the first, nobody disagrees nor could
    assert not np.isnan(two.value) and np.isnan(two.low) and np.isnan(two.high)
    with pytest.raises(ValueError, match="2 items and 1 clusters"):
        coefficient([[2, 1, 0], [3, 0, 0]], ["p"])


@pytest.mark.parametrize("coefficient", [fleiss_kappa, krippendorff_alpha])
def test_items_without_votes_are_no_evidence(coefficient) -> None:  # type: ignore[no-untyped-def]
    counts, codes = clustered_counts(50, 3)
    unrated = np.zeros((30, 3), counts.dtype)
    padded = coefficient(np.concatenate([counts, unrated]), np.concatenate([codes, 1000 + np.arange(30)]))
    assert padded == pytest.approx(coefficient(counts, codes), abs=1e-12)


# ---------------------------------------------------------------------------------------------------- decisions


def test_the_most_frequent_label_wins_and_a_tie_at_the_top_decides_nothing() -> None:
    labels = plurality([[3, 2, 0], [1, 2, 2], [0, 1, 0], [0, 1, 4], [2, 2, 1], [0, 0, 0], [1, 1, 1], [2, 1, 1]])
    assert labels.tolist() == [FIRST, NONE, SECOND, EQUAL, NONE, NONE, NONE, FIRST]


# ---------------------------------------------------------------------------------------------------- annotators


def test_annotators_are_compared_with_the_others_only() -> None:
    # Item 0: 0, 0, 1. Item 1: 1, 0 and an unnamed 1. Item 2: annotator 0 alone. Annotator 2 doesn't exist.
    votes = Votes(np.array([0, 0, 0, 1, 1, 1, 2]), np.array([0, 1, 3, 0, 1, -1, 0]), np.array([0, 0, 1, 1, 0, 1, 2]), 3)
    agreement = annotator_agreement(votes)
    assert agreement.votes.tolist() == [3, 2, 0, 1]
    # 0: item 0 the others tie, item 1 they tie, item 2 nobody else; 1: item 0 tie, item 1 says 1; 3: item 0 says 0.
    assert agreement.compared.tolist() == [0, 1, 0, 1]
    assert agreement.share == pytest.approx([np.nan, 0.0, np.nan, 0.0], nan_ok=True)
    assert agreement.low.tolist() == [0.0] * 4 and agreement.high[[0, 2]].tolist() == [1.0, 1.0]


def test_an_annotators_own_vote_does_not_speak_for_them() -> None:
    rng = np.random.default_rng(0)
    coins = Votes(np.repeat(np.arange(20_000), 3), rng.integers(0, 4, 60_000), rng.integers(0, 3, 60_000), 20_000)
    assert annotator_agreement(coins).share == pytest.approx(np.full(4, 1 / 3), abs=0.02)


# ---------------------------------------------------------------------------------------------------- real data


@pytest.mark.real_data
def test_ukpconvargs_votes_give_the_published_agreement() -> None:
    path = DATA / "ukpconvarg1" / "pairs.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent (set TETHER_DATA to the folder of real data)")
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    given = [
        (i, vote["annotator"], ["a1", "a2", "equal"].index(vote["label"]))
        for i, r in enumerate(rows)
        for vote in r["votes"]
    ]
    item, names, label = zip(*given, strict=True)
    votes = Votes(np.array(item), cluster_codes(names), np.array(label), len(rows))
    counts, topics = votes.counts(), [(row["prompt"], row["stance"]) for row in rows]

    kappa = fleiss_kappa(counts, topics, symmetric=True)
    assert kappa.value == pytest.approx(0.267, abs=0.002)
    assert 0.22 < kappa.low < 0.24 and 0.29 < kappa.high < 0.31  # 32 sides of debates: far wider than pair by pair
    assert krippendorff_alpha(counts, topics, symmetric=True).value == pytest.approx(kappa.value, abs=1e-4)
    labels = plurality(counts)
    found = {
        name: int((labels == label).sum()) for name, label in (("first", FIRST), ("second", SECOND), ("none", NONE))
    }
    assert found == {"first": 6086, "second": 5983, "none": 2721} and (labels == EQUAL).sum() == 2137
    fit = dawid_skene(votes)
    assert fit.converged and (fit.label != NONE).all()
    assert 0.04 < (fit.label != labels)[labels != NONE].mean() < 0.08
    agreement = annotator_agreement(votes)
    often = agreement.compared >= 30
    assert np.corrcoef(agreement.share[often], fit.accuracy[often])[0, 1] > 0.7


def test_two_prompts_are_enough_for_an_interval_and_one_is_not() -> None:
    counts, prompts = np.array([[4, 1], [1, 4], [3, 2], [5, 0], [0, 5], [4, 1]]), [0, 0, 0, 1, 1, 1]
    found = fleiss_kappa(counts, prompts)
    alone = fleiss_kappa(counts[:3]).value, fleiss_kappa(counts[3:]).value
    half = 12.7062 * abs(alone[0] - alone[1]) / 2  # Student's t with one degree of freedom; (C - 1) / C of two squares
    assert found.low == pytest.approx(found.value - half, rel=1e-4)
    assert np.isnan(fleiss_kappa(counts, [0] * 6).low)


def test_pairwise_kappa_is_sklearns_on_common_items_in_both_orders():
    rng = np.random.default_rng(5)
    truth = rng.integers(0, 2, 60)
    rows = [
        (i, who, int(truth[i]) if rng.random() < 0.7 else int(rng.integers(0, 3)))
        for i in range(60) for who in range(4) if who != i % 4 or who == 3
    ]  # fmt: skip
    item, annotator, label = np.array(rows).T
    found = pairwise_agreement(Votes(item, annotator, label, items=60), 20)
    assert list(zip(found.one, found.other, strict=True)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    said = {(i, a): v for i, a, v in rows}
    for one, other, n, share, kappa in zip(*found, strict=True):
        common = [i for i in range(60) if (i, one) in said and (i, other) in said]
        x, y = ([said[i, who] for i in common] for who in (one, other))
        assert (n, share) == (len(common), pytest.approx(np.mean(np.equal(x, y))))
        turn = [1, 0, 2]
        doubled = cohen_kappa_score(x + [turn[v] for v in x], y + [turn[v] for v in y])
        assert kappa == pytest.approx(doubled)
    assert not len(pairwise_agreement(Votes(item, annotator, label, items=60), 61).kappa)


def test_raw_agreement_is_the_mean_share_of_pairs_of_votes_that_agree():
    counts = np.array([[3, 0, 0], [2, 1, 0], [1, 1, 1], [1, 0, 0]])
    found = raw_agreement(counts, range(4))
    assert found.value == pytest.approx((1 + 1 / 3 + 0) / 3) and found.low < found.value < found.high
    assert raw_agreement(counts[3:], [0]) is None
