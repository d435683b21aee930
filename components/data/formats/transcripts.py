"""Prompts in the forms people write them: Anthropic transcripts, lists of messages, plain strings."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from components.data.rows import BadRow, Message, shown
from components.data.tables.cells import Unheld

_TURN = re.compile(r"\n\n(Human|Assistant):")
_FIRST = re.compile(r"\s*(?=(?:Human|Assistant):)")
_LAST = "\n\nAssistant:"
_EXTRA_ID = re.compile(r"\s*<extra_id_1>(User|Assistant)\n")
"""What stands before the turns of HelpSteer's prompts, but for the first, which is the user's."""
SYSTEMS = ("system", "system_prompt", "system_message")
"""Fields with the text of a system message, in public data sets."""
ABOUT = ("input", "context")
"""Fields with what an instruction or a question is about, which is part of the prompt."""
_ANSWER = (
    "reasoning_content", "reasoning", "reasoning_details", "thinking", "refusal", "tool_calls", "function_call",
)  # fmt: skip
"""Fields of a message, beside `content`, with a part of the assistant's answer."""
PROMPT_PARTS = ("tools", "functions", "documents", "image", "images", "video", "videos", "audio", "audios")
"""Fields of what a prompt offers or shows, which templates write into it."""
_TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of the parts of a content that are its text."""
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "ai", "chatbot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}


def before_response(text: str) -> tuple[str, str]:
    """Return the transcript before the last assistant turn, and that turn's text.

    Raises:
        BadRow: no assistant turn, or a human turn after it.
    """
    head, mark, response = _unix(text).rpartition(_LAST)
    if not mark:
        raise BadRow("turns_valid", "no assistant turn")
    if _TURN.search(response):
        raise BadRow("turns_valid", "the transcript ends with a human turn")
    return head, response.strip()


def transcript_messages(text: str) -> list[Message]:
    """Return the turns of a transcript as stripped messages. Text before the first turn is a system message.

    Raises:
        BadRow: there is no turn.
    """
    preamble, *turns = _TURN.split(_FIRST.sub("\n\n", _unix(text), count=1) if _FIRST.match(text) else _unix(text))
    messages = [{"role": "system", "content": preamble.strip()}] if preamble.strip() else []
    if not turns:
        raise BadRow("turns_valid", "no turn before the response")
    labelled = zip(turns[::2], turns[1::2], strict=True)
    return messages + [{"role": _ROLES[who.lower()], "content": text.strip()} for who, text in labelled]


def is_transcript(value: Any) -> bool:
    """Return whether a text is a conversation that starts with the human's turn and has one of the assistant."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and _LAST in _unix(value)


def _unix(text: str) -> str:
    """Return a transcript whose turns are parted by line breaks of Windows with those of Unix."""
    return text.replace("\r\n", "\n") if "\r\n\r\nAssistant:" in text else text


def as_messages(value: Any, name: str) -> list[Message]:
    """Return a prompt (text, transcript or list of messages, with TRL's or ShareGPT's keys) as messages.

    Raises:
        BadRow: it is none of these, or empty.
    """
    if isinstance(value, str):
        if value.startswith("\n\nHuman:") or is_transcript(value):
            return transcript_messages(_unix(value).rstrip().removesuffix(_LAST))
        first, *turns = _EXTRA_ID.split(value)
        later = zip(turns[::2], turns[1::2], strict=True)
        return [{"role": _ROLES[who.lower()], "content": text.strip()} for who, text in (("user", first), *later)]
    if not isinstance(value, list):
        raise BadRow("fields_present", f"`{name}` is {kind(value)}, expected text or a list of messages")
    if not value:
        raise BadRow("fields_present", f"`{name}` is empty")
    return [_message(m, f"{name}[{i}]") for i, m in enumerate(value)]


def split_messages(value: Any, name: str) -> tuple[list[Message], str]:
    """Split a list of messages into those before the last, and the text of the last, which must be the assistant's."""
    if not isinstance(value, list):
        raise BadRow("fields_present", f"`{name}` is {kind(value)}, expected a list of messages")
    *before, last = as_messages(value, name)
    if last["role"] != "assistant":
        raise BadRow("turns_valid", f"`{name}` doesn't end with an assistant turn")
    return before, last["content"]


def split_answer(value: Any, name: str) -> tuple[list[Message], str]:
    """Return the turns before a response, and its text; it is a text, a message, or the last of a list of messages."""
    if isinstance(value, str):
        return [], value
    return split_messages([value] if isinstance(value, dict) else value, name)


def instruction_of(data: Mapping[str, object], name: str = "instruction") -> str:
    """Return the instruction or question in field `name`, followed by Alpaca's `input` and Dolly's `context` if there
    are any. A text that two of these fields repeat counts once."""
    parts = []
    for part in (name, *ABOUT):
        value = data.get(part) if part == name else data.get(part) or ""
        if not isinstance(value, str):
            raise BadRow("fields_present", f"`{part}` is {kind(value)}, expected text")
        parts.append(value.strip())
    return "\n\n".join(filter(None, dict.fromkeys(parts))) if parts[0] else ""


def earlier_turns(data: Mapping[str, object], prompt: list[Message]) -> list[Message]:
    """Return `prompt` preceded by the text of `system` (or `system_prompt`) and the turns of `history`: messages, or
    pairs of an instruction and its answer. A system message that the prompt has already is not repeated.

    Raises:
        BadRow: one of these has another type, or the row has `PROMPT_PARTS`.
    """
    refuse_parts(data)
    name = next((name for name in SYSTEMS if data.get(name) is not None), SYSTEMS[0])
    system = data.get(name)
    if system is not None and not isinstance(system, str):
        raise BadRow("fields_present", f"`{name}` is {kind(system)}, expected text")
    first: list[Message] = [{"role": "system", "content": system.strip()}] if system and system.strip() else []
    return [*([] if prompt[:1] == first else first), *_history(data.get("history")), *prompt]


def refuse_parts(data: Mapping[str, object], where: str = "", of_answer: Sequence[str] = _ANSWER[:1]) -> None:
    """Raise an error if a row, or an object in its field `where` (`input.`), has something in `PROMPT_PARTS`, or one of
    the fields `of_answer`, by default `reasoning_content`.

    Raises:
        BadRow: it has.
    """
    for name in (*of_answer, *PROMPT_PARTS):
        if not is_empty(data.get(name)):
            of = "prompt" if name in PROMPT_PARTS else "answer"
            text = f"`{where}{name}` belongs to the {of}, and only its text is learned; leave the row out, or the field"
            raise BadRow("turns_valid", f"{text} if the {of} is whole without it")


def is_empty(value: object) -> bool:
    """Return whether a field says nothing: null, NaN, an empty text, list or object, also as JSON, or only of these."""
    if isinstance(value, list | dict):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value in (None, "", "[]", "{}", "null") or value != value


def _history(value: object) -> list[Message]:
    if value is None or value == "":
        return []
    turns: list[Message] = []
    for i, turn in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(turn, dict) and isinstance(value, list):
            turns.append(_message(turn, f"history[{i}]"))
        elif isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn):
            turns += [{"role": "user", "content": turn[0].strip()}, {"role": "assistant", "content": turn[1]}]
        else:
            text = "`history` is not a list of messages, or of pairs of texts (an instruction and its answer)"
            raise BadRow("fields_present", text)
    return turns


def kind(value: Any) -> str:
    """Return JSON's name for the type of `value`."""
    if isinstance(value, Unheld):
        return repr(value)
    names = {"NoneType": "missing", "str": "text", "int": "a number", "float": "a number", "bool": "true/false"}
    return {**names, "list": "a list", "dict": "an object"}.get(type(value).__name__, type(value).__name__)


def role_of(message: Any) -> str | None:
    """Return the role that a message says under any of its names; None if it says none that is known."""
    role = next((message[key] for key in ("role", "from") if message.get(key) is not None), None)
    return _ROLES.get(role.strip().lower()) if isinstance(role, str) else None


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow("fields_present", f"`{name}` is {kind(value)}, expected an object with role and content")
    role = role_of(value)
    if role is None:
        wrong = shown(value.get("role", value.get("from")))
        text = f"`{name}` has role {wrong}, expected user (or human), assistant (or gpt, model, bot, ai) or system"
        raise BadRow("fields_present", f"{text} (or developer); write one of these, or leave the row out")
    content = next((value[key] for key in ("content", "value", "parts", "text") if value.get(key) is not None), None)
    refuse_parts(value, f"{name}.", _ANSWER)
    if isinstance(content, list) and content:
        content = _joined(content, name)
    if not isinstance(content, str):
        raise BadRow("fields_present", f"content of `{name}` is {kind(content)}, expected text")
    return {"role": role, "content": content if role == "assistant" else content.strip()}


def _joined(parts: list[Any], name: str) -> str:
    """Return the text of a content that is a list of text parts, a line for each.

    Raises:
        BadRow: a part is no text, such as an image.
    """
    texts = []
    for part in parts:
        typed = isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        text = part.get("text", part.get("value")) if typed else part
        if not isinstance(text, str):
            what = part.get("type") if isinstance(part, dict) and not typed else part
            problem = f"content of `{name}` has a part that is not text ({shown(what)}); leave the row out"
            raise BadRow("fields_present", problem)
        texts.append(text)
    return "\n".join(texts)
