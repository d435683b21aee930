"""Built-in checks: what holds, what does not, and what is unfit to be checked against."""

from typing import Any

import pytest

from components.base.errors import UserError
from components.rewards.config import VerifierReward
from components.rewards.source import Replies
from components.rewards.verifiers import Verifier, last_number


def verdict(check: str, expected: Any, response: str, **options: Any) -> float:
    """The same by a fixed value and by a column of the row."""
    answers = Replies([[{"role": "user", "content": "q"}]], [response], [{"answer": expected}])
    fixed = Verifier(VerifierReward(source=f"verifier:{check}", value=expected, **options)).score(answers)
    column = Verifier(VerifierReward(source=f"verifier:{check}", column="answer", **options)).score(answers)
    assert fixed == column
    return fixed[0]


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 1}}}


@pytest.mark.parametrize(
    ("check", "expected", "response", "holds", "options"),
    [
        ("exact", "Paris", " Paris\n", 1, {}),
        ("exact", "Paris", "paris", 0, {}),
        ("exact", "Paris", "paris", 1, {"ignore_case": True}),
        ("exact", "Paris", "So: <a>Paris</a>", 1, {"extract": "<a>(.*?)</a>"}),
        ("exact", "Paris", "So: Paris", 0, {"extract": "<a>(.*?)</a>"}),
        ("number", 1234.5, "12 boxes cost $1,234.50.", 1, {}),
        ("number", "#### 72", "That is 48 + 24 = 72", 1, {}),
        ("number", 72, "72 and then 73", 0, {}),
        ("number", 72, "none", 0, {}),
        ("number", -3, "it is -3", 1, {}),
        ("number", 3.14159, "3.14", 0, {}),
        ("number", 3.14159, "3.14", 1, {"tolerance": 1e-3}),
        ("regex", r"^\d+$", "42", 1, {}),
        ("regex", r"^\d+$", "42 x", 0, {}),
        ("regex", r"sorry", "Sorry!", 1, {"ignore_case": True}),
        ("json_schema", SCHEMA, '{"n": 2}', 1, {}),
        ("json_schema", SCHEMA, 'Here:\n```json\n{"n": 2}\n```', 1, {}),
        ("json_schema", SCHEMA, '{"n": 0}', 0, {}),
        ("json_schema", SCHEMA, '{"n": 2', 0, {}),
        ("json_schema", '{"type": "array"}', "[]", 1, {}),
    ],
)
def test_a_check_holds_exactly_where_it_should(
    check: str, expected: Any, response: str, holds: int, options: dict[str, Any]
) -> None:
    assert verdict(check, expected, response, **options) == holds


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # ranges, dates, scores, phone numbers: a hyphen or dash, no minus
        ("12-15", 15), ("3-4", 4), ("12–15", 15), ("from 12 to 15", 15), ("2024-05-12", 12), ("12.05.2024", 2024),
        ("10 - 4", 4), ("$12-$15", 15), ("12€-15€", 15), ("50%-60%", 60), ("COVID-19", 19), ("555-1234", 1234),
        ("(3+4)-5", 5), ("x-3", 3), ("a1b", 1), ("v5.2.1", 1),
        # negative numbers
        ("-15", -15), ("−15", -15), ("–15", -15), ("$-15", -15), ("-$15", -15), ("−€15.50", -15.5), ("x=-3", -3),
        ("it is -3", -3), ("(-3)", -3), ("**-3**", -3), ("_-3_", -3), ("\\boxed{-3}", -3), ("[-3, -4]", -4),
        ("-.5", -0.5), ("+5", 5), ("2 and -3.", -3), ("is:-3", -3),
        # powers of ten, decimals, a full stop
        ("1e-3", 1e-3), ("1E−3", 1e-3), ("-2.5e+3", -2500), ("2e3", 2000), (".5", 0.5), ("72.", 72), ("3.14.", 3.14),
        ("72!", 72), ("a 15-inch screen", 15),
        # thousands
        ("1,234", 1234), ("-1,234.50", -1234.5), ("1,234,567.", 1234567), ("1{,}234", 1234), ("1\\,234", 1234),
        ("1\u202f234\u202f567", 1234567), ("1\u00a0234.5", 1234.5), ("12'345", 12345), ("1,23", 23), ("1, 234", 234),
        ("12,5000", 5000), ("none", None), ("-", None),
    ],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_a_row_without_the_column_and_an_unfit_value_are_the_users() -> None:
    answers = Replies([[{"role": "user", "content": "q"}]], ["x"], [{"other": 1, "answer": "many"}])
    with pytest.raises(UserError, match=r"no column 'right' \(it has answer, other\).*data.reward_columns"):
        Verifier(VerifierReward(source="verifier:exact", column="right")).score(answers)
    with pytest.raises(UserError, match=r"column 'answer' of response 1 of 1.*expected a number"):
        Verifier(VerifierReward(source="verifier:number", column="answer")).score(answers)
    with pytest.raises(UserError, match="this is not a JSON schema"):
        Verifier(VerifierReward(source="verifier:json_schema", value={"type": "nothing"}))
