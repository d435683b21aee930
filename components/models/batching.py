"""Make batches from token lists: length buckets, padding, masks. A mask is always True where a token counts."""

import math
import random
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.models.chat.endings import before_stop
from components.models.chat.rendering import rendered_prompt

Messages = Sequence[Mapping[str, str]]
T = TypeVar("T")

PADDING = 0.4
"""Largest share of padding among a run's tokens."""


def encode_prompt(tokenizer: Any, messages: Messages, max_tokens: int) -> list[int]:
    """Return the token ids of a prompt in the tokenizer's chat template, ending where the response begins.

    If the prompt exceeds `max_tokens`, its oldest turns are dropped, so that a user turn comes first (some templates
    require it); a system message stays. If it is still too long, its oldest tokens are dropped.
    """
    turns = list(messages)

    def ids() -> list[int]:
        return tokenizer(rendered_prompt(tokenizer, turns), add_special_tokens=False)["input_ids"]

    out = ids()
    first = int(bool(turns) and turns[0]["role"] == "system")
    while len(out) > max_tokens and len(turns) > first + 1:
        del turns[first]
        while turns[first]["role"] != "user" and len(turns) > first + 1:
            del turns[first]
        out = ids()
    return out[-max_tokens:]


def encode_response(tokenizer: Any, text: str, max_tokens: int) -> list[int]:
    """Return the token ids of a response with a final EOS; one that exceeds `max_tokens` is cut and has no EOS.

    A text that contains a stop string of the tokenizer ends before it, as a sampled response does.
    """
    ids = tokenizer(before_stop(tokenizer, text), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return ids[:max_tokens]


def encode_prompts(tokenizer: Any, prompts: Sequence[Messages], max_tokens: int) -> list[list[int]]:
    """As `encode_prompt` of each prompt, but several times as fast."""
    if not prompts:
        return []
    rendered = [rendered_prompt(tokenizer, prompt) for prompt in prompts]
    encoded = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return [
        ids if len(ids) <= max_tokens else encode_prompt(tokenizer, prompt, max_tokens)
        for ids, prompt in zip(encoded, prompts, strict=True)
    ]


def encode_responses(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """As `encode_response` of each text, but several times as fast."""
    if not texts:
        return []
    encoded = tokenizer([before_stop(tokenizer, text) for text in texts], add_special_tokens=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id][:max_tokens] for ids in encoded]


class Lazy(Sequence[T]):
    """Items that are computed on access, several at a time."""

    @abstractmethod
    def at(self, which: Sequence[int]) -> list[T]:
        """Return the items `which`."""

    @overload
    def __getitem__(self, which: int) -> T: ...
    @overload
    def __getitem__(self, which: slice) -> list[T]: ...
    def __getitem__(self, which: int | slice) -> Any:
        return self.at(range(len(self))[which]) if isinstance(which, slice) else self.at([which])[0]


RUN = 32
"""Number of batches whose items are sorted by length together."""


def length_buckets(lengths: Sequence[int] | NDArray[np.integer[Any]], batch_size: int) -> list[list[int]]:
    """Return all indices sorted by length, in batches, for evaluation."""
    chunk = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]


class LengthBuckets(Sequence[list[int]]):
    """Indices in batches of similar length, for training; each index is in exactly one batch.

    Indices are shuffled, sorted by length within runs of 32 batches, and then the batches are shuffled. They are
    computed on access: a batch needs only the lengths of its own run.
    """

    def __init__(self, lengths: Sequence[int] | NDArray[np.integer[Any]], batch_size: int, rng: random.Random) -> None:
        self._lengths, self._size = lengths, batch_size
        self._order = array("q", range(len(lengths)))
        rng.shuffle(self._order)
        self._places = array("q", range(math.ceil(len(lengths) / batch_size)))
        """Maps a batch's number to its place in the sorted runs."""
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
        all_lengths = self._lengths
        lengths = all_lengths.at(chunk) if isinstance(all_lengths, Lazy) else [all_lengths[i] for i in chunk]
        by_length = sorted(range(len(chunk)), key=lambda i: lengths[i])
        return [chunk[i] for i in by_length[place * self._size : (place + 1) * self._size]]


def even_runs(lengths: Sequence[int], size: int, tokens: int | None = None) -> Iterator[list[int]]:
    """Yield indices of `lengths`, sorted by length, in runs of at most `size` to pad and compute together.

    A run ends earlier if the next index would raise its share of padding above `PADDING`. With `tokens`, a run has at
    most that many tokens, including padding; a longer sequence is a run of its own.
    """
    run: list[int] = []
    real = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        padded = (len(run) + 1) * lengths[i]  # the last is the longest
        full = len(run) == size or (tokens is not None and padded > tokens)
        if run and (full or padded > (1 + PADDING) * (real + lengths[i])):
            yield run
            run, real = [], 0
        run.append(i)
        real += lengths[i]
    yield run


def packed_runs(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return indices of `lengths` in runs of at most `tokens` tokens, to compute end to end without padding.

    Each sequence, the longest first, joins the first run with room for it (first-fit decreasing; it needs at most 11/9
    times the fewest possible runs + 6/9, Dósa 2007). A sequence longer than `tokens` is a run of its own.
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
    """Pad to the longest; return ids (N, L) int64 and mask (N, L) bool, True where a token counts."""
    longest = max(len(s) for s in sequences)
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        at = slice(longest - len(sequence), longest) if side == "left" else slice(0, len(sequence))
        ids[row, at] = torch.tensor(sequence, dtype=torch.long)
        mask[row, at] = True
    return ids, mask


def onto(device: str | torch.device, tensor: Tensor) -> Tensor:
    """Copy a CPU tensor to `device`. The host does not wait: the copy is made from pinned memory, in stream order."""
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def position_ids(mask: Tensor) -> Tensor:
    """Return positions (N, L) that count real tokens from 0, with padding on either side."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)
