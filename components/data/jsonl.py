"""Rows as JSON Lines, written the same way every time: sorted keys, UTF-8, one object a line."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of an artifact (one JSON object a line)."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows`, making the folder; the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON value, indented and with sorted keys, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, sort_keys=True, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
