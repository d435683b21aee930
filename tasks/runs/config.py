"""A run's resolved config, `runs/<run>/config.yaml`, and the profile that it began from, `profile.yaml`. Nothing else
reads or writes these files."""

import functools
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import yaml
from pydantic import JsonValue, TypeAdapter

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.paths import read_regular
from components.gates.renamed import present_options

CONFIG, PROFILE = "config.yaml", "profile.yaml"
_OF_TAGS = (LookupError, AttributeError, TypeError)
"""Errors that YAML's constructors raise for `!!bool maybe`, `!!int` without a number and `!!timestamp soon`."""
_VALUES = TypeAdapter(dict[str, JsonValue])


def write_values(folder: Path, values: Mapping[str, JsonValue], file: str = CONFIG) -> None:
    """Write the resolved config of the run in `folder`, or the values of its profile (`PROFILE`)."""
    write_whole(folder / file, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))


def profile_values(home: Path, run: str) -> dict[str, JsonValue] | None:
    """Return the values of the profile that a run began from; None if it is built in. Raises UserError as
    `run_values`."""
    return run_values(home, run, PROFILE) if (home / "runs" / run / PROFILE).exists() else None


def run_values(home: Path, run: str, file: str = CONFIG) -> dict[str, JsonValue]:
    """Return the resolved config that a run was started with, as plain values under their present names.

    Raises:
        UserError: the file is missing, or its content is not what Tether writes.
    """
    path = home / "runs" / run / file
    try:
        return present_options(_VALUES.validate_python(_parsed(read_regular(path).decode())))
    except (OSError, ValueError, yaml.YAMLError, *_OF_TAGS, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({shorten(str(error), 300)}). Restore the file, or move the folder {path.parent} out "
            f"of {path.parent.parent}."
        ) from error


@functools.lru_cache(maxsize=4)
def _parsed(text: str) -> object:
    """Read YAML, which takes a twentieth of a second; a run reads its config seven times. Callers copy the result."""
    return yaml.safe_load(text)
