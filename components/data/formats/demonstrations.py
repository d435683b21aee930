"""Formats of demonstrations: a prompt and the response to learn from.

response      `prompt` (text, transcript or messages) and `response`, `completion` or `output` (text, or one message)
instruction   `instruction`, perhaps `input` or `context`, and `output` or `response`; or `instances` with one
              `{input, output}`
conversation  `messages` or `conversations`: a list that ends with the assistant's turn
transcript    `text`: a conversation with "\\n\\nHuman:" and "\\n\\nAssistant:" turns
KTO           any of these with `label` or `kto_tag`: true is desirable; false rows are not imitated, but are labels too

Rows of one response with `helpfulness` (HelpSteer) are refused: most are worse than another response to the same
prompt, and which score is good enough to imitate is the user's choice.

With any of the first three, a `system` text becomes the system message, and Alpaca's `history` (pairs of an earlier
instruction and its answer) becomes the turns before the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from components.base.errors import UserError
from components.base.text import counted
from components.data.formats.labels import KTO, desirable, looks_like_kto
from components.data.formats.pairs import text_field
from components.data.formats.public_fields import response_of
from components.data.formats.transcripts import (
    as_messages,
    before_response,
    earlier_turns,
    instruction_of,
    split_messages,
    transcript_messages,
)
from components.data.rows import (
    BadRow,
    Message,
    Problem,
    RawRow,
    Row,
    listed,
    most_common_format,
    refuse_unreadable,
    text_problems,
)

_ANSWERS = ("response", "completion", "output")
_LISTS = ("messages", "conversations")
SCORED = {"prompt", "response", "helpfulness"}
"""The fields of rows that are scored responses, whose scores say which to imitate."""


def detect(rows: Sequence[RawRow], path: object) -> str:
    """Return the format of most of the first rows, by their fields.

    Raises:
        UserError: they have no known format; the message names the fields found and those expected.
    """
    refuse_unreadable(rows, path)
    form, fields = most_common_format(rows, _format_of)
    if set(fields) >= SCORED:
        raise UserError(
            f"{path}: its rows are scored responses (HelpSteer), good and bad ones; as demonstrations, the model would "
            "imitate all of them. Give the file as data.preferences, so that SFT learns the chosen responses, or write "
            "a file of the best response to each prompt, without the column `helpfulness`."
        )
    if form:
        return KTO if looks_like_kto(rows) else form
    raise UserError(
        f"{path}: its rows are not demonstrations. The fields found in {counted(len(rows), 'row')} are "
        f"{listed(fields)}; "
        "expected are `prompt` and `response` (or `completion`, `output`), `instruction` and `output`, `messages`, or "
        "`text` (a transcript). Add what is missing, or map your names with data.demonstration_columns."
    )


def parse_demonstration(
    raw: RawRow, name: str, source: str, max_characters: int, label_values: Mapping[str, str] | None = None
) -> Row:
    """Parse row `raw` of `source` in the format `name`, with all its problems.

    Args:
        label_values: the meanings of label values other than true and false (`data.label_values`).
    """
    row = Row(source, raw)
    try:
        if raw.problem:
            raise BadRow(*raw.problem)
        wanted = desirable(raw.data, label_values or {}, name == KTO)
        prompt, response = _parse(raw.data, (_format_of(raw.data) or "response") if name == KTO else name)
        if _unlearned(raw.data):
            raise BadRow("desirable", "the last message has the weight 0")
        row.item = {"prompt": prompt, "response": response, "source": source, "row": raw.number}
        if wanted is not None:
            row.item["desirable"] = wanted
        row.problems = text_problems(prompt, {"response": response}, max_characters)
        if wanted is False:
            row.problems.append(Problem("desirable", "labelled undesirable (KTO)"))
    except BadRow as bad:
        row.problems = [bad.problem]
    return row


def _format_of(data: Mapping[str, object]) -> str | None:
    answered = any(name in data for name in _ANSWERS)
    if "instruction" in data and (answered or "instances" in data):
        return "instruction"
    if "prompt" in data and answered:
        return "response"
    if any(name in data for name in _LISTS):
        return "conversation"
    return "transcript" if isinstance(text := data.get("text"), str) and "\n\nAssistant:" in text else None


def _parse(data: Mapping[str, object], name: str) -> tuple[list[Message], str]:
    if name == "conversation":
        field = next((f for f in _LISTS if data.get(f) is not None), _LISTS[0])
        prompt, response = split_messages(data.get(field), field)
        if not prompt:
            raise BadRow("turns_valid", "no turn before the response")
        return earlier_turns(data, prompt), response
    if name == "transcript":
        before, response = before_response(text_field(data, "text"))
        return earlier_turns(data, transcript_messages(before)), response
    if name == "instruction":
        return _instruction(data)
    return earlier_turns(data, as_messages(data.get("prompt"), "prompt")), _answer(data)


def _unlearned(data: Mapping[str, object]) -> bool:
    """Return whether the last message says by OpenAI's `weight` 0 that it is not to be learned."""
    messages = next((value for name in _LISTS if isinstance(value := data.get(name), list) and value), [None])
    return isinstance(messages[-1], dict) and messages[-1].get("weight") == 0


def _instruction(data: Mapping[str, object]) -> tuple[list[Message], str]:
    instances = data.get("instances")
    if instances is not None:
        if not isinstance(instances, list) or len(instances) != 1 or not isinstance(instances[0], dict):
            raise BadRow("fields_present", "`instances` is not a list of one {input, output}; write a row for each")
        data = {**data, **instances[0]}
    return earlier_turns(data, [{"role": "user", "content": instruction_of(data)}]), _answer(data)


def _answer(data: Mapping[str, Any]) -> str:
    """Return the first field of `_ANSWERS` that is not empty, else the first that is there."""
    name = max(_ANSWERS, key=lambda name: (data.get(name) is not None, name in data))
    return response_of(data, name)
