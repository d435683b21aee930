"""Find what is judged on the page: a run's sample, pairs of candidates, or pairs without a majority, for experts.

Only the sheet is read. The process that serves the page opens no keys and no files that name authors.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.base.jsonl import Message, json_line, read_rows
from components.base.paths import user_path
from components.data.formats.pairs import detect, parse_pairs
from components.data.formats.transcripts import as_messages
from components.data.rows import BadRow, RawRow
from components.human_eval.blinded_sample import as_text
from components.human_eval.config import GUIDELINES
from components.human_eval.sheet import MEANINGS, AskedCriterion
from components.store.store import ArtifactStore
from tasks.runs.status import has_run, load_status

Kind = Literal["sample", "candidates", "review"]
Messages = list[Message]
_LONGEST = 2_000_000
"""The largest number of characters of a pair's texts; longer ones are refused."""


class JudgedPair(NamedTuple):
    """A pair as its sheet has it. The page may swap the sides."""

    name: str
    prompt: str
    a: str
    b: str


class BatchSource(NamedTuple):
    """A batch of pairs to judge, and the questions to raters."""

    name: str
    """A run's id, or the name of a folder or file with the start of its digest."""
    kind: Kind
    place: Path
    """The run's folder, or the folder or file of pairs."""
    pairs: list[JudgedPair]
    guidelines: str
    ratings: list[str]
    criteria: list[AskedCriterion]
    overlap: int
    """Answers per item, each from a different person."""
    digest: str
    prompts: dict[str, Any]
    """The prompt of each item in the data's format; empty for a run's sample."""


def find_batch(home: Path, named: str, overlap: int | None = None, guidelines: str | None = None) -> BatchSource:
    """Return the batch called `named`: a run's id, a folder of candidates, or a file `pairs.jsonl` or `review.jsonl`.

    Args:
        overlap: answers per item; None means the sheet's number of raters, or 1 for other pairs.
        guidelines: a text that replaces the batch's own guidelines.

    Raises:
        UserError: there is no such run or file, it has no pair, or the run has no sample.
    """
    path = user_path(named, "BATCH")
    if path.exists():
        return _of_path(path.absolute(), overlap, guidelines)
    if not has_run(home, named):
        raise UserError(f"{named}: there is no such run (`tether runs` lists them), folder or file.")
    return sample_batch(sample_folder(home, named), home / "runs" / named, overlap, guidelines)


def sample_folder(home: Path, run: str) -> Path:
    """Return the folder of the artifact that holds a run's sheet.

    Raises:
        UserError: the run has no sheet.
    """
    status = load_status(home, run).stage("human_eval")
    part = status.parts.get("human_eval.sample")
    digest = part.digest if part is not None and part.digest else status.digest
    folder = ArtifactStore(home).path(digest) if digest else None
    if folder is None or not (folder / "sheet.jsonl").is_file():
        raise UserError(
            f"run {run} has no sheet to judge (human_eval: {status.state}). Name a run that awaits labels: one with "
            "human_eval.judges=people."
        )
    return folder


def sample_batch(
    folder: Path, run: Path, overlap: int | None = None, guidelines: str | None = None
) -> BatchSource:
    """Return the batch of a run whose sample artifact is `folder`. Other arguments: as `find_batch`."""
    about = json.loads((folder / "sheet.json").read_text(encoding="utf-8"))
    rows = read_rows(folder / "sheet.jsonl")
    pairs = [JudgedPair(row["item"], row["prompt"], row["response_a"], row["response_b"]) for row in rows]
    return _batch(
        run.name, "sample", run, pairs, guidelines or about.get("guidelines") or about["instructions"],
        about["ratings"], about.get("criteria", []), overlap or about["raters"],
    )  # fmt: skip


def _of_path(path: Path, overlap: int | None, guidelines: str | None) -> BatchSource:
    file = path
    if path.is_dir():
        file = next((path / name for name in ("pairs.jsonl", "review.jsonl") if (path / name).is_file()), path)
        if file is path:
            raise UserError(
                f"{path}: the folder has neither pairs.jsonl nor review.jsonl. Name a run, or such a folder or file."
            )
    try:
        rows = read_rows(file)
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{file}: can't be read as JSON Lines ({error}).") from error
    for number, row in enumerate(rows, 1):
        _refuse_half_characters(row, f"{file}, row {number}")
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file} has no pairs. Give pairs.jsonl of `tether data candidates`, or a review.jsonl.")
    kind: Kind = "review" if "data" in rows[0] else "candidates"
    named = _reviewed(rows, file) if kind == "review" else _candidates(rows, file)
    pairs_and_prompts = [(JudgedPair(name, as_text(prompt), a, b), prompt) for name, prompt, a, b in named]
    pairs = [pair for pair, _ in pairs_and_prompts]
    digest = digest_json([list(pair) for pair in pairs])
    name = f"{(path if path.is_dir() else path.parent).name}-{digest[:8]}"
    batch = _batch(name, kind, file, pairs, guidelines or GUIDELINES, list(MEANINGS), [], overlap or 1)
    return batch._replace(prompts={pair.name: prompt for pair, prompt in pairs_and_prompts})


def _refuse_half_characters(row: Any, where: str) -> None:
    for name, value in row.items() if isinstance(row, dict) else ():
        try:
            json_line({name: value})
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: `{name}` holds {error.object[error.start]!a}, half of a character (a lone surrogate), "
                "which no file in UTF-8 can hold. Correct the text."
            ) from None


def _candidates(rows: Sequence[Mapping[str, object]], file: Path) -> Iterator[tuple[str, Messages, str, str]]:
    """Yield the pairs of `pairs.jsonl`, or of any rows with `prompt`, `a` and `b`."""
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("a"), str) or not isinstance(row.get("b"), str):
            raise UserError(f"{file}, row {number}: `a` and `b` must be texts.")
        try:
            prompt = as_messages(row.get("prompt"), "prompt")
        except BadRow as error:
            raise UserError(f"{file}, row {number}: {error.problem.text}. Give text or a list of messages.") from error
        yield str(row.get("id", number)), prompt, str(row["a"]), str(row["b"])


def _reviewed(rows: Sequence[Mapping[str, Any]], file: Path) -> Iterator[tuple[str, Messages, str, str]]:
    """Yield the pairs of `review.jsonl`, which were quarantined because they have no majority. Their order does not
    reveal which side led."""
    if not all(isinstance(row.get("data"), dict) for row in rows):
        raise UserError(f"{file}: a row without `data` is not from a review.jsonl. Give the file that a run wrote.")
    raw = [RawRow(n, row["data"]) for n, row in enumerate(rows, 1)]
    form = detect(raw, file)
    for raw_row in raw:
        for part, row in enumerate(parse_pairs(raw_row, form, str(file), _LONGEST), 1):
            if row.item is None:
                raise UserError(f"{file}, row {raw_row.number}: it has no readable pair ({row.problems[0].text}).")
            first, second = sorted((row.item["chosen"], row.item["rejected"]), key=lambda text: digest_json([text]))
            yield f"{raw_row.number}.{part}", row.item["prompt"], first, second


def _batch(
    name: str, kind: Kind, place: Path, pairs: list[JudgedPair], guidelines: str, ratings: list[str],
    criteria: list[AskedCriterion], overlap: int,
) -> BatchSource:  # fmt: skip
    names = [pair.name for pair in pairs]
    if doubled := [item for item, times in Counter(names).items() if times > 1]:
        raise UserError(f"{place}: the item {doubled[0]} appears twice. Give each pair an id of its own.")
    digest = digest_json([list(map(list, pairs)), ratings])
    return BatchSource(name, kind, place, pairs, guidelines, ratings, criteria, overlap, digest, {})
