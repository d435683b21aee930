"""The shapes of public preference data, turned row by row into the project's own formats before these are read.

LLaMA-Factory pairs   `conversations` or `messages` (or `prompt`) with `chosen`, `rejected` as one message each;
                      Alpaca's `instruction`, `input`, `system`, `history` with `chosen`, `rejected` as texts
MT-Bench, Arena       `conversation_a`, `conversation_b`, `winner`, perhaps `model_a`, `model_b`, `judge`, `turn`
two responses         two of `output_1`/`output_2`, `response1`/`response2`, `response_1`/`response_2`,
                      `response_a`/`response_b` with `label`, `preference` or `winner` (LLMBar, AlpacaEval), columns
                      `annotator1`, `annotator2`, ... (PandaLM), or `winner_model_a`, `winner_model_b`, `winner_tie`
HelpSteer preferences the same with `preference_strength` or `overall_preference`, -3 (the first is much better) to 3
SHP                   `history`, `human_ref_A`, `human_ref_B`, `score_A`, `score_B`; `labels` must agree with the scores
UltraFeedback         `instruction`, `completions` (`response` and scores)
HelpSteer             a row a response: `prompt`, `response`, `helpfulness` (or the score that is named)
FineGrained           `question`, `passages`, `prediction 1` to `prediction 4`, `preference` (1, 2, 0 of every two)

If a data set alone uses a field's name, the field means what that set's documentation says. If others use the name too
(`label` 1), `data.label_values` must give the meaning.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

from components.data.formats.labels import meant
from components.data.formats.pairs import number_field, text_field
from components.data.formats.transcripts import as_messages, earlier_turns, instruction_of, message_text, split_messages
from components.data.rows import BadRow, Message, RawRow, blank, listed, most_common_format, shown

Data = Mapping[str, Any]


class ReadingOptions(NamedTuple):
    """What the config says of labels and scores."""

    label_values: Mapping[str, str] = MappingProxyType({})
    """What values of labels mean."""
    score: str | None = None
    """Which score of a response counts; None for the format's own."""
    threshold: float = 0.0
    """Largest difference of scores that makes no pair."""


class Shape(NamedTuple):
    """A public shape, and how a row of it becomes one of ours."""

    name: str
    format: str
    """Ours: `strings`, `votes` or `comparisons`."""
    fields: str
    """What it reads, names split by commas."""
    has: Callable[[Data, ReadingOptions], bool]
    standard: Callable[[Data, ReadingOptions], dict[str, Any]]


_KEPT = ("category", "source", "id", "judged_in")
_LISTS = ("conversations", "messages")
_PROMPTS = ("prompt", "instruction", "input", "question", "context", "history")
_TWO = (
    ("output_1", "output_2"),
    ("response1", "response2"),
    ("response_1", "response_2"),
    ("response_a", "response_b"),
)
_VERDICTS = ("label", "preference", "winner")
_ONE_HOT = {"winner_model_a": "a", "winner_model_b": "b", "winner_tie": "tie"}
_STRENGTHS = ("preference_strength", "overall_preference")
_ANNOTATOR = re.compile(r"annotator_?\d+")
_ULTRA_SCORES = ("fine-grained_score", "overall_score")


def shape_of(rows: Sequence[RawRow], options: ReadingOptions) -> Shape | None:
    """The public shape that most of the first rows have; None where most are in no such shape."""

    def named(data: Data) -> str:
        return next((shape.name for shape in SHAPES if shape.has(data, options)), "")

    found, _ = most_common_format(rows, named)
    return next((shape for shape in SHAPES if shape.name == found), None)


def standard_rows(rows: Iterable[RawRow], shape: Shape | None, options: ReadingOptions) -> Iterator[RawRow]:
    """Yield `rows` in one of the project's own formats, each label replaced by the meaning that `options` gives it."""
    gathered = shape is not None and shape.name == HELPSTEER
    if gathered:
        rows = _gathered(rows, options)
    for row in rows:
        if row.problem is None:
            try:
                if shape is not None and not gathered and not shape.has(row.data, options):
                    text = f"the row lacks what most rows have ({shape.name}); its fields are {listed(list(row.data))}"
                    raise BadRow("fields_present", text)
                data = row.data if shape is None else shape.standard(row.data, options)
                row = row._replace(data=_labelled(data, options.label_values))
            except BadRow as bad:
                row = row._replace(problem=bad.problem)
        yield row


def _labelled(data: Data, meanings: Mapping[str, str]) -> Data:
    if not meanings:
        return data
    out = dict(data)
    for name in ("label", "vote"):
        if name in out:
            out[name] = meant(out[name], meanings)
    votes = out.get("votes")
    if isinstance(votes, list):
        out["votes"] = [_labelled(v, meanings) if isinstance(v, dict) else meant(v, meanings) for v in votes]
    if isinstance(votes, dict):
        out["votes"] = {str(meant(name, meanings)): count for name, count in votes.items()}
    return out


# Prompts and responses


def _prompt(data: Data) -> list[Message]:
    """The prompt of a row under one of the names that public sets have for it, after `system` and `history` turns."""
    if data.get("instruction") is not None:
        return earlier_turns(data, [{"role": "user", "content": instruction_of(data)}])
    name = next((name for name in (*_LISTS, *_PROMPTS) if data.get(name) is not None), "prompt")
    prompt = as_messages(data.get(name), name)
    return prompt if name == "history" else earlier_turns(data, prompt)


def _response(data: Data, name: str) -> str:
    value = data.get(name)
    return message_text(value, name) if isinstance(value, dict | list) else text_field(data, name)


def _kept(data: Data) -> dict[str, Any]:
    return {name: data[name] for name in _KEPT if name in data}


# Pairs


def _is_llama_factory(data: Data, options: ReadingOptions) -> bool:
    if not {"chosen", "rejected"} <= data.keys():
        return False
    if isinstance(data["chosen"], dict) and isinstance(data["rejected"], dict):
        return True
    texts = isinstance(data["chosen"], str) and "\n\nAssistant:" not in data["chosen"]
    return texts and data.get("prompt") is None and bool(data.keys() & {*_LISTS, "instruction", "question", "input"})


def _llama_factory(data: Data, options: ReadingOptions) -> dict[str, Any]:
    more = {name: data[name] for name in ("margin", "score_chosen", "score_rejected") if name in data}
    sides = {side: _response(data, side) for side in ("chosen", "rejected")}
    return {**_kept(data), **more, "prompt": _prompt(data), **sides}


# Votes


def _is_arena(data: Data, options: ReadingOptions) -> bool:
    return {"conversation_a", "conversation_b", "winner"} <= data.keys()


def _arena(data: Data, options: ReadingOptions) -> dict[str, Any]:
    (one, a), (other, b) = (_judged_turn(data, f"conversation_{side}") for side in "ab")
    if one != other:
        raise BadRow("prompts_agree", "prompts differ: the two models' earlier responses are not the same")
    return _voted(data, one, a, b, data["winner"], data.get("judge"), ("model_a", "model_b"))


def _judged_turn(data: Data, name: str) -> tuple[list[Message], str]:
    """The messages before the response that is judged, and that response: the last, or that of `turn` (from 1)."""
    value, turn = data[name], data.get("turn")
    if isinstance(value, list):
        value = [_as_text(message) for message in value]
    if isinstance(value, list) and isinstance(turn, int) and not isinstance(turn, bool):
        answers = [i for i, message in enumerate(value) if _role(message) in ("assistant", "gpt")]
        if not 1 <= turn <= len(answers):
            raise BadRow("turns_valid", f"`turn` is {turn}, and `{name}` has {len(answers)} responses")
        value = value[: answers[turn - 1] + 1]
    return split_messages(value, name)


def _role(message: Any) -> object:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None


def _as_text(message: Any) -> Any:
    """A message whose content is a list of parts, all of them text, with the parts put together."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def _voted(
    data: Data, prompt: list[Message], a: str, b: str, label: object, annotator: object, models: tuple[str, str]
) -> dict[str, Any]:
    """A row of the format `votes`; a label that is the name of one of the row's two models means that one."""
    names = [data.get(model) for model in models]
    if isinstance(label, str) and names.count(label) == 1:
        label = "ab"[names.index(label)]
    who = {} if annotator is None or blank(str(annotator)) else {"annotator": str(annotator)}
    called = dict(zip(("model_a", "model_b"), names, strict=True)) if all(isinstance(n, str) for n in names) else {}
    return {**_kept(data), **called, **who, "prompt": prompt, "a": a, "b": b, "label": label}


def _sides(data: Data) -> tuple[str, str] | None:
    return next((two for two in _TWO if set(two) <= data.keys()), None)


def _is_two_responses(data: Data, options: ReadingOptions) -> bool:
    if _sides(data) is None or "item" in data or not data.keys() & set(_PROMPTS):
        return False
    return bool(data.keys() & {*_VERDICTS, "winner_model_a"}) or bool(_annotators(data))


def _annotators(data: Data) -> list[str]:
    return [name for name in data if _ANNOTATOR.fullmatch(str(name))]


def _two_responses(data: Data, options: ReadingOptions) -> dict[str, Any]:
    sides = _sides(data)
    if sides is None:
        raise BadRow("fields_present", "the two responses are not both there")
    if "winner_model_a" in data:
        return _one_hot(data, sides)
    a, b = (_response(data, side) for side in sides)
    models = next((two for two in (("model_a", "model_b"), ("generator_1", "generator_2")) if two[0] in data), ("", ""))
    label = next((data[name] for name in _VERDICTS if data.get(name) is not None), None)
    row = _voted(data, _prompt(data), a, b, label, data.get("annotator"), models)
    if columns := _annotators(data):
        del row["label"]
        row["votes"] = votes_of_columns(data, columns)
    return row


def votes_of_columns(data: Data, columns: Iterable[str]) -> list[dict[str, Any]]:
    """A vote for each of `columns` that holds one; the column's name is the annotator's."""
    votes = ((name, data.get(name)) for name in columns)
    return [{"annotator": name, "label": vote} for name, vote in votes if vote is not None and not blank(str(vote))]


def _one_hot(data: Data, sides: tuple[str, str]) -> dict[str, Any]:
    """Chatbot Arena as a table: turns as lists of texts (or their JSON), the winner as 1 in one of its columns."""
    won = [side for name, side in _ONE_HOT.items() if str(data.get(name)).strip() in ("1", "1.0", "True")]
    if len(won) != 1:
        raise BadRow("votes_valid", f"{len(won)} of {', '.join(_ONE_HOT)} are 1, expected one")
    asked, a, b = (_turns(data.get(name), name) for name in ("prompt", *sides))
    if not len(asked) == len(a) == len(b) or not asked:
        raise BadRow("turns_valid", f"{len(asked)} prompts, {len(a)} and {len(b)} responses")
    if a[:-1] != b[:-1]:
        raise BadRow("prompts_agree", "prompts differ: the two models' earlier responses are not the same")
    before = [
        {"role": role, "content": text}
        for question, answer in zip(asked, a[:-1], strict=False)
        for role, text in (("user", question.strip()), ("assistant", answer))
    ]
    prompt = [*before, {"role": "user", "content": asked[-1].strip()}]
    return _voted(data, prompt, a[-1], b[-1], won[0], None, ("model_a", "model_b"))


def _turns(value: Any, name: str) -> list[str]:
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise BadRow("fields_present", f"`{name}` is {shown(value)}, expected a text or a list of texts")
    return turns


# Scores


def _signed(data: Data, a: str, b: str, difference: float) -> dict[str, Any]:
    """A row of the format `votes` by a difference of scores, above 0 where the first is better; its margin is judged
    where the rows are gathered."""
    label = "tie" if difference == 0 else "a" if difference > 0 else "b"
    return {**_kept(data), "prompt": _prompt(data), "a": a, "b": b, "label": label, "margin": abs(difference)}


def narrow(difference: float, threshold: float) -> str:
    """Say that two scores differ too little to make a pair."""
    return f"narrow: the scores differ by {difference:g}, not more than {threshold:g} (data.score.threshold)"


def _is_strength(data: Data, options: ReadingOptions) -> bool:
    return _sides(data) is not None and bool(data.keys() & set(_STRENGTHS)) and bool(data.keys() & set(_PROMPTS))


def _strength(data: Data, options: ReadingOptions) -> dict[str, Any]:
    sides = _sides(data)
    name = next((name for name in _STRENGTHS if data.get(name) is not None), _STRENGTHS[0])
    if sides is None:
        raise BadRow("fields_present", "the two responses are not both there")
    first, second = (_response(data, side) for side in sides)
    return _signed(data, first, second, -number_field(data.get(name), name))


def _is_shp(data: Data, options: ReadingOptions) -> bool:
    return {"history", "human_ref_A", "human_ref_B", "score_A", "score_B"} <= data.keys()


def _shp(data: Data, options: ReadingOptions) -> dict[str, Any]:
    difference = number_field(data.get("score_A"), "score_A") - number_field(data.get("score_B"), "score_B")
    if data.get("labels") is not None and difference:
        label = number_field(data["labels"], "labels")
        if label not in (0, 1) or (label == 1) != (difference > 0):
            raise BadRow("votes_valid", f"`labels` is {label:g}, and score_A - score_B is {difference:g} (1 prefers A)")
    return _signed(data, text_field(data, "human_ref_A"), text_field(data, "human_ref_B"), difference)


def _is_ultrafeedback(data: Data, options: ReadingOptions) -> bool:
    completions = data.get("completions")
    of_dicts = isinstance(completions, list) and all(isinstance(each, dict) for each in completions)
    return of_dicts and bool(data.keys() & {"instruction", "prompt"})


def _ultrafeedback(data: Data, options: ReadingOptions) -> dict[str, Any]:
    scored = []
    for i, each in enumerate(data["completions"]):
        score = next((s for name in _names(options, _ULTRA_SCORES) if (s := _rating(each, name)) is not None), None)
        if score is not None and str(score).strip().upper() != "N/A":
            scored.append((text_field(each, "response"), number_field(score, f"completions[{i}]: score")))
    return {**_kept(data), "prompt": _prompt(data), "pairs": _compared(scored, options)}


def _names(options: ReadingOptions, own: Sequence[str]) -> Sequence[str]:
    return own if options.score is None else (options.score,)


def _rating(completion: Data, name: str) -> object:
    """A score of a completion, or the `Rating` of an aspect of its `annotations`."""
    if completion.get(name) is not None:
        return completion[name]
    annotations = completion.get("annotations")
    aspect = annotations.get(name) if isinstance(annotations, dict) else None
    return aspect.get("Rating") if isinstance(aspect, dict) else None


def _compared(scored: Sequence[tuple[str, float]], options: ReadingOptions) -> list[dict[str, Any]]:
    """The pairs of responses whose scores differ by more than the threshold, the better one first, with the margin."""
    if len(scored) < 2:
        name = f"`{options.score}`" if options.score else "a score"
        raise BadRow(
            "decided", f"{len(scored)} responses to this prompt with {name}: nothing to compare (data.score.name)"
        )
    pairs, widest = [], 0.0
    for (one, score), (other, other_score) in combinations(scored, 2):
        difference = score - other_score
        widest = max(widest, abs(difference))
        if abs(difference) > options.threshold:
            better, worse = (one, other) if difference > 0 else (other, one)
            pairs.append({"chosen": better, "rejected": worse, "margin": abs(difference)})
    if not pairs:
        raise BadRow("decided", narrow(widest, options.threshold) if widest else "tie")
    return pairs


def _is_helpsteer(data: Data, options: ReadingOptions) -> bool:
    return {"prompt", "response", options.score or "helpfulness"} <= data.keys() and "chosen" not in data


def _gathered(rows: Iterable[RawRow], options: ReadingOptions) -> Iterator[RawRow]:
    """A row for each prompt with all its scored responses, held in memory until the file is read."""
    prompts: dict[str, tuple[RawRow, list[tuple[str, float]], list[int]]] = {}
    score = options.score or "helpfulness"
    for row in rows:
        if row.problem is None:
            try:
                scored = text_field(row.data, "response"), number_field(row.data.get(score), score)
                key = json.dumps(row.data.get("prompt"), sort_keys=True, default=str)
                first, responses, others = prompts.setdefault(key, (row, [], []))
                responses.append(scored)
                others += [row.number] if row is not first else []
                continue
            except BadRow as bad:
                row = row._replace(problem=bad.problem)
        yield row
    for first, responses, others in prompts.values():
        data = {**_kept(first.data), "prompt": first.data.get("prompt"), "scored": responses}
        yield first._replace(data=data, others=tuple(others))


def _helpsteer(data: Data, options: ReadingOptions) -> dict[str, Any]:
    return {
        **_kept(data),
        "prompt": as_messages(data.get("prompt"), "prompt"),
        "pairs": _compared(data["scored"], options),
    }


# FineGrained feedback


def _is_fine_grained(data: Data, options: ReadingOptions) -> bool:
    return {"question", "prediction 1", "prediction 2"} <= data.keys() and isinstance(data.get("preference"), list)


def _fine_grained(data: Data, options: ReadingOptions) -> dict[str, Any]:
    names = [name for name in data if re.fullmatch(r"prediction \d+", str(name))]
    two, said = list(combinations(sorted(names), 2)), data["preference"]
    if len(said) != len(two) or any(each not in (0, 1, 2) for each in said):
        raise BadRow(
            "votes_valid", f"`preference` is {shown(said)}, expected 1, 2 or 0 for each of {len(two)} comparisons"
        )
    passages = data.get("passages") or []
    if not isinstance(passages, list) or not all(isinstance(each, list) for each in passages):
        raise BadRow("fields_present", "`passages` is not a list of lists of sentences")
    texts = [" ".join(map(str, passage)) for passage in passages]
    prompt = "\n\n".join([text_field(data, "question").strip(), *texts])
    decided = [(one, other)[:: 1 if preferred == 1 else -1] for (one, other), preferred in zip(two, said, strict=True)
               if preferred]  # fmt: skip
    if not decided:
        raise BadRow("decided", "tie")
    pairs = [{"chosen": text_field(data, one), "rejected": text_field(data, other)} for one, other in decided]
    return {**_kept(data), "prompt": prompt, "pairs": pairs}


HELPSTEER = "HelpSteer"
_PROMPT_FIELDS = "prompt,instruction,input,question,context,history,system,conversations,messages"
_TWO_FIELDS = ",".join(name for two in _TWO for name in two)
_PREDICTIONS = ",".join(f"prediction {n}" for n in range(1, 5))
SHAPES = (
    Shape("FineGrained feedback", "comparisons", f"question,passages,preference,{_PREDICTIONS}",
          _is_fine_grained, _fine_grained),
    Shape("SHP", "votes", "history,human_ref_A,human_ref_B,labels,score_A,score_B", _is_shp, _shp),
    Shape("MT-Bench and Chatbot Arena votes", "votes",
          "conversation_a,conversation_b,winner,judge,turn,model_a,model_b", _is_arena, _arena),
    Shape("HelpSteer preferences", "votes", f"{_PROMPT_FIELDS},{_TWO_FIELDS},{','.join(_STRENGTHS)}", _is_strength,
          _strength),
    Shape("two responses", "votes", f"{_PROMPT_FIELDS},{_TWO_FIELDS},{','.join(_VERDICTS)},{','.join(_ONE_HOT)},"
          "annotator,model_a,model_b,generator_1,generator_2", _is_two_responses, _two_responses),
    Shape("UltraFeedback", "comparisons", "instruction,prompt,completions", _is_ultrafeedback, _ultrafeedback),
    Shape("LLaMA-Factory pairs", "strings", f"{_PROMPT_FIELDS},chosen,rejected,margin,score_chosen,score_rejected",
          _is_llama_factory, _llama_factory),
    Shape(HELPSTEER, "comparisons", "prompt,response,helpfulness", _is_helpsteer, _helpsteer),
)  # fmt: skip


def reads(shape: Shape, column: str, options: ReadingOptions) -> bool:
    """Whether rows of a shape use a column."""
    return column in shape.fields.split(",") or column in _KEPT or column == options.score or bool(
        shape.name == "two responses" and _ANNOTATOR.fullmatch(column)
    )  # fmt: skip
