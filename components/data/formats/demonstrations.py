"""Formats of demonstrations: a prompt and the response to learn from.

response      `prompt` (text, transcript or messages) and `response`, `completion` or `output`
instruction   `instruction`, perhaps `input`, and `output` or `response`; or `instances` with one `{input, output}`
conversation  `messages` or `conversations`: a list that ends with the assistant's turn
transcript    `text`: a conversation with "\\n\\nHuman:" and "\\n\\nAssistant:" turns
"""

from collections.abc import Mapping, Sequence

from components.base.errors import UserError
from components.data.formats.pairs import text_field
from components.data.formats.transcripts import as_messages, split_messages, split_transcript
from components.data.rows import BadRow, Message, RawRow, Row, listed, most_common_format, text_problems

_ANSWERS = ("response", "completion", "output")
_LISTS = ("messages", "conversations")


def detect(rows: Sequence[RawRow], path: object) -> str:
    """The name of the format that most of the first rows have by their fields.

    Raises:
        UserError: they have none; it names the fields found and those expected.
    """
    found, fields = most_common_format(rows, _format_of)
    if found:
        return found
    raise UserError(
        f"{path}: its rows are no demonstrations. The first {len(rows)} have the fields {listed(fields)}; "
        "expected are `prompt` and `response` (or `completion`, `output`), `instruction` and `output`, `messages`, or "
        "`text` (a transcript). Add what is missing, or map your names with data.demonstration_columns."
    )


def parse_demonstration(raw: RawRow, name: str, source: str, max_characters: int) -> Row:
    """Row `raw` of `source` in the format called `name`, with everything that is wrong with it."""
    row = Row(source, raw.number)
    try:
        if raw.problem:
            raise BadRow(*raw.problem)
        prompt, response = _parse(raw.data, name)
        row.item = {"prompt": prompt, "response": response, "source": source, "row": raw.number}
        row.problems = text_problems(prompt, {"response": response}, max_characters)
    except BadRow as bad:
        row.problems = [bad.problem]
    if row.problems:
        row.data = raw.data
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
        return prompt, response
    if name == "transcript":
        return split_transcript(text_field(data, "text"))
    if name == "instruction":
        return _instruction(data)
    return as_messages(data.get("prompt"), "prompt"), text_field(data, _answer(data))


def _instruction(data: Mapping[str, object]) -> tuple[list[Message], str]:
    instances = data.get("instances")
    if instances is not None:
        if not isinstance(instances, list) or len(instances) != 1 or not isinstance(instances[0], dict):
            raise BadRow("fields_present", "`instances` is not a list of one {input, output}; write a row for each")
        data = {**data, **instances[0]}
    instruction = text_field(data, "instruction").strip()
    more = text_field(data, "input").strip() if data.get("input") is not None else ""
    content = f"{instruction}\n\n{more}" if instruction and more else instruction
    return [{"role": "user", "content": content}], text_field(data, _answer(data))


def _answer(data: Mapping[str, object]) -> str:
    """The first of `_ANSWERS` that holds something, else the first that is there."""
    return max(_ANSWERS, key=lambda name: (data.get(name) is not None, name in data))
