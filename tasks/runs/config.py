"""A run's resolved config as `runs/<run>/config.yaml`; nothing else reads or writes that file."""

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import JsonValue

from components.base.errors import UserError
from components.base.files import write_whole

CONFIG = "config.yaml"


def write_values(folder: Path, values: Mapping[str, JsonValue]) -> None:
    """Write the resolved config of the run in `folder`."""
    write_whole(folder / CONFIG, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))


def run_values(home: Path, run: str) -> dict[str, JsonValue]:
    """Return the resolved config that a run was started with, as values.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = home / "runs" / run / CONFIG
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error
    if not isinstance(found, dict):
        raise _damaged(path, f"it holds {found!r:.40}, not options")
    return found


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged ({why}). Restore the file, or move the folder {path.parent} out of runs/.")
