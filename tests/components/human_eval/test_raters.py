"""What answers say of the raters: leaning to a side, disagreeing with oneself, copying, and being too few."""

import json
import math
import random
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import t as student

from components.base.jsonl import read_rows
from components.data.formats.pairs import parse_pair
from components.data.rows import RawRow
from components.gates.judging import GatesConfig, judge
from components.gates.table import GATES
from components.human_eval.batch.halves import may_train
from components.human_eval.blinding import blind, home_secret
from components.human_eval.results.checks import rater_checks
from components.human_eval.selection import Chosen
from components.human_eval.sheet import SheetRow
from components.stats.betting import always_valid_low
from flows.config.run_config import load_config
from tests.bench.statistics.raters import Study, failing_gates, names_the_offender, simulated_study

Rate = Callable[[SheetRow], tuple[str, ...]]


def honest(row: SheetRow, rater: int, taste: float = 0.75) -> str:
    """Who likes "Hey" mostly, whichever side it stands on."""
    drawn = random.Random(f"{row.prompt} {rater}")
    liked = "a" if row.response_a.startswith("Hey" if drawn.random() < taste else "Dear") else "b"
    return liked if drawn.random() < 0.9 else "tie"


def failed(metrics: dict[str, float], profile: str = "hh-smollm2") -> set[str]:
    gates = load_config(profile).gates
    assert isinstance(gates, GatesConfig)
    return {verdict.name.split(".")[1] for verdict in judge("human_eval", metrics, gates) if not verdict.passed}


def scored(case: Any, rate: Rate) -> tuple[dict[str, float], dict[str, Any]]:
    return case.score(case.fill(rate))


@pytest.fixture(scope="module")
def of_raters() -> tuple[str, ...]:
    return ("position_bias", "self_agreement_low", "raters_alike", "fleiss_kappa")


@pytest.fixture
def case(make_case: Callable[..., Any]) -> Any:
    return make_case(items=40, repeats=0.25)


def test_honest_raters_pass_the_gates_on_raters(case: Any, of_raters: tuple[str, ...]) -> None:
    metrics, result = scored(case, lambda row: tuple(honest(row, n, 0.95) for n in range(3)))
    assert not failed(metrics) & set(of_raters)
    assert metrics["human_eval/self_agreement"] == 1.0 and result["raters"][0]["self_agreement"] == 1.0
    assert 0.5 < metrics["human_eval/self_agreement_low"] < 1


def test_a_rater_who_always_writes_a_fails_position_and_self_agreement(case: Any) -> None:
    metrics, result = scored(case, lambda row: (honest(row, 0, 0.95), honest(row, 1, 0.95), "a"))
    assert failed(metrics) >= {"position_bias", "self_agreement_low"}
    assert metrics["human_eval/position_bias"] == metrics["human_eval/position_bias_high"] == 0.5
    last = result["raters"][2]
    assert last["side_a"]["value"] == 1.0 and last["self_agreement"] == 0.0
    assert metrics["human_eval/self_agreement"] == pytest.approx(2 / 3)


def test_the_position_bias_is_the_named_raters_upper_end(case: Any) -> None:
    """Wilson's interval over prompts: 40 items, 10 of which are shown again."""
    key = json.loads((case.sample / "key.json").read_text())

    def rate(row: SheetRow) -> tuple[str, ...]:
        return (honest(row, 0, 0.95), honest(row, 1, 0.95), "b" if row.item[:5] in ("q0003", "q0011", "q0019") else "a")

    metrics, result = scored(case, rate)
    sides: dict[str, list[float]] = {}
    for row in case.rows():
        item = row.item.split("-")[0]
        sides.setdefault(key["repeat_of"].get(item, item), []).append(float(rate(row)[2] == "a"))
    n, share = 50, 47 / 50
    moved = sum(sum(value - share for value in each) ** 2 for each in sides.values())
    effective, z = share * (1 - share) / (40 / 39 * moved / n**2), student.ppf(0.975, 39)
    high = brentq(lambda x: x - share - z * math.sqrt(x * (1 - x) / effective), share, 1)
    assert metrics["human_eval/position_bias"] == pytest.approx(0.44)
    assert metrics["human_eval/position_bias_high"] == pytest.approx(high - 0.5)
    assert "Rater 3 is named for preferring a side, whichever reply it shows: 47 of 50 ratings for a side are `a`." in (
        result["named_raters"]
    )


def test_a_helper_with_three_answers_is_not_judged_alone() -> None:
    """Three full raters and a helper: position_bias_high was 0.5, raters_alike 1.0."""
    found = failing_gates(Study(48, 3, 3), seeds=range(10), helper=True)
    assert not sum(found.values())


@pytest.mark.parametrize("study", [Study(48, 8, 3), Study(48, 20, 1), Study(128, 8, 3), Study(128, 4, 1)], ids=str)
def test_honest_people_who_share_the_items_pass_the_gates(study: Study) -> None:
    """With 6 or 8 people on 48 items, 0 % passed. At 2 % (make bench-raters) 4 of 30 fail once in 300 times."""
    assert failing_gates(study, range(30))["any"] <= 3


def test_people_who_err_in_seven_of_a_hundred_checks_pass_the_gates() -> None:
    """Two in 120 of these studies failed where a check is guessed in 6 % and odds are 2 (seed 90 among them)."""
    study = Study(128, 12, 3, quality=(0.7, 0.95), care=(0.93, 0.99))
    assert not failing_gates(study, range(84, 96))["any"]


@pytest.mark.parametrize(
    ("study", "offence", "simulations", "least"),
    [(Study(128, 8, 3), offence, 20, 18) for offence in ("always a", "copies", "any answer")]
    + [(Study(256, 20, 3), "coin", 40, 37)],
)
def test_who_does_not_rate_honestly_is_named(study: Study, offence: Any, simulations: int, least: int) -> None:
    """Of 40 coins 35 were named where each other answer was compared alone; knowing how people answer would name 39."""
    named, studies = names_the_offender(study, offence, range(simulations))
    assert studies == simulations and named >= least


def test_raters_who_never_share_an_item_are_not_compared() -> None:
    """The gate `raters_alike` failed where each item has one rater."""
    sample, labels, _ = simulated_study(Study(48, 4, 1), np.random.default_rng(0))
    assert rater_checks(sample, labels).alike is None and GATES["human_eval.raters_alike"].if_measured


def test_two_who_nearly_always_say_tie_are_not_called_copies() -> None:
    """What is equal by the raters' own shares of answers is chance."""
    sample, labels, _ = simulated_study(Study(128, 3, 3), np.random.default_rng(1))
    ties = {item: ("tie", "tie", row[2]) for item, row in labels.items()}
    assert not rater_checks(sample, ties).copies.named
    assert (0, 1) in rater_checks(sample, {i: (row[0], row[0], row[2]) for i, row in labels.items()}).copies.named


def test_copied_columns_fail_though_their_kappa_is_perfect(case: Any) -> None:
    metrics, result = scored(case, lambda row: (honest(row, 0),) * 3)
    assert metrics["human_eval/fleiss_kappa"] == metrics["human_eval/raters_alike"] == 1.0
    assert failed(metrics) & {"raters_alike"} and result["fleiss_kappa_low"] < 1
    assert "Raters 1, 3 are named for copied answers: 50 of 50 answers are equal." in result["named_raters"]


def test_kappa_is_judged_by_its_lower_end_and_stands_with_its_interval(case: Any) -> None:
    drawn = random.Random(4)
    metrics, result = scored(case, lambda row: tuple(drawn.choice("ab") for _ in range(3)))
    assert result["fleiss_kappa_low"] < result["fleiss_kappa"] < result["fleiss_kappa_high"]
    assert "fleiss_kappa" in failed(metrics)


def test_both_bad_counts_a_half_and_is_a_share_of_its_own(make_case: Callable[..., Any]) -> None:
    metrics, result = scored(make_case(), lambda row: ("both_bad", "both_bad", "tie"))
    assert metrics["human_eval/win_rate"] == 0.5 and metrics["human_eval/both_bad"] == pytest.approx(2 / 3)
    assert result["raters"][0]["both_bad"] == 1.0 and result["raters"][0]["ties"] == 0.0


def test_the_win_rates_interval_holds_for_other_raters_too_and_says_when_they_are_too_few(case: Any) -> None:
    metrics, result = scored(case, lambda row: tuple(honest(row, n, (0.5, 0.75, 1.0)[n]) for n in range(3)))
    alike, _ = scored(case, lambda row: tuple(honest(row, n, 0.75) for n in range(3)))
    width, narrow = (m["human_eval/win_rate_high"] - m["human_eval/win_rate_low"] for m in (metrics, alike))
    assert width > 1.2 * narrow
    assert "3 raters are too few" in result["too_few_raters"] and result["interval_over"] == "prompts and raters"


def test_who_looks_early_has_a_bound_that_allows_for_it(make_case: Callable[..., Any]) -> None:
    case = make_case(items=30)
    metrics, result = scored(case, lambda row: tuple(honest(row, n) for n in range(3)))
    key = json.loads((case.sample / "key.json").read_text())["policy_side"]
    scores = []
    for row in case.rows():
        side = key[row.item.split("-")[0]]
        given = [honest(row, n) for n in range(3)]
        scores.append(sum(0.5 if r == "tie" else r == side for r in given) / 3)
    assert metrics["human_eval/always_valid_low"] == always_valid_low(scores)[-1] == result["always_valid_low"]
    of_people = metrics["human_eval/always_valid_low_of_people"]
    assert of_people == result["always_valid_low_of_people"] < metrics["human_eval/always_valid_low"]
    assert 0 < metrics["human_eval/always_valid_low"] < metrics["human_eval/win_rate"]


def test_repeated_items_show_the_pair_again_with_its_sides_exchanged_and_count_in_no_win_rate(case: Any) -> None:
    key = json.loads((case.sample / "key.json").read_text())
    rows = {row.item.split("-")[0]: row for row in case.rows()}
    assert len(rows) == 50 and len(key["repeat_of"]) == 10 == len(set(key["repeat_of"].values()))
    for again, item in key["repeat_of"].items():
        assert again > item and key["policy_side"][again] != key["policy_side"][item]
        assert (rows[again].response_a, rows[again].response_b) == (rows[item].response_b, rows[item].response_a)
    counted = [side for item, side in key["policy_side"].items() if item not in key["repeat_of"]]
    assert counted.count("a") == 20

    def rate(row: SheetRow) -> tuple[str, ...]:
        return ("" if row.item.split("-")[0] in key["repeat_of"] else honest(row, 0),) * 3

    with_them, without = scored(case, lambda row: (honest(row, 0),) * 3)[0], scored(case, rate)[0]
    assert with_them["human_eval/win_rate_low"] == without["human_eval/win_rate_low"]
    assert with_them["human_eval/items"] == without["human_eval/items"] == 40
    assert "human_eval/self_agreement" not in without and "self_agreement_low" in failed(without)


def test_a_scored_sheet_is_data_with_its_votes(case: Any) -> None:
    scored(case, lambda row: (honest(row, 0), "both_bad", "") if row.item < "q0040" else ("", "", ""))
    artifact = case.root / "scored" / "artifact"
    trains, judges = (read_rows(artifact / f"{name}.jsonl") for name in ("preferences", "judged"))
    assert all(may_train(row["prompt"]) for row in trains) and not any(may_train(row["prompt"]) for row in judges)
    rows = sorted([*trains, *judges], key=itemgetter("a"))
    key = json.loads((case.sample / "key.json").read_text())
    shown = {row.item.split("-")[0]: row for row in case.rows()}
    expected = [row for item, row in shown.items() if row.item < "q0040" and item not in key["repeat_of"]]
    expected = sorted(expected, key=attrgetter("response_a"))
    assert trains and judges and len(rows) == len(expected)
    for row, given in zip(rows, expected, strict=True):
        assert (row["a"], row["b"]) == (given.response_a, given.response_b)
        pair = parse_pair(RawRow(1, row), "votes", "x", 20_000)
        assert pair.ballot is not None and sum(pair.ballot) == 2 and pair.ballot.equal >= 1
        assert [name for name, _ in pair.votes] == ["rating_1", "rating_2"]
        assert row["judged_in"] == given.item.split("-")[1]


# The seal -------------------------------------------------------------------------------------------------------------


def test_sides_depend_on_a_secret_of_the_home_and_the_same_home_gives_the_same_bytes(
    make_case: Callable[..., Any],
) -> None:

    def files(name: str, home: str) -> dict[str, bytes]:
        sample = make_case(name, home=home).sample
        return {path.name: path.read_bytes() for path in sample.rglob("*.*")}

    here, again, elsewhere = files("one", "here"), files("two", "here"), files("three", "elsewhere")
    assert here == again
    sides = [json.loads(each["key.json"])["policy_side"] for each in (here, elsewhere)]
    assert sides[0] != sides[1] and here["sheet.csv"] != elsewhere["sheet.csv"]


def test_without_the_secret_the_keys_digest_can_not_be_guessed() -> None:
    chosen = [Chosen([{"role": "user", "content": f"{n}"}], None, "all") for n in range(4)]
    texts = ["one", "two", "three", "four"], ["ein", "zwei", "drei", "vier"]
    salts = {blind(chosen, *texts, seed=0, key=seal)[1] for seal in (b"", b"x", b"y")}
    assert len(salts) == 3


def test_the_secret_is_made_once_for_its_owner_alone(tmp_path: Any) -> None:
    path = home_secret(tmp_path / "home")
    before = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600 and len(before) == 64
    assert home_secret(tmp_path / "home") == path and path.read_bytes() == before
    assert home_secret(tmp_path / "other").read_bytes() != before
    assert [each.name for each in (tmp_path / "home").iterdir()] == [path.name]
