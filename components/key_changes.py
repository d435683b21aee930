"""What differs between two keys' parts: which input, config field, source file, library, or part of the machine."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from components.canonical import canonical_json

T = TypeVar("T")

Part = Literal["input", "config", "runtime", "source", "library"]

_ABSENT = object()


class Change(NamedTuple):
    """One leaf in which a key's parts differ from an earlier key's."""

    part: Part
    name: str
    """An input's or library's name, a dotted config field, or a source file's path."""
    change: Literal["changed", "added", "removed"]
    before: Any
    """None where it was added; a digest of an input, of a source file's tree."""
    now: Any
    """None where it was removed."""

    def __str__(self) -> str:
        if self.part == "source":
            return f"{self.name} {self.change}"
        name = f"{self.part} {self.name}" if self.part in ("input", "library") else self.name
        before, now = (_short(value) if self.part == "input" else _shown(value) for value in (self.before, self.now))
        if self.change == "changed":
            return f"{name} {before} -> {now}"
        return f"{name} {self.change} ({now if self.change == 'added' else before})"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every change from one key's parts to another's; none exactly where both give the same key.

    Args:
        before: an earlier key's parts, as `fingerprint.stage_key` returns them and a record keeps them.
        now: this key's.

    Returns:
        Inputs first, then config, machine, source files, libraries; each by name.
    """
    found: list[Change] = []
    for group, part in (("inputs", "input"), ("job", "config"), ("source", "source"), ("libraries", "library")):
        one, other = before.get(group, {}), now.get(group, {})
        modules = {*one, *other}
        for path, old, new in _leaves(one, other):
            name = ".".join(path)
            kind = "runtime" if part == "config" and path[0] == "runtime" else part
            name = source_file(name, modules) if part == "source" else name
            change = "added" if old is _ABSENT else "removed" if new is _ABSENT else "changed"
            values = (None if value is _ABSENT else value for value in (old, new))
            found.append(Change(kind, name, change, *values))  # type: ignore[arg-type]
    order = ("input", "config", "runtime", "source", "library")
    return sorted(found, key=lambda each: order.index(each.part))


def nearest(now: Mapping[str, Any], earlier: Iterable[tuple[T, Mapping[str, Any]]]) -> tuple[T, list[Change]] | None:
    """Of some earlier keys' parts those with the fewest changes to `now`; the first among equals.

    Args:
        now: a key's parts.
        earlier: whose they are, and the parts; newest first.

    Returns:
        Whose, and the changes; None where there are no earlier ones.
    """
    found = [(owner, changes(parts, now)) for owner, parts in earlier]
    return min(found, key=lambda each: len(each[1]), default=None)


def in_a_line(found: Collection[Change], most: int = 3) -> str:
    """Changes for the console: the first few, and how many more."""
    shown = [str(change) for change in list(found)[:most]]
    return ", ".join(shown) + (f" and {len(found) - most} more" if len(found) > most else "")


def source_file(module: str, modules: Collection[str]) -> str:
    """The file of a module, relative to the project; a package is known by another of `modules` being in it."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    return module.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def _leaves(one: Any, other: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Path and both values of each leaf in which two nested mappings differ as JSON (1 and 1.0 do, and 1 and true)."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in sorted({*one, *other}):
            yield from _leaves(one.get(name, _ABSENT), other.get(name, _ABSENT), (*path, name))
    elif one is _ABSENT or other is _ABSENT or canonical_json(one) != canonical_json(other):
        yield path, one, other


def _short(digest: str | None) -> str:
    return (digest or "")[:12]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
