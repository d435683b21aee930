"""Shapes of public preference data, converted row by row to the project's own formats before parsing.

`docs/guide/formats.md` shows a row of each; `SHAPES` lists them. If a data set alone uses a field's name, the
field means what that set's documentation says. If others use the name too (`label` 1), `data.label_values` must give
the meaning.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

from components.data.formats.labels import meant
from components.data.formats.pairs import SIDE_SCORES, agreed, format_of, text_field, tied_by
from components.data.formats.public_fields import (
    ANNOTATOR,
    ARGILLA,
    KEPT,
    LISTS,
    PROMPT_FIELDS,
    PROMPTS,
    TEXTS,
    Data,
    ReadingOptions,
    Shape,
    kept_fields,
    prompt_of,
)
from components.data.formats.public_scores import HELPSTEER, SHP, STRENGTH, ULTRAFEEDBACK, WEBGPT, gathered_by_prompt
from components.data.formats.public_votes import ARENA, SAFE_RLHF, SUMMARIES, TWO_RESPONSES
from components.data.formats.transcripts import earlier_turns, refuse_parts, split_answer
from components.data.rows import BadRow, RawRow, listed, most_common_format, shown


def shape_of(rows: Sequence[RawRow], options: ReadingOptions) -> Shape | None:
    """Return the public shape that most of the first rows have; None where most have none, or one of our own formats.

    One row with a field that only a public set has must not decide how all the others are read.
    """

    def named(data: Data) -> str | None:
        return next((shape.name for shape in SHAPES if shape.has(data, options)), None) or format_of(data)

    most_common, _ = most_common_format(rows, named)
    return next((shape for shape in SHAPES if shape.name == most_common), None)


def standard_rows(rows: Iterable[RawRow], shape: Shape | None, options: ReadingOptions) -> Iterator[RawRow]:
    """Yield `rows` in one of the project's own formats, each label replaced by the meaning that `options` gives it."""
    if shape is HELPSTEER:
        rows = gathered_by_prompt(rows, options)
    for row in rows:
        if row.problem is None:
            try:
                if shape is not None and shape is not HELPSTEER and not shape.has(row.data, options):
                    text = f"the row lacks what most rows have ({shape.name}); its fields are {listed(list(row.data))}"
                    raise BadRow("fields_present", text)
                refuse_parts(row.data)
                data = row.data if shape is None else kept_fields(row.data) | shape.standard(row.data, options)
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


# Pairs


def _is_llama_factory(data: Data, options: ReadingOptions) -> bool:
    if not {"chosen", "rejected"} <= data.keys():
        return False
    sides = data["chosen"], data["rejected"]
    prompts = {*LISTS, "instruction", "question", "input", "query"}
    if all(isinstance(side, dict) for side in sides):
        return True
    return data.get("prompt") is None and bool(data.keys() & prompts) and all(map(_is_answer, sides))


def _is_answer(value: object) -> bool:
    """Return whether a response is by itself, without the turns before it."""
    if isinstance(value, list):
        return len(value) == 1 and isinstance(value[0], dict)
    return not (isinstance(value, str) and "\n\nAssistant:" in value)


def _has_pair(better: str, worse: str, data: Data, options: ReadingOptions) -> bool:
    return {better, worse} <= data.keys() and not {"chosen", "rejected"} <= data.keys()


def _pair(better: str, worse: str, data: Data, options: ReadingOptions) -> dict[str, Any]:
    """Return a row of two responses, of which the first may follow its prompt in one list of messages."""
    names = ("margin", *chain(*SIDE_SCORES), *filter(None, [tied_by(data)]))
    more = {name: data[name] for name in names if name in data}
    (before, chosen), (other, rejected) = (split_answer(data.get(side), side) for side in (better, worse))
    if isinstance(dialogue := data.get("input"), dict):
        refuse_parts(dialogue, "input.")
        data = {**data, "input": dialogue.get("messages")}
    turns = agreed(before or other, other or before)
    prompt = earlier_turns(data, turns) if turns else prompt_of(data)
    return {**more, "prompt": prompt, "chosen": chosen, "rejected": rejected}


def _of_pairs(name: str, better: str, worse: str) -> Shape:
    fields = f"{PROMPT_FIELDS},{better},{worse},margin,{','.join(chain(*SIDE_SCORES))}"
    has = _is_llama_factory if better == "chosen" else partial(_has_pair, better, worse)
    return Shape(name, "strings", fields, has, partial(_pair, better, worse))


# Rankings


def _is_nectar(data: Data, options: ReadingOptions) -> bool:
    answers = data.get("answers")
    return "prompt" in data and isinstance(answers, list) and bool(answers) and all(
        isinstance(answer, dict) and {"answer", "rank"} <= answer.keys() for answer in answers
    )  # fmt: skip


def _nectar(data: Data, options: ReadingOptions) -> dict[str, Any]:
    for i, answer in enumerate(data["answers"]):
        refuse_parts(answer, f"answers[{i}].")
    texts, ranks = ([answer[name] for answer in data["answers"]] for name in ("answer", "rank"))
    return {"prompt": prompt_of(data), "responses": texts, "ranks": ranks}


def _listed_texts(data: Data) -> str | None:
    """Return the field with two or more texts of which each has a number in `scores` or `ranks`."""
    count = next((len(data[name]) for name in ("scores", "ranks") if isinstance(data.get(name), list)), 0)
    return next(
        (
            name
            for name in TEXTS
            if isinstance(texts := data.get(name), list)
            and len(texts) == count > 1
            and all(isinstance(text, str) for text in texts)
        ),
        None,
    )


def _is_scored_texts(data: Data, options: ReadingOptions) -> bool:
    return "responses" not in data and bool(data.keys() & set(PROMPTS)) and _listed_texts(data) is not None


def _scored_texts(data: Data, options: ReadingOptions) -> dict[str, Any]:
    numbers = {name: data[name] for name in ("scores", "ranks") if name in data}
    return {**numbers, "prompt": prompt_of(data), "responses": data[_listed_texts(data) or ""]}


def _is_several(data: Data, options: ReadingOptions) -> bool:
    sides = [data.get(side) for side in ("chosen", "rejected")]
    return data.get("prompt") is not None and all(
        isinstance(side, list) and bool(side) and all(isinstance(text, str) for text in side) for side in sides
    )


def _several(data: Data, options: ReadingOptions) -> dict[str, Any]:
    chosen, rejected = data["chosen"], data["rejected"]
    ranks = [1] * len(chosen) + [2] * len(rejected)
    return {"prompt": prompt_of(data), "responses": [*chosen, *rejected], "ranks": ranks}


# FineGrained feedback


def _is_fine_grained(data: Data, options: ReadingOptions) -> bool:
    return {"question", "prediction 1", "prediction 2"} <= data.keys() and isinstance(data.get("preference"), list)


def _fine_grained(data: Data, options: ReadingOptions) -> dict[str, Any]:
    names = [name for name in data if re.fullmatch(r"prediction \d+", str(name))]
    two, chosen = list(combinations(sorted(names), 2)), data["preference"]
    if len(chosen) != len(two) or any(side not in (0, 1, 2) for side in chosen):
        raise BadRow(
            "votes_valid", f"`preference` is {shown(chosen)}, expected 1, 2 or 0 for each of {len(two)} comparisons"
        )
    passages = data.get("passages") or []
    if not isinstance(passages, list) or not all(isinstance(passage, list) for passage in passages):
        raise BadRow("fields_present", "`passages` is not a list of lists of sentences")
    texts = [" ".join(map(str, passage)) for passage in passages]
    prompt = "\n\n".join([text_field(data, "question").strip(), *texts])
    decided = [(one, other)[:: 1 if preferred == 1 else -1] for (one, other), preferred in zip(two, chosen, strict=True)
               if preferred]  # fmt: skip
    if not decided:
        raise BadRow("decided", "tie")
    pairs = [{"chosen": text_field(data, one), "rejected": text_field(data, other)} for one, other in decided]
    return {"prompt": prompt, "pairs": pairs}


_PREDICTIONS = ",".join(f"prediction {n}" for n in range(1, 5))
SHAPES = (
    Shape("FineGrained feedback", "comparisons", f"question,passages,preference,{_PREDICTIONS}",
          _is_fine_grained, _fine_grained),
    SHP, ARENA, SAFE_RLHF, SUMMARIES, WEBGPT,
    Shape("Nectar", "ranking", f"{PROMPT_FIELDS},answers", _is_nectar, _nectar),
    Shape("RewardBench 2", "ranking", f"{PROMPT_FIELDS},chosen,rejected", _is_several, _several),
    Shape("scored texts", "ranking", f"{PROMPT_FIELDS},{','.join(TEXTS)},scores,ranks", _is_scored_texts,
          _scored_texts),
    STRENGTH, TWO_RESPONSES,
    *(_of_pairs(*names) for names in (
        ("OpenAI preferences", "preferred_output", "non_preferred_output"),
        ("ms-swift conversations", "messages", "rejected_messages"),
        ("ms-swift messages", "messages", "rejected_response"),
        ("ms-swift queries", "response", "rejected_response"),
        ("chosen and rejected responses", "chosen_response", "rejected_response"),
        ("Stack Exchange pairs", "response_j", "response_k"),
        ("positive and negative answers", "pos_answer", "neg_answer"),
        ("LLaMA-Factory pairs", "chosen", "rejected"),
    )),
    ULTRAFEEDBACK, HELPSTEER,
)  # fmt: skip


def reads(shape: Shape, column: str, options: ReadingOptions, prompts: Collection[str]) -> bool:
    """Return whether rows of a shape use a column; `prompts` are the fields of their prompts."""
    if column in (*PROMPTS, *LISTS) and column not in (*prompts, "history"):
        return False
    return column in shape.fields.split(",") or column in KEPT or column == options.score or bool(
        shape is TWO_RESPONSES and (ANNOTATOR.fullmatch(column) or ARGILLA.match(column))
    )  # fmt: skip
