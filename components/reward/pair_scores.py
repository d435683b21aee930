"""Score pairs for training: both responses in one row after their shared prompt, which is then computed only once.

    p1 p2 p3 | c1 c2 c3 EOS | r1 r2 EOS        tokens
     0  1  2 |  3  4  5   6 |  3  4   5        positions

Each response attends to the shared tokens and to itself. If prompts and responses have similar lengths, the second copy
of the prompt would be a third of a pair's tokens.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.base.errors import CheckFailed
from components.distributed.sharding import passes_must_match, through
from components.models.batching import even_runs, onto, pad
from components.models.runtime import Runtime, autocast
from components.reward.scoring import head_scores, score_sequences
from components.reward.training_pairs import Pair, Pairs, packed_length, shared_tokens

TOLERANCE = 1e-3
"""Largest allowed difference, absolute and relative, between a score in a packed row and the score computed alone."""


class PackedPairs(NamedTuple):
    """N pairs as rows of at most L tokens."""

    ids: Tensor
    """(N, L) token ids: shared tokens, rest of the chosen, rest of the rejected, padding."""
    positions: Tensor
    """(N, L) position of each token in its own sequence."""
    sees: Tensor
    """(N, 1, L, L) bool: whether the token (second last axis) attends to another one (last)."""
    ends: Tensor
    """(N, 2) index of the last token of the chosen and of the rejected response."""


def pack(pairs: Sequence[Pair], pad_id: int) -> PackedPairs:
    """Pack pairs into rows, padded to the longest row."""
    shared = [shared_tokens(pair) for pair in pairs]
    ids, _ = pad([p.chosen + p.rejected[n:] for p, n in zip(pairs, shared, strict=True)], pad_id)
    begins = torch.tensor(shared).unsqueeze(1)
    turns = torch.tensor([len(pair.chosen) for pair in pairs]).unsqueeze(1)
    ends = torch.tensor([packed_length(pair) for pair in pairs]).unsqueeze(1)
    at = torch.arange(ids.shape[1])
    part = (at >= begins).long() + (at >= turns) + (at >= ends)  # 0 shared, 1 chosen, 2 rejected, 3 padding
    positions = at - (at >= turns) * (turns - begins)
    sees = (at <= at.unsqueeze(1)) & ((part == 0).unsqueeze(1) | (part.unsqueeze(1) == part.unsqueeze(2)))
    return PackedPairs(ids, positions, sees.unsqueeze(1), torch.cat([turns, ends], dim=1) - 1)


def packed_scores(model: Any, pairs: Sequence[Pair], pad_id: int, runtime: Runtime) -> tuple[Tensor, Tensor]:
    """Return differentiable raw scores (N, K), float32, of the chosen and of the rejected, in runs of similar
    length."""

    def score(run: list[int]) -> Tensor:
        rows = PackedPairs(*(onto(runtime.device, tensor) for tensor in pack([pairs[i] for i in run], pad_id)))
        return through(model, _scores_at_ends, rows, runtime)

    chosen, rejected = _in_runs(model, [packed_length(pair) for pair in pairs], score).unbind(1)
    return chosen, rejected


def _scores_at_ends(model: Any, rows: PackedPairs, runtime: Runtime) -> Tensor:
    with autocast(runtime):
        hidden = model.base_model(
            input_ids=rows.ids, attention_mask=rows.sees, position_ids=rows.positions, use_cache=False
        ).last_hidden_state
        ends = hidden.gather(1, rows.ends.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    return model.score(ends.float()).float()


def _in_runs(model: Any, lengths: Sequence[int], score: Callable[[list[int]], Tensor]) -> Tensor:
    """Return `score` of all indices, in their order, computed in `even_runs`.

    It is a single run if all ranks must make the same number of passes.
    """
    count = len(lengths)
    runs = [list(range(count))] if passes_must_match(model) else list(even_runs(lengths, count))
    scores = torch.cat([score(run) for run in runs])
    return scores[onto(scores.device, torch.tensor(list(chain(*runs))).argsort())]


def separate_scores(model: Any, pairs: Sequence[Pair], pad_id: int, runtime: Runtime) -> tuple[Tensor, Tensor]:
    """As `packed_scores`, but with each response after its own copy of the prompt.

    The two responses are not padded to a common length, since that made a seventh of the tokens padding.
    """
    sequences = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]

    def score(run: list[int]) -> Tensor:
        ids, mask = pad([sequences[i] for i in run], pad_id)
        return head_scores(model, onto(runtime.device, ids), onto(runtime.device, mask), runtime, side="right")

    chosen, rejected = _in_runs(model, [len(s) for s in sequences], score).chunk(2)
    return chosen, rejected


@torch.no_grad()
def check_packed(model: Any, pairs: Sequence[Pair], pad_id: int, runtime: Runtime) -> None:
    """Check that the model, in eval mode, supports packed rows. Most models with only full attention do.

    Raises:
        CheckFailed: some score in a packed row differs from the score computed alone.
    """
    exact = runtime.model_copy(update={"dtype": "float32"})
    packed, alone = (torch.stack(scores(model, pairs, pad_id, exact)) for scores in (packed_scores, separate_scores))
    if not torch.allclose(packed, alone, rtol=TOLERANCE, atol=TOLERANCE):
        raise CheckFailed(
            f"reward: with reward.shared_prompts the scores differ by {(packed - alone).abs().max():.3g} from those of "
            "separate sequences: this model does not use full attention only. Set reward.shared_prompts=false."
        )


def score_pairs(model: Any, pad_id: int, pairs: Pairs, runtime: Runtime) -> NDArray[np.float64]:
    """Return raw scores (2, n), the chosen responses' first, of pairs that are all encoded."""
    sides = [score_sequences(model, pad_id, side, runtime) for side in (pairs.chosen, pairs.rejected)]
    return torch.stack(sides).double().numpy()
