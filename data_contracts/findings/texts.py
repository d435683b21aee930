"""Measure the texts of good rows: token counts with the run's own tokenizer, MinHash signatures, and samples.

The rows are read once, shard by shard, in several processes if there are many. The results are stored on disk next to
the rows.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.data.config import NearDuplicateConfig
from components.data.rows import CanonicalRow, Problem
from components.models.chat.endings import Endings, before_any, endings_of, special_tokens
from components.models.chat.rendering import ManyRendered, rendered_conversation, rendered_prompt
from components.models.config import GenerationConfig
from data_contracts.findings.drift import language_of
from data_contracts.findings.encoding import Encoded, Encoder
from data_contracts.findings.near import PERMUTATIONS, Sketches, runs_of_words, signatures
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import RESPONSES, Side, item_in
from data_contracts.rows.processes import in_order
from data_contracts.rows.shards import Shard, is_whole, write_shard

_CHUNK = 500
"""Number of rows whose tokens are in memory at once."""
_RENDERED = 50
"""Number of rows that are rendered together; if the template refuses one, they are rendered one by one."""
TEMPLATE_READINGS = ("agrees", "refused", "changed")
"""Results of a chat template for a row: it renders the row unchanged, refuses its prompt, or changes the text."""
_OF_ALL = frozenset(("tokens", "sketch", "prompt_sketch"))
"""The measures of a shard that are no columns of the contract."""
SAMPLE = 2_000
"""Number of texts of each split (or source) for language detection and the classifier test."""


@dataclass
class RowTexts:
    """Measures of the good rows of a ledger (m of n), in order."""

    wanted: NDArray[np.bool_]
    """Which rows are good (n,)."""
    shards: Sequence[Shard]
    sketch: Sketches
    """Signatures of prompt and responses together."""
    prompt_sketch: Sketches
    """Signatures of the prompts."""
    unknown: float
    """Share of tokens that are the tokenizer's unknown token; NaN without a tokenizer."""
    samples: dict[int, list[CanonicalRow]]
    """A sample of rows of each split, by the split's position in SPLITS."""

    @property
    def index(self) -> NDArray[np.int64]:
        """Return the positions (m,) of the rows in the ledger."""
        return np.flatnonzero(self.wanted)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Return token counts (m, 3) of the prompt, the chosen and the rejected response before truncation, EOS
        included; -1 if there is none."""
        return np.concatenate([np.empty((0, 3), np.int32), *(shard.column("tokens") for shard in self.shards)])


class TextReading(NamedTuple):
    """Settings for reading texts."""

    tokenizer: Any
    """The run's tokenizer; None leaves out everything that needs one."""
    generation: GenerationConfig
    near: NearDuplicateConfig
    languages: bool
    """Whether to detect each row's language, which takes half a millisecond a row."""


class _Part(NamedTuple):
    rows: Path
    texts: Path
    """The shard to write."""
    wanted: NDArray[np.bool_]
    """Which rows are good (rows,)."""


class _Measured(NamedTuple):
    columns: defaultdict[str, list[NDArray[Any]]]
    late: list[tuple[int, Problem]]
    """Notes: the row and the problem of each."""


def read_texts(ledger: Ledger, how: TextReading, progress: Callable[[int], None], processes: int = 1) -> RowTexts:
    """Read the texts of the good rows of `ledger`, and record there what the tokenizer makes of them.

    Complete shards from an earlier attempt are reused.
    """
    wanted = ledger.good()
    folder = ledger.path.with_name(f"{ledger.path.name}-texts")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        _Part(shard.path, folder / shard.path.name, wanted[start : start + shard.rows])
        for start, shard in zip(ledger.starts, ledger.shards, strict=True)
    ]
    seen = 0
    for rows in in_order(_read_part, how, parts, processes):
        seen += rows
        progress(seen)
    measures = [Shard(part.texts) for part in parts]
    sketched, of_prompts = (Sketches(folder / name) for name in ("sketches", "prompt-sketches"))
    counts = np.zeros(2)  # unknown tokens, tokens
    for start, part, shard in zip(ledger.starts, parts, measures, strict=True):
        sketched.append(shard.column("sketch"))
        of_prompts.append(shard.column("prompt_sketch"))
        notes = shard.notes()
        counts += notes["counts"]
        for place, check, text in notes["late"]:
            ledger.note(start + place, Problem(check, text))
        here = start + np.flatnonzero(part.wanted)
        for column in shard.names - _OF_ALL:
            ledger.measure(column, here, shard.column(column))
        if how.languages:
            ledger.measure("language", here, np.array(notes["languages"], object))
    chosen = _sampled(ledger, wanted)
    samples: dict[int, list[CanonicalRow]] = {}
    for index, item in ledger.items(chosen):
        samples.setdefault(int(ledger.facts["split"][index]), []).append(item)
    unknown = counts[0] / counts[1] if counts[1] else float("nan")
    return RowTexts(wanted, measures, sketched, of_prompts, unknown, samples)


def _read_part(how: TextReading, part: _Part) -> int:
    """Write a part's shard of text measures unless it exists; return the number of its rows."""
    here = np.flatnonzero(part.wanted)
    if is_whole(part.texts):
        return len(here)
    shard, measured = Shard(part.rows), _Measured(defaultdict(list), [])
    noted, rows = shard.column("noted"), iter(zip(here.tolist(), shard.texts("line", here), strict=True))
    tokenizer = how.tokenizer
    if tokenizer is not None:
        markers, encode = _markers(tokenizer), _encoder(tokenizer)
    counts = np.zeros(2)
    languages: list[str] = []
    empty = np.empty((0, PERMUTATIONS), np.uint32)
    lengths, sketches, of_prompts = [np.empty((0, 3), np.int32)], [empty], [empty]
    while chunk := list(islice(rows, _CHUNK)):
        indices = [index for index, _ in chunk]
        items = [item_in(line, noted[index]) for index, line in chunk]
        tokens = np.full((len(items), 3), -1, np.int32)
        if tokenizer is not None:
            tokens, more = _tokenised(measured, tokenizer, encode, how.generation, indices, items)
            counts += more
            _find_markers(measured, markers, indices, items)
        words = how.near.words
        prompts = [runs_of_words(" ".join(m["content"] for m in item["prompt"]), words) for item in items]
        answers = [runs_of_words(" ".join(_responses(item)), words) for item in items]
        lengths.append(tokens)
        of_prompts.append(signatures(prompts))
        # A signature holds the minimum hash of each permutation, so a union's signature is the elementwise minimum.
        sketches.append(np.minimum(signatures(answers), of_prompts[-1]))
        if how.languages:
            languages += [language_of(" ".join(_responses(i)) or i["prompt"][-1]["content"]) for i in items]
    columns = {name: np.concatenate(parts).astype(np.float32) for name, parts in measured.columns.items()}
    write_shard(
        part.texts,
        {
            "tokens": np.concatenate(lengths), "sketch": np.concatenate(sketches),
            "prompt_sketch": np.concatenate(of_prompts), **columns,
        },
        {
            "late": [(index, *problem) for index, problem in measured.late], "counts": counts.tolist(),
            "languages": languages,
        },
    )  # fmt: skip
    return len(here)


def overlong(texts: RowTexts, rows: int, cap: int) -> NDArray[np.bool_]:
    """Return which responses of a ledger's rows exceed `cap` tokens including EOS: (rows, 2) for chosen and rejected; a
    demonstration's response is in the first column. False if there is no response or it was not read."""
    exceeding = np.zeros((rows, 2), np.bool_)
    exceeding[texts.wanted] = texts.tokens[:, 1:] > cap
    return exceeding


def _responses(item: CanonicalRow) -> list[str]:
    return [item[name] for name in RESPONSES if name in item]


def _sampled(ledger: Ledger, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a seeded sample of up to SAMPLE good rows of each split (n,)."""
    rng = random.Random(f"sample {ledger.seed}")
    out = np.zeros_like(wanted)
    for split in np.unique(ledger.facts["split"][wanted]):
        there = np.flatnonzero(wanted & (ledger.facts["split"] == split))
        out[there[rng.sample(range(len(there)), min(SAMPLE, len(there)))]] = True
    return out


def _markers(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern for texts that the tokenizer reads as one special token anywhere, or that end a response."""
    texts = sorted({*special_tokens(tokenizer).values(), *endings_of(tokenizer).strings}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)))


def _find_markers(measured: _Measured, markers: Any, indices: list[int], items: list[CanonicalRow]) -> None:
    counts = np.zeros(len(items))
    for place, (index, item) in enumerate(zip(indices, items, strict=True)):
        for text in (*(m["content"] for m in item["prompt"]), *_responses(item)):
            if marker := markers.search(text):
                if not counts[place]:
                    what = f"special token or stop string {marker.group()!r} in a text"
                    measured.late.append((index, Problem("no_markers", what)))
                counts[place] += 1
    measured.columns["special_texts"].append(counts)


# Both compare their first texts with a slower way, so a process makes them once.
_encoder = lru_cache(maxsize=1)(Encoder)
_rendering = lru_cache(maxsize=1)(ManyRendered)


def _tokenised(
    measured: _Measured, tokenizer: Any, encode: Encoder, generation: GenerationConfig, indices: list[int],
    items: list[CanonicalRow],
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:  # fmt: skip
    """Return token counts (n, 3) of the rows' texts, and the unknown and total counts that `read_texts` adds up."""
    sides = [side for side in RESPONSES if side in items[0]]
    cap, ends = generation.max_new_tokens, endings_of(tokenizer)
    rendered: list[str] = []
    template = np.zeros(len(items))
    for start in range(0, len(items), _RENDERED):
        for prompt, problem in _all_rendered(tokenizer, items[start : start + _RENDERED], sides, ends):
            if problem:
                reading = "refused" if problem.check == "template_takes" else "changed"
                template[len(rendered)] = TEMPLATE_READINGS.index(reading)
                measured.late.append((indices[len(rendered)], problem))
            rendered.append(prompt)
    prompts = encode(rendered)
    answers = [encode([before_any(ends.strings, item[side]) for item in items]) for side in sides]
    tokens = np.full((len(items), 3), -1, np.int32)
    tokens[:, 0] = prompts.lengths()
    for side, of_side in enumerate(answers, 1):
        tokens[:, side] = of_side.lengths() + 1
    longest = tokens[:, 1:].max(1)
    same_cut = _same_cut(answers[0], answers[1], cap) if len(answers) == 2 else np.zeros(len(items), np.bool_)
    for place in np.flatnonzero(same_cut).tolist():
        what = f"the responses agree in their first {cap} tokens (generation.max_new_tokens)"
        measured.late.append((indices[place], Problem("differ_truncated", what)))
    for place in np.flatnonzero(tokens[:, 0] > generation.max_prompt_tokens).tolist():
        measured.late.append((indices[place], Problem("prompt_fits", f"the prompt has {tokens[place, 0]} tokens")))
    for place in np.flatnonzero(longest > cap).tolist():
        measured.late.append((indices[place], Problem("response_fits", f"a response has {longest[place]} tokens")))
    for column, values in (
        ("template", template), ("prompt_tokens", tokens[:, 0]), ("response_tokens", longest),
        ("chosen_tokens", tokens[:, 1]), ("rejected_tokens", tokens[:, 2]), ("distinct_cut_responses", 2 - same_cut),
    ):  # fmt: skip
        measured.columns[column].append(values)
    ids = np.concatenate([of_texts.ids for of_texts in (prompts, *answers)])
    unknown = 0 if tokenizer.unk_token_id is None else np.count_nonzero(ids == tokenizer.unk_token_id)
    return tokens, np.array([unknown, len(ids)], np.float64)


def _all_rendered(
    tokenizer: Any, items: list[CanonicalRow], sides: list[Side], ends: Endings
) -> list[tuple[str, Problem | None]]:
    """Return `rendered_and_judged` of each row. Rendering many together takes half the time."""
    try:
        rendering, turns_of = _rendering(tokenizer), [item["prompt"] for item in items]
        prompts = rendering.prompts(turns_of)
        agree = [True] * len(items)
        for side in sides:
            responses = [item[side] for item in items]
            talks = zip(turns_of, responses, strict=True)
            wholes = rendering.conversations([[*turns, {"role": "assistant", "content": r}] for turns, r in talks])
            agree = [
                so_far and _continued(whole, prompt, text, str(tokenizer.eos_token), ends.strings)
                for so_far, whole, prompt, text in zip(agree, wholes, prompts, responses, strict=True)
            ]
    except Exception:  # raised by one of the rows; rendered one by one, only that row fails
        return [rendered_and_judged(tokenizer, item["prompt"], [item[side] for side in sides]) for item in items]
    read = zip(turns_of, prompts, agree, strict=True)
    return [(prompt, _left_out(turns, prompt) if agrees else Problem(*_CHANGED)) for turns, prompt, agrees in read]


_CHANGED = (
    "template_agrees", "the chat template doesn't render the conversation as its prompt, the response and EOS"
)  # fmt: skip


def rendered_and_judged(
    tokenizer: Any, messages: list[dict[str, str]], responses: list[str]
) -> tuple[str, Problem | None]:
    """Return a prompt rendered in the chat template (empty if the template refuses it), and the problems of it or
    `responses`."""
    prompt, eos, strings = "", str(tokenizer.eos_token), endings_of(tokenizer).strings
    try:
        prompt = rendered_prompt(tokenizer, messages)
        for response in responses:
            whole = rendered_conversation(tokenizer, [*messages, {"role": "assistant", "content": response}])
            if not _continued(whole, prompt, response, eos, strings):
                return prompt, Problem(*_CHANGED)
        return prompt, _left_out(messages, prompt)
    except Exception as error:  # a template is third-party code and may raise anything
        if not prompt:
            return "", Problem("template_takes", f"the chat template refuses the prompt: {error}")
    return prompt, Problem(*_CHANGED)


def _left_out(messages: list[dict[str, str]], prompt: str) -> Problem | None:
    """Return the problem that a question or a system message is not in the rendered prompt; None if all are."""
    role = next((m["role"] for m in messages if m["role"] != "assistant" and m["content"].strip() not in prompt), None)
    return Problem("template_takes", f"the chat template leaves out the text of a {role} message") if role else None


def _continued(whole: str, prompt: str, response: str, eos: str, strings: tuple[str, ...]) -> bool:
    """Return whether a rendered conversation is `prompt` + `response` + EOS, or ends with another of `strings`."""
    answer, response = whole.removeprefix(prompt).lstrip(), response.strip()
    rest = answer[len(response) :]
    ends = rest.lstrip().startswith((eos, *strings)) or rest.startswith(strings)
    return whole.startswith(prompt) and answer.startswith(response) and ends


def _same_cut(one: Encoded, other: Encoded, cap: int) -> NDArray[np.bool_]:
    """Return whether text i of `one` and of `other` agree in their first `cap` tokens, EOS included (n,)."""
    alike = np.minimum(one.lengths(), cap) == np.minimum(other.lengths(), cap)
    for place in np.flatnonzero(alike).tolist():
        alike[place] = np.array_equal(one.of(place)[:cap], other.of(place)[:cap])
    return alike
