"""Files of pairs for tests, and splits as validation publishes them."""

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from components.data.tables.published import SplitWriter, read_split

OF_SINGLE_QUESTIONS = ("votes_helpful", "votes_compliant")


def published(pairs: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pairs of the support desk's generator without the votes on single questions, which a split has no columns for."""
    for pair in pairs:
        yield {name: value for name, value in pair.items() if name not in OF_SINGLE_QUESTIONS}


def write_split(folder: Path, rows: Iterable[Mapping[str, Any]], weighted: bool = False) -> None:
    """Write `rows` as the split `folder`, and replace an existing one. `weighted` and errors are as for
    `SplitWriter`."""
    shutil.rmtree(folder, ignore_errors=True)
    with SplitWriter(folder, weighted) as split:
        for row in rows:
            split.write(row)


def pairs(start: int, stop: int, **more: Any) -> list[dict[str, Any]]:
    """Pairs that differ in their numbers, with the fields `more`."""
    return [
        {"prompt": f"question {i}", "chosen": f"good {i} indeed", "rejected": f"bad {i}", **more}
        for i in range(start, stop)
    ]


def write(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows, texts as they are, a line each; gzipped if the name says so. Return `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def lines(out: Path, name: str) -> list[Any]:
    """The rows of a split of the artifact in `out`."""
    return list(read_split(out / "artifact" / name))


def contents(out: Path) -> dict[str, bytes]:
    """The files of the artifact in `out`, by name."""
    files = (path for path in (out / "artifact").rglob("*") if path.is_file())
    return {str(path.relative_to(out / "artifact")): path.read_bytes() for path in files}
