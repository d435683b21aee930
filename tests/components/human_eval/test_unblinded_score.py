import csv
import json
from collections.abc import Callable
from typing import Any

import pytest

from components.base.errors import UserError
from components.human_eval.sheet import SheetRow
from components.stats.raters import crossed_proportion


def prefer(start: str) -> Callable[[SheetRow], tuple[str, ...]]:
    """Three raters who can tell by a response's first word which one they want."""
    return lambda row: ("a" if row.response_a.startswith(start) else "b",) * 3


def test_raters_who_prefer_the_policy_give_it_every_win_through_the_blinding(make_case: Callable[..., Any]) -> None:
    case = make_case()
    metrics, result = case.score(case.fill(prefer("Hey")))
    assert metrics["human_eval/win_rate"] == metrics["human_eval/win_rate_high"] == 1.0
    assert 0 < metrics["human_eval/win_rate_low"] < 1.0 and metrics["human_eval/always_valid_low"] > 0.5
    assert metrics["human_eval/fleiss_kappa"] == 1.0
    assert metrics["human_eval/labels_complete"] == 1.0 and metrics["human_eval/items"] == 12.0
    assert result["judges"] == "people"
    assert all(r["win_rate"] == 1.0 and r["agreement"] == 1.0 and r["side_a"]["value"] == 0.5 for r in result["raters"])
    assert case.score(case.fill(prefer("Dear")))[0]["human_eval/win_rate"] == 0.0


def test_swapping_the_two_models_flips_the_win_rate(make_case: Callable[..., Any]) -> None:
    def rate(row: SheetRow) -> tuple[str, ...]:
        liked = int(row.prompt.split("Question ")[1].split("?")[0]) % 3  # likes one voice on most questions
        wanted = "Hey" if liked else "Dear"
        side = "a" if row.response_a.startswith(wanted) else "b"
        return side, side, "tie"

    there, back = make_case("there"), make_case("back", sft="Hey", policy="Dear")
    one, other = there.score(there.fill(rate))[0], back.score(back.fill(rate))[0]
    assert one["human_eval/win_rate"] != 0.5
    assert one["human_eval/win_rate"] == pytest.approx(1 - other["human_eval/win_rate"])
    assert one["human_eval/win_rate_low"] == pytest.approx(1 - other["human_eval/win_rate_high"])


def test_raters_who_always_name_the_first_response_give_half(make_case: Callable[..., Any]) -> None:
    case = make_case()
    metrics, result = case.score(case.fill(lambda row: ("a", "a", "a")))
    assert metrics["human_eval/win_rate"] == 0.5
    assert "human_eval/fleiss_kappa" not in metrics and result["fleiss_kappa"] is None
    assert [r["side_a"]["value"] for r in result["raters"]] == [1.0] * 3


def test_hand_computed_result(make_case: Callable[..., Any]) -> None:
    case = make_case(items=4)
    key = json.loads((case.sample / "key.json").read_text())["policy_side"]
    other = {"a": "b", "b": "a"}
    sides = {row.item: key[row.item.split("-")[0]] for row in case.rows()}
    plan = dict(zip(sides, ("ppp", "pps", "pt-", "---"), strict=True))  # policy, sft, tie, no rating

    def rate(row: SheetRow) -> tuple[str, ...]:
        named = {"p": sides[row.item], "s": other[sides[row.item]], "t": "tie", "-": ""}
        return tuple(named[c] for c in plan[row.item])

    metrics, result = case.score(case.fill(rate))
    # Items: 1, 2/3 and 3/4; the last isn't rated. Kappa: agreements 1, 1/3 and 0.
    assert metrics["human_eval/win_rate"] == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    low = crossed_proportion([1, 1, 1, 1, 1, 0, 1, 0.5], [0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1]).low
    assert metrics["human_eval/win_rate_low"] == pytest.approx(low)
    assert metrics["human_eval/labels_complete"] == 8 / 12 and metrics["human_eval/items"] == 3.0
    shares = {"a": 0.0, "b": 0.0, "tie": 1 / 6}
    for item, (p, s) in zip(sides, ((1, 0), (2 / 3, 1 / 3), (1 / 2, 0), (0, 0)), strict=True):
        shares[sides[item]] += p / 3
        shares[other[sides[item]]] += s / 3
    chance = sum(v * v for v in shares.values())
    assert metrics["human_eval/fleiss_kappa"] == pytest.approx(((1 + 1 / 3 + 0) / 3 - chance) / (1 - chance))
    assert result["ratings"] == {"given": 8, "asked": 12}
    assert [r["n"] for r in result["raters"]] == [3, 3, 2]
    last = result["raters"][2]
    about = {"rater": "rating_3", "n": 2, "win_rate": 0.5, "ties": 0.0, "both_bad": 0.0, "agreement": 0.5}
    about |= {"a": last["a"], "b": 1 - last["a"], "seconds": None}
    about["attention"] = None
    assert last == about | {"self_agreement": None, "side_a": last["side_a"]}


def test_the_unblinded_table_names_the_authors(make_case: Callable[..., Any]) -> None:
    case = make_case(sft="=Dear")
    case.score(case.fill(prefer("Hey")))
    with (case.root / "scored" / "artifact" / "ratings.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    for row in rows:
        assert row["policy"].startswith("Hey") and row["sft"].startswith("'=Dear")
        assert (row["rating_1"], row["score"]) == ("policy", "1.0")


def test_the_judge_is_named_after_whose_ratings_they_are(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.data.support_desk import desk

    monkeypatch.setattr(desk, "simulated_judges", lambda prompt, a, b, seed: ["a", "tie", "b"])
    case = make_case(judges="simulated", task="support-desk")
    assert case.score(case.sample / "ratings.simulated.csv")[1]["judges"] == "simulated"
    assert case.score(case.fill(prefer("Hey")))[1]["judges"] == "people"


def test_sheets_of_another_sample_unknown_and_doubled_items_are_refused(make_case: Callable[..., Any]) -> None:
    case, other = make_case(), make_case("other", seed=1)
    ours = case.rows()[0].item.partition("-")[2]
    said = rf"filled\.csv, row 2: item q\S+ belongs to the sheet of another sample \(items of this one end in -{ours}\)"
    with pytest.raises(UserError, match=said):
        case.score(other.fill(prefer("Hey")))
    good = case.fill(prefer("Hey")).read_text(encoding="utf-8")
    unknown = case.root / "unknown.csv"
    unknown.write_text(good.replace("q0003-", "q0999-"), encoding="utf-8")
    with pytest.raises(UserError, match=r"unknown\.csv, row 4, column `item`: .q0999-\w+. is not an item"):
        case.score(unknown)
    doubled = case.root / "doubled.csv"
    doubled.write_text(good.replace("q0003-", "q0002-"), encoding="utf-8")
    with pytest.raises(UserError, match=r"doubled\.csv, row 4: item q0002-\w+ is in row 3 already"):
        case.score(doubled)


def test_an_unfilled_sheet_and_ties_where_none_are_allowed_are_refused(make_case: Callable[..., Any]) -> None:
    case = make_case(scale="a/b")
    with pytest.raises(UserError, match="holds no rating yet"):
        case.score(case.sample / "sheet.csv")
    with pytest.raises(UserError, match=r"'tie' is not a rating\. Write a, b,"):
        case.score(case.fill(lambda row: ("a", "b", "tie")))
    assert not (case.root / "scored").exists()


def test_a_changed_key_is_refused(make_case: Callable[..., Any]) -> None:
    case = make_case()
    sheet = case.fill(prefer("Hey"))
    key = case.sample / "key.json"
    key.write_text(key.read_text().replace('"a"', '"b"', 1))
    with pytest.raises(UserError, match="sealed with another key"):
        case.score(sheet)
