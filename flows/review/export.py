"""A batch's answers as files: a file for each rater of a run, or rows of votes that `data.preferences` reads."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from sqlalchemy import select

from components.base.errors import UserError
from components.base.files import make_folder, replacing
from components.base.jsonl import write_rows
from components.data.spreadsheet import write_csv
from components.human_eval.batch.reading import parse_sheet
from components.human_eval.sheet import OWN, PEOPLE, RATERS, TEXTS, rater_file
from flows.review.batches import BatchSource
from flows.review.database.tables import rater
from flows.review.summary import CountedAnswer, counted_answers
from flows.review.votes import SKIP, Voting

VOTES = "votes.jsonl"
"""What people answered of candidates, or experts of pairs without a majority, beside them."""
_MORE = ("skipped", "flags", "comment", "seconds")
"""Columns of an exported file that no sheet given out has."""


def export(voting: Voting, source: BatchSource, out: Path | None = None) -> list[Path]:
    """Write what is answered so far, and return the files; done again, they are replaced.

    Args:
        out: a folder; None takes `raters/` of the run, or the one that holds the pairs.

    Raises:
        UserError: nobody has answered, or a file there holds ratings that the page did not write.
    """
    with voting.engine.connect() as connection:
        answers = counted_answers(connection, voting.batch.id)
        people = connection.scalars(select(rater.c.number).where(rater.c.batch == voting.batch.id)).all()
    if not answers:
        raise UserError(f"{voting.batch.name}: nobody has answered yet. Send the raters their links.")
    if source.kind != "sample":
        return [_write_votes(out or source.place.parent, source, answers)]
    own: dict[int, dict[str, CountedAnswer]] = {}
    for each in answers:
        own.setdefault(each.rater, {})[each.item] = each
    folder = out or source.place / RATERS
    files = [folder / rater_file(number) for number in sorted(own)]
    for file in files:
        _check_ours(file, max(people), source.ratings)
    make_folder(folder)
    for number, file in zip(sorted(own), files, strict=True):
        columns = [*TEXTS, *OWN, PEOPLE, *(each["name"] for each in source.criteria), *_MORE]
        with replacing(file) as temporary:
            write_csv(temporary, columns, _rows(source, number, own[number], max(people)))
    return files


def _rows(source: BatchSource, number: int, own: Mapping[str, CountedAnswer], people: int) -> Iterator[dict[str, str]]:
    """Yield a row for each item of the sheet, empty where the rater was not asked or could not judge."""
    for pair in source.pairs:
        given = own.get(pair.name)
        row = dict(zip(TEXTS, pair, strict=True)) | {"rater": str(number), PEOPLE: str(people)}
        row |= {each["name"]: given.criteria.get(each["name"], "") if given else "" for each in source.criteria}
        if given is None:
            yield row | dict.fromkeys(("rating", *_MORE), "")
            continue
        yield row | {
            "rating": "" if given.answer == SKIP else given.answer,
            "skipped": "yes" if given.answer == SKIP else "",
            "flags": " ".join(given.flags),
            "comment": given.comment,
            "seconds": "" if given.seconds is None else f"{given.seconds:.1f}",
        }


def _check_ours(file: Path, people: int, ratings: list[str]) -> None:
    """Refuse to replace what somebody has filled in by hand."""
    if not file.exists():
        return
    try:
        rows = parse_sheet(file, people, ratings).rows
        written_here = "skipped" in file.read_text(encoding="utf-8-sig", errors="replace").split("\n", 1)[0]
    except UserError as error:
        raise UserError(
            f"{file}: a file with another format is there ({error}). Move it away, or give --out."
        ) from error
    if not written_here and any(any(row.ratings) for row in rows):
        raise UserError(f"{file} holds ratings that did not come from the page. Move it away, or give --out DIR.")


def _write_votes(folder: Path, source: BatchSource, answers: list[CountedAnswer]) -> Path:
    """Rows with `prompt`, `a`, `b` and the votes on them by annotator."""
    votes: dict[str, list[dict[str, str]]] = {}
    who = "expert" if source.kind == "review" else "rater"
    for each in answers:
        if each.answer != SKIP:
            votes.setdefault(each.item, []).append({"annotator": f"{who}_{each.rater}", "label": each.answer})
    make_folder(folder)
    file = folder / VOTES
    with replacing(file) as temporary:
        write_rows(
            temporary,
            (
                {
                    "id": pair.name,
                    "prompt": source.prompts[pair.name],
                    "a": pair.a,
                    "b": pair.b,
                    "votes": votes[pair.name],
                }
                for pair in source.pairs
                if pair.name in votes
            ),
        )
    return file
