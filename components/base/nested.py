"""Nested options, as YAML and JSON hold them."""

from collections.abc import Mapping

from pydantic import JsonValue


def group(values: Mapping[str, JsonValue], *path: str) -> Mapping[str, JsonValue]:
    """Return the group of options at `path`, as in `group(job, "reward", "objectives")`; empty if there is none."""
    for name in path:
        inner = values.get(name)
        values = inner if isinstance(inner, dict) else {}
    return values


def flatten(values: Mapping[str, JsonValue], prefix: str = "") -> dict[str, JsonValue]:
    """Return nested options by dotted name."""
    flat: dict[str, JsonValue] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
