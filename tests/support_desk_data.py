"""A small validate artifact of the built-in task, made without validating."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.base.jsonl import write_json
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.data.tables.published import SplitWriter

NO_COLUMNS = ("votes_helpful", "votes_compliant")
"""Fields of the generator's pairs for which a split has no columns."""


def make_data(folder: Path, times: int = 1) -> Path:
    """Write the artifact, with `times` as many rows as the smallest; return its folder. Needs no package but the
    learning's."""
    folder.mkdir(parents=True)
    demonstrations, pairs = generate(0, SupportDeskConfig(demonstrations=110 * times, pairs=90 * times))
    _write(folder / "demonstrations.train", demonstrations[: 96 * times])
    _write(folder / "demonstrations.heldout", demonstrations[96 * times :])
    ends = {"train": (0, 48), "calibration": (48, 64), "test": (64, 90)}
    for split, (start, end) in ends.items():
        rows = pairs[start * times : end * times]
        _write(folder / f"pairs.{split}", ({k: v for k, v in row.items() if k not in NO_COLUMNS} for row in rows))
        _write(folder / f"prompts.{split}", ({k: row[k] for k in ("prompt", "category")} for row in rows))
    write_json(folder / "task.json", {"name": "support-desk"})
    return folder


def _write(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with SplitWriter(folder, weighted=False) as split:
        for row in rows:
            split.write(row)
