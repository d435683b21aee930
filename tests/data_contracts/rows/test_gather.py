import json

import pytest

from components.base.errors import UserError
from components.data.config import DataConfig, SplitConfig
from components.data.rows import RawRow
from data_contracts.findings.whole import mark_duplicates
from data_contracts.rows.gather import DETECT_ON, RowSource, judged_rows, look_at
from data_contracts.rows.ledger import Ledger

GOOD = {"prompt": "hi", "chosen": "x", "rejected": "y"}


def gather(rows, columns=None, name="preferences", most=1000):
    raws = [RawRow(number, row) for number, row in enumerate(rows, 1)]
    return list(judged_rows(RowSource(name, "my.jsonl", iter(raws), columns or {}, "data.columns"), most))


def reasons(rows):
    return {row.number: [p.text for p in row.problems] for row in rows if row.problems}


@pytest.fixture
def late(tmp_path):
    """What the whole shows of rows, by row number."""

    def late(rows, name="preferences"):
        ledger = Ledger(tmp_path / "rows.jsonl", SplitConfig(), 0)
        ledger.fill(gather(rows, name=name), lambda rows: None)
        mark_duplicates(ledger)
        return {int(ledger.facts["row"][i]): [p.text for p in found] for i, found in ledger.late.items()}

    return late


TURNED = {"prompt": "hi", "chosen": "y", "rejected": "x"}
OTHER = GOOD | {"prompt": "other"}


@pytest.mark.parametrize(
    ("rows", "name", "found"),
    [
        ([GOOD, GOOD | {"chosen": "z"}, GOOD], "preferences", {3: ["duplicate of row 1"]}),
        ([GOOD, TURNED, OTHER], "preferences", {1: ["contradicts row 2"], 2: ["contradicts row 1"]}),
        ([GOOD, OTHER], "preferences", {}),
        ([{"prompt": "hi", "response": r} for r in "aba"], "demonstrations", {3: ["duplicate of row 1"]}),
    ],
)
def test_repeated_rows_and_both_sides_of_a_contradiction_are_marked(late, rows, name, found):
    assert late(rows, name) == found


def test_a_quarantined_row_keeps_the_fields_it_came_with():
    rows = gather([GOOD, {"prompt": "hi", "chosen": "", "rejected": "y", "note": "kept"}])
    assert rows[1].data["note"] == "kept" and rows[0].data == {}


def test_a_row_that_breaks_its_schema_is_marked_by_field():
    assert reasons(gather([GOOD, GOOD | {"category": 5}])) == {2: ["category: Input should be a valid string"]}


def test_a_source_without_one_valid_row_is_refused_with_the_commonest_reason(tmp_path):
    with pytest.raises(UserError, match=r"has no valid preference pair in 3 rows.*`rejected` is missing.*\(2"):
        rows = [GOOD | {"rejected": None}, GOOD | {"chosen": ""}, GOOD | {"rejected": None}]
        path = tmp_path / "my.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        look_at("preferences", path, DataConfig())


def test_the_format_is_found_behind_bad_rows_and_all_rows_come_through():
    rows = gather([{"other": 1}] * 5 + [GOOD | {"prompt": str(i)} for i in range(DETECT_ON + 10)])
    assert len(rows) == DETECT_ON + 15 and sum(not row.problems for row in rows) == DETECT_ON + 10


def test_columns_are_renamed_and_what_stood_there_gives_way():
    rows = gather([{"q": "hi", "better": "x", "rejected": "y", "chosen": "b"}], {"prompt": "q", "chosen": "better"})
    assert (rows[0].item["prompt"][0]["content"], rows[0].item["chosen"]) == ("hi", "x")


def test_a_column_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UserError, match=r"data\.columns names the column 'best'.*my\.jsonl.*prompt, chosen, rejected"):
        gather([GOOD], {"chosen": "best"})
