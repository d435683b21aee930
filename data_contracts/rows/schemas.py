"""The schema of rows that leave validation, on which every later stage relies."""

from typing import Annotated

from pydantic import AfterValidator, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from components.data.rows import CanonicalRow, Problem


class SourceReading(TypedDict):
    """How a file was read, in the output of `tether data check --json`."""

    source: str
    """`preferences`, `demonstrations` or `prompts`."""
    file: str
    format: str
    ignored: list[str]
    """Columns that are not used."""
    hint: str | None
    """What to do if they should be used; None if nothing is to be done."""


_DEMONSTRATION = {"prompt", "response", "source", "row"}
_PROMPT = {"prompt", "category", "source", "row"}
_PAIR_MAY = {"columns", "judged_in", "votes_of_models"}
_PAIR = CanonicalRow.__annotations__.keys() - {"response", "desirable", "overlong", "source_weight", *_PAIR_MAY}


def _whole(row: CanonicalRow) -> CanonicalRow:
    fields = _DEMONSTRATION if "response" in row else _PAIR if "chosen" in row else _PROMPT
    optional = {"desirable"} if "response" in row else _PAIR_MAY if "chosen" in row else {"columns"}
    if row.keys() - optional != fields:
        raise ValueError(f"the fields {', '.join(sorted(row.keys() ^ fields))} are missing or too many")
    votes, chosen = row.get("votes"), row.get("votes_chosen")
    if (votes is None) != (chosen is None):
        raise ValueError("votes and votes_chosen come together")
    if votes is not None and chosen is not None and chosen > votes:
        raise ValueError(f"votes_chosen is {chosen} of {votes} votes")
    if "chosen" in row and row["chosen"] == row["rejected"]:
        raise ValueError("identical responses")
    return row


_SCHEMA = TypeAdapter(Annotated[CanonicalRow, AfterValidator(_whole)])


def schema_problems(item: CanonicalRow) -> list[Problem]:
    """Return the schema problems of a canonical pair (a demonstration if it has `response`, a prompt without
    `chosen`)."""
    try:
        _SCHEMA.validate_python(item)
    except ValidationError as error:
        return [
            _problem([str(part) for part in e["loc"]], e["msg"])
            for e in error.errors(include_url=False, include_input=False)
        ]
    return []


def _problem(where: list[str], message: str) -> Problem:
    about_votes = "votes" in message or where[:1] in (["votes"], ["votes_chosen"])
    return Problem("votes_valid" if about_votes else "fields_present", f"{'.'.join(where) or 'row'}: {message}")
