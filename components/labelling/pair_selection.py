"""Choose pairs of responses to label, on random sides, and write them as rows that `data.preferences` can read.

Labellers write a, b, tie or both_bad into `label`; a row without a label is quarantined when read. If several people
vote, either a column `annotator` names the author of each row (with their sheets one below the other), or the columns
`votes_a`, `votes_b`, `votes_tie` and `votes_both_bad` hold counts instead of `label`.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from components.base.hashing import digest_json
from components.base.jsonl import write_rows
from components.data.formats.transcripts import as_messages
from components.data.rows import Message, text_problems
from components.data.spreadsheet import LABELLED, write_csv

COLUMNS = ("id", "prompt", "a", "b", "label")


class CandidateResponse(TypedDict):
    """A response of a model; `drawn` is how often it was sampled, `ended` whether it ends with EOS."""

    id: str
    text: str
    model: str
    model_digest: str
    temperature: float
    ended: bool
    drawn: int


class PromptCandidates(TypedDict):
    """A line of `candidates.jsonl`: a prompt and the different responses to it."""

    id: str
    prompt: list[Message]
    responses: list[CandidateResponse]


class CandidatePair(NamedTuple):
    """Two responses to a prompt, with their authors known."""

    id: str
    """Its name on the sheet. It does not identify the prompt."""
    prompt_id: str
    prompt: list[Message]
    a: CandidateResponse
    b: CandidateResponse


def make_pairs(
    candidates: Sequence[PromptCandidates], per_prompt: int, max_characters: int, seed: int
) -> list[CandidatePair]:
    """Return up to `per_prompt` pairs of each of `candidates`, blinded and in random order.

    All random choices come from a digest of the responses *with their models*. So the holder of the key can repeat
    them, but a labeller who knows the seed cannot. Between any two models (at their temperatures) sides are balanced to
    within one.
    """
    secret = digest_json([seed, list(candidates)])
    triples: list[tuple[PromptCandidates, CandidateResponse, CandidateResponse]] = []
    for candidate in candidates:
        rng = random.Random(f"{secret} pairs {candidate['id']}")
        prompt, responses = candidate["prompt"], candidate["responses"]
        usable = [r for r in responses if not text_problems(prompt, {"": r["text"]}, max_characters)]
        for two in choose_pairs(usable, per_prompt, rng):
            first, second = sorted(two, key=_author)
            triples.append((candidate, first, second))
    random.Random(f"{secret} order").shuffle(triples)
    sides, places = random.Random(f"{secret} sides"), list(range(len(triples)))
    sides.shuffle(places)
    places.sort(key=lambda i: (_author(triples[i][1]), _author(triples[i][2])))
    start = sides.getrandbits(1)
    turned = {i: bool((n + start) % 2) for n, i in enumerate(places)}
    mark = digest_json([secret, "id"])[:8]
    pairs = []
    for i, (candidate, first, second) in enumerate(triples):
        a, b = (second, first) if turned[i] else (first, second)
        pairs.append(CandidatePair(f"{LABELLED}{i + 1:05d}-{mark}", candidate["id"], candidate["prompt"], a, b))
    return pairs


def choose_pairs(
    responses: Sequence[CandidateResponse], most: int, rng: random.Random
) -> list[tuple[CandidateResponse, CandidateResponse]]:
    """Choose up to `most` pairs of different responses.

    Pairs whose model and temperature differ most come first, then those whose responses are in the fewest pairs so far;
    ties are broken at random.
    """
    left = list(itertools.combinations(responses, 2))
    rng.shuffle(left)
    used: Counter[str] = Counter()
    chosen: list[tuple[CandidateResponse, CandidateResponse]] = []
    while left and len(chosen) < most:
        best = min(left, key=lambda two: (-_differences(*two), used[two[0]["id"]] + used[two[1]["id"]]))
        left.remove(best)
        used.update(response["id"] for response in best)
        chosen.append(best)
    return chosen


def write_pairs(folder: Path, pairs: Sequence[CandidatePair]) -> None:
    """Write `pairs.csv` (for spreadsheets) and `pairs.jsonl`, both without authors, and `key.jsonl`."""
    write_csv(folder / "pairs.csv", COLUMNS, (_row(p, readable(p.prompt), "") for p in pairs))
    write_rows(folder / "pairs.jsonl", (_row(p, p.prompt, None) for p in pairs))
    key = ({"id": p.id, "prompt_id": p.prompt_id, "a": p.a["id"], "b": p.b["id"]} for p in pairs)
    write_rows(folder / "key.jsonl", key)


def readable(prompt: list[Message]) -> str | list[Message]:
    """Return the most readable form of a prompt that is read back as the same messages: text, a transcript, or the
    messages themselves."""
    names = {"user": "Human", "assistant": "Assistant"}
    transcript = "".join(f"\n\n{names.get(m['role'], 'System')}: {m['content']}" for m in prompt)
    forms: Iterable[str] = (prompt[0]["content"], transcript)
    return next((form for form in forms if as_messages(form, "prompt") == prompt), prompt)


def _row(pair: CandidatePair, prompt: str | list[Message], label: str | None) -> dict[str, str | list[Message] | None]:
    return {"id": pair.id, "prompt": prompt, "a": pair.a["text"], "b": pair.b["text"], "label": label}


def _author(response: CandidateResponse) -> tuple[str, float]:
    return response["model_digest"], response["temperature"]


def _differences(one: CandidateResponse, other: CandidateResponse) -> int:
    return (one["model_digest"] != other["model_digest"]) + (one["temperature"] != other["temperature"])
