import json

import pytest

from components.base.errors import UserError
from components.data.checks_config import ChecksConfig, SheetChecks
from components.data.readers import read_source
from components.data.spreadsheet import write_csv
from data_contracts.sheets import check_sheet, is_sheet

COLUMNS = ["item", "prompt", "response_a", "response_b", "rating_1", "rating_2"]


def clean(n=40):
    """Raters agree; the sides win in turn; a formula-like text survives the spreadsheet."""
    return [
        {
            "item": f"i{k}", "prompt": "=why?", "response_a": "one two", "response_b": "one",
            "rating_1": "ab"[k % 2], "rating_2": " A " if k % 2 == 0 else "b",
        }
        for k in range(n)
    ]  # fmt: skip


@pytest.fixture
def checked(tmp_path):
    def checked(rows, columns=COLUMNS, out=None):
        write_csv(tmp_path / "sheet.csv", columns, rows)
        return check_sheet(tmp_path / "sheet.csv", ("a", "b", "tie"), ChecksConfig(), out)

    return checked


def fired(report):
    return {c["name"]: c["row_numbers"] for c in report["checks"] if not c["passed"]}


def test_a_clean_sheet_raises_no_check_and_its_raters_agree(checked, tmp_path):
    report = checked(clean())
    assert fired(report) == {} and report["passed"] and report["kappa"] == pytest.approx(1)
    assert report["majority"] == {"a": 20, "b": 20, "tie": 0, "none": 0} and report["longer_wins"] == 0.5
    assert is_sheet(list(read_source(tmp_path / "sheet.csv")))


@pytest.mark.parametrize(
    ("change", "check", "rows"),
    [
        ({"item": ""}, "item_named", [7]),
        ({"item": "i1"}, "item_once", [3, 7]),
        ({"rating_2": "left"}, "rating_known", [7]),
        ({"response_b": ""}, "responses_kept", [7]),
        ({"rating_1": ""}, "rated", [7]),
    ],
)
def test_each_planted_row_is_named_by_its_own_check_alone(checked, change, check, rows):
    sheet = clean()
    sheet[5] |= change
    assert fired(checked(sheet)) == {check: rows}, "the header is row 1"


def test_rows_that_cannot_be_counted_are_quarantined_with_their_reasons(checked, tmp_path):
    sheet = clean()
    sheet[5] |= {"rating_2": "left", "response_b": ""}
    sheet[7] |= {"rating_1": ""}  # only a warning
    (tmp_path / "out").mkdir()
    report = checked(sheet, out=tmp_path / "out")
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert (row["row"], row["data"]["item"]) == (7, "i5") and report["quarantined"] == 1 and report["pairs"] == 39
    assert [reason.split(":")[0] for reason in row["reasons"]] == ["fails rating_known", "fails responses_kept"]
    assert (tmp_path / "out" / "data_docs" / "index.html").exists()


def test_raters_who_always_name_the_side_shown_first_are_found(checked):
    report = checked([row | {"rating_1": "a", "rating_2": "a"} for row in clean()])
    assert fired(report) == {"side_position": []} and report["passed"]


def test_every_check_of_a_sheet_is_planted_here():
    assert set(SheetChecks.model_fields) == {
        "item_named", "item_once", "rating_known", "responses_kept", "rated", "side_position",
    }  # fmt: skip


def test_a_sheet_without_ratings_is_the_users_error(checked):
    with pytest.raises(UserError, match="no column rating_1"):
        checked(clean(), COLUMNS[:4])


def test_a_rating_column_that_the_first_row_of_json_lines_leaves_out_counts_all_the_same(tmp_path):
    rows = [{name: value.strip() for name, value in row.items()} for row in clean()]
    del rows[0]["rating_2"]
    (tmp_path / "sheet.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check_sheet(tmp_path / "sheet.jsonl", ("a", "b", "tie"), ChecksConfig())
    assert fired(report) == {"rated": [1]} and report["kappa"] == pytest.approx(1)
