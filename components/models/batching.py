"""Token lists into batches: length buckets, padding, masks. A mask is True where a token counts, everywhere."""

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.models.tokenizers import rendered_prompt

Messages = Sequence[Mapping[str, str]]

PADDING = 0.4
"""Most padding of a run, as a share of its tokens."""


def encode_prompt(tokenizer: Any, messages: Messages, max_tokens: int) -> list[int]:
    """Token ids of a prompt in the tokenizer's chat template, ready for the response.

    A prompt over `max_tokens` loses its oldest turns up to one of the user's (a system message stays), for templates
    that insist on it, then its oldest tokens.
    """
    kept = list(messages)

    def ids() -> list[int]:
        return tokenizer(rendered_prompt(tokenizer, kept), add_special_tokens=False)["input_ids"]

    out = ids()
    first = int(bool(kept) and kept[0]["role"] == "system")
    while len(out) > max_tokens and len(kept) > first + 1:
        del kept[first]
        while kept[first]["role"] != "user" and len(kept) > first + 1:
            del kept[first]
        out = ids()
    return out[-max_tokens:]


def encode_response(tokenizer: Any, text: str, max_tokens: int) -> list[int]:
    """Token ids of a response with EOS at its end; one that exceeds `max_tokens` is cut and has no EOS."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return ids[:max_tokens]


def encode_prompts(tokenizer: Any, prompts: Sequence[Messages], max_tokens: int) -> list[list[int]]:
    """As `encode_prompt` of each, which it takes a fraction of the time of."""
    if not prompts:
        return []
    rendered = [rendered_prompt(tokenizer, prompt) for prompt in prompts]
    found = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return [
        ids if len(ids) <= max_tokens else encode_prompt(tokenizer, prompt, max_tokens)
        for ids, prompt in zip(found, prompts, strict=True)
    ]


def encode_responses(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """As `encode_response` of each, which it takes a fraction of the time of."""
    if not texts:
        return []
    found = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id][:max_tokens] for ids in found]


def length_buckets(
    lengths: Sequence[int] | NDArray[np.integer[Any]], batch_size: int, rng: random.Random, shuffle: bool = True
) -> list[list[int]]:
    """Indices in batches of like length: shuffled, sorted within runs of 32 batches, the batches shuffled again.

    Without `shuffle` everything is sorted by length, for evaluation. Every index stands in exactly one batch.
    """
    order = array("q", range(len(lengths)))
    run = batch_size * 32 if shuffle else len(order)
    if shuffle:
        rng.shuffle(order)
    batches = []
    for start in range(0, len(order), max(run, 1)):
        chunk = sorted(order[start : start + run], key=lambda i: lengths[i])
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    if shuffle:
        rng.shuffle(batches)
    return batches


def even_runs(lengths: Sequence[int], size: int, tokens: int | None = None) -> Iterator[list[int]]:
    """Indices of `lengths`, sorted by length, in runs of at most `size` to pad and compute together.

    A run ends earlier where the next one would take its padding over `PADDING` of its tokens. With `tokens`, a run
    holds at most so many, padding included; a sequence that exceeds them alone is a run of its own.
    """
    run: list[int] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        padded = (len(run) + 1) * lengths[i]  # the longest comes last
        full = len(run) == size or (tokens is not None and padded > tokens)
        if run and (full or padded > (1 + PADDING) * (real + lengths[i])):
            yield run
            run, real = [], 0
        run.append(i)
        real += lengths[i]
    yield run


def packed_runs(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of `lengths` in runs that hold at most `tokens` together, to compute end to end without padding.

    Each sequence, the longest first, joins the first run with room for it (first-fit decreasing: at most 11/9 of the
    fewest runs + 6/9, Dósa 2007). A sequence that exceeds `tokens` alone is a run of its own.
    """
    runs: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((run for run, left in enumerate(room) if lengths[i] <= left), len(runs))
        if at == len(runs):
            runs.append([])
            room.append(tokens)
        runs[at].append(i)
        room[at] -= lengths[i]
    return runs


def pad(
    sequences: Sequence[Sequence[int]], pad_id: int, side: Literal["left", "right"] = "right"
) -> tuple[Tensor, Tensor]:
    """Pad to the longest: ids (N, L) int64 and mask (N, L) bool, True where a token counts."""
    longest = max(len(s) for s in sequences)
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        at = slice(longest - len(sequence), longest) if side == "left" else slice(0, len(sequence))
        ids[row, at] = torch.tensor(sequence, dtype=torch.long)
        mask[row, at] = True
    return ids, mask


def onto(device: str | torch.device, tensor: Tensor) -> Tensor:
    """`tensor`, which is on the CPU, on `device`. The host waits for no GPU: the copy is made from pinned memory,
    in the order of the GPU's other work."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def position_ids(mask: Tensor) -> Tensor:
    """Positions (N, L) that count real tokens from 0, whichever side the padding stands on."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
