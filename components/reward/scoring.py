"""Scores of whole responses, raw and on the scale that PPO uses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from components.batching import length_buckets, pad
from components.logprobs import last_hidden
from components.models import autocast
from components.runtime import Runtime
from components.settings import Settings
from components.training import seeded


class ScoreScale(Settings):
    """What turns a raw score into one whose unit is a standard deviation of the SFT policy's own responses."""

    shift: float
    """Mean raw score of SFT responses to prompts of the calibration split."""
    scale: float = Field(gt=0)
    """Standard deviation of those raw scores."""
    missing_eos_score: float
    """First percentile of the scaled scores of SFT responses: what a response without EOS gets."""
    temperature: float = Field(gt=0)
    """Raw score differences divided by this are calibrated log-odds."""
    responses: int
    """How many SFT responses these were measured on."""

    def __call__(self, raw: Tensor) -> Tensor:
        """Scaled scores: (raw - shift) / scale."""
        return (raw - self.shift) / self.scale

    @classmethod
    def read(cls, artifact: Path) -> "ScoreScale":
        """The scale of a reward artifact."""
        return cls.model_validate_json((artifact / "reward.json").read_text())


def last_counted(mask: Tensor) -> Tensor:
    """Index (N,) of the last True of each row of `mask` (N, L), whichever side the padding stands on."""
    return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)


def score_tokens(model: Any, ids: Tensor, mask: Tensor, runtime: Runtime) -> Tensor:
    """Raw scores (N,) float32: the scalar head at the last counted token.

    Args:
        ids, mask: (N, L) prompt and response, padded on either side.
    """
    with autocast(runtime):
        hidden = last_hidden(model, ids, mask)
        hidden = hidden[torch.arange(len(ids), device=ids.device), last_counted(mask)]
    return model.score(hidden.float()).squeeze(-1).float()


@torch.no_grad()
def score_sequences(
    model: Any, pad_id: int, sequences: Sequence[Sequence[int]], runtime: Runtime, batch_size: int = 64,
    side: Literal["left", "right"] = "right",
) -> Tensor:  # fmt: skip
    """Raw scores (N,) of token lists (prompt and response), in their order, on the CPU."""
    out = torch.zeros(len(sequences))
    for batch in length_buckets([len(s) for s in sequences], batch_size, seeded(0), shuffle=False):
        ids, mask = pad([sequences[i] for i in batch], pad_id, side)
        out[torch.tensor(batch)] = score_tokens(model, ids.to(runtime.device), mask.to(runtime.device), runtime).cpu()
    return out


def invariance(model: Any, pad_id: int, sequences: Sequence[Sequence[int]], runtime: Runtime) -> float:
    """Largest |score difference| of a text scored alone, in a batch, and padded on either side, in float32.

    It measures masks and positions, not rounding: it runs without autocast whatever the runtime's format.
    """
    exact = runtime.model_copy(update={"dtype": "float32"})
    alone = score_sequences(model, pad_id, sequences, exact, batch_size=1)
    batched = [score_sequences(model, pad_id, sequences, exact, len(sequences), side) for side in ("right", "left")]
    return max(float((other - alone).abs().max()) for other in batched)
