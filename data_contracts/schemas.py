"""The rows that leave validation, as pydantic models: what every later stage may rely on."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from components.data.rows import Item, Problem

Text = Annotated[str, StringConstraints(min_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Message(_Row):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Text


class DemonstrationRow(_Row):
    """A prompt and the response to learn from."""

    prompt: list[Message] = Field(min_length=1)
    response: Text
    source: Text
    """Which input the row came from, or a pair's own `source`."""
    row: int = Field(ge=1)
    """Its 1-based number there."""


class PairRow(_Row):
    """A prompt and two responses, of which annotators prefer `chosen`."""

    prompt: list[Message] = Field(min_length=1)
    chosen: Text
    rejected: Text
    margin: float | None = Field(allow_inf_nan=False)
    """How much better the chosen response is, in the source's units."""
    votes_chosen: int | None = Field(ge=0)
    """Annotators who preferred `chosen`."""
    votes: int | None = Field(ge=1)
    """Annotators who voted, those for neither among them."""
    soft_label: float | None = Field(ge=0.5, le=1, allow_inf_nan=False)
    """Share of the votes for `chosen`, one for neither a half: a target for the reward loss."""
    objectives: dict[Text, Annotated[float, Field(ge=0, le=1)]] | None
    """Share of the votes for `chosen` on single questions, by name."""
    weight: float = Field(gt=0, le=1)
    """What the pair counts: the kept pairs of one ranking share a count of 1."""
    category: Text | None
    """Stratum of the prompt."""
    source: Text
    """What the row itself calls its source, else which input it came from."""
    row: int = Field(ge=1)

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if (self.votes is None) != (self.votes_chosen is None):
            raise ValueError("votes and votes_chosen come together")
        if self.votes is not None and self.votes_chosen is not None and self.votes_chosen > self.votes:
            raise ValueError(f"votes_chosen is {self.votes_chosen} of {self.votes} votes")
        if self.chosen == self.rejected:
            raise ValueError("identical responses")
        return self


class PromptRow(_Row):
    """A prompt for PPO."""

    prompt: list[Message] = Field(min_length=1)
    category: Text | None
    source: Text
    row: int = Field(ge=1)


class QuarantinedRow(_Row):
    """A row that was kept out, and why."""

    file: Text
    row: int = Field(ge=1)
    reasons: list[Text] = Field(min_length=1)
    data: dict[str, Any]


_PAIR, _DEMONSTRATION, _PROMPT = TypeAdapter(PairRow), TypeAdapter(DemonstrationRow), TypeAdapter(PromptRow)


def schema_problems(item: Item) -> list[Problem]:
    """What of a canonical pair (demonstration, if it has a `response`; prompt, without `chosen`) breaks its schema."""
    schema = _DEMONSTRATION if "response" in item else _PAIR if "chosen" in item else _PROMPT
    try:
        schema.validate_python(item)
    except ValidationError as error:
        return [
            _problem([str(part) for part in e["loc"]], e["msg"])
            for e in error.errors(include_url=False, include_input=False)
        ]
    return []


def _problem(where: list[str], message: str) -> Problem:
    about_votes = "votes" in message or where[:1] in (["votes"], ["votes_chosen"])
    return Problem("votes_valid" if about_votes else "fields_present", f"{'.'.join(where) or 'row'}: {message}")
