"""YAML as people expect it: `1e-4` is a number, only true and false are booleans, a key stands once."""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from components.base.errors import UserError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's plain scalars; 1.1 reads `1e-4` as text and `on` as true."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way to say it)
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[-1] == "null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(None, None, "a key is text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_NUMBER_STARTS = list("-+.0123456789")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), _NUMBER_STARTS)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    _NUMBER_STARTS,
)


# Decimal, with or without leading zeros (PyYAML reads 010 as octal eight).
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value, 10))


def parse(text: str, where: str) -> Any:
    """The value of one YAML document; `where` names it in errors.

    Raises:
        UserError: it is no YAML, or holds a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}{line}: not readable as YAML: {problem}.") from error


def read_mapping(path: Path) -> dict[str, JsonValue]:
    """The YAML file at `path` as a mapping; an empty file is an empty one.

    Raises:
        UserError: it can't be read, is no UTF-8, no YAML or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {error.start}).") from error
    value = parse(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: a profile is a mapping of keys to values, this is a {type(value).__name__}.")
    return value


def dump(value: Any) -> str:
    """`value` as block-style YAML, keys in their given order, which `parse` reads back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as another type (so it resolves plain scalars as that does)."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
