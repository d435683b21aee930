"""Public shapes whose rows score responses: a difference of scores makes a pair, and is its margin."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from components.data.formats.gathered_rows import as_seen, gathered
from components.data.formats.labels import desirable
from components.data.formats.pairs import number_field, text_field
from components.data.formats.public_fields import (
    PROMPT_FIELDS,
    PROMPTS,
    STRENGTHS,
    TWO_FIELDS,
    Data,
    ReadingOptions,
    Shape,
    kept_fields,
    prompt_of,
    response_of,
    sides_of,
    voted_shape,
)
from components.data.formats.transcripts import SYSTEMS, as_messages, earlier_turns, is_empty, refuse_parts
from components.data.rows import BadRow, RawRow

_ULTRA_SCORES = ("fine-grained_score", "overall_score")
_PROMPT = ("prompt", "history", *SYSTEMS)


def _signed(data: Data, a: str, b: str, difference: float) -> dict[str, Any]:
    """Return a row of the format `votes` from a difference of scores, positive if the first is better. The threshold is
    applied when the rows are gathered."""
    label = "tie" if difference == 0 else "a" if difference > 0 else "b"
    return {"prompt": prompt_of(data), "a": a, "b": b, "label": label, "margin": abs(difference)}


def narrow(difference: float, threshold: float) -> str:
    """Say that two scores differ too little to make a pair."""
    return f"narrow: the scores differ by {difference:g}, not more than {threshold:g} (data.score.threshold)"


def _is_strength(data: Data, options: ReadingOptions) -> bool:
    return sides_of(data) is not None and bool(data.keys() & set(STRENGTHS)) and bool(data.keys() & set(PROMPTS))


def _strength(data: Data, options: ReadingOptions) -> dict[str, Any]:
    sides = sides_of(data)
    name = next((name for name in STRENGTHS if data.get(name) is not None), STRENGTHS[0])
    if sides is None:
        raise BadRow("fields_present", "the two responses are not both there")
    first, second = (response_of(data, side) for side in sides)
    return _signed(data, first, second, -number_field(data.get(name), name))


def _shp(data: Data, options: ReadingOptions) -> dict[str, Any]:
    difference = number_field(data.get("score_A"), "score_A") - number_field(data.get("score_B"), "score_B")
    if data.get("labels") is not None and difference:
        label = number_field(data["labels"], "labels")
        if label not in (0, 1) or (label == 1) != (difference > 0):
            raise BadRow("votes_valid", f"`labels` is {label:g}, and score_A - score_B is {difference:g} (1 prefers A)")
    return _signed(data, text_field(data, "human_ref_A"), text_field(data, "human_ref_B"), difference)


def _webgpt(data: Data, options: ReadingOptions) -> dict[str, Any]:
    question = data["question"]
    prompt = question.get("full_text") if isinstance(question, dict) else question
    difference = number_field(data["score_0"], "score_0") - number_field(data["score_1"], "score_1")
    a, b = (text_field(data, name) for name in ("answer_0", "answer_1"))
    return _signed({"prompt": prompt}, a, b, difference)


def _is_ultrafeedback(data: Data, options: ReadingOptions) -> bool:
    completions = data.get("completions")
    of_dicts = isinstance(completions, list) and all(isinstance(completion, dict) for completion in completions)
    return of_dicts and bool(data.keys() & {"instruction", "prompt"})


def _ultrafeedback(data: Data, options: ReadingOptions) -> dict[str, Any]:
    scored, completions = [], data["completions"]
    names = _ULTRA_SCORES if options.score is None else (options.score,)
    # One score for the whole row: the scales differ.
    name = max(names, key=lambda name: min(2, sum(_rating(completion, name) is not None for completion in completions)))
    for i, completion in enumerate(completions):
        refuse_parts(completion, f"completions[{i}].")
        score = _rating(completion, name)
        if score is not None and str(score).strip().upper() != "N/A":
            scored.append((text_field(completion, "response"), number_field(score, f"completions[{i}]: score")))
    return {"prompt": prompt_of(data), "pairs": _compared(scored, options)}


def _rating(completion: Data, name: str) -> object:
    """Return a score of a completion, or the `Rating` of an aspect in its `annotations`."""
    if not is_empty(completion.get(name)):
        return completion[name]
    annotations = completion.get("annotations")
    aspect = annotations.get(name) if isinstance(annotations, dict) else None
    return aspect.get("Rating") if isinstance(aspect, dict) else None


def _compared(scored: Sequence[tuple[str, float]], options: ReadingOptions) -> list[dict[str, Any]]:
    """Return the pairs of responses whose scores differ by more than the threshold, better one first, with the
    margin."""
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
    """Return whether a row is one scored response."""
    return {"prompt", "response", _score(options)} <= data.keys() and "chosen" not in data


def _score(options: ReadingOptions) -> str:
    return options.score or "helpfulness"


def gathered_by_prompt(rows: Iterable[RawRow], options: ReadingOptions) -> Iterator[RawRow]:
    """Yield a row for each prompt with all its scored responses. A label (KTO) is a score too, 1 or 0."""

    def add(row: RawRow, first: RawRow, scored: dict[Any, Any]) -> None:
        refuse_parts(row.data)
        response, score = response_of(row.data, "response"), _score(options)
        wanted = desirable({"label": row.data.get(score)}, options.label_values, False)
        scored[row.number] = response, number_field(row.data.get(score) if wanted is None else int(wanted), score)

    def whole(data: Data, scored: dict[Any, Any]) -> Data:
        return {**kept_fields(data), **{name: data.get(name) for name in _PROMPT}, "scored": [*scored.values()]}

    return gathered(rows, lambda data: as_seen([data.get(name) for name in _PROMPT]), add, whole)


def _helpsteer(data: Data, options: ReadingOptions) -> dict[str, Any]:
    prompt = earlier_turns(data, as_messages(data.get("prompt"), "prompt"))
    return {"prompt": prompt, "pairs": _compared(data["scored"], options)}


SHP = voted_shape("SHP", "history,human_ref_A,human_ref_B,score_A,score_B", "labels", _shp)
WEBGPT = voted_shape("WebGPT comparisons", "question,answer_0,answer_1,score_0,score_1", "", _webgpt)
STRENGTH = Shape("HelpSteer preferences", "votes", f"{PROMPT_FIELDS},{TWO_FIELDS},{','.join(STRENGTHS)}",
                 _is_strength, _strength)  # fmt: skip
ULTRAFEEDBACK = Shape("UltraFeedback", "comparisons", f"{PROMPT_FIELDS},completions", _is_ultrafeedback, _ultrafeedback)
HELPSTEER = Shape("HelpSteer", "comparisons", f"prompt,history,{','.join(SYSTEMS)},response,helpfulness",
                  _is_helpsteer, _helpsteer)  # fmt: skip
