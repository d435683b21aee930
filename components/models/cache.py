"""The sampler's key-value cache, which is allocated once if the model allows it.

Legend: B responses, P prompt tokens (padded on the left), n rows of the batch that have not ended.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from components.base.errors import UserError
from components.models.adapters import AdapterView
from components.models.batching import onto, position_ids
from components.models.config import CAPTURED_TOKENS, PREFILL_PARTS
from components.models.matrices.quantized import is_four_bit

ALIGNED = {"cpu": 1, "cuda": 8}
"""Number of slots by which a mask's rows and its first column are aligned, by device type. CUDA's memory-efficient
attention reads 16 bytes of a mask at a time. torch copies a mask whose rows are not aligned, in every layer, and does
not check where it begins: the kernel then fails with a misaligned address."""
CAPTURED_TYPES = ("llama", "qwen2", "qwen3", "gpt2", "gemma", "phi", "phi3", "smollm3")
"""Types of models whose decoding step was found to make the host wait for nothing, as a capture requires. (transformers
says of its classes whether they can be compiled, which does not suffice: Falcon copies numbers to the GPU.)"""
FEWEST_ROWS = 8
"""A step is replayed for half of the rows if more than this number are left. The time of a step with few rows does not
depend on them."""


Draw = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]
"""Draws tokens (n,) and computes further tensors (n,), by name, of a model, hidden states (n, D) and uniforms (n,). Two
that are equal compute the same."""


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


class Context:
    """The state of a batch of sequences: first the prompts are read, then one token per row at a time."""

    model: Any
    append: Callable[[Tensor], Tensor]
    """Appends `tokens` (n,), one to each row; returns the last hidden states (n, D)."""

    def step(self, tokens: Tensor, uniforms: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """Append `tokens` (n,); return the last hidden states (n, D) and what `draw` draws of them."""
        hidden = self.append(tokens)
        return hidden, draw(self.model, hidden, uniforms)


class PreallocatedContext(Context):
    """For models with full attention in every layer.

    No tensor grows, and no mask is built after the prompts. A row that ends is overwritten by the last row, so that it
    costs a copy of one row and not of the batch.
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
        seen = self.bias[..., self.window.start : self.window.end + 1]
        hidden = _last_hidden(self.model, tokens.unsqueeze(1), seen, self.positions, self.cache)
        self.window.end += 1
        self.positions += 1
        return hidden

    def keep(self, order: Sequence[int]) -> bool:
        """Replace row i by row `order[i]`, for `order` (n,) with order[i] ≥ i, and drop the other rows. Return whether
        that was done: not if a step would cost as much."""
        device = self.prompt_ids.device
        moved = [i for i, row in enumerate(order) if row != i]
        index, holes = (onto(device, torch.tensor(places, dtype=torch.long)) for places in (order, moved))
        movers = index[holes]
        for layer in self.cache.layers:
            layer.keep(holes, movers)
        self.padding = [self.padding[row] for row in order]
        rows = self.window.rows = slice(0, len(order))
        self.window.start = self._first_slot()
        self.bias[rows], self.positions[rows] = self.bias[index], self.positions[index]
        self.bias, self.positions = self.bias[rows], self.positions[rows]
        return True

    def _first_slot(self) -> int:
        """Return the first slot with a token of any row, or an aligned one before it: the mask hides what is
        between."""
        return min(self.padding) // self.aligned * self.aligned


class Graphs:
    """CUDA graphs of one model's decoding steps, and all tensors that they read and write.

    A graph repeats kernels with their addresses. So the tensors keep theirs, and everything is freed when the model's
    weights have moved or a batch needs larger tensors. Every step's numbers come from a replay, so results do not
    depend on what was captured before.
    """

    def __init__(self) -> None:
        self.model: Any = None
        """The model's copy in bfloat16, which each engine refreshes in place; None if the model itself is sampled."""
        self.rows, self.slots, self.addresses = 0, 0, list[int]()
        self._free()

    def _free(self) -> None:
        self.replays: dict[Hashable, Callable[[], None]] = {}  # freed before their pool
        self.captures = Captures()  # torch refuses captures into a pool whose graphs were all freed
        self.stacks: list[Tensor] = []
        """Keys and values (layers, rows, heads, slots, width)."""
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def reserve(self, model: Any, rows: int, slots: int) -> None:
        """Prepare for a batch of `model`. The tensors' strides depend on `slots` alone, which is the config's."""
        whole = model.backbone.model if isinstance(model, AdapterView) else model
        addresses = [x.data_ptr() for x in (*whole.parameters(), *whole.buffers())]
        if rows > self.rows or (slots, addresses) != (self.slots, self.addresses):
            self._free()
            self.rows, self.slots, self.addresses = max(rows, self.rows), slots, addresses

    def put(self, tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        """Copy `x` (n, ...) to the first rows of `tensors[name]`, of `inputs` or `outputs`; return these rows."""
        if name not in tensors:
            tensors[name] = x.new_zeros(self.rows, *x.shape[1:])
        tensors[name][: len(x)] = x
        return tensors[name][: len(x)]


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


class StackedLayer(PreallocatedLayer):
    """A layer whose states are parts of two tensors for all layers, `Graphs.stacks`, so that one operation copies a
    token's."""

    def __init__(self, window: Window, graphs: Graphs, number: int, layers: int) -> None:
        super().__init__(window, graphs.rows, graphs.slots)
        self.number, self.layers, self.stacks = number, layers, graphs.stacks

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


class GraphedContext(PreallocatedContext):
    """The same by CUDA graphs: a step and its draw are captured and then replayed for each token.

    The host launches a step's kernels more slowly than a GPU computes them; it launches a graph at once. A graph's
    addresses and shapes are fixed, so a step attends to a window of slots with a fixed end. The new token's states are
    written to the window's last slot and then copied to their own; the mask hides the slots between. There is a graph
    for each window and number of rows. The batch halves its rows, and rows are dropped only then.
    """

    def __init__(
        self, model: Any, prompt_ids: Tensor, lengths: Sequence[int], new_tokens: int, layers: int, graphs: Graphs
    ) -> None:
        super().__init__(model, prompt_ids, lengths, new_tokens, layers)
        self.slots = -(-self.slots // CAPTURED_TOKENS) * CAPTURED_TOKENS
        self.graphs = graphs
        graphs.reserve(model, len(prompt_ids), self.slots)
        self.cache = Cache(layers=[StackedLayer(self.window, graphs, i, layers) for i in range(layers)])

    def read_prompts(self) -> Tensor:
        hidden = super().read_prompts()
        self.bias[..., self.window.end :] = -torch.inf
        self.bias = self.graphs.put(self.graphs.inputs, "bias", self.bias)
        self.positions = self.graphs.put(self.graphs.inputs, "positions", self.positions)
        return hidden

    def step(self, tokens: Tensor, uniforms: Tensor, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        """As `Context`, for the first n rows."""
        graphs, rows, end = self.graphs, self.window.rows, self.window.end
        last = (end // CAPTURED_TOKENS + 1) * CAPTURED_TOKENS - 1
        graphs.put(graphs.inputs, "tokens", tokens)
        graphs.put(graphs.inputs, "uniforms", uniforms)
        self.bias[..., last] = 0
        key, step = (rows.stop, last, draw), functools.partial(self._step, rows, last, draw)
        if key not in graphs.replays:
            step()  # loads the kernels and allocates `graphs.outputs`, which a capture could not
            graphs.replays[key] = graphs.captures(step)
        graphs.replays[key]()
        if end < last:
            for stack in graphs.stacks:
                stack[:, rows, :, end] = stack[:, rows, :, last]
        self.bias[..., end] = 0
        self.window.end += 1
        self.positions += 1
        drawn = {name: column[: len(tokens)].clone() for name, column in graphs.outputs.items()}
        return drawn.pop("hidden"), drawn

    def _step(self, rows: slice, last: int, draw: Draw) -> None:
        """Compute `graphs.outputs` of `graphs.inputs`; write the tokens' states to the slot `last`."""
        inputs, end = self.graphs.inputs, self.window.end
        self.window.rows, self.window.start, self.window.end = rows, 0, last
        ids, mask = inputs["tokens"][rows].unsqueeze(1), inputs["bias"][rows, ..., : last + 1]
        hidden = _last_hidden(self.model, ids, mask, inputs["positions"][rows], self.cache)
        self.window.end = end
        for name, column in {"hidden": hidden, **draw(self.model, hidden, inputs["uniforms"][rows])}.items():
            self.graphs.put(self.graphs.outputs, name, column)

    def keep(self, order: Sequence[int]) -> bool:
        """As `PreallocatedContext`. The batch is halved some times; rows beyond `order` stay as they are."""
        rows = self.window.rows.stop
        while rows > FEWEST_ROWS and len(order) <= -(-rows // 2):
            rows = -(-rows // 2)
        return rows < self.window.rows.stop and super().keep([*order, *range(len(order), rows)])


class DynamicContext(Context):
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

    def keep(self, order: Sequence[int]) -> bool:
        index = onto(self.mask.device, torch.tensor(order, dtype=torch.long))
        self.cache.reorder_cache(index)
        self.mask, self.positions = self.mask[index], self.positions[index]
        return True


def open_context(
    model: Any, prompt_ids: Tensor, lengths: Sequence[int], new_tokens: int, graphs: Graphs | None = None
) -> PreallocatedContext | DynamicContext:
    """Open the context of a batch of prompts (B, P), padded on the left, with room for `new_tokens` more in each row.

    Args:
        lengths: (B,) the prompts' lengths. Sorting the prompts by length saves padding.
        graphs: decode by these CUDA graphs; None decodes without. For a model that `can_be_captured`.
    """
    dynamic = DynamicCache(config=model.config)
    full = bool(dynamic.layers) and all(type(layer) is DynamicLayer for layer in dynamic.layers)
    if full and model.config._attn_implementation in ("sdpa", "eager"):
        batch = model, prompt_ids, lengths, new_tokens, len(dynamic.layers)
        return PreallocatedContext(*batch) if graphs is None else GraphedContext(*batch, graphs)
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
