"""Write a batch's answers as files: one per rater of a run, or rows of votes that `data.preferences` reads."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sqlalchemy import select

from components.base.errors import UserError
from components.base.files import make_folder, replacing
from components.base.jsonl import write_rows
from components.data.spreadsheet import write_csv
from components.human_eval.batch.returned_sheets import parse_sheet
from components.human_eval.sheet import OWN, PEOPLE, RATERS, TEXTS, rater_file
from flows.review.batch_summary import CountedAnswer, counted_answers
from flows.review.database.tables import rater
from flows.review.rater_votes import SKIP, Voting
from flows.review.review_batches import BatchSource

VOTES = "votes.jsonl"
"""The file of votes on candidates, or of experts' votes on pairs without a majority, next to the pairs."""
_MORE = ("skipped", "flags", "comment", "seconds")
"""Columns of an exported file that the sheets given out do not have."""


def export(voting: Voting, source: BatchSource, out: Path | None = None) -> list[Path]:
    """Write the answers so far and return the files. Earlier exports are replaced.

    Args:
        out: a folder; None means the run's `raters/`, or the folder of the pairs.

    Raises:
        UserError: nobody has answered, or an existing file holds ratings that the page did not write.
    """
    with voting.engine.connect() as connection:
        answers = counted_answers(connection, voting.batch.id)
        people = connection.scalars(select(rater.c.number).where(rater.c.batch == voting.batch.id)).all()
    if not answers:
        raise UserError(f"{voting.batch.name}: nobody has answered yet. Send the raters their links.")
    if source.kind != "sample":
        who = "expert" if source.kind == "review" else "rater"
        votes: dict[str, list[dict[str, str]]] = {}
        for answer in answers:
            if answer.answer != SKIP:
                votes.setdefault(answer.item, []).append({"annotator": f"{who}_{answer.rater}", "label": answer.answer})
        return [write_votes(source, votes, out)]
    by_rater: dict[int, dict[str, CountedAnswer]] = {}
    for answer in answers:
        by_rater.setdefault(answer.rater, {})[answer.item] = answer
    folder = out or source.place / RATERS
    files = [folder / rater_file(number) for number in sorted(by_rater)]
    for file in files:
        _check_ours(file, max(people), source.ratings)
    make_folder(folder)
    for number, file in zip(sorted(by_rater), files, strict=True):
        columns = [*TEXTS, *OWN, PEOPLE, *(criterion["name"] for criterion in source.criteria), *_MORE]
        with replacing(file) as temporary:
            write_csv(temporary, columns, _rows(source, number, by_rater[number], max(people)))
    return files


def _rows(
    source: BatchSource, number: int, answers: Mapping[str, CountedAnswer], people: int
) -> Iterator[dict[str, str]]:
    """Yield a row for each item of the sheet; empty if the rater was not asked or could not judge it."""
    for pair in source.pairs:
        answer = answers.get(pair.name)
        row = dict(zip(TEXTS, pair, strict=True)) | {"rater": str(number), PEOPLE: str(people)}
        criteria = answer.criteria if answer else {}
        row |= {criterion["name"]: criteria.get(criterion["name"], "") for criterion in source.criteria}
        if answer is None:
            yield row | dict.fromkeys(("rating", *_MORE), "")
            continue
        yield row | {
            "rating": "" if answer.answer == SKIP else answer.answer,
            "skipped": "yes" if answer.answer == SKIP else "",
            "flags": " ".join(answer.flags),
            "comment": answer.comment,
            "seconds": "" if answer.seconds is None else f"{answer.seconds:.1f}",
        }


def _check_ours(file: Path, people: int, ratings: list[str]) -> None:
    """Refuse to replace a file that was filled in by hand."""
    if not file.exists():
        return
    try:
        rows = parse_sheet(file, people, ratings).rows
        written_here = "skipped" in file.read_text(encoding="utf-8-sig", errors="replace").split("\n", 1)[0]
    except UserError as error:
        raise UserError(f"{file}: this file has another format ({error}). Move it away, or give --out.") from error
    if not written_here and any(any(row.ratings) for row in rows):
        raise UserError(f"{file} holds ratings that did not come from the page. Move it away, or give --out DIR.")


def write_votes(
    source: BatchSource, votes: Mapping[str, Sequence[Mapping[str, str]]], out: Path | None = None
) -> Path:
    """Write a row with `prompt`, `a`, `b` and `votes` for each pair that has a vote, and return the file.

    Args:
        votes: by item, each with `annotator` and `label`.
        out: a folder; None means the folder of the pairs.
    """
    file = (out or source.place.parent) / VOTES
    make_folder(file.parent)
    with replacing(file) as temporary:
        write_rows(
            temporary,
            (
                {"id": name, "prompt": source.prompts[name], "a": a, "b": b, "votes": votes[name]}
                for name, _, a, b in source.pairs
                if votes.get(name)
            ),
        )
    return file
