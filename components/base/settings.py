"""The base of every config class: frozen, no unknown fields, a docstring per field, and which fields enter a key."""

from collections.abc import Callable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator


class Settings(BaseModel):
    """A frozen group of options. Docstrings under the fields become their descriptions. Numbers are finite, since keys
    are JSON, and `true` is not a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _a_boolean_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if _as_number(value, cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("true and false are not numbers; write a number")
        return value

    def uses(self, option: str) -> bool:
        """Return whether a dotted option below this group can change a stage's output. A job may leave some unused."""
        return True


def _as_number(option: Any, annotation: Any) -> bool:
    """Return whether pydantic would read a boolean as a number, in `option` or in its elements.

    Nested settings check their own fields.
    """
    members = get_args(annotation)
    if get_origin(annotation) is dict:
        return isinstance(option, dict) and any(_as_number(value, members[1]) for value in option.values())
    if get_origin(annotation) is tuple:
        return isinstance(option, list | tuple) and any(_as_number(element, members[0]) for element in option)
    if annotation in (int, float):
        return isinstance(option, bool)
    return bool not in members and any(_as_number(option, member) for member in members)


def unkeyed(default: Any = ..., **kwargs: Any) -> Any:
    """Define a field that cannot change a stage's output (a path, a checkpoint interval) and so is not in its key."""
    return Field(default, json_schema_extra={"keyed": False}, **kwargs)


def keyed_if_set(default: Any, **kwargs: Any) -> Any:
    """Define a field that is in its stage's key only if it is not the default, so that a new option keeps old keys."""
    return Field(default, json_schema_extra={"keyed": "if set"}, **kwargs)


def keyed_values(
    settings: BaseModel, uses: Callable[[str], bool] | None = None, prefix: str = ""
) -> dict[str, JsonValue]:
    """Return the values of `settings` that can change a stage's output: all but the fields made by `unkeyed`, and those
    that it does not use (`Settings.uses`), and the defaults of those made by `keyed_if_set`.

    Args:
        uses, prefix: those of the settings that hold `settings`, and its dotted name there with a dot.
    """
    out: dict[str, JsonValue] = {}
    uses = uses or (settings.uses if isinstance(settings, Settings) else lambda option: True)
    for name, field in type(settings).model_fields.items():
        if field.json_schema_extra == {"keyed": False} or not uses(prefix + name):
            continue
        value = getattr(settings, name)
        if field.json_schema_extra == {"keyed": "if set"} and value == field.default:
            continue
        if isinstance(value, BaseModel):
            out[name] = keyed_values(value, uses, f"{prefix}{name}.")
        elif isinstance(value, tuple) and value and all(isinstance(element, BaseModel) for element in value):
            out[name] = [keyed_values(element) for element in value]
        else:
            out |= settings.model_dump(mode="json", include={name})
    return out
