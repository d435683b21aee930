"""Verdicts as people read them."""

import pytest

from components.gates.gate_text import markdown, number, outcome, rule
from components.gates.judging import Verdict


def verdict(**fields: object) -> Verdict:
    given = {"name": "policy.kl", "metric": "policy/kl_high", "value": 9.0, "op": "<=", "threshold": 8.0,
             "passed": False}  # fmt: skip
    return Verdict.model_validate(given | fields)


@pytest.mark.parametrize(
    ("fields", "word", "stops"),
    [
        ({"threshold": None, "passed": True}, "OFF", False),
        ({"passed": True}, "PASS", False),
        ({"waived": True}, "WAIVED", False),
        ({"warn_only": True}, "WARN", False),
        ({}, "FAIL", True),
    ],
)
def test_a_verdict_in_one_word_and_whether_the_run_stops(fields: dict[str, object], word: str, stops: bool) -> None:
    assert (outcome(verdict(**fields)), verdict(**fields).stops) == (word, stops)


def test_a_number_has_four_digits_thousands_apart_and_a_whole_one_all_of_them_below_a_billion() -> None:
    numbers = {
        None: "none", 0.05: "0.05", 12.34567: "12.35", 14000.0: "14,000", -3.0: "-3", 999_999_999.0: "999,999,999",
        1234.56: "1,235", -123456.5: "-123,456", 999.96: "1,000", 4.172e-07: "4.172e-07",
    }  # fmt: skip
    assert {value: number(value) for value in numbers} == numbers
    assert [number(1e9), number(-1e9)] == ["1e+09", "-1e+09"]


def test_a_rule_is_its_sign_and_threshold_or_both_ends_of_a_range() -> None:
    assert rule(verdict()) == "<= 8" and rule(verdict(threshold=None)) == "off"
    assert rule(verdict(op="between", threshold=(0.8, 1.25))) == "0.8 to 1.25"


def test_a_rule_on_both_ends_of_an_interval_does_not_seem_to_hold_for_the_value_alone() -> None:
    failed = verdict(name="policy.length_ratio", op="between", threshold=(0.5, 1.5), value=1.45)
    assert rule(failed) == "interval within 0.5 to 1.5"


def test_a_rule_says_the_second_bound_that_lets_a_gate_pass() -> None:
    assert rule(verdict(threshold=0.05, within=0.1732)) == "<= 0.05 or within 0.1732"
    assert rule(verdict(op="between", threshold=(0.8, 1.25), within=(0.64, 1.5))) == "0.8 to 1.25 or within 0.64 to 1.5"
    assert "| <= 0.05 or within 0.1732 |" in markdown([verdict(threshold=0.05, within=0.1732)])


def test_the_table_has_a_row_a_gate_and_says_who_waived_it_and_why() -> None:
    waived = verdict(waived=True, user="ada", reason="a|b", description="KL is held")
    assert markdown([verdict(description="KL is held"), waived]).splitlines() == [
        "| gate | outcome | metric | value | rule | what it asks |",
        "|---|---|---|---|---|---|",
        "| policy.kl | FAIL | policy/kl_high | 9 | <= 8 | KL is held |",
        "| policy.kl | WAIVED | policy/kl_high | 9 | <= 8 | KL is held Waived by ada: a\\|b |",
    ]
    assert markdown([]).endswith("|---|\n")
