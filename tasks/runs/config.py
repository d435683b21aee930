"""A run's resolved config as `runs/<run>/config.yaml`; nothing else reads or writes that file."""

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import JsonValue

from components.base.errors import naming

CONFIG = "config.yaml"


def write_values(folder: Path, values: Mapping[str, JsonValue]) -> None:
    """Write the resolved config of the run in `folder`."""
    with naming(folder / CONFIG):
        text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
        (folder / CONFIG).write_text(text, encoding="utf-8")


def run_values(home: Path, run: str) -> dict[str, JsonValue]:
    """Return the resolved config that a run was started with, as values."""
    return yaml.safe_load((home / "runs" / run / CONFIG).read_text(encoding="utf-8")) or {}
