"""Read YAML the way people expect: `1e-4` is a number, only true and false are booleans, duplicate keys are errors."""

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from components.base.errors import UserError
from components.base.paths import read_regular


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2. YAML 1.1 reads `1e-4` as text and `on` as true."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way to say it)
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[-1] == "null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse deep nesting at once: PyYAML takes a time that is quadratic in the depth."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(
                problem=f"groups are nested more than {_DEEPEST} deep", problem_mark=self.peek_event().start_mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

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
    """Read a decimal number, with or without leading zeros (PyYAML reads 010 as octal eight)."""
    if len(node.value) > _DIGITS:
        raise _problem(node, f"a number has more than {_DIGITS} digits")
    return int(node.value, 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


_TAGS = {
    **{f"tag:yaml.org,2002:{name}": yaml.ScalarNode for name in ("null", "bool", "int", "float", "str")},
    "tag:yaml.org,2002:seq": yaml.SequenceNode,
    "tag:yaml.org,2002:map": yaml.MappingNode,
}
"""The types that JSON has, with the kind of YAML node that writes each."""
_MOST, _DEEPEST, _LARGEST, _DIGITS = 20_000, 50, 2**20, 1000
"""Limits of a file: values with aliases expanded, depth of groups, characters, digits of a number. The demo has 100
values, 4 levels and 4,000 characters."""


def parse(text: str, where: str) -> Any:
    """Return the value of one YAML document; `where` names it in errors.

    Raises:
        UserError: it is not YAML, has a duplicate key, a key without a value or a type that JSON lacks, or exceeds the
            limits above.
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
    except (yaml.YAMLError, ValueError, KeyError) as error:  # `!!bool maybe` raises KeyError
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    raise UserError(f"{where}{line}: not readable as YAML: {problem}.")


def _refuse(root: yaml.Node) -> None:
    """Raise for a document that is too large or holds an invalid type, before it is turned into values.

    An alias counts as what it refers to, so an alias to a group around itself exceeds the depth limit.
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
            text = "does not fit this value" if node.tag in _TAGS else "is not a type that a config can hold"
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
    """Read the YAML file at `path` as a mapping; an empty file gives an empty one.

    Raises:
        UserError: it can't be read, or is not UTF-8, YAML or a mapping.
    """
    try:
        text = read_regular(path).decode()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 (byte {error.start}).") from error
    value = parse(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: a profile must be a mapping of keys to values; this is a {type(value).__name__}.")
    return value


def dump(value: Any) -> str:
    """Return `value` as block-style YAML, keys in the given order; `parse` reads it back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that `_Loader` would read as another type, because it resolves plain scalars the same way."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
