"""A long list computed in chunks that survive an interruption."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from components.data.jsonl import write_json
from components.files import replacing

T = TypeVar("T")
Row = dict[str, Any]


def in_chunks(
    items: Sequence[T],
    size: int,
    checkpoint: Path,
    compute: Callable[[Sequence[T], int], list[Row]],
    done: Callable[[int], None],
) -> list[Row]:
    """`compute(chunk, start)` of every `size` items in turn, joined: rows that JSON can hold.

    A chunk that is computed is written to `<checkpoint>-<start>.json`; what is there is not computed again. Where a
    chunk's rows depend on nothing but its items and `start`, an interrupted run ends with the same rows.

    Args:
        done: called with the number of rows so far after every chunk, those found on disk among them.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    for start in range(0, len(items), size):
        file = checkpoint.with_name(f"{checkpoint.name}-{start:06d}.json")
        if not file.exists():
            rows = compute(items[start : start + size], start)
            with replacing(file) as temporary:
                write_json(temporary, rows)
        found += json.loads(file.read_text(encoding="utf-8"))
        done(len(found))
    return found
