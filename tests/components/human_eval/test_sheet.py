import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.data.spreadsheet import write_csv
from components.human_eval.sheet import SheetRow, as_record
from tests.sheets import read_sheet

VALID = ("a", "b", "tie")
NASTY = st.text(max_size=40) | st.sampled_from(
    ["=1+1", "'=1", "@SUM(A1)", "-2", "+3", "\t=x", "a,b;c\td", 'say "hi"', "two\nlines", "cr\rlf\r\n", "\ufeff",
     "\uff1d1", "", " ", "'", "''", "\x00", "\u2028", "🙂 ü 中", "=cmd|' /C calc'!A0"]
)  # fmt: skip
ROWS = st.lists(st.tuples(NASTY, NASTY, NASTY, st.tuples(*[st.sampled_from(["", *VALID])] * 2)), min_size=1, max_size=6)
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


def numbered(rows: list[tuple[str, str, str, tuple[str, ...]]], first: int) -> list[SheetRow]:
    return [SheetRow(n, f"q{n:04d}-abcdef01", *row) for n, row in enumerate(rows, first)]


def as_csv(path: Path, rows: list[SheetRow]) -> Path:
    write_csv(path, list(as_record(rows[0])), map(as_record, rows))
    return path


@ONE_FOLDER
@given(ROWS)
def test_any_text_survives_both_files(tmp_path: Path, rows: list[tuple[str, str, str, tuple[str, ...]]]) -> None:
    sheet = numbered(rows, first=2)
    assert read_sheet(as_csv(tmp_path / "s.csv", sheet), 2, VALID) == sheet
    write_rows(tmp_path / "s.jsonl", map(as_record, sheet))
    assert read_sheet(tmp_path / "s.jsonl", 2, VALID) == [row._replace(number=row.number - 1) for row in sheet]


def test_a_spreadsheet_sees_utf8_text_and_no_formula(tmp_path: Path) -> None:
    file = as_csv(tmp_path / "s.csv", numbered([("=HYPERLINK(1)", "ü", "two\nlines", ("", ""))], 2))
    raw = file.read_bytes()
    assert raw.startswith(b"\xef\xbb\xbf")  # without it Excel reads UTF-8 as Windows-1252
    assert b'"\'=HYPERLINK(1)"' in raw and b'"two\nlines"' in raw and raw.endswith(b"\r\n")


@pytest.mark.parametrize(
    ("delimiter", "encoding"),
    [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-16"), (";", "cp1252"), (",", "utf-8-sig")],
)
def test_what_spreadsheets_save_is_read_back(tmp_path: Path, delimiter: str, encoding: str) -> None:
    table = io.StringIO(newline="")
    writer = csv.writer(table, delimiter=delimiter)  # quotes only where needed, as Excel does
    writer.writerow([" item ", "prompt", "response_a", "response_b", "rating_1", "comment", "rating_2"])
    writer.writerow(["q0001-abcdef01", "Größe, Preis; \t?", "one\ntwo", "'=1", " TIE", "hm", "B"])
    writer.writerow([""] * 7)
    writer.writerow(["q0002-abcdef01", "x", "y", "z", "a"])  # trailing empty cells dropped
    file = tmp_path / "back.csv"
    file.write_bytes(table.getvalue().encode(encoding))
    assert read_sheet(file, 2, VALID) == [
        SheetRow(2, "q0001-abcdef01", "Größe, Preis; \t?", "one\ntwo", "=1", ("tie", "b")),
        SheetRow(4, "q0002-abcdef01", "x", "y", "z", ("a", "")),
    ]


@pytest.fixture
def usual_csv_limit() -> Iterator[None]:
    """The csv module's limit on a cell is one for the whole process, and reading preferences raises it."""
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)


@pytest.mark.usefixtures("usual_csv_limit")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("item,rating_1,rating_2\nq1,a,better\n", r"row 2, column `rating_2`: 'better' is not a rating.*a, b, tie"),
        ("item,prompt\nq1,p\n", r"no rating column. Add rating_1, rating_2, or `rating` and `rater`"),
        ("item,rating_1\nq1,a\n", r"no column `prompt`, `response_a`, `response_b`. Without the texts"),
        ("item,prompt,response_a,response_b,rating\nq1,p,x,y,a\n", r"no column `rater`, which says"),
        ("item,prompt,response_a,response_b,rater,rating\nq1,p,x,y,3,a\n", r"is not a rater of this sheet \(1 to 2\)"),
        ("item,prompt,response_a,response_b,rater,rating,rating_1\nq1,p,x,y,1,a,b\n", r"are the same rater's"),
        ("item,rating_1,rating_2,rating_3\nq1,a,b,a\n", r"`rating_3` is not a rating column of this sheet"),
        ("item,rating_1,rating_2,rating_1\nq1,a,b,a\n", r"`rating_1` appears twice"),
        ("item,rating_1,rating_2\n,a,b\n", r"row 2: column `item` is empty"),
        ("question,rating_1,rating_2\nq1,a,b\n", r"no column `item`"),
        ("item,rating_1,rating_2\n", r"holds no rows"),
        ('{"item": "q1", "item": "q2", "rating_1": "a", "rating_2": "b"}', r"a key appears twice: 'item'"),
        ('{"item": "q1", "rating_1": ' + "[" * 5000, r"row 1: not JSON.*nested"),
        ("", r"no column `item`"),
        ('{"item": "q1", "rating_1": "a", "rating_2": "b"}\n{"item": "q2"', r"row 2: not JSON"),
        ('{"item": "q1", "rating": "a"}', r"no column `rater`"),
        ("[1]", r"row 1: a JSON object is needed"),
        ("[{]", r"not JSON"),
        ('{"item": "q1", "rating_1": "a", "rating_2": 3}', r"row 1, column `rating_2`: '3' is not a rating"),
        ('{"item": 7, "rating_1": "a", "rating_2": null}', r"row 1, column `item`: text is needed"),
        ("PK\x03\x04...", r"Save the sheet as CSV"),
    ],
)
def test_a_broken_sheet_is_the_users_mistake_and_names_its_place(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        read_sheet(file, 2, VALID)
    assert str(file) in str(error.value)


def test_a_missing_sheet_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv can't be read: No such file"):
        read_sheet(tmp_path / "none.csv", 2, VALID)


def test_a_row_whose_text_was_split_into_further_cells_is_named_and_no_cell_is_dropped(tmp_path: Path) -> None:
    file = as_csv(tmp_path / "s.csv", numbered([("p", "one", "two", ("a", "b")), ("p", "one", "two", ("a", "b"))], 2))
    header, first, second = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([header, first + ",,", second]))
    assert len(read_sheet(file, 2, VALID)) == 2, "empty cells at the end are a spreadsheet's habit"
    file.write_text("\n".join([header, first, second + ",b"]))
    with pytest.raises(UserError, match="row 3: 7 cells where row 1 has 6"):
        read_sheet(file, 2, VALID)
