"""Score whole responses, raw and on the scale that PPO uses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from components.base.errors import CheckFailed
from components.base.jsonl import write_json
from components.base.settings import Settings
from components.distributed.sharding import through
from components.models.batching import length_buckets, onto, pad
from components.models.folders import frozen, load_reward_model
from components.models.logprobs import Side, last_hidden
from components.models.runtime import Runtime, autocast
from components.reward.config import EnsembleConfig
from components.training.tokens import lengths_of


class ScoreScale(Settings):
    """Converts a raw score to units of the standard deviation of the SFT policy's own scores."""

    shift: float
    """Mean raw score of SFT responses to prompts of the calibration split."""
    scale: float = Field(gt=0)
    """Standard deviation of those raw scores."""
    missing_eos_score: float
    """First percentile of the scaled scores of SFT responses; the score of a response without EOS."""
    temperature: float = Field(gt=0)
    """Raw score differences divided by this are calibrated log-odds."""
    responses: int
    """Number of SFT responses on which these were measured."""
    objectives: dict[str, float] = Field(default_factory=dict)
    """Weight of each head of the reward model in its score; empty if it has one head."""

    def __call__(self, raw: Tensor) -> Tensor:
        """Return scaled scores: (raw - shift) / scale."""
        return (raw - self.shift) / self.scale

    @classmethod
    def read(cls, artifact: Path) -> "ScoreScale":
        """Read the scale of a reward artifact; for several members it is that of their mean score."""
        return cls.model_validate_json((artifact / "reward.json").read_text())

    def write(self, artifact: Path, objectives: Mapping[str, float]) -> None:
        """Write the scale of a reward artifact, with the weights of the model's heads."""
        scale = self.model_copy(update={"objectives": objectives})
        write_json(artifact / "reward.json", scale.model_dump(exclude_defaults=True))

    @classmethod
    def measure(cls, raw: Tensor, temperature: float) -> "ScoreScale":
        """Return the scale on which SFT responses with these raw scores (N,) have mean 0 and standard deviation 1.

        Raises:
            CheckFailed: all scores are equal.
        """
        raw = raw.double()
        shift, scale = float(raw.mean()), float(raw.std())
        if not scale > 0:
            raise CheckFailed("every SFT response has the same score: the reward model cannot tell responses apart.")
        low = float(((raw - shift) / scale).quantile(0.01))
        return cls(shift=shift, scale=scale, missing_eos_score=low, temperature=temperature, responses=len(raw))


def member_folder(artifact: Path, member: int) -> Path:
    """Return the folder of a reward artifact's `member` (from 0), which has `model/` and, with LoRA, `adapter/`."""
    return artifact if member == 0 else artifact / "members" / str(member + 1)


def adapter_name(member: int) -> str:
    """Return the name of the adapter of `member` (from 0) on the shared backbone."""
    return f"reward-{member + 1}" if member else "reward"


def read_sft_scores(artifact: Path) -> Tensor:
    """Read the raw scores (M, N), float64, that the M members of a reward artifact gave N SFT responses."""
    return torch.tensor(json.loads((artifact / "sft_scores.json").read_text()), dtype=torch.float64)


def combine(raw: Tensor, shifts: Tensor, config: EnsembleConfig) -> Tensor:
    """Combine members' raw scores (M, N) into one score (N,). Each member's own constant, `shifts` (M,), is removed."""
    if len(raw) == 1:
        return raw[0]
    scores = raw - shifts.to(raw).unsqueeze(1)
    if config.ensemble == "minimum":
        return scores.amin(0)
    return scores.mean(0) - (scores.std(0) if config.ensemble == "lower" else 0)


def with_one_head(model: Any, objectives: Mapping[str, float]) -> Any:
    """Replace a model's heads by one head whose score is their sum weighted by `objectives`; return the model.

    The weighted sum of linear heads is a linear head, so code that scores or trains the model sees only one head. Heads
    are in the order of their names. Without `objectives` the model stays as it is.
    """
    if objectives:
        heads = model.score.weight.detach()
        weights = heads.new_tensor([objectives[name] for name in sorted(objectives)])
        model.score = nn.Linear(heads.shape[1], 1, bias=False, device=heads.device)
        model.score.weight = nn.Parameter(weights.unsqueeze(0) @ heads)
    return model


class RewardEnsemble(nn.Module):
    """Several reward models combined into one."""

    def __init__(self, members: Sequence[Any], shifts: Tensor, config: EnsembleConfig) -> None:
        super().__init__()
        self.members, self.how = nn.ModuleList(members), config
        self.shifts = onto(members[0].score.weight.device, shifts)


def as_one(members: Sequence[Any], sft_scores: Tensor, config: EnsembleConfig) -> tuple[Any, Tensor]:
    """Return one model for `score_tokens` that gives the combined score, and the SFT responses' combined scores
    (N,)."""
    shifts = sft_scores.mean(1)
    model = members[0] if len(members) == 1 else RewardEnsemble(members, shifts, config)
    return model, combine(sft_scores, shifts, config)


def load_scorer(artifact: Path, runtime: Runtime) -> tuple[Any, Any]:
    """Load a reward artifact as one frozen model with one head, and its tokenizer.

    Several members are combined into their mean score, several heads into their sum weighted as in the artifact.
    """
    sft_scores, objectives = read_sft_scores(artifact), ScoreScale.read(artifact).objectives
    loaded = [load_reward_model(member_folder(artifact, member), runtime) for member in range(len(sft_scores))]
    members = [frozen(with_one_head(model, objectives)) for model, _ in loaded]
    return as_one(members, sft_scores, EnsembleConfig())[0], loaded[0][1]


def last_counted(mask: Tensor) -> Tensor:
    """Return the index (N,) of the last True in each row of `mask` (N, L), with padding on either side."""
    return mask.shape[1] - 1 - mask.long().flip(1).argmax(1)


def score_tokens(model: Any, ids: Tensor, mask: Tensor, runtime: Runtime, side: Side | None = None) -> Tensor:
    """Return raw scores (N,), float32: the scalar head at the last counted token, or an ensemble's combined score.

    Args:
        ids, mask: (N, L) prompt and response, padded on either side.
        side: the side of the padding, as for `last_hidden`.
    """
    if isinstance(model, RewardEnsemble):
        raw = torch.stack([score_tokens(member, ids, mask, runtime, side) for member in model.members])
        return combine(raw, model.shifts, model.how)
    return head_scores(model, ids, mask, runtime, side).squeeze(-1)


def head_scores(model: Any, ids: Tensor, mask: Tensor, runtime: Runtime, side: Side | None = None) -> Tensor:
    """Return raw scores (N, K), float32, of one model's K heads at the last counted token; see `score_tokens`."""
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
    """Return raw scores (N,) of token lists (prompt and response), in their order, on the CPU."""
    out = torch.zeros(len(sequences))
    for batch in length_buckets(lengths_of(sequences), batch_size):
        ids, mask = pad([sequences[i] for i in batch], pad_id, side)
        ids, mask = onto(runtime.device, ids), onto(runtime.device, mask)
        out[torch.tensor(batch)] = score_tokens(model, ids, mask, runtime, side).cpu()
    return out


def invariance(model: Any, pad_id: int, sequences: Sequence[Sequence[int]], runtime: Runtime) -> float:
    """Return the largest |score difference| of a text scored alone, in a batch, and padded on either side.

    It tests masks and positions, not rounding, so it runs in float32 without autocast, whatever the runtime's dtype.
    NaN if a score is NaN.
    """
    exact = runtime.model_copy(update={"dtype": "float32"})
    alone = score_sequences(model, pad_id, sequences, exact, batch_size=1)
    batched = [score_sequences(model, pad_id, sequences, exact, len(sequences), side) for side in ("right", "left")]
    return float((torch.stack(batched) - alone).abs().max())
