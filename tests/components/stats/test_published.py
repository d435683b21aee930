"""The statistics of people's ratings equal those of published libraries on the same tables.

statsmodels and choix compute beside them; krippendorff (GPL-3.0) is no dependency, and its number is recorded with the
command that gave it.
"""

import math

import choix
import numpy as np
import pytest
import statsmodels.api as sm
from statsmodels.stats.inter_rater import fleiss_kappa as their_kappa
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.sandwich_covariance import cov_cluster

from components.stats.annotator_votes import Votes, annotator_agreement, fleiss_kappa, krippendorff_alpha
from components.stats.intervals import clustered_mean, wilson
from components.stats.paired import PairedScore, davidson, tallies
from components.stats.raters import _variance

# Twelve items by four raters: a, b, tie. Of both bad there is none.
COUNTS = [[4, 0, 0], [3, 1, 0], [0, 4, 0], [2, 2, 0], [1, 1, 2], [0, 3, 1],
          [4, 0, 0], [0, 0, 4], [3, 0, 1], [1, 3, 0], [2, 1, 1], [0, 4, 0]]  # fmt: skip
WINS = {(0, 1): 18, (1, 0): 9, (0, 2): 20, (2, 0): 5, (1, 2): 14, (2, 1): 11,
        (0, 3): 7, (3, 0): 13, (1, 3): 6, (3, 1): 17, (2, 3): 4, (3, 2): 19}  # fmt: skip
TIED = {(0, 1): 6, (0, 2): 3, (1, 2): 8, (0, 3): 5, (1, 3): 2, (2, 3): 4}


def test_fleiss_kappa_is_statsmodels() -> None:
    assert fleiss_kappa(COUNTS).value == pytest.approx(their_kappa(np.array(COUNTS)), abs=1e-12)


def test_krippendorffs_alpha_is_the_package_krippendorffs() -> None:
    # krippendorff 0.9.0: alpha(value_counts=np.array(COUNTS), level_of_measurement="nominal")
    assert krippendorff_alpha(COUNTS).value == pytest.approx(0.4427724578203375, abs=1e-12)


def test_wilsons_interval_of_a_share_is_statsmodels() -> None:
    for wins, n in ((0, 12), (7, 12), (31, 40), (200, 200)):
        p = wins / n
        ours = wilson(p, p * (1 - p) / n, math.inf, n, 0.95)
        assert (ours.low, ours.high) == pytest.approx(proportion_confint(wins, n, method="wilson"), abs=1e-12)


def test_how_often_a_rater_goes_with_the_others_has_statsmodels_interval() -> None:
    item, annotator, label = np.array([(i, a, (i % 3 == 0) * (a == 2)) for i in range(20) for a in range(3)]).T
    found = annotator_agreement(Votes(item, annotator, label, items=20))
    assert found.compared[2] == 20
    low, high = proportion_confint(round(found.share[2] * 20), 20, method="wilson")
    assert (found.low[2], found.high[2]) == pytest.approx((low, high), abs=1e-12)


def test_the_error_of_a_mean_over_prompts_and_that_over_raters_too_are_statsmodels() -> None:
    random = np.random.default_rng(0)
    items, raters = np.repeat(np.arange(30), 4), random.permuted(np.tile(np.arange(9), (30, 1)), axis=1)[:, :4].ravel()
    y = (random.random(120) + random.random(30)[items] + random.random(9)[raters] / 2) / 2.5
    fit = sm.OLS(y, np.ones(120)).fit()
    one, two = (float(cov_cluster(fit, groups)[0, 0]) for groups in (items, raters))
    both = one + two - float(cov_cluster(fit, items * 9 + raters, use_correction=False)[0, 0])
    assert both > max(one, two), "else the larger of the two counts"
    assert _variance((y - y.mean()) / 120, items, raters)[0] == pytest.approx(both, rel=1e-12)
    interval = clustered_mean(y, items.tolist())
    theirs = sm.OLS(y, np.ones(120)).fit(cov_type="cluster", cov_kwds={"groups": items}, use_t=True).conf_int()[0]
    assert (interval.low, interval.high) == pytest.approx(tuple(theirs), abs=1e-12)


def test_strengths_without_ties_are_choixs() -> None:
    lost = [pair for pair, n in WINS.items() for _ in range(n)]
    ours, nu, _ = davidson(tallies([PairedScore(*pair, 1.0) for pair in lost], 4))
    assert ours == pytest.approx(choix.opt_pairwise(4, lost, alpha=0, tol=1e-12), abs=1e-6) and nu == 0


def test_strengths_with_ties_are_those_of_statsmodels_log_linear_model() -> None:
    """Fienberg and Larntz 1976 (Biometrika 63:245): Davidson's model is a Poisson one with a term for each pair."""
    made = [PairedScore(*pair, 1.0) for pair, n in WINS.items() for _ in range(n)]
    made += [PairedScore(*pair, 0.5) for pair, n in TIED.items() for _ in range(n)]
    counts, design = [], []
    for number, (i, j) in enumerate(TIED):
        for kind, n in ((1, WINS[i, j]), (-1, WINS[j, i]), (0, TIED[i, j])):
            row = np.zeros(4 + 6)  # strengths of models 1 to 3 against 0, log nu, the pairs
            for model, sign in ((i, kind), (j, -kind)):
                if model:
                    row[model - 1] = sign / 2
            row[3], row[4 + number] = kind == 0, 1
            counts.append(n)
            design.append(row)
    theirs = sm.GLM(counts, np.array(design), family=sm.families.Poisson()).fit(tol=1e-12).params
    ours, nu, _ = davidson(tallies(made, 4))
    assert ours[1:] - ours[0] == pytest.approx(theirs[:3], abs=1e-6)
    assert math.log(nu) == pytest.approx(theirs[3], abs=1e-6)
