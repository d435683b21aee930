import numpy as np
import pytest

from components.stats.annotator_votes import EQUAL, FIRST, NONE, SECOND, Votes, plurality
from components.stats.dawid_skene import dawid_skene

# 40 items, 6 annotators of falling care, simulated once; a column an annotator, a dot where they didn't vote.
SHEET = """
    222222 2.1020 221012 .22.2. 11121. 222012 .2.200 000000 .100.1 0...00 0.20.0 20202. 222.20 00.000 .11011 ..0.2.
    .00.00 .22222 00.000 .1.11. 212.2. 000.0. 112.10 000..0 22222. 002020 ..22.. .1.111 111011 1111.1 .12121 ...111
    11.1.. 2..020 2212.. 22..00 212.11 111121 .11012 220.12
""".split()
# Dawid and Skene 1979, table 1, as transcribed in github.com/dallascard/dawid_skene: 45 patients, grades 1 to 4;
# observer 1 three times, then observers 2 to 5.
ANAESTHETISTS = """
    1111111 3334334 1122122 2223121 2223222 2223322 1222111 3333433 2222223 2322223 4444444 2223343 1111111 2223212
    1211111 1112111 1111111 1111111 2222221 2221322 2222222 2222221 2223222 2212222 1111111 1111111 2322222 1111111
    1111111 1121121 1111111 3333233 1111111 2222222 2223232 4334343 2212232 2323233 3333432 1111111 1111111 1212111
    2322222 1211111 2222222
""".split()


def read(sheet: list[str], annotators: list[int], first: int, labels: int = 3) -> Votes:
    given = [
        (item, annotators[column], int(label) - first)
        for item, row in enumerate(sheet)
        for column, label in enumerate(row)
        if label != "."
    ]
    return Votes(*np.array(given).T, len(sheet), labels)  # type: ignore[misc]


def simulated(items: int, skill: np.ndarray, votes: int, seed: int) -> tuple[np.ndarray, Votes]:
    """True labels (a tenth equal), and votes that are right as often as the annotator's skill, else drawn at random."""
    rng = np.random.default_rng(seed)
    truth = rng.choice(3, items, p=[0.45, 0.45, 0.1])
    item = np.repeat(np.arange(items), votes)
    annotator = rng.integers(0, skill.size, item.size)
    label = np.where(rng.random(item.size) < skill[annotator], truth[item], rng.integers(0, 3, item.size))
    return truth, Votes(item, annotator, label, items)


def reordered(votes: Votes, items: np.ndarray) -> Votes:
    """The same votes, with the responses of `items` (I,), booleans, stored the other way round."""
    turn = items[votes.item] & (votes.label != EQUAL)
    return Votes(votes.item, votes.annotator, np.where(turn, 1 - votes.label, votes.label), votes.items)


# crowd-kit 1.4.2, DawidSkene(n_iter=1500, tol=-inf).fit(...): priors_ and errors_, here as rows of the true label.
CROWD_KIT = {
    "anaesthetists": (
        [0.399555, 0.421983, 0.111795, 0.066667],
        {
            0: [
                [0.889488, 0.110512, 0, 0], [0.070585, 0.876380, 0.053035, 0],
                [0, 0.338822, 0.661178, 0], [0, 0, 0.555556, 0.444444],
            ],
            3: [
                [0.944430, 0.055570, 0, 0], [0.053672, 0.842627, 0.103702, 0],
                [0, 0, 0.801224, 0.198776], [0, 0, 0.333333, 0.666667],
            ],
        },
    ),
    "sheet": (
        [0.236732, 0.362092, 0.401177],
        {
            0: [[1, 0, 0], [0, 0.816496, 0.183504], [0, 0, 1]],
            2: [[0.690846, 0, 0.309154], [0.107184, 0.569181, 0.323635], [0.107844, 0.232652, 0.659504]],
            5: [[1, 0, 0], [0.093497, 0.820394, 0.086109], [0.496051, 0, 0.503949]],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CROWD_KIT)
def test_dawid_skene_is_crowd_kits(name: str) -> None:
    sheet = read(SHEET, [*range(6)], 0)
    votes = sheet if name == "sheet" else read(ANAESTHETISTS, [0, 0, 0, 1, 2, 3, 4], 1, labels=4)
    fit = dawid_skene(votes, symmetric=False, smoothing=1e-9, tolerance=1e-13, max_iterations=1500)
    prior, confusion = CROWD_KIT[name]
    assert fit.prior == pytest.approx(prior, abs=2e-6)
    for annotator, expected in confusion.items():
        assert fit.confusion[annotator] == pytest.approx(np.array(expected), abs=2e-6)
    if name == "anaesthetists":
        classes = "142222132243121111222222112111131224233111212"  # with crowd-kit's probas_ of patient 38 beside it
        assert "".join(str(label + 1) for label in fit.label) == classes
        assert fit.posterior[37] == pytest.approx([0, 0.021200, 0.978800, 0], abs=2e-6)
    else:
        assert fit.posterior[1] == pytest.approx([0, 0.018184, 0.981816], abs=2e-6)


def test_it_knows_the_careful_from_the_careless_and_labels_better_than_a_count_of_votes() -> None:
    skill = np.linspace(0.05, 0.95, 40)
    truth, votes = simulated(4000, skill, 5, 3)
    for symmetric in (False, True):
        fit = dawid_skene(votes, symmetric)
        assert fit.converged
        assert fit.accuracy == pytest.approx(skill + (1 - skill) / 3, abs=0.06)
        assert (fit.label == truth).mean() > (plurality(votes.counts()) == truth).mean() + 0.05
        sure = fit.posterior.max(axis=1)
        assert sure.mean() == pytest.approx((fit.label == truth).mean(), abs=0.01), "its certainty must be calibrated"


def test_the_symmetric_fit_is_that_of_each_item_in_both_orders_and_blind_to_the_stored_one() -> None:
    votes = simulated(500, np.linspace(0, 1, 15), 4, 4)[1]
    fit = dawid_skene(votes)
    turned = np.random.default_rng(5).random(500) < 0.8
    other = dawid_skene(reordered(votes, turned))
    assert other.confusion == pytest.approx(fit.confusion, abs=1e-9)
    assert other.posterior[turned] == pytest.approx(fit.posterior[turned][:, [1, 0, 2]], abs=1e-9)
    flipped = reordered(votes, np.ones(500, bool))
    doubled = Votes(
        np.concatenate([votes.item, 500 + votes.item]), np.concatenate([votes.annotator] * 2),
        np.concatenate([votes.label, flipped.label]), 1000,
    )  # fmt: skip
    # Twice the votes: twice the smoothing, and the same tolerance a vote.
    assert dawid_skene(doubled, False, smoothing=0.2).posterior[:500] == pytest.approx(fit.posterior, abs=1e-9)


def test_what_nobody_voted_stays_impossible_and_an_item_without_votes_unlabelled() -> None:
    item = np.array([0, 0, 0, 1, 1, 1, 3, 3])
    fit = dawid_skene(Votes(item, np.array([0, 1, 2, 0, 1, 2, 0, 1]), np.array([0, 0, 1, 1, 1, 1, 0, 1]), 4))
    assert fit.posterior[[0, 1, 3], EQUAL].tolist() == [0.0] * 3 and fit.prior[EQUAL] == 0.0
    assert np.isnan(fit.posterior[2]).all() and fit.posterior[[0, 1, 3]].sum(axis=1) == pytest.approx(1.0)
    assert fit.label[:3].tolist() == [FIRST, SECOND, NONE]
    assert fit.label[3] == NONE  # annotators 0 and 1 err alike here


def test_equals_who_oppose_each_other_leave_an_item_undecided_whatever_the_rounding() -> None:
    rng = np.random.default_rng(8)
    skill, truth = np.array([0.9, 0.75, 0.6, 0.8, 0.7]), rng.integers(0, 2, 100)
    alike = np.where(rng.random((100, 5)) < skill, truth[:, None], 1 - truth[:, None])  # five pairs who vote alike
    sides = rng.integers(0, 2, (100, 5))
    label = np.concatenate([np.concatenate([alike, alike], axis=1), np.concatenate([sides, 1 - sides], axis=1)])
    fit = dawid_skene(Votes(np.repeat(np.arange(200), 10), np.tile(np.arange(10), 200), label.ravel(), 200))
    assert (fit.posterior[100:, FIRST] != 0.5).any(), "the example must be one that rounds"
    assert (fit.label[100:] == NONE).all() and (fit.label[:100] != NONE).all()


def test_votes_it_cannot_use_are_refused() -> None:
    with pytest.raises(ValueError, match="each with its annotator"):
        dawid_skene(Votes(np.zeros(3, int), np.full(3, -1), np.array([0, 0, 1]), 1))
    with pytest.raises(ValueError, match="needs votes"):
        dawid_skene(Votes(*[np.zeros(0, int)] * 3, 2))
