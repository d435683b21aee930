"""Write the rating sheet: one for all raters (CSV and JSON Lines), and a file with instructions for each rater.

`components.human_eval.batch.returned_sheets` reads the returned files.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

from components.data.spreadsheet import write_csv

SIMULATED = "ratings.simulated.csv"
"""A file of a sample artifact: the sheet as filled in by the simulated judges."""
GUIDELINES_FILE = "guidelines.md"
"""The file with the guidelines for raters, in a sample artifact and in a run's folder."""
RATERS = "raters"
"""The folder of the raters' own files, in a sample artifact and in a run's folder."""
TEXTS = ("item", "prompt", "response_a", "response_b")
OWN = ("rater", "rating")
"""Columns of a rater's own file in addition to `TEXTS`: the rater's number in every row, and the rating to fill in."""
PEOPLE = "raters"
"""The column with the number of people who rated, if they are more than the sheet's ratings per item."""

MEANINGS = {
    "a": "reply A is better",
    "b": "reply B is better",
    "tie": "both are equally good",
    "both_bad": "both are bad, and neither should be sent",
}
"""Maps every rating to its explanation for raters."""
OF_CRITERIA = ("a", "b", "tie")
"""The answers to a criterion."""
FLAGS = {
    "harmful": "harmful",
    "false": "says something false",
    "off_topic": "off topic",
    "broken": "broken or cut off",
    "personal": "personal data",
}
"""Flags that may be set with an answer, on the review page and in Label Studio."""
_SYNONYMS = {"equal": "tie"}
"""Other names of ratings that are accepted; sheets of candidates used `equal`."""


class SheetRow(NamedTuple):
    """A line of a sheet. `number` is its row in the file (a CSV's first is row 1); "" is a missing rating."""

    number: int
    item: str
    prompt: str
    response_a: str
    response_b: str
    ratings: tuple[str, ...]
    criteria: tuple[tuple[str, ...], ...] = ()
    """Each criterion's answers, one per rater."""
    seconds: tuple[float | None, ...] = ()
    """How long each rater took, if any rater's tool measured it."""


class AskedCriterion(TypedDict):
    """A further question about each pair, answered by a, b or tie."""

    name: str
    question: str


class SheetInfo(TypedDict):
    """The content of `sheet.json`: what raters are told, and what is needed to read a returned sheet."""

    guidelines: NotRequired[str]
    """The guidelines that raters read before they judge, as Markdown."""
    guidelines_sha256: NotRequired[str]
    """The sha256 of `guidelines` in UTF-8, which identifies their version."""
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


def rating_columns(raters: int, question: str = "rating") -> list[str]:
    """Return the columns `rating_1` to `rating_k`, one per rater, or those of another question or of `seconds`."""
    return [f"{question}_{i}" for i in range(1, raters + 1)]


def rating_of(value: object) -> str:
    """Normalise a rating: lower case, `_` for a blank or hyphen within; older names are replaced."""
    text = "" if value is None else "_".join(str(value).casefold().replace("-", " ").split())
    return _SYNONYMS.get(text, text)


def criterion_columns(criteria: Sequence[str], raters: int) -> list[str]:
    """Return the columns `helpful_1` to `helpful_k` for each criterion, one per rater."""
    return [column for name in criteria for column in rating_columns(raters, name)]


def as_record(row: SheetRow, criteria: Sequence[str] = ()) -> dict[str, str]:
    """Return a sheet's row by column."""
    columns = [*TEXTS, *rating_columns(len(row.ratings)), *criterion_columns(criteria, len(row.ratings))]
    cells = [*row[1:5], *row.ratings, *(answer for answers in row.criteria for answer in answers)]
    return dict(zip(columns, cells, strict=True))


def write_joint(
    path: Path, rows: Sequence[SheetRow], raters: int, shared: bool = False, criteria: Sequence[str] = ()
) -> None:
    """Write the sheet with a column for each rater, for each criterion and rater, and for measured seconds.

    Args:
        shared: note in the sheet that more people than its raters rated it.
    """
    more = {PEOPLE: str(raters)} if shared else {}
    timed = rating_columns(max((len(row.seconds) for row in rows), default=0), "seconds")
    columns = [*TEXTS, *rating_columns(raters), *criterion_columns(criteria, raters), *more, *timed]
    records = (as_record(row, criteria) | more | dict(zip(timed, _tenths(row), strict=True)) for row in rows)
    write_csv(path, columns, records)


def _tenths(row: SheetRow) -> list[str]:
    return ["" if taken is None else f"{taken:.1f}" for taken in row.seconds]


def rater_file(rater: int) -> str:
    """Return the name of a rater's own file."""
    return f"rater_{rater}.csv"


def guideline_blocks(text: str) -> list[tuple[str, str]]:
    """Return guidelines as blocks, each a tag (`h1` to `h6`, `p` or `blockquote`) and a text: Markdown headings,
    paragraphs and quotations. Other markup stays in the text."""
    blocks = []
    for part in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip()):
        lines = part.strip().split("\n")
        if heading := re.match(r"(#{1,6})\s+(.*)$", lines[0]):
            blocks.append((f"h{len(heading[1])}", heading[2]))
            lines = lines[1:]
        if lines and all(line.startswith(">") for line in lines):
            blocks.append(("blockquote", "\n".join(line[1:].strip() for line in lines)))
        elif lines:
            blocks.append(("p", "\n".join(lines)))
    return blocks


COLUMNS = (
    "Write your rating of each row into your rating column, and leave it empty where you cannot judge.",
    "Change nothing else, do not sort or move single columns, and save the file as CSV (UTF-8).",
)
"""How to fill in a spreadsheet (not shown in other tools)."""


def header_lines(guidelines: str, ratings: Sequence[str], criteria: Sequence[AskedCriterion] = ()) -> list[str]:
    """Return the lines above the header of a rater's own file."""
    meanings = "; ".join(f"{rating} = {MEANINGS[rating]}" for rating in ratings)
    questions = [f"Column {criterion['name']}: {criterion['question']} Write a, b or tie." for criterion in criteria]
    return [*filter(str.strip, guidelines.splitlines()), *COLUMNS, *questions, f"Ratings: {meanings}."]


def write_raters_files(
    folder: Path, rows: Sequence[SheetRow], raters: int, lines: Sequence[str], criteria: Sequence[str] = ()
) -> None:
    """Write `rater_1.csv` to `rater_k.csv`: `lines`, then the items with an empty column `rating` and one for each
    criterion."""
    for rater in range(1, raters + 1):
        cells = dict(zip(OWN, (str(rater), ""), strict=True)) | dict.fromkeys(criteria, "")
        records = (dict(zip(TEXTS, row[1:5], strict=True)) | cells for row in rows)
        write_csv(folder / rater_file(rater), [*TEXTS, *cells], records, above=[f"Rater {rater}", *lines])
