"""Token lists into batches: length buckets, padding, masks. A mask is True where a token counts, everywhere."""

import math
import random
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.models.chat.endings import before_stop
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
    """Token ids of a response with EOS at its end; one that exceeds `max_tokens` is cut and has no EOS.

    A text that holds a stop string of the tokenizer ends before it, as a sampled one does.
    """
    ids = tokenizer(before_stop(tokenizer, text), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
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
    found = tokenizer([before_stop(tokenizer, text) for text in texts], add_special_tokens=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id][:max_tokens] for ids in found]


class LazyLengths(Sequence[int]):
    """Lengths in tokens that are computed when they are asked for, several at a time."""

    @abstractmethod
    def at(self, which: Sequence[int]) -> list[int]:
        """The lengths of the items `which`."""


RUN = 32
"""Batches that are sorted by length together."""


def length_buckets(
    lengths: Sequence[int] | NDArray[np.integer[Any]], batch_size: int, rng: random.Random, shuffle: bool = True
) -> list[list[int]]:
    """Indices in batches of like length: shuffled, sorted within runs of 32 batches, the batches shuffled again.

    Without `shuffle` everything is sorted by length, for evaluation. Every index stands in exactly one batch.
    """
    if shuffle:
        return list(LengthBuckets(lengths, batch_size, rng))
    chunk = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]


class LengthBuckets(Sequence[list[int]]):
    """The batches of `length_buckets`, shuffled: each asks for the lengths of its own run of 32 batches alone."""

    def __init__(self, lengths: Sequence[int] | NDArray[np.integer[Any]], batch_size: int, rng: random.Random) -> None:
        self._lengths, self._size = lengths, batch_size
        self._order = array("q", range(len(lengths)))
        rng.shuffle(self._order)
        self._places = array("q", range(math.ceil(len(lengths) / batch_size)))
        """Which batch of the sorted runs each batch is."""
        rng.shuffle(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, which: int) -> list[int]: ...
    @overload
    def __getitem__(self, which: slice) -> list[list[int]]: ...
    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            return [self[place] for place in range(len(self))[which]]
        run, place = divmod(self._places[which], RUN)
        chunk = self._order[run * RUN * self._size : (run + 1) * RUN * self._size]
        known = self._lengths
        lengths = known.at(chunk) if isinstance(known, LazyLengths) else [known[i] for i in chunk]
        by_length = sorted(range(len(chunk)), key=lambda i: lengths[i])
        return [chunk[i] for i in by_length[place * self._size : (place + 1) * self._size]]


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
