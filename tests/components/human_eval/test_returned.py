"""Sheets as people return them: what spreadsheets do is forgiven, ratings of another item are refused by row."""

import csv
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.base.errors import Mistakes, UserError
from components.data.spreadsheet import protect, unprotect
from components.human_eval.batch.returned_texts import plain, same
from components.human_eval.returned_labels import Sample
from components.human_eval.sheet import SheetRow
from tests.sheets import Table, cells, save


def mixed(row: SheetRow) -> tuple[str, ...]:
    """Three raters who differ, in no order."""
    drawn = random.Random(row.item)
    return tuple(drawn.choice(["a", "b", "tie", "both_bad"]) for _ in range(3))


@pytest.fixture
def case(make_case: Callable[..., Any]) -> Any:
    return make_case(items=24)


@pytest.fixture
def table(case: Any) -> Table:
    """The filled sheet, header first: item, prompt, response_a, response_b and three ratings."""
    return cells(case.fill(mixed))


def mistakes(case: Any, *files: Path) -> list[str]:
    """What is told of returned files."""
    with pytest.raises(Mistakes) as error:
        Sample.open(case.sample).ratings(*files)
    return [str(each) for each in error.value.args]


def column(table: Table, index: int, values: Sequence[str]) -> Table:
    """The table with other values in a column."""
    return [
        table[0],
        *([*row[:index], value, *row[index + 1 :]] for row, value in zip(table[1:], values, strict=True)),
    ]


# What makes a rating another item's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", ["items", "replies"])
def test_a_moved_column_is_refused_by_row(case: Any, table: Table, moved: str) -> None:
    items = [row[0] for row in table[1:]]
    slipped = column(table, 0, [items[-1], *items[:-1]])
    exchanged = [table[0], *([row[0], row[1], row[3], row[2], *row[4:]] for row in table[1:])]
    back = save(case.root / "back.csv", slipped if moved == "items" else exchanged)
    told = mistakes(case, back)
    assert {each.split(",")[1] for each in told} == {f" row {n}" for n in range(2, 26)}
    assert "If columns were moved, exchanged or sorted alone, put them back" in told[0]


def test_an_edited_text_is_refused_with_the_place_of_the_change(case: Any, table: Table) -> None:
    table[5][2] += " indeed"
    (told,) = mistakes(case, save(case.root / "back.csv", table))
    assert "row 6, column `response_a`: the text is not the one given out" in told and "' indeed'" in told


def test_a_column_of_ratings_sorted_alone_is_refused_and_whole_rows_sorted_by_it_are_not(
    case: Any, table: Table
) -> None:
    alone = save(case.root / "alone.csv", column(table, 5, sorted(row[5] for row in table[1:])))
    (told,) = mistakes(case, alone)
    assert "rows 2 to 25: the ratings of rater 2 are sorted (a, then b, then both_bad, then tie)" in told
    rows = save(case.root / "rows.csv", [table[0], *sorted(table[1:], key=lambda row: row[5])])
    assert Sample.open(case.sample).ratings(rows) == Sample.open(case.sample).ratings(case.root / "filled.csv")


def test_a_sheet_without_its_texts_is_refused(case: Any, table: Table) -> None:
    (told,) = mistakes(case, save(case.root / "back.csv", [[row[0], *row[4:]] for row in table]))
    assert "no column `prompt`, `response_a`, `response_b`" in told


# What spreadsheets do -------------------------------------------------------------------------------------------------

NASTY = {"sft": "'tis → 😀 « naïve » \x07\r\n=1+1; \t\n'quoted' ", "policy": "  =SUM(A1)\u2028 — 中文 \r\rfin"}


@pytest.mark.parametrize(
    "back",
    [
        lambda text: text.replace("\r\n", "\n").replace("\r", "\n"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\n".join(line.rstrip() for line in text.split("\n")),
        lambda text: unprotect(text),
        lambda text: text.replace("\x07", ""),
    ],
    ids=["one kind of line break", "the other kind", "blanks at the ends", "apostrophes taken off", "bells dropped"],
)
def test_what_spreadsheets_change_in_a_text_is_forgiven(
    make_case: Callable[..., Any], back: Callable[[str], str]
) -> None:
    case = make_case(items=6, **NASTY)
    table = cells(case.fill(mixed))
    changed = [table[0], *([row[0], *map(back, row[1:4]), *row[4:]] for row in table[1:])]
    expected = Sample.open(case.sample).ratings(case.root / "filled.csv")
    assert Sample.open(case.sample).ratings(save(case.root / "back.csv", changed)) == expected


@pytest.mark.parametrize(("encoding", "delimiter"), [("cp1252", ";"), ("utf-16", "\t"), ("ascii", ",")])
def test_what_an_older_encoding_loses_is_forgiven_and_an_edit_beside_it_is_not(
    make_case: Callable[..., Any], encoding: str, delimiter: str
) -> None:
    texts = {"sft": "arrow → face 😀 end", "policy": "Chinese 中文 here"}
    case = make_case(items=6, **texts)
    table = cells(case.fill(mixed))
    file = save(case.root / "back.csv", table, encoding, delimiter=delimiter)
    assert Sample.open(case.sample).ratings(file) == Sample.open(case.sample).ratings(case.root / "filled.csv")
    table[1][2] = table[1][2].replace("end", "bend").replace("here", "there")
    (told,) = mistakes(case, save(case.root / "back.csv", table, encoding, delimiter=delimiter))
    assert "row 2, column `response_a`" in told


def test_excels_cut_of_a_long_cell_is_forgiven_and_a_shorter_one_is_not() -> None:
    long = plain("word " * 10_000)
    assert same(long, plain(long[:32_767])) and same(long, plain("'" + long[:32_766]))
    assert not same(long, plain(long[:20_000])) and not same(long, "x" + plain(long[1:32_767]))
    assert not same("word " * 100, "word " * 99)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.text(max_size=60), st.text(max_size=60))
def test_a_text_is_the_same_as_itself_through_any_program_and_no_other_is(one: str, other: str) -> None:
    for through in (one, protect(one), one.replace("\r\n", "\n"), one + "  ", unprotect(one)):
        assert same(plain(one), plain(through))
    lost = one.encode("cp1252", "replace").decode("cp1252")
    assert same(plain(one), plain(lost), lossy=True) or one != one.translate({0x2028: None, 0x2029: None, 0x85: None})
    if plain(one) != plain(other):
        assert not same(plain(one), plain(other))


# Raters' own files ----------------------------------------------------------------------------------------------------


def own_files(case: Any) -> list[Path]:
    """Each rater's own file as they return it, with what `mixed` has them answer."""
    answers = {row.item: mixed(row) for row in case.rows()}
    files = []
    for rater in (1, 2, 3):
        table = cells(case.sample / "raters" / f"rater_{rater}.csv")
        header = next(n for n, row in enumerate(table) if row[0] == "item")
        for row in table[header + 1 :]:
            assert row[-2:] == [str(rater), ""]
            row[-1] = answers[row[0]][rater - 1]
        files.append(save(case.root / f"from {rater}.csv", table, delimiter=",;\t"[rater - 1]))
    return files


def test_a_raters_file_tells_them_what_to_do_and_nothing_of_the_others(case: Any) -> None:
    table = cells(case.sample / "raters" / "rater_2.csv")
    header = next(n for n, row in enumerate(table) if row[0] == "item")
    above = [row[0] for row in table[:header]]
    assert above[0] == "Rater 2" and len(above) > 4 and all(len(line) < 200 for line in above)
    assert (
        "a = reply A is better; b = reply B is better; tie = both are equally good; both_bad = both are bad"
        in above[-1]
    )
    assert table[header] == ["item", "prompt", "response_a", "response_b", "rater", "rating"]
    assert [row[:4] for row in table[header + 1 :]] == [list(row[1:5]) for row in case.rows()]


def test_three_raters_own_files_are_scored_as_the_joined_sheet_to_the_byte(case: Any, table: Table) -> None:
    sample = Sample.open(case.sample)
    joined = sample.ratings(case.root / "filled.csv")
    assert sample.ratings(*own_files(case)) == sample.ratings(*reversed(own_files(case))) == joined
    sample.write(case.root / "one.csv", sample.answers(case.root / "filled.csv"))
    shuffled = [table[0], *random.Random(1).sample(table[1:], 24)]
    sample.write(
        case.root / "two.csv", sample.answers(save(case.root / "back.csv", shuffled, "utf-16", delimiter="\t"))
    )
    assert (case.root / "one.csv").read_bytes() == (case.root / "two.csv").read_bytes()
    assert case.score(case.root / "one.csv") == case.score(case.root / "filled.csv")


def test_a_sheet_with_ones_own_column_only_is_read_and_the_others_answers_are_missing(case: Any, table: Table) -> None:
    alone = save(case.root / "mine.csv", [[*row[:4], row[5]] for row in table])
    found = Sample.open(case.sample).ratings(alone)
    assert [each[1] for each in found.values()] == [mixed(row)[1] for row in case.rows()]
    assert {(each[0], each[2]) for each in found.values()} == {("", "")}
    metrics, result = case.score(alone)
    assert metrics["human_eval/labels_complete"] == pytest.approx(1 / 3) and metrics["human_eval/raters"] == 1
    assert "1 rater is too few" in result["too_few_raters"]


def test_two_people_with_one_raters_file_are_told_apart_by_what_they_answered(case: Any) -> None:
    first, second, _ = own_files(case)
    table = [[*row[:-2], "1", row[-1]] if row[-2:-1] == ["2"] else row for row in cells(second, ";")]
    told = mistakes(case, first, save(case.root / "again.csv", table))
    differing = [row for row in case.rows() if mixed(row)[0] != mixed(row)[1]]
    assert len(told) == len(differing) and "two people need two rater numbers" in told[0]


# Everything at once ---------------------------------------------------------------------------------------------------


def test_every_mistake_of_every_file_is_told_at_once_each_in_its_line(case: Any, table: Table) -> None:
    table[3][4], table[7][6], table[9][0], table[12][3] = "left", "c", "q9999-00000000", "other"
    table[15][0] = table[14][0]
    file, gone = save(case.root / "back.csv", table), case.root / "gone.csv"
    told = mistakes(case, file, gone)
    places = ["row 4, column `rating_1`", "row 8, column `rating_3`", "row 10", "row 13, column `response_b`", "row 16"]
    assert [place for place in places if sum(place in each for each in told) == 1][0:2] == places[:2]
    assert any("gone.csv can't be read" in each for each in told)
    with pytest.raises(UserError) as error:
        Sample.open(case.sample).ratings(file, gone)
    assert str(error.value).splitlines()[0] == f"{len(told)} mistakes:"
    assert len(str(error.value).splitlines()) == 1 + len(told)


def test_of_many_mistakes_twenty_are_shown_and_the_rest_counted() -> None:
    lines = str(Mistakes(*(f"row {n}" for n in range(50)))).splitlines()
    assert len(lines) == 22 and lines[0] == "50 mistakes:" and lines[-1].strip() == "and 30 more"
    assert str(Mistakes("row 1")) == "row 1"


@pytest.mark.parametrize(
    "above", [[["sep=;"]], [["Ratings of the third week"], []], []], ids=["Excel's sep", "title", "capitals"]
)
def test_a_title_or_a_header_in_capitals_is_passed_over(case: Any, table: Table, above: Table) -> None:
    header = [name.replace("_", " ").title() for name in table[0]]
    assert header[:3] == ["Item", "Prompt", "Response A"]
    file = save(case.root / "back.csv", [*above, header, *table[1:]], delimiter=";")
    assert Sample.open(case.sample).ratings(file) == Sample.open(case.sample).ratings(case.root / "filled.csv")


def test_one_answer_left_open_is_a_share_and_not_a_failure(case: Any, table: Table) -> None:
    table[3][5] = ""
    metrics, _ = case.score(save(case.root / "back.csv", table))
    assert metrics["human_eval/labels_complete"] == 71 / 72


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_long_cells_and_json_arrays_come_back(make_case: Callable[..., Any], kind: str) -> None:
    before = csv.field_size_limit(131_072)
    try:
        case = make_case(items=4, sft="word " * 27_000)
        file = case.fill(mixed)
        if kind == "json":
            header, *rows = csv_rows(file)
            records = [{n: unprotect(c) for n, c in zip(header, row, strict=True)} for row in rows]
            file = case.root / "back.json"
            file.write_text(json.dumps(records, indent=1))
        found = Sample.open(case.sample).ratings(file)
        assert list(found.values()) == [mixed(row) for row in case.rows()]
        assert csv.field_size_limit() == 131_072, "the limit is the whole process's"
    finally:
        csv.field_size_limit(before)


def csv_rows(path: Path) -> Table:
    before = csv.field_size_limit(10**7)
    try:
        return cells(path)
    finally:
        csv.field_size_limit(before)


def test_the_older_word_for_a_tie_and_other_spellings_are_read(case: Any, table: Table) -> None:
    spelled = {"tie": "Equal ", "both_bad": "Both bad", "a": " A", "b": "B"}
    changed = [table[0], *([*row[:4], *(spelled[rating] for rating in row[4:])] for row in table[1:])]
    file = save(case.root / "back.csv", changed)
    assert Sample.open(case.sample).ratings(file) == Sample.open(case.sample).ratings(case.root / "filled.csv")
