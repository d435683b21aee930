"""Bytes of models as they are held: trained, frozen, as adapters on a backbone, copied to sample from."""

from typing import Literal, NamedTuple

from components.models.config import AdapterConfig
from components.planning.shape import ModelShape
from components.planning.tensors import FLOAT, Format

Sharding = Literal["replicas", "zero2", "zero3"]
"""As `Runtime.sharding`: what ranks hold of what trains."""
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0 + 2 * 4 / 256}
"""Bytes a parameter of AdamW's two moments: float32; or 8 bits and a float32 scale for each block of 256."""
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes a weight of 4 bits (NF4): a scale for each block of 64, itself of 8 bits with one for each 256 (Dettmers et al.
2023, "QLoRA", section 3)."""


class Ranks(NamedTuple):
    """How many processes share the work of a stage, a device each, and what each holds."""

    number: int = 1
    sharding: Sharding = "zero2"

    @property
    def sharded(self) -> bool:
        """Return whether the ranks share out a model that trains whole."""
        return self.number > 1 and self.sharding != "replicas"

    def share(self, held: float) -> float:
        """Return what a rank holds of moments and gradients, or of weights between passes."""
        return held / self.number if self.sharded else held

    def rows(self, rows: int) -> int:
        """Sequences of a batch that a rank gets."""
        return -(-rows // self.number)


class Trained(NamedTuple):
    """What trains of a model: bytes a rank, outside and inside of a pass."""

    weights: float
    """Float32, or a rank's share."""
    moments: float
    gradients: float
    """At a step."""
    unreduced: float
    """Gradients that are held between the micro-batches of a step: ranks add theirs up after the last."""
    working: float
    """Further memory of a pass: gathered weights, and copies in bfloat16 that autograd keeps."""
    largest: float
    """The largest gradient, which is made beside the one it is added to."""


def whole(shape: ModelShape, scalar: bool, dtype: Format, optimizer: str, ranks: Ranks, again: bool) -> Trained:
    """Return a model that trains with all its weights.

    Args:
        scalar: with a scalar head, else as a language model.
        again: whether gradient checkpointing casts weights anew, block by block, in the backward pass.
    """
    count = shape.scalar_parameters if scalar else shape.parameters
    block = shape.matrices / shape.layers
    edges = shape.embedding + (0 if scalar else shape.output)
    held = FLOAT * count
    casts = 0.0
    if dtype == "bfloat16":
        casts = 2 * (block if again else shape.matrices) + (0 if scalar else 2 * shape.embedding)
    gathered = 0.0
    if ranks.sharded:  # all blocks' weights, or those at work and next; embedding and output are held through a step
        gathered = held if ranks.sharding == "zero2" else FLOAT * (2 * block + edges)
    moments = FLOAT * 2 * shape.vectors + MOMENTS[optimizer] * (count - shape.vectors)
    gradients = ranks.share(held) + (FLOAT * (block + edges) if ranks.sharded else 0)
    return Trained(ranks.share(held), ranks.share(moments), gradients, held, gathered + casts, FLOAT * shape.embedding)


def adapter(shape: ModelShape, config: AdapterConfig, scalar: bool, optimizer: str) -> Trained:
    """Return an adapter that trains, with a scalar head if it has one; the ranks each hold all of it."""
    count = shape.adapter_parameters(config) + (shape.hidden_size if scalar else 0)
    return Trained(FLOAT * count, MOMENTS[optimizer] * count, FLOAT * count, FLOAT * count, 0.0, 0.0)


def frozen(shape: ModelShape, scalar: bool, dtype: Format) -> float:
    """Return a model that only computes, whole on each rank: the blocks' matrices in the format of products, the rest
    in float32."""
    count = shape.scalar_parameters if scalar else shape.parameters
    return FLOAT * (count - shape.matrices) + (2 if dtype == "bfloat16" else FLOAT) * shape.matrices


def backbone(shape: ModelShape, dtype: Format, quantize: str | None) -> float:
    """Return the frozen model that adapters stand on; each rank holds it."""
    if quantize is None:
        return frozen(shape, False, dtype)
    return FLOAT * (shape.parameters - shape.matrices) + FOUR_BITS * shape.matrices


def packed(shape: ModelShape, dtype: Format, device: str) -> float:
    """Copies of the matrices in the blocks that a CPU's products read fastest, while it samples."""
    size = 2 if dtype == "bfloat16" else FLOAT
    return size * (shape.matrices + shape.embedding) if device == "cpu" else 0.0
