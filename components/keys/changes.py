"""Differences between two keys' parts: inputs, config fields, source files, libraries, or parts of the machine."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from pydantic import ConfigDict, JsonValue, with_config
from typing_extensions import TypedDict

from components.base.hashing import canonical_json

T = TypeVar("T")

Part = Literal["input", "config", "runtime", "source", "task", "library"]

_PARTS: dict[str, Part] = {
    "inputs": "input", "job": "config", "source": "source", "task": "task", "libraries": "library",
}  # fmt: skip
TASK_OPTIONS = ("data", "generator")
"""The options of the built-in task. They enter a key only if the task is the data source: nothing else reads them."""

_ABSENT = object()


@with_config(ConfigDict(extra="allow"))
class KeyParts(TypedDict, total=False):
    """The parts of which a key is the sha256. The record of an older version may lack some, and have others."""

    stage: str
    job: dict[str, JsonValue]
    """The keyed config values."""
    inputs: dict[str, str]
    """Input name to digest."""
    source: dict[str, str]
    """Module to digest."""
    task: dict[str, str]
    """The built-in task of the data, to its digest; empty for other data."""
    libraries: dict[str, str]
    """Distribution to version."""


@dataclass(frozen=True)
class Change:
    """One leaf in which a key's parts differ from an earlier key's."""

    part: Part
    name: str
    """A dotted config field, a source file's path, or the name of an input, library or built-in task."""
    change: Literal["changed", "added", "removed"]
    before: JsonValue
    """The earlier value, None if it was added. For an input, a source file or a task it is a digest."""
    now: JsonValue
    """The current value, None if it was removed."""

    def __str__(self) -> str:
        if self.part in ("source", "task"):
            return f"{'the built-in task ' if self.part == 'task' else ''}{self.name} {self.change}"
        name = f"{self.part} {self.name}" if self.part in ("input", "library") else self.name
        before, now = (_short(value) if self.part == "input" else _shown(value) for value in (self.before, self.now))
        if self.change == "changed":
            return f"{name} {before} -> {now}"
        return f"{name} {self.change} ({now if self.change == 'added' else before})"


def changes(before: KeyParts, now: KeyParts) -> list[Change]:
    """Return every change from an earlier key's parts to this key's; empty exactly if both give the same key.

    Inputs come first, then config, machine, source files, the built-in task, libraries; each sorted by name.
    """
    differences: list[Change] = []
    modules = {*before.get("source", {}), *now.get("source", {})}
    other_task = before.get("task", {}).keys() != now.get("task", {}).keys()
    for group, part in _PARTS.items():
        for path, old, new in _differences(before.get(group, {}), now.get(group, {})):
            if path == TASK_OPTIONS and other_task:
                continue  # the task is named, and comes and goes with its options
            name = ".".join(path)
            kind = "runtime" if part == "config" and path[0] == "runtime" else part
            name = source_file(name, modules) if part == "source" else name
            change = "added" if old is _ABSENT else "removed" if new is _ABSENT else "changed"
            values = (None if value is _ABSENT else value for value in (old, new))
            differences.append(Change(kind, name, change, *values))  # type: ignore[arg-type]
    return sorted(differences, key=lambda difference: get_args(Part).index(difference.part))


def nearest(now: KeyParts, earlier: Iterable[tuple[T, KeyParts]]) -> tuple[T, list[Change]] | None:
    """Return the owner of the earlier key with the fewest changes to `now`, and these changes; None without any key.

    Among equals the first wins.
    """
    candidates = [(owner, changes(parts, now)) for owner, parts in earlier]
    return min(candidates, key=lambda candidate: len(candidate[1]), default=None)


def in_a_line(differences: Collection[Change], most: int = 3) -> str:
    """Return changes as one line for the console: the first few, and how many more."""
    texts = [str(change) for change in list(differences)[:most]]
    return ", ".join(texts) + (f" and {len(differences) - most} more" if len(differences) > most else "")


def source_file(module: str, modules: Collection[str]) -> str:
    """Return a module's file relative to the project. A module is a package if another of `modules` is in it."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    return module.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def _differences(one: Any, other: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield path and both values of each leaf in which two nested mappings differ as JSON (as 1 and 1.0, or 1 and
    true)."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted({*one, *other}):
            yield from _differences(one.get(name, _ABSENT), other.get(name, _ABSENT), (*path, name))
    elif one is _ABSENT or other is _ABSENT or canonical_json(one) != canonical_json(other):
        yield path, one, other


def _short(digest: JsonValue) -> str:
    return str(digest or "")[:12]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
