"""Public shapes whose rows say which of two responses is better."""

from typing import Any

from components.data.formats.labels import is_side, meant
from components.data.formats.pairs import agreed, list_in_cell, text_field
from components.data.formats.public_fields import (
    ARGILLA,
    ONE_HOT,
    PROMPT_FIELDS,
    PROMPTS,
    TWO_FIELDS,
    VERDICTS,
    Data,
    ReadingOptions,
    Shape,
    annotators_of,
    prompt_of,
    response_of,
    sides_of,
    voted_shape,
    votes_of_columns,
)
from components.data.formats.transcripts import role_of, split_messages
from components.data.rows import BadRow, Message, blank, shown


def _arena(data: Data, options: ReadingOptions) -> dict[str, Any]:
    (one, a), (other, b) = (_judged_turn(data, f"conversation_{side}") for side in "ab")
    return _voted(data, agreed(one, other), a, b, data["winner"], data.get("judge"), ("model_a", "model_b"))


def _judged_turn(data: Data, name: str) -> tuple[list[Message], str]:
    """Return the messages before the judged response, and that response: the last one, or that of `turn` (from 1)."""
    value, turn = data[name], data.get("turn")
    if isinstance(value, list) and isinstance(turn, int) and not isinstance(turn, bool):
        answers = [i for i, entry in enumerate(value) if isinstance(entry, dict) and role_of(entry) == "assistant"]
        if not 1 <= turn <= len(answers):
            raise BadRow("turns_valid", f"`turn` is {turn}, and `{name}` has {len(answers)} responses")
        value = value[: answers[turn - 1] + 1]
    return split_messages(value, name)


def _voted(
    data: Data, prompt: list[Message], a: str, b: str, label: object, annotator: object, models: tuple[str, str]
) -> dict[str, Any]:
    """Return a row of the format `votes`; a label that is the name of one of the row's two models means that model."""
    names = [data.get(model) for model in models]
    if isinstance(label, str) and names.count(label) == 1:
        label = "ab"[names.index(label)]
    who = {} if annotator is None or blank(str(annotator)) else {"annotator": str(annotator)}
    called = dict(zip(("model_a", "model_b"), names, strict=True)) if all(isinstance(n, str) for n in names) else {}
    return {**called, **who, "prompt": prompt, "a": a, "b": b, "label": label}


def _is_two_responses(data: Data, options: ReadingOptions) -> bool:
    if sides_of(data) is None or "item" in data or not data.keys() & set(PROMPTS):
        return False
    return bool(data.keys() & {*VERDICTS, "winner_model_a"} or annotators_of(data) or any(map(ARGILLA.match, data)))


def _two_responses(data: Data, options: ReadingOptions) -> dict[str, Any]:
    sides = sides_of(data)
    if sides is None:
        raise BadRow("fields_present", "the two responses are not both there")
    if "winner_model_a" in data:
        return _one_hot(data, sides)
    a, b = (response_of(data, side) for side in sides)
    models = next((two for two in (("model_a", "model_b"), ("generator_1", "generator_2")) if two[0] in data), ("", ""))
    label = next((data[name] for name in VERDICTS if data.get(name) is not None), None)
    row = _voted(data, prompt_of(data), a, b, label, data.get("annotator"), models)
    votes = argilla_votes(data)
    if votes is None and (columns := annotators_of(data)):
        columns_vote = label is None or any(is_side(meant(data[name], options.label_values)) for name in columns)
        votes = votes_of_columns(data, columns) if columns_vote else None
    if votes is None:
        return row | {"label": _side_named(label, sides)} if label in sides else row
    if not votes:
        raise BadRow("votes_valid", "no annotator has submitted a vote")
    del row["label"]
    return row | {"votes": [vote | {"label": _side_named(vote["label"], sides)} for vote in votes]}


def _side_named(label: Any, sides: tuple[str, str]) -> Any:
    """Return a label; that of a response's column becomes its side."""
    return "ab"[sides.index(label)] if label in sides else label


def argilla_votes(data: Data, drafts: bool = False) -> list[dict[str, Any]] | None:
    """Return the submitted votes of one of Argilla's records (`drafts`: those that are not submitted); None if a row
    has none of its columns: `NAME.responses` with `.users` and `.status`, or lists of `value`, `user_id` and `status`.
    """
    votes: list[tuple[Any, ...]] | None = None
    questions = [name for name in data if name.endswith(".responses") and f"{name}.status" in data]
    if len(questions) > 1:
        raise BadRow("votes_valid", f"{' and '.join(questions)} answer several questions; leave out all but one")
    for name, values in data.items():
        if name in VERDICTS and isinstance(values, list) and all(isinstance(value, dict) for value in values):
            votes = [(value.get("value"), value.get("user_id"), value.get("status")) for value in values]
        elif name in questions:
            columns = [data.get(f"{name}{part}") or [] for part in ("", ".users", ".status")]
            if not all(isinstance(column, list) for column in columns) or len({*map(len, columns)}) > 1:
                raise BadRow("votes_valid", f"`{name}`, its users and its status are not lists of one length")
            votes = list(zip(*columns, strict=True))
    if votes is None:
        return None
    return [
        {"annotator": who, "label": label} for label, who, status in votes if (status == "submitted") is not drafts
    ]


def _one_hot(data: Data, sides: tuple[str, str]) -> dict[str, Any]:
    """Convert a row of Chatbot Arena's table: turns as lists of texts (or their JSON), the winner as 1 in a column."""
    won = [side for name, side in ONE_HOT.items() if str(data.get(name)).strip() in ("1", "1.0", "True")]
    if len(won) != 1:
        raise BadRow("votes_valid", f"{len(won)} of {', '.join(ONE_HOT)} are 1, expected one")
    questions, a, b = (_turns(data.get(name), name) for name in ("prompt", *sides))
    if not len(questions) == len(a) == len(b) or not questions:
        raise BadRow("turns_valid", f"{len(questions)} prompts, {len(a)} and {len(b)} responses")
    if a[:-1] != b[:-1]:
        raise BadRow("prompts_agree", "prompts differ: the two models' earlier responses are not the same")
    before = [
        {"role": role, "content": text}
        for question, answer in zip(questions, a[:-1], strict=False)
        for role, text in (("user", question.strip()), ("assistant", answer))
    ]
    prompt = [*before, {"role": "user", "content": questions[-1].strip()}]
    return _voted(data, prompt, a[-1], b[-1], won[0], None, ("model_a", "model_b"))


def _turns(value: Any, name: str) -> list[str]:
    value = list_in_cell(value)
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise BadRow("fields_present", f"`{name}` is {shown(value)}, expected a text or a list of texts")
    return turns


def _safe_rlhf(data: Data, options: ReadingOptions) -> dict[str, Any]:
    a, b = (response_of(data, side) for side in ("response_0", "response_1"))
    return {"prompt": prompt_of(data), "a": a, "b": b, "label": _index(data, "better_response_id")}


def _summaries(data: Data, options: ReadingOptions) -> dict[str, Any]:
    """Return a comparison with the prompt of Stiennon et al. 2020 (appendix B.1): subreddit, title and post, or a news
    article."""
    info, two = data["info"], data["summaries"]
    if not isinstance(info, dict):
        raise BadRow("fields_present", f"`info` is {shown(info)}, expected an object with `post` or `article`")
    if not isinstance(two, list) or len(two) != 2 or not all(isinstance(summary, dict) for summary in two):
        raise BadRow("fields_present", "`summaries` is not a list of two objects with `text`")
    if info.get("post") is None:
        text = f"Article: {text_field(info, 'article').strip()}\n\nTL;DR:"
    else:
        labels = (("SUBREDDIT: r/", "subreddit"), ("TITLE: ", "title"), ("POST: ", "post"))
        parts = [f"{word}{text_field(info, name).strip()}" for word, name in labels if info.get(name)]
        text = "\n\n".join([*parts, "TL;DR:"])
    a, b = (text_field(summary, "text") for summary in two)
    prompt: list[Message] = [{"role": "user", "content": text}]
    return _voted(data, prompt, a, b, _index(data, "choice"), data.get("worker"), ("", ""))


def _index(data: Data, name: str) -> str:
    place = data[name]
    if isinstance(place, bool) or str(place) not in ("0", "1", "0.0", "1.0"):
        raise BadRow("votes_valid", f"`{name}` is {shown(place)}, expected 0 or 1")
    return "ab"[int(float(place))]


ARENA = voted_shape("MT-Bench and Chatbot Arena votes", "conversation_a,conversation_b,winner",
                    "judge,turn,model_a,model_b", _arena)  # fmt: skip
SAFE_RLHF = voted_shape(
    "PKU-SafeRLHF", "prompt,response_0,response_1,better_response_id", PROMPT_FIELDS, _safe_rlhf
)
SUMMARIES = voted_shape("Learning to summarize comparisons", "info,summaries,choice", "worker", _summaries)
TWO_RESPONSES = Shape(
    "two responses", "votes",
    f"{PROMPT_FIELDS},{TWO_FIELDS},{','.join((*VERDICTS, *ONE_HOT))},annotator,model_a,model_b,generator_1,generator_2",
    _is_two_responses, _two_responses,
)  # fmt: skip
