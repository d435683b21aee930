"""The sampler's key-value cache, which is allocated once if the model allows it.

Legend: B responses, P prompt tokens (padded on the left), n rows of the batch that have not ended.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from components.base.errors import UserError
from components.models.adapters import AdapterView
from components.models.batching import onto, position_ids
from components.models.config import PREFILL_PARTS
from components.models.matrices.quantized import is_four_bit

ALIGNED = {"cpu": 1, "cuda": 8}
"""Number of slots by which a mask's rows and its first column are aligned, by device type. CUDA's memory-efficient
attention reads 16 bytes of a mask at a time. torch copies a mask whose rows are not aligned, in every layer, and does
not check where it begins: the kernel then fails with a misaligned address."""
CAPTURED_TOKENS = 128
"""Number of tokens for which a captured step is replayed. Its attention always reads room for that many."""
CAPTURED_TYPES = ("llama", "qwen2", "qwen3", "gpt2", "gemma", "phi", "phi3", "smollm3")
"""Types of models whose decoding step was found to make the host wait for nothing, as a capture requires. (transformers
says of its classes whether they can be compiled, which does not suffice: Falcon copies numbers to the GPU.)"""
FEWEST_ROWS, FEWEST_TOKENS = 8, 32
"""A step is captured again for fewer rows if more than the first number were captured and the second number of tokens
is left. The time of a step with few rows does not depend on them, and a capture takes as long as many replays."""


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
        return self.window.end - self.window.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that `query_length` more tokens attend to, and the offset of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
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
        self.slots = -(-(width + new_tokens) // self.aligned) * self.aligned
        self.cache = Cache(layers=[PreallocatedLayer(self.window, batch, width + new_tokens) for _ in range(layers)])
        self.padding = [width - length for length in lengths]
        """Number of empty slots before each row's first token; kept on the host, so that it need not wait for a GPU."""

    def read_prompts(self) -> Tensor:
        """Process the prompts; return the last hidden state of each (B, D)."""
        width, device = self.prompt_ids.shape[1], self.prompt_ids.device
        padding = onto(device, torch.tensor(self.padding)).unsqueeze(1)
        slots = torch.arange(self.slots, device=device)
        parts = []
        for rows, start in self._parts():
            self.window.rows, self.window.start, self.window.end = rows, start, start
            at = (slots[start:width] - padding[rows]).clamp(min=0)
            mask = self._prompt_mask(rows, padding, slots[start:width])
            ids = self.prompt_ids[rows, start:]
            parts.append(_last_hidden(self.model, ids, mask, at, self.cache))
        hidden = torch.cat(parts)
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
        size = -(-len(self.padding) // PREFILL_PARTS[self.prompt_ids.device.type])
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

    def shrinks(self, count: int) -> bool:
        """Return whether a step costs less with `count` rows than now, so that the others should be dropped."""
        return True

    def keep(self, order: Sequence[int]) -> None:
        """Replace row i by row `order[i]`, for `order` (n,) with order[i] ≥ i; drop the other rows."""
        device = self.prompt_ids.device
        moved = [i for i, row in enumerate(order) if row != i]
        index, holes = (onto(device, torch.tensor(places, dtype=torch.long)) for places in (order, moved))
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


class StackedLayer(PreallocatedLayer):
    """A layer whose states are parts of two tensors for all layers, (layers, B, heads, slots, width), so that one
    operation copies a token's."""

    def __init__(self, window: Window, batch: int, slots: int, number: int, layers: int, stacks: list[Tensor]) -> None:
        super().__init__(window, batch, slots)
        self.number, self.layers, self.stacks = number, layers, stacks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tensors for all layers by the states of the first one, whose shape all must have."""
        states = (key_states, value_states)
        if not self.stacks:
            self.stacks += [x.new_zeros(self.layers, self.batch, x.shape[1], self.slots, x.shape[3]) for x in states]
        assert all(x.shape[1::2] == stack.shape[2::2] for x, stack in zip(states, self.stacks, strict=True)), (
            "layers differ in heads or widths"
        )
        self.keys, self.values = (stack[self.number] for stack in self.stacks)
        self.is_initialized = True


class Captures:
    """Captures functions as CUDA graphs. Their memory is one pool, which is freed with this object.

    A capture cannot use the allocator's unused memory. `torch.cuda.graph` frees it before each capture, and training
    then has to allocate it again; here it is freed only if little other memory is left.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.MemPool()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture `step`, which has run once before; return a function that replays it.

        Raises:
            UserError: the step cannot be captured, since the host waits for the GPU in it.
        """
        free, total = torch.cuda.mem_get_info()
        if free < total // 8:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capture_stream()):
            torch.cuda.current_blas_handle()  # allocates cuBLAS's workspace, which would else be part of the pool
            try:
                # Of this thread only: NCCL's may ask the GPU something meanwhile.
                graph.capture_begin(pool=cast(Any, self.pool.id), capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                cause = str(error.__context__ or error).partition("\n")[0]
                raise UserError(
                    f"a decoding step of this model cannot be captured as a CUDA graph ({cause}). Set "
                    "runtime.cuda_graphs=false."
                ) from error
        return graph.replay


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream for captures; the default stream does not allow them. cuBLAS keeps a workspace for each
    stream."""
    return torch.cuda.Stream()


class GraphedContext(PreallocatedContext):
    """The same by CUDA graphs: a step is captured and then replayed for each token.

    The host launches a step's kernels more slowly than a GPU computes them; it launches a graph at once. A graph's
    addresses and shapes are fixed, so a step attends to a window of slots with a fixed end. The new token's states are
    written to the window's last slot and then copied to their own; the mask hides the slots between. A step is captured
    anew when the window is full, and when at most half of the rows are left: only then are rows dropped. The context is
    made for one batch, and the model's weights must not change or move meanwhile. So what was captured before, by this
    process or by one that was killed, changes no result.
    """

    def __init__(self, model: Any, prompt_ids: Tensor, lengths: Sequence[int], new_tokens: int, layers: int) -> None:
        super().__init__(model, prompt_ids, lengths, new_tokens, layers)
        batch = len(prompt_ids)
        self.stacks: list[Tensor] = []
        self.cache = Cache(
            layers=[StackedLayer(self.window, batch, self.slots, i, layers, self.stacks) for i in range(layers)]
        )
        self.tokens = prompt_ids.new_zeros(batch)
        self.last = -1
        """Last slot of the window."""
        self.replay: Callable[[], None] | None = None
        self.captures = Captures()

    def read_prompts(self) -> Tensor:
        """As `PreallocatedContext`. The result holds until the next `append`, as do those of `append`."""
        self.hidden = super().read_prompts()
        self.bias[..., self.window.end :] = -torch.inf
        return self.hidden

    def append(self, tokens: Tensor) -> Tensor:
        """As `PreallocatedContext`; with fewer `tokens` (n,) than rows, to the first n rows."""
        rows, end = self.window.rows, self.window.end
        self.tokens[: len(tokens)] = tokens
        if end > self.last:
            filled = -(-(end + CAPTURED_TOKENS) // self.aligned) * self.aligned
            self.last, self.replay = min(filled, self.slots) - 1, None
            self.bias[..., self.last] = 0
        if self.replay is None:
            self._step()  # also loads the kernels, which a capture could not
            self.replay = self.captures(self._step)
        else:
            self.replay()
        if end < self.last:
            for stack in self.stacks:
                stack[:, rows, :, end] = stack[:, rows, :, self.last]
        self.bias[..., end] = 0
        self.window.end += 1
        self.positions += 1
        return self.hidden[: len(tokens)]

    def _step(self) -> None:
        """Compute `hidden` of `tokens`, at fixed addresses; write the states to the window's last slot."""
        rows, end = self.window.rows, self.window.end
        self.window.start, self.window.end = 0, self.last
        ids, mask = self.tokens[rows].unsqueeze(1), self.bias[..., : self.last + 1]
        self.hidden[rows] = _last_hidden(self.model, ids, mask, self.positions, self.cache)
        self.window.end = end

    def shrinks(self, count: int) -> bool:
        return self._rows_for(count) < self.window.rows.stop and self.slots - self.window.end >= FEWEST_TOKENS

    def keep(self, order: Sequence[int]) -> None:
        """As `PreallocatedContext`. Up to the number of rows of a captured step, rows beyond `order` stay as they
        are."""
        super().keep([*order, *range(len(order), self._rows_for(len(order)))])
        self.replay = None

    def _rows_for(self, count: int) -> int:
        """Return the number of rows with which a step for `count` rows is captured: the batch, halved some times."""
        rows = self.window.rows.stop
        while rows > FEWEST_ROWS and count <= -(-rows // 2):
            rows = -(-rows // 2)
        return rows


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

    def shrinks(self, count: int) -> bool:
        return True

    def keep(self, order: Sequence[int]) -> None:
        index = onto(self.mask.device, torch.tensor(order, dtype=torch.long))
        self.cache.reorder_cache(index)
        self.mask, self.positions = self.mask[index], self.positions[index]


def open_context(
    model: Any, prompt_ids: Tensor, lengths: Sequence[int], new_tokens: int, graphs: bool = False
) -> PreallocatedContext | DynamicContext:
    """Open the context of a batch of prompts (B, P), padded on the left, with room for `new_tokens` more in each row.

    Args:
        lengths: (B,) the prompts' lengths. Sorting the prompts by length saves padding.
        graphs: decode by CUDA graphs if the model allows it.
    """
    dynamic = DynamicCache(config=model.config)
    full = bool(dynamic.layers) and all(type(layer) is DynamicLayer for layer in dynamic.layers)
    if full and model.config._attn_implementation in ("sdpa", "eager"):
        kind = GraphedContext if graphs and can_be_captured(model) else PreallocatedContext
        return kind(model, prompt_ids, lengths, new_tokens, len(dynamic.layers))
    return DynamicContext(model, prompt_ids, lengths, dynamic)


def can_be_captured(model: Any) -> bool:
    """Return whether a decoding step of `model` can be captured: it is of a type in `CAPTURED_TYPES`, is not in 4 bits,
    and has rotary frequencies that do not depend on the position, which transformers would read from the GPU."""
    whole = model.backbone.model if isinstance(model, AdapterView) else model
    rope = str(getattr(whole.config, "rope_parameters", ""))
    steady = not any(kind in rope for kind in ("dynamic", "longrope"))
    return whole.config.model_type in CAPTURED_TYPES and steady and not is_four_bit(whole)


def _last_hidden(model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
    """Return the hidden states (n, D) of the last of the tokens `ids` (n, tokens)."""
    return model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state[:, -1]
