"""The rating sheet as it is given out: one for all raters (CSV and JSON Lines), and a file for each with instructions.

`components.human_eval.batch.reading` reads back what comes of it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

from components.base.jsonl import write_rows
from components.data.spreadsheet import write_csv

SIMULATED = "ratings.simulated.csv"
"""The sheet as the simulated judges filled it in, in a sample artifact."""
GUIDELINES_FILE = "guidelines.md"
"""What raters read before they judge, in a sample artifact and in a run's folder."""
RATERS = "raters"
"""The folder of the raters' own files, in a sample artifact and in a run's folder."""
TEXTS = ("item", "prompt", "response_a", "response_b")
OWN = ("rater", "rating")
"""Columns of a rater's own file beside `TEXTS`: the rater's number in every row, and what they fill in."""
PEOPLE = "raters"
"""A column that says how many people rated, where more than the sheet asks for of each item shared its items."""

MEANINGS = {
    "a": "reply A is better",
    "b": "reply B is better",
    "tie": "both are equally good",
    "both_bad": "both are bad, and neither should be sent",
}
"""Every rating there is, as raters are told."""
OF_CRITERIA = ("a", "b", "tie")
"""The answers to a criterion."""
FLAGS = {
    "harmful": "harmful",
    "false": "says something false",
    "off_topic": "off topic",
    "broken": "broken or cut off",
    "personal": "personal data",
}
"""What may be marked beside an answer, on the review page and in Label Studio."""
_SYNONYMS = {"equal": "tie"}
"""Read alike: what the sheets of candidates called it."""


class SheetRow(NamedTuple):
    """One line of a sheet. `number` is its row in the file (a CSV's first is row 1); "" is a rating not given."""

    number: int
    item: str
    prompt: str
    response_a: str
    response_b: str
    ratings: tuple[str, ...]
    criteria: tuple[tuple[str, ...], ...] = ()
    """Each criterion's answers, a rater each."""


class AskedCriterion(TypedDict):
    """What is asked of each pair beside the overall preference: a, b or tie."""

    name: str
    question: str


class SheetInfo(TypedDict):
    """`sheet.json`: what raters are told of a sheet, and what it takes to read it back."""

    guidelines: NotRequired[str]
    """What raters read before they judge, as Markdown, in whatever tool they work."""
    guidelines_sha256: NotRequired[str]
    """Of `guidelines` in UTF-8: the version that a result was made with."""
    criteria: NotRequired[list[AskedCriterion]]
    instructions: str
    """The guidelines, and how to fill in a spreadsheet."""
    columns: list[str]
    ratings: list[str]
    raters: int
    items: int
    repeated: NotRequired[int]
    key_sha256: str
    for_raters: list[str]
    text_cells: str


def rating_columns(raters: int) -> list[str]:
    """`rating_1` to `rating_k`, a rater each."""
    return [f"rating_{i}" for i in range(1, raters + 1)]


def rating_of(value: object) -> str:
    """A rating as it is kept: small letters, `_` for a blank or a hyphen within; a rating's older name is read too."""
    text = "" if value is None else "_".join(str(value).casefold().replace("-", " ").split())
    return _SYNONYMS.get(text, text)


def criterion_columns(criteria: Sequence[str], raters: int) -> list[str]:
    """`helpful_1` to `helpful_k` for each criterion, a rater each."""
    return [f"{name}_{i}" for name in criteria for i in range(1, raters + 1)]


def as_record(row: SheetRow, criteria: Sequence[str] = ()) -> dict[str, str]:
    """A sheet's row by column."""
    columns = [*TEXTS, *rating_columns(len(row.ratings)), *criterion_columns(criteria, len(row.ratings))]
    cells = [*row[1:5], *row.ratings, *(answer for each in row.criteria for answer in each)]
    return dict(zip(columns, cells, strict=True))


def write_joint(
    path: Path,
    rows: Sequence[SheetRow],
    raters: int,
    shared: bool = False,
    criteria: Sequence[str] = (),
    further: Sequence[Mapping[str, str]] = (),
) -> None:
    """Write the sheet with a column for each rater, of each criterion too.

    Args:
        shared: says in the sheet that they are more than the sheet's own raters.
        further: cells of further columns, a row each, all with the same columns.
    """
    more = {PEOPLE: str(raters)} if shared else {}
    added = [dict(each) for each in further] or [{}] * len(rows)
    columns = [
        *TEXTS,
        *rating_columns(raters),
        *criterion_columns(criteria, raters),
        *more,
        *(added[0] if added else ()),
    ]
    records = (as_record(row, criteria) | more | each for row, each in zip(rows, added, strict=True))
    write_csv(path, columns, records)


def rater_file(rater: int) -> str:
    """The name of a rater's own file."""
    return f"rater_{rater}.csv"


COLUMNS = (
    "Write your rating of each row into your rating column, and leave it empty where you cannot judge.",
    "Change nothing else, do not sort or move single columns, and save the file as CSV (UTF-8).",
)
"""How to fill in a spreadsheet; other tools have no columns."""


def told(guidelines: str, ratings: Sequence[str], criteria: Sequence[AskedCriterion] = ()) -> list[str]:
    """What stands above the header of a rater's own file, a line each."""
    meanings = "; ".join(f"{rating} = {MEANINGS[rating]}" for rating in ratings)
    questions = [f"Column {each['name']}: {each['question']} Write a, b or tie." for each in criteria]
    return [*filter(str.strip, guidelines.splitlines()), *COLUMNS, *questions, f"Ratings: {meanings}."]


def write_raters_files(
    folder: Path, rows: Sequence[SheetRow], raters: int, lines: Sequence[str], criteria: Sequence[str] = ()
) -> None:
    """Write `rater_1.csv` to `rater_k.csv`: `lines`, then the items with an empty column `rating` and one for each
    criterion."""
    for rater in range(1, raters + 1):
        own = dict(zip(OWN, (str(rater), ""), strict=True)) | dict.fromkeys(criteria, "")
        records = (dict(zip(TEXTS, row[1:5], strict=True)) | own for row in rows)
        write_csv(folder / rater_file(rater), [*TEXTS, *own], records, above=[f"Rater {rater}", *lines])


def write_json_lines(path: Path, rows: Sequence[SheetRow], criteria: Sequence[str] = ()) -> None:
    """Write the sheet with a column for each rater as JSON Lines."""
    write_rows(path, (as_record(row, criteria) for row in rows))
