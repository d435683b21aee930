"""The base of every config class: frozen, no unknown fields, a docstring per field, and which fields enter a key."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Settings(BaseModel):
    """A frozen group of options. Docstrings under the fields become their descriptions. Numbers are finite, since keys
    are JSON."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


def unkeyed(default: Any = ..., **kwargs: Any) -> Any:
    """Define a field that cannot change a stage's output (a path, a checkpoint interval) and so is not in its key."""
    return Field(default, json_schema_extra={"keyed": False}, **kwargs)


def keyed_values(settings: BaseModel) -> dict[str, JsonValue]:
    """Return the values of `settings` that can change a stage's output: all but the fields made by `unkeyed`."""
    out: dict[str, JsonValue] = {}
    for name, field in type(settings).model_fields.items():
        if field.json_schema_extra == {"keyed": False}:
            continue
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            out[name] = keyed_values(value)
        elif isinstance(value, tuple) and value and all(isinstance(each, BaseModel) for each in value):
            out[name] = [keyed_values(each) for each in value]
        else:
            out |= settings.model_dump(mode="json", include={name})
    return out
