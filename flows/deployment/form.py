"""The form of the pipeline's deployment: what people change first, and the config folded, one field a stage.

Prefect draws an input for each option of an object, and one field of JSON for an object whose schema lists no options.
So a group's options stand where the server checks them and its page does not look.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from components.base.errors import UserError, refuse_credentials
from components.gates.judging import Waiver
from tasks.runs.label import Label


class Folded:
    """Annotates a model: its groups of options are fields of JSON on the form, checked as before."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The model's schema, each group's own schema moved below `then`, whose condition any object meets."""
        found = handler(schema)
        fields: dict[str, Any] = handler.resolve_ref_schema(found)["properties"]
        for name, field in fields.items():
            if "$ref" in field:
                kept = {key: value for key, value in field.items() if key != "$ref"}
                checked = {"if": {"type": "object"}, "then": {"$ref": field["$ref"]}}
                fields[name] = {"type": "object", "title": name, **kept, **checked}
        return found


def label(name: str | None, note: str | None, tags: Sequence[str]) -> Label:
    """A run's name and tags; the note is the tag `note`.

    Raises:
        UserError: as `Label.of`.
    """
    return Label.of(name, [*tags, *([f"note={note}"] if note else [])])


def waivers(gates: Sequence[str], because: str | None, waived_by: str | None) -> list[Waiver]:
    """The gates that may fail in a run. A server's form knows nobody, so people name themselves.

    Raises:
        UserError: the reason or the name is missing, or there is nothing to waive.
    """
    reason, user = (because or "").strip(), (waived_by or "").strip()
    if gates and not (reason and user):
        raise UserError(f"waive = {gates[0]}: say why, in because, and who you are, in waived_by; both are recorded.")
    if (reason or user) and not gates:
        raise UserError("because, waived_by: name the gate that they are about, in waive.")
    refuse_credentials("because", reason)
    refuse_credentials("waived_by", user)
    return [Waiver(gate=gate, user=user, reason=reason) for gate in gates]
