"""The form of the pipeline's deployment: first what people change most, then the config, one JSON field per stage.

Prefect draws an input for each option of an object and can't fold them. For an object whose schema lists no options it
draws one JSON field. So the options are placed where the server checks them but its page does not look: below `then`,
of an `if` that every object meets. The page shows changes to the deployed config, because the whole config is long.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from prefect.flows import Flow
from prefect.utilities.callables import ParameterSchema
from pydantic import ConfigDict, JsonValue

from components.base.errors import UserError, refuse_credentials
from components.gates.judging import Waiver, check_waivers
from flows.config.profiles import lay, refuse_unused
from flows.config.removed import renamed
from flows.config.run_config import RunConfig, check_config, check_kl_limits, to_values
from flows.launch.request import asked_waivers
from tasks.runs.run_label import LONGEST_NAME, Label, one_line

LAST = ("runners", "runtime", "retries", "retry_seconds", "prices", "mlflow", "project")
"""Options that runs seldom change. The others come before them, in their own order, after the seed."""


class _Schema(ParameterSchema):
    """Prefect's schema, with further JSON Schema keywords next to the parameters."""

    model_config = ConfigDict(extra="allow")


def schema(flow: Flow[..., Any], config: RunConfig) -> ParameterSchema:
    """Return the schema of the pipeline's parameters, for the form and for the server's check of each run.

    Args:
        flow: the pipeline; its parameters have the order of the form.
        config: the deployed config; its gates are those that can be waived.
    """
    form = deepcopy(flow.parameters.model_dump())
    fields, definitions = form["properties"], form["definitions"]
    whole = fields.pop("config")
    for field in fields.values():
        _without_null(field)
    fields["waive"]["items"]["enum"] = [gate.name for gate, _ in config.gates.rules()]
    # Scripts may still use these former names; `changed` reads them under the present ones.
    kl = definitions["KLConfig"]["properties"]
    definitions["WatchConfig"]["properties"]["kl_high"], kl["stop_above"] = kl["band"], kl["ceiling"]
    fields["changes"] |= {"properties": _groups(definitions["RunConfig"]["properties"]), "additionalProperties": False}
    return _Schema(**{**form, "required": [], "if": {"type": "object"}, "then": {"properties": {"config": whole}}})


def _without_null(field: dict[str, Any]) -> None:
    """Make the form show a plain input for an optional text, not a switch between text and None."""
    kinds = [kind for kind in field.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1 and field.get("default") is None:
        del field["anyOf"], field["default"]
        field.update(kinds[0])
        if "enum" in field:  # without a default the server accepts null only if it is one of the values
            field["enum"] = [*field["enum"], None]


def _groups(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's fields without defaults, each group of options as one JSON field."""
    names = ["seed", *(name for name in options if name not in ("seed", *LAST)), *LAST]
    fields = {}
    for place, name in enumerate(names):
        field = {key: value for key, value in options[name].items() if key not in ("default", "$ref", "allOf")}
        if "$ref" in options[name]:
            field |= {"type": "object", "if": {"type": "object"}, "then": {"$ref": options[name]["$ref"]}}
        if field.get("type") == "object":
            field["default"] = {}
        fields[name] = {**field, "title": name, "position": place}
    return fields


def changed(config: RunConfig, changes: Mapping[str, JsonValue]) -> RunConfig:
    """Return `config` with the form's changes applied.

    Raises:
        UserError: as `refuse_unused`, `check_config` and `check_kl_limits`.
    """
    made = renamed({name: value for name, value in changes.items() if value != {}}, "changes")
    if not made:
        return config
    deployed = to_values(config)
    refuse_unused(deployed, made, "changes")
    changed_config = check_config(lay(deployed, made), source="changes")
    check_kl_limits(changed_config, "changes", config)
    return changed_config


def label(name: str | None, note: str | None, tags: Sequence[str]) -> Label:
    """Return a run's name and tags; the note is the tag `note`.

    Raises:
        UserError: as `Label.of`.
    """
    return Label.of(name, [*tags, *([f"note={note}"] if note else [])])


def person(field: str, name: str | None, default: str) -> str:
    """Return who asked, from the form's field `field`, because the server knows no users; `default` if it is empty.

    Raises:
        UserError: the name contains a secret, is too long, or can't be shown on one line.
    """
    return one_line(field, (name or "").strip(), LONGEST_NAME) or default


def waivers(gates: Sequence[str], because: str | None, waived_by: str | None, config: RunConfig) -> list[Waiver]:
    """Return the waivers for a run of `config`. People name themselves, because the server knows no users.

    Raises:
        UserError: there is no such gate, the reason or the name is missing, or there is nothing to waive.
    """
    user = (waived_by or "").strip()
    if bool(user) != bool(gates):
        raise UserError("waived_by: give your name together with the gate (waive) and the reason (because).")
    refuse_credentials("waived_by", user)
    requested = asked_waivers(gates, because or "", user=user)
    check_waivers(requested, config.gates, "waive =")
    return requested
