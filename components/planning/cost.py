"""Floating-point operations and bytes sent, by formula. Importable without torch.

Legend: N sequences of L tokens, K of them predicted; M parameters of the blocks' matrices, D width, Q width of the
queries, V vocabulary. A product of matrices counts two operations for each multiplication with its addition.
"""

from components.planning.memory import PlannedRun
from components.planning.models import Ranks
from components.planning.shape import ModelShape
from components.planning.tensors import FLOAT


def forward(shape: ModelShape, rows: int, tokens: int, predicted: int = 0) -> int:
    """Return the operations of a forward pass: 2 M N L + 2 Q N L² for each block + 2 V D K.

    The second term is causal attention, over half of all pairs of tokens; the third is the logits.
    """
    attention = 2 * shape.layers * shape.queries * rows * tokens**2
    return 2 * shape.matrices * rows * tokens + attention + 2 * shape.embedding * predicted


def training(shape: ModelShape, rows: int, tokens: int, predicted: int, checkpointing: bool, adapters: bool) -> int:
    """Return the operations of a forward and a backward pass.

    The backward pass costs two forward passes: one product for the gradients of inputs, and one for those of weights,
    which frozen weights do not have. Gradient checkpointing computes the blocks' forward pass once more.
    """
    once = forward(shape, rows, tokens, predicted)
    again = forward(shape, rows, tokens) if checkpointing else 0
    return (2 if adapters else 3) * once + again


def ppo_update(run: PlannedRun) -> dict[str, int]:
    """Return the operations of one PPO update, by phase, summed over all ranks."""
    shape, config, batch = run.shape, run.ppo, run.ppo.batch_size
    predicted = batch * run.response
    separate = config.has_critic and config.critic.kind == "separate"
    asked = (1 + run.asks_policy) * forward(shape, batch, run.length, predicted)
    asked += (run.reward.published + separate) * forward(shape, batch, run.length)
    how = config.gradient_checkpointing, config.lora is not None
    learnt = training(shape, batch, run.length, predicted, *how)
    learnt += training(shape, batch, run.length, 0, *how) if separate else 0
    return {
        "sampling": forward(shape, batch, run.length, predicted),
        "frozen pass": asked,
        "updates": config.epochs * learnt,
    }


def step_traffic(shape: ModelShape, ranks: Ranks, micro_batches: int) -> float:
    """Return the bytes that a rank sends in an optimiser step of a whole model (Rajbhandari et al. 2020, "ZeRO",
    section 7).

    ZeRO-2 gathers the weights and reduces the gradients once per step. ZeRO-3 gathers each block's weights in both
    passes of every micro-batch. Replicas sum their gradients, which is one reduction and one gathering.
    """
    share = (ranks.number - 1) / ranks.number
    blocks, whole = FLOAT * shape.matrices * share, FLOAT * shape.parameters * share
    if ranks.sharding == "zero3":
        return 2 * micro_batches * blocks + (whole - blocks) + whole
    return 2 * whole
