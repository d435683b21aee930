"""A long list computed in chunks that survive an interruption."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from components.base.files import make_folder, read_sealed, replacing, seal

logger = logging.getLogger(__name__)

T = TypeVar("T")
Row = TypeVar("Row")


def in_chunks(
    items: Sequence[T],
    size: int,
    checkpoint: Path,
    compute: Callable[[Sequence[T], int], list[Row]],
    done: Callable[[int], None],
) -> list[Row]:
    """`compute(chunk, start)` of every `size` items in turn, joined: rows that JSON can hold.

    A chunk that is computed is written to `<checkpoint>-<start>.json`; what is there, undamaged, is not computed again.
    Where a chunk's rows depend on nothing but its items and `start`, an interrupted run ends with the same rows.
    `done` is called after every chunk with the number of rows so far, those found on disk among them.
    """
    make_folder(checkpoint.parent)
    found: list[Row] = []
    for start in range(0, len(items), size):
        file = checkpoint.with_name(f"{checkpoint.name}-{start:06d}.json")
        rows = _computed_before(file)
        if rows is None:
            with replacing(file) as temporary:
                temporary.write_text(seal(compute(items[start : start + size], start)), encoding="utf-8")
            rows = read_sealed(file)
        found += rows
        done(len(found))
    return found


def _computed_before(file: Path) -> Any:
    """The rows of a chunk's file; None where there is none, or a damaged one."""
    try:
        return read_sealed(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("computing a damaged chunk again: %s", error)
        return None
