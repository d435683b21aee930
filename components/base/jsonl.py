"""Rows as JSON Lines, written the same way every time: sorted keys, UTF-8, one object a line."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.base.errors import naming

Message = dict[str, str]
"""A turn of a conversation: its role and content."""


def read_rows(path: Path) -> list[Any]:
    """The rows of a file of an artifact (one JSON object a line), of the type that the caller knows them to have."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def json_line(row: Mapping[str, object]) -> bytes:
    """A row as a line of a file: the same row gives the same bytes."""
    return (json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n").encode()


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write `rows`, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("wb") as out:
        out.writelines(map(json_line, rows))


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value, indented and with sorted keys, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        path.write_text(json.dumps(value, sort_keys=True, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
