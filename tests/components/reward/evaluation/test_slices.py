"""A fault in one slice is seen there, and chance alone is not called a fault."""

import json
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from components.gates.judging import GatesConfig, judge
from components.reward.evaluation import slices
from components.reward.evaluation.slices import BINS, SMALLEST, ScoredPairs, slice_report, slices_of
from components.stats.calibration.calibration_metrics import calibration, fit_temperature
from components.stats.calibration.nulls import joint_quantiles

THRESHOLDS = {"slice_ece_excess": 0.0, "slice_accuracy_low": 0.5, "ece": 0.05, "calibration_slope": (0.8, 1.25)}


def simulated(seed: int, n: int = 2000, long: float = 1.0) -> ScoredPairs:
    """Pairs whose logits are true, but for a factor `long` on the longest quarter of them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 60, size=(2, n))
    longest = tokens.max(axis=0) > np.quantile(tokens.max(axis=0), 0.75)
    true = rng.normal(scale=1.5, size=n)
    first_wins = rng.random(n) < expit(true)
    said = np.where(longest, long, 1.0) * true
    margin = np.where(first_wins, said, -said)
    votes = rng.integers(3, 6, size=n)
    rows = [
        {"chosen": "x" * int(a), "rejected": "x" * int(b), "votes": 5, "votes_chosen": int(v), "source": "s",
         "category": f"c{i % 4}"}
        for i, (a, b, v) in enumerate(zip(*tokens, votes, strict=True))
    ]  # fmt: skip
    return ScoredPairs(rows, tokens, np.stack([margin, np.zeros(n)]))


def report(pairs: ScoredPairs, temperature: float = 1.0) -> dict[str, Any]:
    return slice_report(pairs, range(len(pairs.rows)), temperature, seed=0, draws=2000).document()


def failed(pairs: ScoredPairs, temperature: float = 1.0, reported: dict[str, Any] | None = None) -> list[str]:
    overall = calibration(pairs.scores[0], range(len(pairs.rows)), temperature, seed=0, draws=200).numbers
    found = overall | (reported or report(pairs, temperature))
    metrics = {f"reward/{name}": value for name, value in found.items() if isinstance(value, float)}
    gates = GatesConfig.model_validate({"reward": THRESHOLDS})
    return [verdict.name for verdict in judge("reward", metrics, gates) if verdict.stops]


def by_name(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [each for each in found["slices"] if each["kind"] == kind]


def test_a_model_without_fault_passes_every_slice() -> None:
    assert failed(simulated(0)) == []


def test_wrong_on_long_answers_is_caught_by_the_slices_and_not_by_the_overall_error() -> None:
    """Logits 2.5 times too large on the longest quarter; the temperature makes up for it on average."""
    pairs = simulated(1, long=2.5)
    temperature = fit_temperature(simulated(11, long=2.5).scores[0])
    found = report(pairs, temperature)
    assert failed(pairs, temperature, found) == ["reward.slice_ece_excess"]
    excess = [each["ece"] - each["ece_null_joint"] for each in by_name(found, "length")]
    assert max(excess) > 0.01 and excess[-1] > 0
    slopes = [each["calibration_slope"] for each in by_name(found, "length")]
    assert slopes[-1] < 0.75 and min(slopes[:-1]) > 1, "overconfident on the longest alone"


def test_a_model_that_ranks_long_answers_backwards_fails_on_the_accuracy_of_that_slice() -> None:
    pairs = simulated(2, long=-1.0)
    found = report(pairs)
    long = by_name(found, "length")[-1]
    assert long["accuracy"] < 0.4 and found["slice_accuracy_low"] == long["accuracy_low"]
    assert "reward.slice_accuracy_low" in failed(pairs, reported=found)


def test_slices_that_take_the_label_to_tell_are_reported_and_not_judged() -> None:
    """The longer wins with a chance of 0.65 and the model says so: perfect, and wrong whenever the shorter won."""
    n = 2000
    rng = np.random.default_rng(3)
    tokens = np.stack([rng.integers(30, 60, n), rng.integers(5, 25, n)])
    tokens = np.where(rng.random(n) < 0.65, tokens, tokens[::-1])
    margin = np.log(0.65 / 0.35) * np.sign(tokens[0] - tokens[1])
    rows = [{"chosen": "x" * int(a), "rejected": "x" * int(b)} for a, b in tokens.T]
    found = report(ScoredPairs(rows, tokens, np.stack([margin, np.zeros(n)])))
    longer, shorter = by_name(found, "chosen is")
    assert (longer["accuracy"], shorter["accuracy"]) == (1.0, 0.0)
    assert min(longer["ece"], shorter["ece"]) > 0.3 and not longer["judged"] and not shorter["judged"]
    assert found["slice_ece_excess"] <= 0 and found["balanced_length_accuracy"] == 0.5


def test_a_slice_says_all_that_a_calibration_of_its_pairs_alone_says() -> None:
    pairs, prompts = simulated(8, n=1200), [f"prompt {i // 3}" for i in range(1200)]
    found = slice_report(pairs, prompts, 1.7, seed=0, draws=300).document()
    inside = next(each.inside for each in slices_of(pairs) if (each.kind, each.name) == ("category", "c2"))
    slice_ = next(each for each in by_name(found, "category") if each["slice"] == "c2")
    of_them = [prompt for prompt, taken in zip(prompts, inside, strict=True) if taken]
    alone = calibration(pairs.scores[0][inside], of_them, 1.7, 0, BINS, draws=slices.DRAWS).document()
    assert alone.keys() - slice_.keys() == {"target", "level", "temperature", "temperature_at_end"}
    null = alone.pop("ece_null_95")  # of draws that all slices share
    assert {name: value for name, value in alone.items() if name in slice_} == {
        n: slice_[n] for n in alone if n in slice_
    }
    assert slice_["ece_null_95"] == pytest.approx(null, rel=0.2)
    assert slice_["ece_width_low"] < slice_["ece_width_high"] and slice_["log_loss_before"] != slice_["log_loss"]


def test_a_slice_of_too_few_pairs_or_prompts_is_said_and_not_judged() -> None:
    pairs = simulated(4, n=1000)
    rows = [row | {"category": "rare" if i < SMALLEST - 1 else "often"} for i, row in enumerate(pairs.rows)]
    rare, often = sorted(by_name(report(pairs._replace(rows=rows)), "category"), key=lambda each: each["pairs"])
    assert (rare["pairs"], rare["judged"]) == (SMALLEST - 1, False) and "fewer than" in rare["why_not"]
    assert "accuracy" not in rare and often["judged"]
    one_prompt = slice_report(pairs, ["same"] * 1000, 1.0, seed=0, draws=50).numbers
    assert one_prompt["slices_judged"] == 0
    assert one_prompt["slice_accuracy_low"] is None and one_prompt["slice_ece_excess"] is None


def test_every_pair_is_in_one_slice_of_each_kind_that_names_all() -> None:
    pairs = simulated(5, n=300)
    for kind in ("length", "length difference", "source", "category", "vote"):
        count = sum(each.inside.astype(int) for each in slices_of(pairs) if each.kind == kind)
        assert (count == 1).all(), kind


def test_pairs_with_a_cut_response_are_a_judged_slice_where_there_are_any() -> None:
    pairs = simulated(9, n=600)
    assert by_name(report(pairs), "response cap") == []
    marked = [row | {"overlong": True} if i % 3 == 0 else row for i, row in enumerate(pairs.rows)]
    within, cut = by_name(report(pairs._replace(rows=marked)), "response cap")
    assert (within["slice"], within["pairs"], cut["slice"], cut["pairs"]) == ("within", 400, "a response is cut", 200)
    assert within["judged"] and cut["judged"] and cut["accuracy"] != within["accuracy"]


def test_votes_are_unanimous_clear_and_narrow() -> None:
    votes = [(5, 5), (3, 3), (4, 5), (3, 4), (2, 3), (3, 5), (None, None)]
    rows = [{"chosen": "a", "rejected": "bb", "votes_chosen": c, "votes": v} for c, v in votes]
    pairs = ScoredPairs(rows, np.ones((2, 7), dtype=int), np.zeros((2, 7)))
    found = {each.name: np.flatnonzero(each.inside).tolist() for each in slices_of(pairs) if each.kind == "vote"}
    assert found == {"unanimous": [0, 1], "clear": [2, 3], "narrow": [4, 5]}


def test_rare_names_share_a_slice() -> None:
    names = [f"n{i:02}" for i in range(25)] * 2 + ["n03", None]
    found = slices._by_name("category", names)
    assert len(found) == slices.MOST_NAMES + 1 and found[0].name == "n03" and found[-1].name == "all others"
    assert sum(each.inside.sum() for each in found) == 51


def test_the_report_is_json_and_the_same_again() -> None:
    pairs = simulated(6, n=600)
    found = report(pairs)
    assert json.loads(json.dumps(found, allow_nan=False)) == found == report(pairs)
    assert all(len(each["bins"]) <= BINS for each in found["slices"] if "bins" in each)


def test_joint_quantiles_of_one_column_are_its_own_and_of_copies_need_no_correction() -> None:
    column = np.random.default_rng(0).random((2000, 1))
    alone = joint_quantiles(column)
    assert alone[0] == pytest.approx(np.quantile(column, 0.95), abs=2e-3)
    assert joint_quantiles(np.repeat(column, 8, axis=1)) == pytest.approx(np.repeat(alone, 8))
    independent = joint_quantiles(np.random.default_rng(1).random((20_000, 8)))
    assert independent == pytest.approx(np.full(8, 0.95 ** (1 / 8)), abs=3e-3)  # Sidak's level


def test_a_chosen_response_one_character_longer_is_the_longer_one() -> None:
    pairs = simulated(0, n=8)
    for row, (chosen, rejected) in zip(
        pairs.rows, [("ab", "a"), ("a", "ab"), ("ab", "cd"), ("abc", "a")] * 2, strict=True
    ):
        row.update(chosen=chosen, rejected=rejected)
    sides = {each.name: each.inside.tolist() for each in slices_of(pairs) if each.kind == "chosen is"}
    assert sides == {"the longer": [True, False, False, True] * 2, "the shorter": [False, True, False, False] * 2}
