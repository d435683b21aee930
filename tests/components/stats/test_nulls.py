"""A perfect model is called miscalibrated as rarely as is said, however its pairs depend on each other."""

from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.special import expit

from components.gates.judging import GatesConfig, judge
from components.reward.evaluation.slices import BINS, ScoredPairs, slice_report, slices_of
from components.stats.calibration.calibration_metrics import calibration, equal_mass_bins, equal_width_bins
from components.stats.calibration.nulls import Judgements, cells_of, ece_nulls, slope_null

BAND = (0.8, 1.25)
REPEATED, EACH = 20, 150
"""Sets of scores, and outcomes drawn for each."""


class Ranked(NamedTuple):
    """Rankings of k responses, all pairs of each, and a model that knows their true scores."""

    scores: np.ndarray
    """(rankings, k), the highest first."""
    better: np.ndarray
    worse: np.ndarray
    """(n,) places of the pairs' responses in `scores`, flat; the model prefers `better`."""

    @classmethod
    def drawn(cls, rng: np.random.Generator, rankings: int, k: int) -> "Ranked":
        scores = -np.sort(-rng.normal(scale=1.2, size=(rankings, k)))
        pairs = np.array(list(combinations(range(k), 2)))
        places = (np.arange(rankings)[:, None, None] * k + pairs).reshape(-1, 2)
        return cls(scores, *places.T)

    @property
    def logits(self) -> np.ndarray:
        return self.scores.ravel()[self.better] - self.scores.ravel()[self.worse]

    def rankings(self, rng: np.random.Generator, draws: int) -> np.ndarray:
        """Whether the model is right on each pair, (draws, n): the best is chosen, then the best of the rest."""
        weights = np.broadcast_to(np.exp(self.scores), (draws, *self.scores.shape)).copy()
        rank = np.empty(weights.shape)
        for place in range(self.scores.shape[1]):
            total = weights.cumsum(axis=2)
            taken = (total > rng.random(total.shape[:2])[..., None] * total[..., -1:]).argmax(axis=2)[..., None]
            np.put_along_axis(rank, taken, place, axis=2)
            np.put_along_axis(weights, taken, 0.0, axis=2)
        rank = rank.reshape(draws, -1)
        return rank[:, self.better] < rank[:, self.worse]

    def rows(self, right: np.ndarray) -> list[dict[str, Any]]:
        """Pairs as validation writes them, of outcomes (n,)."""
        k = self.scores.shape[1]
        sides = [(b, w) if won else (w, b) for b, w, won in zip(self.better, self.worse, right, strict=True)]
        return [
            {"prompt": f"prompt {c // k}", "chosen": f"reply {c % k}", "rejected": f"reply {r % k}", "source": "file",
             "row": int(c // k) + 1}
            for c, r in sides
        ]  # fmt: skip


def report(logits: np.ndarray, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    prompts = [row["prompt"] for row in rows]
    return calibration(logits, prompts, 1.0, judgements=Judgements.of(rows, prompts), **options).numbers


def errors(confidence: np.ndarray, right: np.ndarray, bin_of: np.ndarray) -> np.ndarray:
    """ECE (draws,) of outcomes (draws, n)."""
    return np.abs((confidence - right) @ np.eye(bin_of.max() + 1)[bin_of]).sum(axis=1) / confidence.size


def slopes(size: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Recalibration slopes (draws,): Newton's steps on the logistic regression of outcomes (draws, n)."""
    b = np.ones((len(right), 1))
    for _ in range(8):
        p = expit(b * size)
        b = b + ((right - p) @ size / (p * (1 - p) @ size**2))[:, None].clip(-0.5, 0.5)
    return b[:, 0]


@pytest.fixture(scope="module", params=[(12, 9), (40, 9), (600, 2)], ids=["12 of 9", "40 of 9", "600 pairs"])
def perfect(request: Any) -> dict[str, np.ndarray]:
    """How often a perfect model is over each null, and outside the slope's band and null, over 3,000 outcomes."""
    rng = np.random.default_rng(5)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("ece", "ece_width", "outside", "off")}
    for seed in range(REPEATED):
        ranked = Ranked.drawn(rng, *request.param)
        right, confidence = ranked.rankings(rng, EACH), expit(ranked.logits)
        null = report(np.where(right[0], 1, -1) * ranked.logits, ranked.rows(right[0]), seed=seed, draws=1500)
        for name, bins in (("ece", equal_mass_bins), ("ece_width", equal_width_bins)):
            found[name].append(errors(confidence, right, bins(confidence, 10)) > null[f"{name}_null_95"])
        slope = slopes(ranked.logits, right)
        outside = (slope < BAND[0]) | (slope > BAND[1])
        found["outside"].append(outside)
        found["off"].append((slope < null["slope_null_low"]) | (slope > null["slope_null_high"]))
    return {name: np.concatenate(each) for name, each in found.items()}


def test_a_perfect_model_is_over_its_null_in_5_percent_of_rankings_and_of_independent_pairs(perfect: Any) -> None:
    for name in ("ece", "ece_width", "off"):
        assert 0.04 <= perfect[name].mean() <= 0.06, name
    assert (perfect["outside"] & perfect["off"]).mean() <= 0.06


def stopped(ranked: Ranked, right: np.ndarray, factor: float) -> list[str]:
    """The gates that stop a model whose logits are `factor` times the true ones."""
    rows = ranked.rows(right)
    found = report(factor * np.where(right, 1, -1) * ranked.logits, rows, seed=0, draws=300)
    metrics = {f"reward/{name}": value for name, value in found.items() if isinstance(value, float)}
    gates = GatesConfig.model_validate({"reward": {"ece": 0.05, "ece_width": 0.05, "calibration_slope": BAND}})
    return [verdict.name for verdict in judge("reward", metrics, gates) if verdict.stops]


@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
@pytest.mark.parametrize("size", [(60, 9), (1000, 2)], ids=["60 of 9", "1000 pairs"])
def test_a_temperature_that_is_off_by_half_is_caught(size: tuple[int, int], factor: float) -> None:
    rng = np.random.default_rng(7)
    found = []
    for _ in range(20):
        ranked = Ranked.drawn(rng, *size)
        found.append(stopped(ranked, ranked.rankings(rng, 1)[0], factor))
    assert np.mean(["reward.calibration_slope" in each for each in found]) >= 0.85
    assert np.mean([bool(each) for each in found]) >= 0.9, "by this gate or that"


def test_chance_takes_any_slice_of_rankings_over_its_joint_null_in_5_percent() -> None:
    rng = np.random.default_rng(9)
    any_over: dict[str, list[np.ndarray]] = {"together": [], "apart": []}
    for seed in range(4):
        ranked = Ranked.drawn(rng, 40, 9)
        right, rows = ranked.rankings(rng, 500), ranked.rows(ranked.rankings(rng, 1)[0])
        confidence, prompts = expit(ranked.logits), [row["prompt"] for row in rows]
        tokens = rng.integers(5, 60, size=(2, len(rows)))
        pairs = ScoredPairs(rows, tokens, np.stack([ranked.logits, np.zeros(len(rows))]))
        for name, judgements in (("together", Judgements.of(rows, prompts)), ("apart", None)):
            clusters = prompts if judgements else list(range(len(rows)))
            found = slice_report(pairs, clusters, 1.0, seed, 2000, judgements).slices
            over = [
                errors(confidence[each.inside], right[:, each.inside], equal_mass_bins(confidence[each.inside], BINS))
                > slice_.numbers["ece_null_joint"]
                for each, slice_ in zip(slices_of(pairs), found, strict=True)
                if slice_.why_not is None
            ]
            any_over[name].append(np.any(over, axis=0))
    assert 0.03 <= np.mean(any_over["together"]) <= 0.065
    assert np.mean(any_over["apart"]) > 0.08


def test_pairs_of_one_prompt_that_were_judged_apart_widen_the_nulls_as_far_as_they_agree() -> None:
    """A model says 0.7 of every pair, and is right in 0.5 on some prompts and in 0.9 on others: perfect on average."""
    rng = np.random.default_rng(3)
    n, cells_for = 480, np.ones(480, dtype=bool)
    judgements = Judgements.alone(np.repeat(np.arange(80), 6))
    found = []
    for seed in range(500):
        right = rng.random(n) < np.repeat(rng.choice([0.5, 0.9], 80), 6)
        size = rng.normal(np.log(7 / 3), 0.01, n)
        logits, confidence = np.where(right, size, -size), expit(size)
        bin_of = equal_mass_bins(confidence, 4)
        nulls = ece_nulls(logits, judgements, cells_of([cells_for], [bin_of], 4), np.array([n]), seed, 200)
        ece, slope = errors(confidence, right[None], bin_of)[0], slopes(size, right[None])[0]
        low, high = slope_null(logits, judgements, nulls.wrong)
        low_apart, high_apart = slope_null(logits, Judgements.alone(np.arange(n)), nulls.wrong)
        found.append((
            ece > nulls.quantile(0.95)[0], ece > np.quantile(nulls.simulated, 0.95),
            not low < slope < high, not low_apart < slope < high_apart,
        ))  # fmt: skip
    over, over_apart, off, off_apart = np.mean(found, axis=0)
    assert over <= 0.065 and off <= 0.065, "the nulls hold"
    assert over_apart > 0.09 and off_apart > 0.12, "and would not, were the pairs taken for independent"


def test_one_prompt_whose_pairs_were_judged_apart_has_no_null() -> None:
    numbers = calibration([1.0, -0.5, 2.0, 0.3], ["same"] * 4, 1.0, 0, 2, 50).numbers
    assert [numbers[name] for name in ("ece_null_95", "ece_width_null_95", "slope_null_low", "slope_null_high")] == [
        None
    ] * 4


def test_only_pairs_of_one_row_are_judged_together_and_share_their_responses() -> None:
    def row(prompt: str, number: int, chosen: str, rejected: str) -> dict[str, Any]:
        return {"prompt": prompt, "row": number, "chosen": chosen, "rejected": rejected, "source": "file"}

    rows = [row("p", 1, "a", "b"), row("p", 1, "b", "c"), row("q", 2, "a", "b"), row("q", 3, "b", "a")]
    found = Judgements.of(rows, [each["prompt"] for each in rows])
    assert found.prompts.tolist() == [0, 0, 1, 1] and found.together.tolist() == [0, 0, 1, 2]
    (a, b, *others), (b_too, c, *more) = found.responses.tolist()
    assert b == b_too and len({a, b, c, *others, *more}) == 7
    assert found.unknown_dependence and not found.inside(np.array([True, True, True, False])).unknown_dependence
    rows_without_a_number = [{name: value for name, value in each.items() if name != "row"} for each in rows]
    assert Judgements.of(rows_without_a_number, "ppqq").together.tolist() == [0, 1, 2, 3]
