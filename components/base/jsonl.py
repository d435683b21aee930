"""Rows as JSON Lines, written the same way every time: sorted keys, UTF-8, one object a line."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from components.base.errors import naming

T = TypeVar("T")

Message = dict[str, str]
"""A turn of a conversation: `role` and `content`."""


def read_rows(path: Path) -> list[Any]:
    """Return the rows (one JSON object a line) of an artifact's file. Their type is not checked."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def json_line(row: Mapping[str, object]) -> bytes:
    """Return a row as one line of JSON. Equal rows give equal bytes."""
    return (json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n").encode()


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write `rows` to `path`, and make its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("wb") as out:
        out.writelines(map(json_line, rows))


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value, indented and with sorted keys, and make the folder of `path` if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        path.write_text(json.dumps(value, sort_keys=True, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class AppendedLines(Generic[T]):
    """A file of lines that survives kills: it holds an earlier process's lines, and each new line is synced to disk."""

    def __init__(self, path: Path, read: Callable[[Any], T]) -> None:
        """Read the lines of `path` up to the first one that is damaged or incomplete, and drop the rest.

        Args:
            read: turns a line's JSON into a value; raises ValueError, TypeError or KeyError if the line is damaged.
        """
        self.found: list[T] = []
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
            try:
                value = read(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                break
            if not line.endswith(b"\n"):
                break
            self.found.append(value)
            whole += len(line)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def add(self, lines: bytes) -> None:
        """Append whole lines; they are on the disk when this returns."""
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
