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
                raise yaml.constructor.ConstructorError(None, None, f"{key} appears twice", key_node.start_mark)
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


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Decimal, with or without leading zeros (PyYAML reads 010 as octal eight)."""
    if len(node.value) > _DIGITS:
        raise _problem(node, f"a number has more than {_DIGITS} digits")
    return int(node.value, 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_TAGS = {
    **{f"tag:yaml.org,2002:{name}": yaml.ScalarNode for name in ("null", "bool", "int", "float", "str")},
    "tag:yaml.org,2002:seq": yaml.SequenceNode,
    "tag:yaml.org,2002:map": yaml.MappingNode,
}
"""What JSON has, and how it is written."""
_MOST, _DEEPEST, _LARGEST, _DIGITS = 20_000, 50, 2**20, 1000
"""Values in a file with its aliases written out, groups inside each other, and characters. The demo has 100, 4 and
4,000."""


def parse(text: str, where: str) -> Any:
    """Return the value of one YAML document; `where` names it in errors.

    Raises:
        UserError: it is not YAML, holds a key twice, a key without a value, or what JSON has no type for, or is larger
            or deeper than any config.
    """
    try:
        if len(text) > _LARGEST:
            raise yaml.YAMLError(f"it has more than {_LARGEST} characters")
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse(node)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, KeyError) as error:  # the last of `!!bool maybe`
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    except RecursionError:
        line, problem = "", f"groups are nested more than {_DEEPEST} deep"
    raise UserError(f"{where}{line}: not readable as YAML: {problem}.")


def _refuse(root: yaml.Node) -> None:
    """Raise for what would take forever to read, or become what no config holds, before anything is made of it.

    An alias counts as what it stands for. So one that stands for a group around itself is nested without end.
    """
    waiting, count = [(root, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if depth > _DEEPEST:
            raise _problem(node, f"groups are nested more than {_DEEPEST} deep")
        if count > _MOST:
            raise _problem(node, f"it has more than {_MOST} values, aliases expanded")
        if not isinstance(node, _TAGS.get(node.tag, ())):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            text = "isn't what this is" if node.tag in _TAGS else "is not a type that a config can hold"
            raise _problem(node, f"{tag} {text}")
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(value, yaml.ScalarNode) and value.value == "" and value.style is None:
                    raise _problem(key, f"{getattr(key, 'value', 'a key')} has no value; write null for none")
                waiting += [(key, depth + 1), (value, depth + 1)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(value, depth + 1) for value in node.value]


def _problem(node: yaml.Node, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)


def read_mapping(path: Path) -> dict[str, JsonValue]:
    """Return the YAML file at `path` as a mapping; an empty file is an empty one.

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
