"""The sampler's key-value cache, which is allocated once if the model allows it.

Legend: B responses, P prompt tokens (padded on the left), n rows of the batch that have not ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from components.models.batching import onto, position_ids

PREFILL_PARTS = 8
"""Prompts are processed in this many parts, sorted by length, each padded to its own longest prompt."""
ALIGNED = {"cpu": 1, "cuda": 8}
"""Number of slots by which a mask's rows and its first column are aligned, by device type. CUDA's memory-efficient
attention reads 16 bytes of a mask at a time. torch copies a mask whose rows are not aligned, in every layer, and does
not check where it begins: the kernel then fails with a misaligned address."""


@dataclass
class Window:
    """The part of the preallocated tensors that a forward pass reads and appends to, the same in every layer."""

    rows: slice
    """Rows of the batch."""
    start: int
    """First slot with a token of any of these rows."""
    end: int
    """Slot of the next token."""


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one layer, (B, heads, slots, width); `update` writes in place and returns views."""

    is_sliding = False

    def __init__(self, window: Window, batch: int, slots: int) -> None:
        super().__init__()
        self.window, self.batch, self.slots = window, batch, slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate by the heads, widths, dtype and device of the first states. Zeros, since a masked NaN stays NaN."""
        self.keys, self.values = (
            x.new_zeros(self.batch, x.shape[1], self.slots, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states (n, heads, tokens, width) at the window's end; return views of all states in the window."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, start, end = self.window.rows, self.window.start, self.window.end
        filled = end + key_states.shape[2]
        self.keys[rows, :, end:filled] = key_states
        self.values[rows, :, end:filled] = value_states
        return self.keys[rows, :, start:filled], self.values[rows, :, start:filled]

    def get_seq_length(self) -> int:
        """Return the number of tokens in the window."""
        return self.window.end - self.window.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` more tokens attend to, and the offset of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.slots

    def keep(self, holes: Tensor, movers: Tensor) -> None:
        """Copy rows `movers` (m,) to rows `holes` (m,)."""
        filled = slice(self.window.start, self.window.end)
        for states in (self.keys, self.values):
            states[holes, :, filled] = states[movers, :, filled]


class PreallocatedContext:
    """The state of a batch of sequences: first the prompts are read, then one token per row at a time.

    For models with full attention in every layer. No tensor grows, and no mask is built after the prompts. A row that
    ends is overwritten by the last row, so that it costs a copy of one row and not of the batch.
    """

    def __init__(self, model: Any, prompt_ids: Tensor, lengths: Sequence[int], new_tokens: int, layers: int) -> None:
        batch, width = prompt_ids.shape
        self.model, self.prompt_ids = model, prompt_ids
        self.window = Window(slice(0, batch), 0, 0)
        self.aligned = ALIGNED[prompt_ids.device.type]
        self.cache = Cache(layers=[PreallocatedLayer(self.window, batch, width + new_tokens) for _ in range(layers)])
        self.padding = [width - length for length in lengths]
        """Number of empty slots before each row's first token; kept on the host, so that it need not wait for a GPU."""
        self.new_tokens = new_tokens

    def read_prompts(self) -> Tensor:
        """Process the prompts; return the last hidden state of each (B, D)."""
        width, device = self.prompt_ids.shape[1], self.prompt_ids.device
        padding = onto(device, torch.tensor(self.padding)).unsqueeze(1)
        slots = torch.arange(-(-(width + self.new_tokens) // self.aligned) * self.aligned, device=device)
        found = []
        for rows, start in self._parts():
            self.window.rows, self.window.start, self.window.end = rows, start, start
            at = (slots[start:width] - padding[rows]).clamp(min=0)
            mask = self._prompt_mask(rows, padding, slots[start:width])
            ids = self.prompt_ids[rows, start:]
            found.append(_last_hidden(self.model, ids, mask, at, self.cache))
        hidden = torch.cat(found)
        self.window.rows, self.window.end = slice(0, len(hidden)), width
        self.window.start = self._first_slot()
        bias = torch.zeros(len(hidden), len(slots), dtype=hidden.dtype, device=device)
        # Four-dimensional, so that transformers uses it as it is instead of building a mask for every token.
        self.bias = bias.masked_fill_(slots < padding, -torch.inf)[:, None, None]
        self.positions = width - padding
        return hidden

    def _prompt_mask(self, rows: slice, padding: Tensor, slots: Tensor) -> Tensor | None:
        """Return the mask of a part's prompts as transformers builds it; None if no row is padded.

        For SDPA it has four dimensions (n, 1, k, k). transformers would inspect a two-dimensional one to see whether it
        masks anything, for which the host waits for the GPU.
        """
        lengths = self.padding[rows]
        if min(lengths) == max(lengths):
            return None
        real = slots >= padding[rows]
        if self.model.config._attn_implementation == "eager":
            return real
        return ((slots <= slots.unsqueeze(1)) & real.unsqueeze(1)).unsqueeze(1)

    def _parts(self) -> Iterator[tuple[slice, int]]:
        """Yield runs of rows (sorted by length, see `open_context`), each with the first slot that has a token."""
        size = -(-len(self.padding) // PREFILL_PARTS)
        for first in range(0, len(self.padding), size):
            rows = slice(first, min(first + size, len(self.padding)))
            yield rows, min(self.padding[rows])

    def append(self, tokens: Tensor) -> Tensor:
        """Append `tokens` (n,), one to each row; return the last hidden states (n, D)."""
        seen = self.bias[..., self.window.start : self.window.end + 1]
        hidden = _last_hidden(self.model, tokens.unsqueeze(1), seen, self.positions, self.cache)
        self.window.end += 1
        self.positions += 1
        return hidden

    def keep(self, order: Sequence[int]) -> None:
        """Replace row i by row `order[i]`, for `order` (n,) with order[i] ≥ i; drop the other rows."""
        device = self.prompt_ids.device
        moved = [i for i, row in enumerate(order) if row != i]
        index, holes = (onto(device, torch.tensor(each, dtype=torch.long)) for each in (order, moved))
        movers = index[holes]
        for layer in self.cache.layers:
            layer.keep(holes, movers)
        self.padding = [self.padding[row] for row in order]
        self.bias, self.positions = self.bias[index], self.positions[index]
        self.window.rows, self.window.start = slice(0, len(order)), self._first_slot()

    def _first_slot(self) -> int:
        """Return the first slot with a token of any row, or an aligned one before it: the mask hides what is
        between."""
        return min(self.padding) // self.aligned * self.aligned


class DynamicContext:
    """The same for all other models (sliding windows, recurrent states), with transformers' own cache and masks."""

    def __init__(self, model: Any, prompt_ids: Tensor, lengths: Sequence[int], cache: Cache) -> None:
        self.model, self.prompt_ids, self.cache = model, prompt_ids, cache
        width, device = prompt_ids.shape[1], prompt_ids.device
        padding = onto(device, torch.tensor([width - length for length in lengths])).unsqueeze(1)
        self.mask = torch.arange(width, device=device) >= padding
        self.positions = position_ids(self.mask)

    def read_prompts(self) -> Tensor:
        hidden = _last_hidden(self.model, self.prompt_ids, self.mask, self.positions, self.cache)
        self.positions = self.positions[:, -1:]
        return hidden

    def append(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        self.positions = self.positions + 1
        return _last_hidden(self.model, tokens.unsqueeze(1), self.mask, self.positions, self.cache)

    def keep(self, order: Sequence[int]) -> None:
        index = onto(self.mask.device, torch.tensor(order, dtype=torch.long))
        self.cache.reorder_cache(index)
        self.mask, self.positions = self.mask[index], self.positions[index]


def open_context(
    model: Any, prompt_ids: Tensor, lengths: Sequence[int], new_tokens: int
) -> PreallocatedContext | DynamicContext:
    """Open the context of a batch of prompts (B, P), padded on the left, with room for `new_tokens` more in each row.

    `lengths` (B,) are the prompts' lengths. Sorting the prompts by length saves padding.
    """
    dynamic = DynamicCache(config=model.config)
    full = bool(dynamic.layers) and all(type(layer) is DynamicLayer for layer in dynamic.layers)
    if full and model.config._attn_implementation in ("sdpa", "eager"):
        return PreallocatedContext(model, prompt_ids, lengths, new_tokens, len(dynamic.layers))
    return DynamicContext(model, prompt_ids, lengths, dynamic)


def _last_hidden(model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
    """Return the hidden states (n, D) of the last of the tokens `ids` (n, tokens)."""
    return model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state[:, -1]
