"""Nested options, as YAML and JSON hold them."""

from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue


def group(values: Mapping[str, JsonValue], *path: str) -> Mapping[str, JsonValue]:
    """Return the group of options at `path`, as in `group(job, "reward", "objectives")`; empty if there is none."""
    for name in path:
        inner = values.get(name)
        values = inner if isinstance(inner, dict) else {}
    return values


def nested(path: Sequence[str], value: JsonValue) -> dict[str, JsonValue]:
    """Return nested options with one value: `{"a": {"b": value}}` for the path `a`, `b`."""
    *groups, name = path
    options = {name: value}
    for outer in reversed(groups):
        options = {outer: options}
    return options


def merge(below: Mapping[str, JsonValue], above: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return `above` merged over `below`: groups key by key; any other value is replaced."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def selected(
    values: Mapping[str, JsonValue], is_chosen: Callable[[str], bool], prefix: str = ""
) -> dict[str, JsonValue]:
    """Return nested options with only those values for whose dotted names `is_chosen` returns True."""
    chosen: dict[str, JsonValue] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            inner = selected(value, is_chosen, f"{prefix}{name}.")
            chosen |= {name: inner} if inner else {}
        elif is_chosen(prefix + name):
            chosen[name] = value
    return chosen


def flatten(values: Mapping[str, JsonValue], prefix: str = "") -> dict[str, JsonValue]:
    """Return nested options by dotted name."""
    flat: dict[str, JsonValue] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
