"""Public shapes whose rows score responses: a difference of scores makes a pair, and is its margin."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from components.data.formats.pairs import number_field, text_field
from components.data.formats.public_fields import (
    PROMPTS,
    STRENGTHS,
    Data,
    ReadingOptions,
    kept_fields,
    prompt_of,
    response_of,
    sides_of,
)
from components.data.formats.transcripts import SYSTEMS, as_messages, earlier_turns, is_empty, refuse_parts
from components.data.rows import BadRow, RawRow
from components.data.words import seen

_ULTRA_SCORES = ("fine-grained_score", "overall_score")
_PROMPT = ("prompt", "history", *SYSTEMS)


def _signed(data: Data, a: str, b: str, difference: float) -> dict[str, Any]:
    """Return a row of the format `votes` from a difference of scores, positive if the first is better. The threshold is
    applied when the rows are gathered."""
    label = "tie" if difference == 0 else "a" if difference > 0 else "b"
    return {**kept_fields(data), "prompt": prompt_of(data), "a": a, "b": b, "label": label, "margin": abs(difference)}


def narrow(difference: float, threshold: float) -> str:
    """Say that two scores differ too little to make a pair."""
    return f"narrow: the scores differ by {difference:g}, not more than {threshold:g} (data.score.threshold)"


def is_strength(data: Data, options: ReadingOptions) -> bool:
    """Tell whether a row has two responses and how strongly one is preferred."""
    return sides_of(data) is not None and bool(data.keys() & set(STRENGTHS)) and bool(data.keys() & set(PROMPTS))


def strength(data: Data, options: ReadingOptions) -> dict[str, Any]:
    """Return a row of HelpSteer's preferences as one of the format `votes`."""
    sides = sides_of(data)
    name = next((name for name in STRENGTHS if data.get(name) is not None), STRENGTHS[0])
    if sides is None:
        raise BadRow("fields_present", "the two responses are not both there")
    first, second = (response_of(data, side) for side in sides)
    return _signed(data, first, second, -number_field(data.get(name), name))


def shp(data: Data, options: ReadingOptions) -> dict[str, Any]:
    """Return a row of SHP as one of the format `votes`."""
    difference = number_field(data.get("score_A"), "score_A") - number_field(data.get("score_B"), "score_B")
    if data.get("labels") is not None and difference:
        label = number_field(data["labels"], "labels")
        if label not in (0, 1) or (label == 1) != (difference > 0):
            raise BadRow("votes_valid", f"`labels` is {label:g}, and score_A - score_B is {difference:g} (1 prefers A)")
    return _signed(data, text_field(data, "human_ref_A"), text_field(data, "human_ref_B"), difference)


def webgpt(data: Data, options: ReadingOptions) -> dict[str, Any]:
    """Return a row of WebGPT's comparisons as one of the format `votes`."""
    question = data["question"]
    prompt = question.get("full_text") if isinstance(question, dict) else question
    difference = number_field(data["score_0"], "score_0") - number_field(data["score_1"], "score_1")
    a, b = (text_field(data, name) for name in ("answer_0", "answer_1"))
    return _signed({**kept_fields(data), "prompt": prompt}, a, b, difference)


def is_ultrafeedback(data: Data, options: ReadingOptions) -> bool:
    """Tell whether a row has scored completions."""
    completions = data.get("completions")
    of_dicts = isinstance(completions, list) and all(isinstance(completion, dict) for completion in completions)
    return of_dicts and bool(data.keys() & {"instruction", "prompt"})


def ultrafeedback(data: Data, options: ReadingOptions) -> dict[str, Any]:
    """Return a row of UltraFeedback as one of comparisons."""
    scored, completions = [], data["completions"]
    names = _ULTRA_SCORES if options.score is None else (options.score,)
    # One score for the whole row: the scales differ.
    name = max(names, key=lambda name: min(2, sum(_rating(completion, name) is not None for completion in completions)))
    for i, completion in enumerate(completions):
        refuse_parts(completion, f"completions[{i}].")
        score = _rating(completion, name)
        if score is not None and str(score).strip().upper() != "N/A":
            scored.append((text_field(completion, "response"), number_field(score, f"completions[{i}]: score")))
    return {**kept_fields(data), "prompt": prompt_of(data), "pairs": _compared(scored, options)}


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


def is_helpsteer(data: Data, options: ReadingOptions) -> bool:
    """Tell whether a row is one scored response."""
    return {"prompt", "response", options.score or "helpfulness"} <= data.keys() and "chosen" not in data


def gathered_by_prompt(rows: Iterable[RawRow], options: ReadingOptions) -> Iterator[RawRow]:
    """Yield a row for each prompt with all its scored responses; rows are kept in memory until the file is read."""
    prompts: dict[str, tuple[RawRow, list[tuple[str, float]], list[int]]] = {}
    score = options.score or "helpfulness"
    for row in rows:
        if row.problem is None:
            try:
                refuse_parts(row.data)
                scored = text_field(row.data, "response"), number_field(row.data.get(score), score)
                prompt = [row.data.get(name) for name in _PROMPT]
                key = seen(json.dumps(prompt, sort_keys=True, default=str, ensure_ascii=False))
                first, responses, others = prompts.setdefault(key, (row, [], []))
                responses.append(scored)
                others += [row.number] if row is not first else []
                continue
            except BadRow as bad:
                row = row._replace(problem=bad.problem)
        yield row
    for first, responses, others in prompts.values():
        before = {name: first.data.get(name) for name in _PROMPT}
        data = {**kept_fields(first.data), **before, "scored": responses}
        yield first._replace(data=data, others=tuple(others))


def helpsteer(data: Data, options: ReadingOptions) -> dict[str, Any]:
    """Return the gathered responses to one prompt as a row of comparisons."""
    return {
        **kept_fields(data),
        "prompt": earlier_turns(data, as_messages(data.get("prompt"), "prompt")),
        "pairs": _compared(data["scored"], options),
    }
