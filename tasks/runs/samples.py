"""Responses that a stage shows while it computes, as text in the run's folder and as a table.

samples/<stage>.txt   one block per step, newest last
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from components.base.errors import naming
from components.base.text import line, plain
from tasks.runs.points import Point

Sample = Mapping[str, Any]


def samples_file(folder: Path, stage: str) -> Path:
    return folder / "samples" / f"{stage}.txt"


class SamplesFile:
    """Writes the samples of one stage in one run. Steps that are already in the file are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        there = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self._steps = {int(text.split()[2]) for text in there if text.startswith("== step ") and text.endswith(" ==")}

    def add(self, point: Point) -> None:
        """Write the samples of a point."""
        samples, step = point.get("samples"), point["step"]
        if not samples or step in self._steps:
            return
        self._steps.add(step)
        with naming(self._path):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(block(step, samples))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def block(step: int, samples: Sequence[Sample]) -> str:
    parts = [f"== step {step} ==\n"]
    for sample in samples:
        parts.append(f"[{_numbers(sample)}]\n> {line(_prompt(sample))}\n{_quoted(str(sample.get('response', '')))}\n\n")
    return "".join(parts)


def as_table(points: Iterable[Point]) -> str:
    """Return the samples of all points as the JSON of an MLflow table; empty if there are none."""
    rows = [{"step": p["step"], **s, "prompt": _prompt(s)} for p in points for s in p.get("samples") or ()]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return json.dumps({"columns": columns, "data": [[row.get(c) for c in columns] for row in rows]}) if rows else ""


def choice_of(artifact: Path) -> str:
    """Return which checkpoint an artifact holds and why, from its `metadata.json`; empty if that does not say."""
    try:
        metadata = json.loads((artifact / "metadata.json").read_text(encoding="utf-8"))
        return str(metadata["reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # of an older version
        return ""


def _prompt(sample: Sample) -> str:
    prompt = sample.get("prompt")
    if isinstance(prompt, list):
        return "\n".join(str(turn.get("content", "") if isinstance(turn, Mapping) else turn) for turn in prompt)
    return str(prompt)


def _numbers(sample: Sample) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in sample.items() if isinstance(value, (int, float)))


def _quoted(text: str) -> str:
    """Return a response's lines, indented so that none looks like the head of a block."""
    return "\n".join(f"  {row}" for row in plain(text).split("\n"))
