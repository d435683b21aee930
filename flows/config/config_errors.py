"""Explain what is wrong with a config in one paragraph: the key, the value, the rule and the nearest valid key."""

import difflib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError

from components.base.errors import UserError

Model = TypeVar("Model", bound=BaseModel)
_MOST = 5  # number of problems that a paragraph names
_OURS = ("value_error", "assertion_error")
"""Pydantic's types of errors that our own validators raise."""


def validated(model: type[Model], values: object, source: str, extra_keys: Iterable[str] = ()) -> Model:
    """Return `values` as `model`. Raises UserError with the paragraph of `explain`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, values, model, source, extra_keys)) from error


def explain(
    error: ValidationError, values: object, model: type[BaseModel], source: str, extra_keys: Iterable[str] = ()
) -> str:
    """Return the paragraph for `error`, which `model` raised for the `values` that were read from `source`.

    `extra_keys` are valid keys that are not fields of `model`.
    """
    keys = [*valid_keys(model), *extra_keys]
    problems = list(dict.fromkeys(_problem(item, values, keys) for item in error.errors(include_url=False)))
    more = f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
    text = f"{source}: {'; '.join(problems[:_MOST])}{more}"
    return text if text.endswith("?") else f"{text}."


@functools.cache
def valid_keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Return every dotted key that `model` accepts, each group before its members."""
    return tuple(_keys(model, ""))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    if issubclass(model, RootModel):
        return
    for name, field in model.model_fields.items():
        yield prefix + name
        for within, group in _groups(field.annotation):
            if within:
                yield prefix + name + within
            yield from _keys(group, f"{prefix}{name}{within}.")


def nearest(key: str, keys: list[str]) -> str | None:
    """Return the key most similar to `key`: first within its group, then among keys with the same last part, then among
    all keys. None if no key is similar."""
    group, _, name = key.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == group]
    near = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in siblings], n=1, cutoff=0.6)
    if near:
        return f"{group}.{near[0]}" if group else near[0]
    same_name = [k for k in keys if k.rpartition(".")[2] == name]
    others = [k for k in keys if not key.startswith(f"{k}.")]
    near = difflib.get_close_matches(key, same_name or others, n=1, cutoff=0.0 if same_name else 0.6)
    return near[0] if near else None


def unknown(key: str, value: Any, keys: list[str]) -> str:
    """Return the message that `key` does not exist, with the most similar key of `keys`."""
    near = nearest(key, keys)
    return f"{key} = {show(value)}: no such key" + (f"; did you mean {near}?" if near else "")


def _problem(item: Any, values: object, keys: list[str]) -> str:
    path, value = _locate(item["loc"], values)
    key = ".".join(path) or "the config"
    kind = item["type"]
    if kind == "extra_forbidden":
        path, value = _only_leaf(path, value)
        return unknown(".".join(path), value, keys)
    if kind == "missing":
        return f"{'.'.join(map(str, item['loc']))}: is required"
    rule = _rule(kind, item["msg"])
    if isinstance(value, dict) and kind in _OURS:  # for a rule over several keys the message names them
        return rule if not path or rule.startswith(f"{key}.") else f"{key}: {rule}"
    return f"{key} = {show(value)}: {rule}"


def _rule(kind: str, message: str) -> str:
    if kind in _OURS:
        message = message.split(", ", 1)[-1]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a group of keys"
    return message.replace("Input should be", "must be").rstrip(".")


def _locate(loc: tuple[Any, ...], values: Any) -> tuple[list[str], Any]:
    """Return the part of pydantic's location `loc` that exists in `values`, and the value there. Pydantic's location
    also names members of unions."""
    path: list[str] = []
    for part in loc:
        if (isinstance(values, dict) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values)
        ):
            values = values[part]
            path.append(str(part))
    return path, values


def _only_leaf(path: list[str], value: Any) -> tuple[list[str], Any]:
    """Follow an unknown group to its only value, so that the error names `poo.kl.target` as the user typed it."""
    path = list(path)
    while isinstance(value, dict) and len(value) == 1:
        [(name, value)] = value.items()
        path.append(str(name))
    return path, value


def _groups(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the config classes in an annotation, each with the key that leads to it (`.ppo` in a dict of stages)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    elif get_origin(annotation) is dict:
        names, value = get_args(annotation)
        for name in get_args(names):
            yield from ((f".{name}{within}", group) for within, group in _groups(value))
    elif get_origin(annotation) is not None:
        for member in get_args(annotation):
            yield from _groups(member)


def show(value: Any) -> str:
    """Return a value as YAML writes it, in at most 60 characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
