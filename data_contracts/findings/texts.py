"""What the contract learns from the texts themselves: tokens as the run's own tokenizer cuts them, sketches, samples.

One pass over the good rows, in chunks. Texts are dropped as they are read; what stays is a few numbers a row.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from components.data.config import NearDuplicateConfig
from components.data.rows import CanonicalRow, Problem
from components.models.config import GenerationConfig
from components.models.tokenizers import rendered_conversation, rendered_prompt, special_tokens
from data_contracts.findings.drift import language_of
from data_contracts.findings.near import Signatures, SketchFile, runs_of_words, signatures
from data_contracts.rows.ledger import Ledger

_CHUNK = 2_000
_RESPONSES: tuple[Literal["chosen", "rejected", "response"], ...] = ("chosen", "rejected", "response")
TEMPLATE_READINGS = ("agrees", "refused", "changed")
"""What a chat template makes of a row: renders it unchanged, refuses its prompt, or changes it."""
SAMPLE = 2_000
"""Texts of each split (or source) that language and classifier look at."""


@dataclass
class RowTexts:
    """Of the rows `index` (m,) of a ledger, in order."""

    index: NDArray[np.int64]
    tokens: NDArray[np.int32]
    """(m, 3): of the prompt, the chosen and the rejected response before they are cut, EOS included; -1 without."""
    sketch: Signatures
    """Of prompt and responses."""
    prompt_sketch: Signatures
    """Of the prompt."""
    unknown: float
    """Share of tokens that are the tokenizer's unknown token; NaN without tokenizer."""
    samples: dict[int, list[CanonicalRow]]
    """A few rows of each split (by its place in SPLITS)."""


def read_texts(
    ledger: Ledger,
    tokenizer: Any,
    generation: GenerationConfig,
    near: NearDuplicateConfig,
    progress: Callable[[int], None],
    languages: bool = False,
) -> RowTexts:
    """Read the texts of the good rows of `ledger`, and measure there what the tokenizer makes of them.

    Args:
        tokenizer: the run's own; None leaves out what needs it.
        languages: measure the language of each row too, which takes half a millisecond a row.
    """
    wanted = ledger.good()
    language_names: list[Any] = [None] * len(ledger.facts)
    chosen_for_sample = _sampled(ledger, wanted)
    markers = None if tokenizer is None else _markers(tokenizer)
    lengths = [np.empty((0, 3), np.int32)]
    sketched, of_prompts = (SketchFile(ledger.path.with_suffix(f".{name}")) for name in ("sketches", "prompt-sketches"))
    counts = np.zeros(2)  # unknown tokens, tokens
    samples: dict[int, list[CanonicalRow]] = {}
    seen = 0
    rows = ledger.items(wanted)
    while chunk := list(islice(rows, _CHUNK)):
        indices, items = [index for index, _ in chunk], [item for _, item in chunk]
        tokens = np.full((len(items), 3), -1, np.int32)
        if tokenizer is not None:
            tokens, more = _tokenised(ledger, tokenizer, generation, indices, items)
            counts += more
            _find_markers(ledger, markers, indices, items)
        prompts = [runs_of_words(" ".join(m["content"] for m in item["prompt"]), near.words) for item in items]
        answers = [runs_of_words(" ".join(_responses(item)), near.words) for item in items]
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        lengths.append(tokens)
        sketched.append(signatures(whole))
        of_prompts.append(signatures(prompts))
        for index, item in chunk:
            if languages:
                language_names[index] = language_of(" ".join(_responses(item)) or item["prompt"][-1]["content"])
            if index in chosen_for_sample:
                samples.setdefault(int(ledger.facts["split"][index]), []).append(item)
        seen += len(items)
        progress(seen)
    if languages:
        ledger.measured["language"] = np.array(language_names, object)
    unknown = counts[0] / counts[1] if counts[1] else float("nan")
    return RowTexts(
        np.flatnonzero(wanted), np.concatenate(lengths), sketched.mapped(), of_prompts.mapped(), unknown, samples
    )


def overlong(texts: RowTexts, rows: int, cap: int) -> NDArray[np.bool_]:
    """Which responses of a ledger's rows exceed `cap` tokens with their EOS: (rows, 2), chosen and rejected, or a
    demonstration's in the first column. False where there is no response, or it was not read."""
    found = np.zeros((rows, 2), np.bool_)
    found[texts.index] = texts.tokens[:, 1:] > cap
    return found


def _responses(item: CanonicalRow) -> list[str]:
    return [item[name] for name in _RESPONSES if name in item]


def _sampled(ledger: Ledger, wanted: NDArray[np.bool_]) -> set[int]:
    """Up to SAMPLE good rows of each split, seeded."""
    rng = random.Random(f"sample {ledger.seed}")
    out: set[int] = set()
    for split in np.unique(ledger.facts["split"][wanted]):
        there = np.flatnonzero(wanted & (ledger.facts["split"] == split)).tolist()
        out |= set(rng.sample(there, min(SAMPLE, len(there))))
    return out


def _markers(tokenizer: Any) -> re.Pattern[str]:
    """Find what the tokenizer reads as one special token wherever it stands in a text."""
    texts = sorted(set(special_tokens(tokenizer).values()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)))


def _find_markers(ledger: Ledger, markers: Any, indices: list[int], items: list[CanonicalRow]) -> None:
    counts = np.zeros(len(items))
    for place, (index, item) in enumerate(zip(indices, items, strict=True)):
        for text in (*(m["content"] for m in item["prompt"]), *_responses(item)):
            if found := markers.search(text):
                if not counts[place]:
                    ledger.note(index, Problem("no_markers", f"special token {found.group()!r} in a text"))
                counts[place] += 1
    ledger.measure("special_texts", np.array(indices), counts)


def _tokenised(
    ledger: Ledger, tokenizer: Any, generation: GenerationConfig, indices: list[int], items: list[CanonicalRow]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Lengths (n, 3) of the rows' texts in tokens, and the counts that `read_texts` adds up."""
    sides = [side for side in _RESPONSES if side in items[0]]
    rendered = []
    template = np.zeros(len(items))
    for place, (index, item) in enumerate(zip(indices, items, strict=True)):
        prompt, problem = rendered_and_judged(tokenizer, item["prompt"], [item[side] for side in sides])
        rendered.append(prompt)
        if problem:
            template[place] = TEMPLATE_READINGS.index("refused" if problem.check == "template_takes" else "changed")
            ledger.note(index, problem)
    prompts = _ids(tokenizer, rendered)
    answers = [_ids(tokenizer, [item[side] for item in items]) for side in sides]
    tokens = np.full((len(items), 3), -1, np.int32)
    tokens[:, 0] = [len(ids) for ids in prompts]
    cap = generation.max_new_tokens
    for side, ids in enumerate(answers, 1):
        tokens[:, side] = [len(row) + 1 for row in ids]
    same_cut = np.zeros(len(items))
    for place, index in enumerate(indices):
        if len(answers) == 2 and _cut(answers[0][place], cap) == _cut(answers[1][place], cap):
            what = f"the responses agree in their first {cap} tokens (generation.max_new_tokens)"
            ledger.note(index, Problem("differ_truncated", what))
            same_cut[place] = 1
        if tokens[place, 0] > generation.max_prompt_tokens:
            ledger.note(index, Problem("prompt_fits", f"the prompt has {tokens[place, 0]} tokens"))
        if tokens[place].max(where=[False, True, True], initial=0) > cap:
            ledger.note(index, Problem("response_fits", f"a response has {tokens[place, 1:].max()} tokens"))
    where = np.array(indices)
    for column, values in (
        ("template", template), ("prompt_tokens", tokens[:, 0]), ("response_tokens", tokens[:, 1:].max(1)),
        ("chosen_tokens", tokens[:, 1]), ("rejected_tokens", tokens[:, 2]), ("distinct_cut_responses", 2 - same_cut),
    ):  # fmt: skip
        ledger.measure(column, where, values)
    texts = [row for ids in (prompts, *answers) for row in ids]
    unknown = sum(row.count(tokenizer.unk_token_id) for row in texts)
    return tokens, np.array([unknown, sum(map(len, texts))], np.float64)


def rendered_and_judged(
    tokenizer: Any, messages: list[dict[str, str]], responses: list[str]
) -> tuple[str, Problem | None]:
    """A prompt in the chat template (empty if the template refuses it), and what is wrong with it or `responses`."""
    prompt = ""
    try:
        prompt = rendered_prompt(tokenizer, messages)
        if all(continues(tokenizer, prompt, messages, response) for response in responses):
            return prompt, None
    except Exception as error:  # a template is a program of others
        if not prompt:
            return "", Problem("template_takes", f"the chat template refuses the prompt: {error}")
    return prompt, Problem(
        "template_agrees", "the chat template doesn't render the conversation as its prompt, the response and EOS"
    )


def continues(tokenizer: Any, prompt: str, messages: list[dict[str, str]], response: str) -> bool:
    """Whether the chat template renders the conversation with its response as `prompt`, the response, then EOS."""
    whole = rendered_conversation(tokenizer, [*messages, {"role": "assistant", "content": response}])
    answer = response.strip()
    rest = whole.removeprefix(prompt).lstrip()
    return whole.startswith(prompt) and rest.removeprefix(answer).lstrip().startswith(str(tokenizer.eos_token))


def _cut(ids: list[int], cap: int) -> tuple[list[int], bool]:
    """What is left of a response, and whether its EOS is."""
    return ids[:cap], len(ids) < cap


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """As `tokenizer(texts)` without the masks and offsets, which take longer than the ids."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encoded]
