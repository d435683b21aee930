"""Read the rows of sources into a ledger's shards, in several processes, resuming an interrupted validation."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from components.base.files import make_folder, write_whole
from components.data.rows import RawRow
from data_contracts.config import ValidateJob
from data_contracts.rows import ledger as ledgers
from data_contracts.rows.gather import RowSource, detected, parsed
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import Measuring, write_rows
from data_contracts.rows.processes import in_order
from data_contracts.rows.shards import is_whole

PLAN = "plan.json"
CHARACTERS = 2**22
"""A shard ends at the row that reaches this many characters, so that long rows do not fill memory: each process holds
some ten times this many bytes, and the process that reads holds four shards."""


class _Part(NamedTuple):
    path: Path
    raws: list[RawRow]
    format: str
    source: RowSource
    """The source, without its rows."""
    file: int
    """The index of its file."""
    max_characters: int


def read_sources(
    ledger: Ledger, sources: Sequence[RowSource], max_characters: int, processes: int,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    """Fill `ledger` with the rows of `sources`. Complete shards from an earlier attempt are reused.

    Args:
        progress: called with the number of rows read.

    Raises:
        UserError: a source can't be read, or has no known format.
    """
    ledger.path.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []

    def parts() -> Iterator[_Part]:
        for file, (_, alike) in enumerate(groupby(sources, lambda source: source.file)):
            for source in alike:
                name, raws = detected(source._replace(extra=ledger.extra))
                options = source.options._replace(label_values=dict(source.options.label_values))
                bare = source._replace(
                    rows=(), columns=dict(source.columns), options=options, extra=ledger.extra, unread=None,
                )  # fmt: skip
                for some in _in_parts(iter(raws)):
                    paths.append(ledger.shard_path(len(paths)))
                    yield _Part(paths[-1], some, name, bare, file, max_characters)

    read = 0
    for number, rows in enumerate(in_order(_write_part, ledger.measuring, parts(), processes)):
        read += rows
        if number or rows >= ledgers.SHARD_ROWS:  # a small file is read at once
            progress(read)
    ledger.take(paths)


def _in_parts(raws: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    part: list[RawRow] = []
    characters = 0
    for raw in raws:
        part.append(raw if raw.extra else raw._replace(extra={}))  # a mapping view can't be sent to another process
        characters += sum(len(value) for value in raw.data.values() if isinstance(value, str | list))
        if len(part) == ledgers.SHARD_ROWS or characters >= CHARACTERS:
            yield part
            part, characters = [], 0
    if part:
        yield part


def _write_part(how: Measuring, part: _Part) -> int:
    """Write a shard unless it exists; return the number of its source rows."""
    if not is_whole(part.path):
        rows = parsed(part.raws, part.format, part.source, part.max_characters)
        write_rows(part.path, rows, part.file, how)
    return len(part.raws)


def begin(folder: Path, job: ValidateJob, inputs: Mapping[str, Path]) -> None:
    """Prepare `folder` for shards: keep what an interrupted validation of the same job and files left, else empty
    it."""
    files = {
        name: [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in [path, *sorted(path.rglob("*"))]]
        for name, path in inputs.items()
        if path.exists()  # a missing file is reported where it is read
    }
    plan = {
        "job": job.model_dump(mode="json", exclude={"data": {"processes"}}), "files": files,
        "shards": [ledgers.SHARD_ROWS, CHARACTERS],
    }  # fmt: skip
    text = json.dumps(plan, sort_keys=True)
    plan_file = folder / PLAN
    if not plan_file.is_file() or plan_file.read_text(encoding="utf-8") != text:
        shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    write_whole(folder / PLAN, text)
