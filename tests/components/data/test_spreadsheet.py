"""No cell of a CSV of ours is a formula, whatever its reader splits cells and rows at; and every text comes back."""

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.readers import read_source
from components.data.spreadsheet import protect, unprotect, write_csv

SIGNS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
TEXTS = st.text(alphabet="=+-@\uff1d';|\t\n\r\v\u2028\" \u00a0a,[{", max_size=12) | st.text(max_size=8)


def cells(content: str, delimiter: str) -> list[str]:
    """Every line of every cell as a program sees it that splits cells at `delimiter`."""
    rows = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter)
    return [line for row in rows for cell in row for line in cell.splitlines()]


@pytest.mark.parametrize(
    "text", ["x\n=1", "x\r\n@SUM(1)", "x;=1", "x\t+1", "x; -1", 'x\n"=1', "x\n\n-1", "x|=1", "a\u2028=1", "x;\uff1d1"]
)
@pytest.mark.parametrize("delimiter", list(",;\t|"))
def test_a_formula_after_a_line_break_or_another_locales_delimiter_is_text(
    tmp_path: Path, text: str, delimiter: str
) -> None:
    rows = [{"id": "q1", "text": text, "messages": [{"role": "user", "content": text}]}]
    write_csv(tmp_path / "s.csv", ["id", "text", "messages"], rows)
    content = (tmp_path / "s.csv").read_text("utf-8-sig")
    assert not [cell for cell in cells(content, delimiter) if cell.lstrip().startswith(SIGNS)]


@settings(max_examples=400, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_no_text_at_all_makes_a_formula_in_any_locale_and_each_comes_back(texts: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "s.csv")
        row = {"id": "tether-1", **{f"t{n}": text for n, text in enumerate(texts)}, "messages": [{"said": texts}]}
        write_csv(path, list(row), [row])
        content = path.read_bytes().decode("utf-8-sig")
        for delimiter in ",;\t|":
            assert not [cell for cell in cells(content, delimiter) if cell.lstrip().startswith(SIGNS)]
        if any("\ud800" <= char <= "\udfff" for char in "".join(texts)):
            return
        (read,) = read_source(path)
        assert {name: value or "" for name, value in read.data.items()} == row
    assert [unprotect(protect(text)) for text in texts] == texts


def test_what_is_no_formula_stays_readable() -> None:
    for text in ("plain, text", "a - b", "1 + 1 = 2", "mail@example.org", "first line\n\nsecond line", "a; b", "x\t1"):
        assert protect(text) == text
    assert json.loads(json.dumps("it's")) == protect("it's")
