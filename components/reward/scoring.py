"""Scores of whole responses, raw and on the scale that PPO uses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from components.base.errors import CheckFailed
from components.base.settings import Settings
from components.distributed.sharding import through
from components.models.batching import length_buckets, onto, pad
from components.models.folders import autocast
from components.models.logprobs import Side, last_hidden
from components.models.runtime import Runtime
from components.reward.config import EnsembleConfig
from components.training.loop import seeded
from components.training.tokens import lengths_of


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
    objectives: dict[str, float] = Field(default_factory=dict)
    """Weight of each head of the reward model in its score; none where it has one head."""

    def __call__(self, raw: Tensor) -> Tensor:
        """Scaled scores: (raw - shift) / scale."""
        return (raw - self.shift) / self.scale

    @classmethod
    def read(cls, artifact: Path) -> "ScoreScale":
        """The scale of a reward artifact: of its members' mean score, where it has several."""
        return cls.model_validate_json((artifact / "reward.json").read_text())

    @classmethod
    def measure(cls, raw: Tensor, temperature: float) -> "ScoreScale":
        """The scale on which SFT responses with these raw scores (N,) have mean 0 and standard deviation 1.

        Raises:
            CheckFailed: they all have the same.
        """
        raw = raw.double()
        shift, scale = float(raw.mean()), float(raw.std())
        if not scale > 0:
            raise CheckFailed("every SFT response has the same score: the reward model cannot tell responses apart.")
        low = float(((raw - shift) / scale).quantile(0.01))
        return cls(shift=shift, scale=scale, missing_eos_score=low, temperature=temperature, responses=len(raw))


def member_folder(artifact: Path, member: int) -> Path:
    """Where a reward artifact holds its reward model `member` (from 0): `model/` and, of LoRA, `adapter/`."""
    return artifact if member == 0 else artifact / "members" / str(member + 1)


def adapter_name(member: int) -> str:
    """What the adapter of reward model `member` (from 0) is called on a backbone that holds all."""
    return f"reward-{member + 1}" if member else "reward"


def read_sft_scores(artifact: Path) -> Tensor:
    """Raw scores (M, N), float64, that the M members of a reward artifact gave N SFT responses."""
    return torch.tensor(json.loads((artifact / "sft_scores.json").read_text()), dtype=torch.float64)


def combine(raw: Tensor, shifts: Tensor, config: EnsembleConfig) -> Tensor:
    """One score (N,) of the members' raw scores (M, N), which are log-odds up to a constant each: `shifts` (M,)."""
    if len(raw) == 1:
        return raw[0]
    scores = raw - shifts.to(raw).unsqueeze(1)
    if config.ensemble == "minimum":
        return scores.amin(0)
    return scores.mean(0) - (config.ensemble_deviations * scores.std(0) if config.ensemble == "lower" else 0)


def with_one_head(model: Any, objectives: Mapping[str, float]) -> Any:
    """The same model, its heads replaced by the one whose score is the sum of theirs, weighted by `objectives`.

    Linear heads' weighted sum is a linear head: whoever asks for scores or values, or trains on from there, needs to
    know of no other. Heads stand in the order of their names; without `objectives` nothing is done.
    """
    if objectives:
        heads = model.score.weight.detach()
        weights = heads.new_tensor([objectives[name] for name in sorted(objectives)])
        model.score = nn.Linear(heads.shape[1], 1, bias=False, device=heads.device)
        model.score.weight = nn.Parameter(weights.unsqueeze(0) @ heads)
    return model


class RewardEnsemble(nn.Module):
    """Several reward models as one."""

    def __init__(self, members: Sequence[Any], shifts: Tensor, config: EnsembleConfig) -> None:
        super().__init__()
        self.members, self.how = nn.ModuleList(members), config
        self.shifts = onto(members[0].score.weight.device, shifts)


def as_one(members: Sequence[Any], sft_scores: Tensor, config: EnsembleConfig) -> tuple[Any, Tensor]:
    """The model that `score_tokens` asks for the combined score, and the combined scores (N,) of the SFT responses."""
    shifts = sft_scores.mean(1)
    model = members[0] if len(members) == 1 else RewardEnsemble(members, shifts, config)
    return model, combine(sft_scores, shifts, config)


def last_counted(mask: Tensor) -> Tensor:
    """Index (N,) of the last True of each row of `mask` (N, L), whichever side the padding stands on."""
    return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)


def score_tokens(model: Any, ids: Tensor, mask: Tensor, runtime: Runtime, side: Side | None = None) -> Tensor:
    """Raw scores (N,) float32: the scalar head at the last counted token, or what an ensemble makes of its members'.

    Args:
        ids, mask: (N, L) prompt and response, padded on either side.
        side: where the padding stands, as for `last_hidden`.
    """
    if isinstance(model, RewardEnsemble):
        raw = torch.stack([score_tokens(member, ids, mask, runtime, side) for member in model.members])
        return combine(raw, model.shifts, model.how)
    return head_scores(model, ids, mask, runtime, side).squeeze(-1)


def head_scores(model: Any, ids: Tensor, mask: Tensor, runtime: Runtime, side: Side | None = None) -> Tensor:
    """Raw scores (N, K) float32 of the K heads of one model at the last counted token; arguments as `score_tokens`."""
    return through(model, _head_scores, ids, mask, runtime, side)


def _head_scores(model: Any, ids: Tensor, mask: Tensor, runtime: Runtime, side: Side | None) -> Tensor:
    with autocast(runtime):
        hidden = last_hidden(model, ids, mask, side)
        hidden = hidden[torch.arange(len(ids), device=ids.device), last_counted(mask)]
    return model.score(hidden.float()).float()


@torch.no_grad()
def score_sequences(
    model: Any, pad_id: int, sequences: Sequence[Sequence[int]], runtime: Runtime, batch_size: int = 64,
    side: Side = "right",
) -> Tensor:  # fmt: skip
    """Raw scores (N,) of token lists (prompt and response), in their order, on the CPU."""
    out = torch.zeros(len(sequences))
    for batch in length_buckets(lengths_of(sequences), batch_size, seeded(0), shuffle=False):
        ids, mask = pad([sequences[i] for i in batch], pad_id, side)
        ids, mask = onto(runtime.device, ids), onto(runtime.device, mask)
        out[torch.tensor(batch)] = score_tokens(model, ids, mask, runtime, side).cpu()
    return out


def invariance(model: Any, pad_id: int, sequences: Sequence[Sequence[int]], runtime: Runtime) -> float:
    """Largest |score difference| of a text scored alone, in a batch, and padded on either side, in float32.

    It measures masks and positions, not rounding: it runs without autocast whatever the runtime's format. NaN where a
    score is.
    """
    exact = runtime.model_copy(update={"dtype": "float32"})
    alone = score_sequences(model, pad_id, sequences, exact, batch_size=1)
    batched = [score_sequences(model, pad_id, sequences, exact, len(sequences), side) for side in ("right", "left")]
    return float((torch.stack(batched) - alone).abs().max())
