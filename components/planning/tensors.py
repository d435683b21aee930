"""Bytes of what a model makes on the way: activations, logits, keys and values. Counted from torch's autograd.

Legend: N sequences of L tokens, K of them predicted; D width, I of the MLP, V vocabulary.
"""

from typing import Literal, NamedTuple

from components.models.config import AdapterConfig
from components.planning.shape import ModelShape

Format = Literal["float32", "bfloat16"]
"""Format of matrix products; weights that train are float32 in both."""

FLOAT = 4
LOGITS_AT_ONCE = 2**26
"""As `components.models.logprobs`, which imports torch: elements of the logits that are held at a time."""
SAMPLED_AT_ONCE = 64
"""Responses that the sampler makes at a time outside of PPO."""


def width(dtype: Format) -> int:
    """Bytes of an element of matrix products."""
    return 2 if dtype == "bfloat16" else 4


class Pass(NamedTuple):
    """What one forward pass reads."""

    rows: int
    """N, sequences."""
    tokens: int
    """L, of each, padding included."""
    masked: bool = False
    """Whether attention gets a mask (packed pairs), which is then kept by every layer, and expanded keys and values."""

    @property
    def all(self) -> int:
        """N · L."""
        return self.rows * self.tokens


def block_activations(shape: ModelShape, work: Pass, dtype: Format, lora: AdapterConfig | None = None) -> int:
    """Bytes that autograd keeps of one block's forward pass.

    In float32, a token: 6 D (what enters each of two norms, what it is normalised to, and what the linear layers then
    read), queries and attention's output, keys and values, 4 I (gate, its SiLU, up, their product); two reciprocal
    deviations and the log-sum of each head. Under autocast to bfloat16 the norms stay in float32 and each of five
    linear layers keeps a copy of its own of its input. Norms that are frozen keep no normalised states.
    """
    kept = shape.queries if work.masked else shape.keys
    size, norms = width(dtype), (4 if dtype == "bfloat16" else 6) - (0 if lora is None else 2)
    token = FLOAT * (norms * shape.hidden_size + 2 + shape.heads)
    token += 5 * size * shape.hidden_size if dtype == "bfloat16" else 0
    token += size * (2 * shape.queries + 2 * kept + 4 * shape.intermediate_size)
    token += FLOAT * work.tokens if work.masked else 0
    if lora is not None:
        names = shape.linears if lora.targets is None else lora.targets
        token += size * lora.rank * len(names)
        if dtype == "bfloat16":  # the adapter reads a copy of its own; the frozen layer beside it keeps none
            token += size * (shape.queries if "o_proj" in names else 0)
    return work.all * token


def activations(
    shape: ModelShape, work: Pass, dtype: Format, checkpointing: bool = False, lora: AdapterConfig | None = None
) -> int:
    """Bytes that autograd keeps of a forward pass below the head; with gradient checkpointing, what enters a block."""
    last = FLOAT * work.all * 2 * shape.hidden_size
    if checkpointing:
        return last + FLOAT * work.all * shape.hidden_size * shape.layers
    return last + shape.layers * block_activations(shape, work, dtype, lora)


def passing(shape: ModelShape, work: Pass, dtype: Format) -> int:
    """Bytes that a forward pass without gradients holds at most: the MLP's three, and what stands beside them."""
    return work.all * (FLOAT * 3 * shape.hidden_size + width(dtype) * 3 * shape.intermediate_size)


def logits(shape: ModelShape, predicted: int, copies: float) -> int:
    """Bytes of `copies` of the float32 logits of `predicted` tokens, or of as many as are held at a time."""
    return int(FLOAT * copies * min(predicted * shape.vocabulary, max(LOGITS_AT_ONCE, shape.vocabulary)))


def cached_keys(shape: ModelShape, rows: int, slots: int, dtype: Format) -> int:
    """Bytes of the keys and values of `rows` sequences of `slots` tokens."""
    return 2 * width(dtype) * shape.layers * shape.keys * rows * slots
