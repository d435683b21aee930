"""The folders that the administrator of a machine allows runs to read files and to import code from."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components.base.errors import UserError
from components.base.paths import files_read, holds_model_or_data

VARIABLE = "TETHER_ALLOWED_FOLDERS"
"""The environment variable with the folders, separated by colons. If unset, every path is allowed."""
CODE = ("ppo.rewards.root", "ppo.rules.root", "evaluation.tasks")
"""Options that name a folder of code, or a file that may name code."""
FILES = (
    "data.preferences", "data.judge_preferences", "data.demonstrations", "data.prompts", "data.suite",
    "data.decontaminate", "data.deployment_prompts", "sft.base", "sft.chat_template", "reward.suites",
    "reward.refresh.from_run", "ppo.rewards.source", "ppo.rules.file", "ppo.rollout.folder", "human_eval.guidelines",
    "evaluation.probes", "evaluation.judge",
)  # fmt: skip
"""Options that may name a file or folder. A test walks the config, so that a new one is not left out."""


def refuse_outside(options: BaseModel, home: Path) -> None:
    """Check each path in a config or a stage's job. Files may also be in the home, code only in the allowed folders.

    Raises:
        UserError: a path is outside, after links are resolved.
    """
    if VARIABLE in os.environ:
        for name, text in texts_of(options):
            if name in CODE:
                refuse_path(name, text, None)
            elif name in FILES and not text.startswith(("function:", "plugin:", "http:", "verifier:")):
                refuse_path(name, text.removeprefix("model:"), home)


def refuse_path(name: str, text: str, home: Path | None) -> None:
    """Check one path, which the option `name` gives; a text that names nothing here is none.

    Raises:
        UserError: as `refuse_outside`.
    """
    if VARIABLE not in os.environ:
        return
    try:
        path = Path(text).expanduser()
        if not (path.exists() or path.is_absolute() or ".." in path.parts):  # a hub's name, a run's id, a template
            return
        inside = [Path(folder).resolve() for folder in os.environ[VARIABLE].split(os.pathsep) if folder]
        inside += [] if home is None else [home.resolve()]
        files = files_read(path) if path.is_dir() and holds_model_or_data(path) else ()
        outside = next((file for file in (path, *files) if not any(map(file.resolve().is_relative_to, inside))), None)
    except (OSError, ValueError, RuntimeError):  # no path: too long, a NUL character, `~name` of an unknown user
        return
    if outside is not None:
        raise UserError(
            f"{name}: {outside} is outside the folders that {VARIABLE} allows on this machine "
            f"({os.environ[VARIABLE] or 'none'}). Put it into one of them, or ask the machine's administrator."
        )


def texts_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the text of each option that is a text, or that a list or group of texts holds."""
    if isinstance(value, BaseModel):
        for field, item in value:
            if (name, field) != ("ppo.rules", "root") or getattr(value, "function", None):  # patterns have no code
                yield from texts_of(item, f"{name}.{field}".removeprefix("."))
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_of(item, name)
    elif isinstance(value, str):
        yield name, value
