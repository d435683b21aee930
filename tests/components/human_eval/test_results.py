"""Wins and losses, the win rate at equal length, raters' time, and whether the reward model agrees with the judges."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from components.data.spreadsheet import write_csv
from components.gates.judging import judge
from components.human_eval.results.outcomes import at_equal_length, outcomes
from components.human_eval.returned_labels import Sample
from components.human_eval.sheet import SheetRow, as_record
from flows.config.run_config import load_config


def lengths(n: int, seed: int, effect: float = 0.0, bonus: float = 0.0) -> tuple[list[float], list[float]]:
    """Scores of n items whose win depends on the difference of lengths, and those differences, in characters."""
    rng = np.random.default_rng(seed)
    gaps = rng.normal(40, 60, n)
    return list((rng.random(n) < expit(bonus + effect * gaps / 60)).astype(float)), list(gaps)


def test_the_fit_at_equal_length_is_the_logistic_regression_of_a_library() -> None:
    scores, gaps = lengths(300, 1, effect=1.0, bonus=0.3)
    scores[:40] = [1 / 3] * 20 + [0.5] * 20
    rate, effect = at_equal_length(scores, gaps, range(300), 0, 0.95, draws=2)
    design = sm.add_constant(np.array(gaps) / np.std(gaps))
    fitted = sm.GLM(scores, design, family=sm.families.Binomial()).fit()
    assert rate.value == pytest.approx(expit(fitted.params[0]), abs=1e-8)
    assert effect == pytest.approx(fitted.params[1], abs=1e-8)


def test_a_policy_that_wins_by_length_alone_has_a_half_at_equal_length() -> None:
    scores, gaps = lengths(600, 5, effect=1.5)
    rate, effect = at_equal_length(scores, gaps, range(600), 0, 0.95)
    assert np.mean(scores) > 0.65 and rate.low < 0.5 < rate.high and rate.value == pytest.approx(0.5, abs=0.05)
    assert effect == pytest.approx(1.5, abs=0.4)


def test_the_interval_at_equal_length_covers_the_truth_and_is_wider_where_prompts_come_in_copies() -> None:
    found = [at_equal_length(*lengths(120, seed, 0.8, 0.5), range(120), 0, 0.95, draws=100)[0] for seed in range(100)]
    assert 0.89 <= np.mean([each.low <= expit(0.5) <= each.high for each in found]) <= 0.99
    scores, gaps = lengths(60, 3, 0.8, 0.5)
    alone = at_equal_length(scores, gaps, range(60), 0, 0.95, draws=400)[0]
    fourfold = [(score, gap, prompt) for prompt, (score, gap) in enumerate(zip(scores, gaps, strict=True))] * 4
    copied = at_equal_length(*map(list, zip(*sorted(fourfold), strict=True)), 0, 0.95, draws=400)[0]
    assert copied.value == pytest.approx(alone.value) and copied.high - copied.low == pytest.approx(
        alone.high - alone.low, rel=0.15
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(-50, 50)), min_size=2, max_size=30))
def test_any_scores_and_lengths_give_a_rate_within_its_ends(rows: list[tuple[float, int]]) -> None:
    scores, gaps = [row[0] for row in rows], [row[1] for row in rows]
    if len(set(gaps)) == 1:
        with pytest.raises(ValueError, match="not all equal"):
            at_equal_length(scores, gaps, range(len(rows)), 0, 0.95, draws=20)
        return
    rate, effect = at_equal_length(scores, gaps, range(len(rows)), 0, 0.95, draws=20)
    assert 0 <= rate.low <= rate.value <= rate.high <= 1 and np.isfinite(effect)
    flipped, _ = at_equal_length([1 - s for s in scores], gaps, range(len(rows)), 0, 0.95, draws=20)
    assert flipped.value == pytest.approx(1 - rate.value, abs=1e-6)


def test_outcomes_count_items_by_their_mean_rating() -> None:
    assert outcomes([1, 2 / 3, 0.5, 0.5, 1 / 3]) == {
        "wins": 2, "ties": 2, "losses": 1, "wins_share": 0.4, "ties_share": 0.4, "losses_share": 0.2,
    }  # fmt: skip


def liking(share: float, seed: int = 0) -> Callable[[SheetRow], tuple[str, ...]]:
    """Three raters of one mind, who like the policy (`Hey`) on a share of the items."""
    rng = random.Random(seed)

    def rate(row: SheetRow) -> tuple[str, ...]:
        wanted = "Hey" if rng.random() < share else "Dear"
        return ("a" if row.response_a.startswith(wanted) else "b",) * 3

    return rate


def test_wins_ties_losses_and_equal_length_stand_in_the_result(make_case: Callable[..., Any]) -> None:
    case = make_case(policy="Hey you there,", items=30, repeats=0.1)

    def rate(row: SheetRow) -> tuple[str, ...]:
        number = int(row.item[1:5])
        policy = "a" if row.response_a.startswith("Hey") else "b"
        return ("tie", "both_bad", "tie") if number % 5 == 0 else (policy, policy, "tie" if number % 2 else "")

    metrics, result = case.score(case.fill(rate))
    repeated = set(json.loads((case.sample / "key.json").read_text())["repeat_of"])
    tied = sum(f"q{n:04d}" not in repeated for n in range(5, 34, 5))
    assert (metrics["human_eval/items_won"], metrics["human_eval/items_tied"]) == (30 - tied, tied)
    assert metrics["human_eval/items_lost"] == 0 == result["outcomes"]["items"]["losses"]
    of_ratings = result["outcomes"]["ratings"]
    assert of_ratings["wins"] == 2 * (30 - tied) and of_ratings["losses"] == 0 and of_ratings["ties"] > 3 * tied
    assert sum(of_ratings[f"{name}_share"] for name in ("wins", "ties", "losses")) == pytest.approx(1)
    assert result["equal_length"] is None, "every reply of the policy is longer by the same number of characters"
    assert "human_eval/win_rate_equal_length" not in metrics


def test_the_reward_model_is_judged_by_the_judges_through_the_blinding(make_case: Callable[..., Any]) -> None:
    case = make_case(items=40)
    sheet = case.fill(liking(0.7))
    case.believe(lambda row, text: 3.0 if text.startswith("Hey") else 0.0)
    metrics, result = case.score(sheet)
    won = metrics["human_eval/win_rate"]
    assert metrics["human_eval/reward_agreement"] == pytest.approx(won), "it always names the policy"
    assert metrics["human_eval/reward_auroc"] == 0.5, "and so can't tell where the policy loses"
    assert metrics["human_eval/reward_pairs"] == 40
    assert result["reward_model"]["policy_preferred"] == {"judges": pytest.approx(won), "reward_model": 1.0}
    assert metrics["human_eval/reward_ece"] == pytest.approx(expit(3) - won)

    case.believe(lambda row, text: 0.0 if text.startswith("Hey") else 3.0)
    assert case.score(sheet)[0]["human_eval/reward_agreement"] == pytest.approx(1 - won)


@pytest.mark.parametrize("profile", ["demo", "hh-smollm2"])
def test_a_policy_whose_reward_model_disagrees_with_the_judges_is_held(
    make_case: Callable[..., Any], profile: str
) -> None:
    case, gates = make_case(items=40), load_config(profile).gates
    sheet = case.fill(liking(0.92))
    stopped = []
    for believed in ("Hey", "Dear"):
        case.believe(lambda row, text, believed=believed: 2.0 if text.startswith(believed) else 0.0)
        verdicts = judge("human_eval", case.score(sheet)[0], gates)
        stopped.append({verdict.name for verdict in verdicts if verdict.stops and "reward" in verdict.name})
    assert stopped == [set(), {"human_eval.reward_agreement_low", "human_eval.reward_ece"}]


def test_agreement_is_told_by_how_clearly_a_pair_was_decided(make_case: Callable[..., Any]) -> None:
    case = make_case(items=40)

    def rate(row: SheetRow) -> tuple[str, ...]:
        policy = "a" if row.response_a.startswith("Hey") else "b"
        other = "ab"[policy == "a"]
        return ((policy,) * 3, (policy, policy, "tie"), (policy, policy, other), (policy, other, "tie"))[
            int(row.item[1:5]) % 4
        ]

    sheet = case.fill(rate)
    case.believe(lambda row, text: float(text.startswith("Hey")) if int(row.item[1:5]) % 4 < 2 else len(text) % 5)
    _, result = case.score(sheet)
    found = {each["gap"]: each for each in result["reward_model"]["by_gap"]}
    assert list(found) == ["unanimous", "clear", "narrow"] and {each["pairs"] for each in found.values()} == {10}
    assert found["unanimous"]["accuracy"] == found["clear"]["accuracy"] == 1.0 and found["unanimous"]["low"] < 1
    assert result["reward_model"]["pairs"] == 30, "a pair with as many ratings for either side is not decided"


def test_a_pair_counts_as_decided_from_three_ratings_on_or_as_many_as_the_config_says(
    make_case: Callable[..., Any],
) -> None:
    def rate(row: SheetRow) -> tuple[str, ...]:
        policy = "a" if row.response_a.startswith("Hey") else "b"
        number = int(row.item[1:5])
        return (policy, policy, "" if number % 2 else policy)

    for name, options, pairs in (("three", {}, 20), ("two", {"minimum": 2}, 40)):
        case = make_case(name, items=40, **options)
        sheet = case.fill(rate)
        case.believe(lambda row, text: float(text.startswith("Hey") == (int(row.item[1:5]) % 2 == 0)))
        metrics, result = case.score(sheet)
        assert metrics["human_eval/reward_pairs"] == pairs and result["reward_model"]["undecided"] == 40 - pairs
        assert metrics["human_eval/reward_agreement"] == (1 if pairs == 20 else 0.5)
    pair = make_case("pair", items=40, raters=2)
    sheet = pair.fill(lambda row: rate(row)[:2])
    pair.believe(lambda row, text: float(text.startswith("Hey")))
    assert pair.score(sheet)[0]["human_eval/reward_pairs"] == 40, "two raters can give no third rating"


def test_the_agreement_holds_for_other_people_so_that_raters_who_differ_widen_it(
    make_case: Callable[..., Any],
) -> None:
    def rate(row: SheetRow) -> tuple[str, ...]:
        policy = "a" if row.response_a.startswith("Hey") else "b"
        other = "ab"[policy == "a"]
        number = int(row.item[1:5])
        return (policy, other if number % 2 else policy, other if number % 4 else policy)

    case = make_case(items=40)
    case.believe(lambda row, text: float(text.startswith("Hey")))
    differ, _ = case.score(case.fill(rate))
    alike, _ = case.score(case.fill(lambda row: (max(rate(row), key=rate(row).count),) * 3))
    assert differ["human_eval/reward_agreement"] == alike["human_eval/reward_agreement"] == 0.5
    assert differ["human_eval/reward_agreement_low"] < alike["human_eval/reward_agreement_low"] - 0.05


def test_gains_that_only_the_reward_model_likes_show_as_a_low_win_rate_where_they_are_highest(
    make_case: Callable[..., Any],
) -> None:
    case = make_case(items=40)

    def rate(row: SheetRow) -> tuple[str, ...]:
        policy = "a" if row.response_a.startswith("Hey") else "b"
        number = int(row.item[1:5])
        return (("tie",) * 3, ("ab"[policy == "a"],) * 3)[number > 30] if number % 2 or number > 30 else (policy,) * 3

    sheet = case.fill(rate)
    case.believe(lambda row, text: float(int(row.item[1:5]) * text.startswith("Hey")), temperature=2)
    _, result = case.score(sheet)
    quarters = result["reward_model"]["by_gain"]
    repeated = set(json.loads((case.sample / "key.json").read_text())["repeat_of"])
    gains = sorted(int(row.item[1:5]) for row in case.rows() if row.item not in repeated)
    of = [gains[i : i + 10] for i in range(0, 40, 10)]
    assert [(q["gain_from"], q["gain_to"], q["pairs"]) for q in quarters] == [(g[0] / 2, g[-1] / 2, 10) for g in of]
    expected = [sum(0.0 if n > 30 else 0.5 if n % 2 else 1.0 for n in numbers) / 10 for numbers in of]
    assert [q["win_rate"] for q in quarters] == pytest.approx(expected) and expected[0] > expected[-1]
    assert all(q["low"] < q["high"] for q in quarters)


def test_the_area_under_the_curve_is_a_librarys_and_ignores_how_often_the_policy_wins(
    make_case: Callable[..., Any],
) -> None:
    case = make_case(items=40)
    sheet, rng = case.fill(liking(0.6, seed=5)), random.Random(1)
    gain = {row.item.split("-")[0]: rng.gauss(1, 2) for row in case.rows()}
    case.believe(lambda row, text: gain[row.item.split("-")[0]] if text.startswith("Hey") else 0.0)
    metrics, _ = case.score(sheet)
    rated = liking(0.6, seed=5)
    won = {r.item.split("-")[0]: (rated(r)[0] == "a") == r.response_a.startswith("Hey") for r in case.rows()}
    assert metrics["human_eval/reward_auroc"] == pytest.approx(
        roc_auc_score([won[item] for item in gain], list(gain.values()))
    )
    assert metrics["human_eval/reward_auroc_low"] < metrics["human_eval/reward_auroc"]


def test_without_a_decided_pair_nothing_is_said_of_the_reward_model_so_that_its_gate_fails(
    make_case: Callable[..., Any],
) -> None:
    case = make_case()
    case.believe(lambda row, text: float(len(text)))
    metrics, result = case.score(case.fill(lambda row: ("tie", "both_bad", "tie")))
    assert result["reward_model"] is None and not [name for name in metrics if "reward" in name]


@pytest.mark.parametrize("own", [True, False])
def test_a_raters_time_is_the_median_of_what_their_tool_measured(make_case: Callable[..., Any], own: bool) -> None:
    case = make_case()
    path, rows = case.root / "timed.csv", []
    for number, row in enumerate(case.rows()):
        record = as_record(row._replace(ratings=("a", "", "")))
        cell = ["7", "9.5", "11", "", "soon", "-3", "nan"][number % 7]
        if own:
            record = {name: record[name] for name in ("item", "prompt", "response_a", "response_b")}
            record |= {"rater": "2", "rating": "a", "seconds": cell}
        else:
            record |= {"seconds_2": cell}
        rows.append(record)
    write_csv(path, list(rows[0]), rows)
    found = Sample.open(case.sample).answers(path).seconds
    assert {rater for _, rater in found} == {1} and sorted(set(found.values())) == [7, 9.5, 11]
    _, result = case.score(path)
    assert [each["seconds"] for each in result["raters"]] == [None, 9.5, None]
