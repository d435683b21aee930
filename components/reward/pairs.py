"""Preference pairs as a reward model trains on them: token ids, what people said of them, whose pairs they are."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from components.base.errors import UserError
from components.base.hashing import hash8
from components.data.rows import CanonicalRow
from components.models.batching import encode_prompts, encode_responses
from components.models.config import GenerationConfig
from components.reward.config import RewardConfig
from components.training.loop import seeded
from components.training.tokens import TokenLists, TokenWriter, chunks

NO_VOTES = math.nan
"""The share of votes where nobody voted."""


PreferencePair = CanonicalRow
"""A row of a validate artifact's `pairs.<split>`."""


class Pair(NamedTuple):
    """Token ids of prompt and response, the chosen and the rejected, and what is known of the choice."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0
    """By how much the chosen one's score should at least be higher, in logits."""
    weight: float = 1.0
    """How often the pair counts: the pairs of one ranking count once together."""
    shares: tuple[float, ...] = (1.0,)
    """Of each head: the share of votes for the chosen response, `NO_VOTES` where there are none."""


class EncodedPairs(Sequence[Pair]):
    """n pairs, of which the tokens are read when they are asked for."""

    def __init__(self, chosen: TokenLists, rejected: TokenLists, labels: NDArray[np.float64]) -> None:
        """`labels` (n, 2 + heads): margin, weight, and the share of votes of each head."""
        self.chosen, self.rejected, self._labels = chosen, rejected, labels

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, which: int) -> Pair: ...
    @overload
    def __getitem__(self, which: slice) -> "EncodedPairs": ...
    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            return self.choose(np.arange(len(self))[which])
        margin, weight, *shares = self._labels[which].tolist()
        return Pair(self.chosen[which], self.rejected[which], margin, weight, tuple(shares))

    def choose(self, which: NDArray[np.int64]) -> "EncodedPairs":
        """The pairs at the indices `which` (m,)."""
        return EncodedPairs(self.chosen.choose(which), self.rejected.choose(which), self._labels[which])

    @property
    def weights(self) -> NDArray[np.float64]:
        """How often each counts (n,)."""
        return self._labels[:, 1]


def encode_pairs(
    tokenizer: Any,
    rows: Sequence[PreferencePair],
    generation: GenerationConfig,
    config: RewardConfig = RewardConfig(),  # noqa: B008  (it is frozen)
    folder: Path | None = None,
) -> EncodedPairs:
    """Token ids of pairs, cut to the lengths of `generation`, labelled as `config` says.

    Args:
        folder: for a file of the tokens; None holds them in memory.
    """
    chosen, rejected = TokenWriter(folder), TokenWriter(folder)
    labels = [np.empty((0, 2 + max(len(config.heads), 1)))]
    for chunk in chunks(rows):
        prompts = encode_prompts(tokenizer, [row["prompt"] for row in chunk], generation.max_prompt_tokens)
        good = encode_responses(tokenizer, [row["chosen"] for row in chunk], generation.max_new_tokens)
        bad = encode_responses(tokenizer, [row["rejected"] for row in chunk], generation.max_new_tokens)
        for prompt, one, other in zip(prompts, good, bad, strict=True):
            chosen.append(prompt + one)
            rejected.append(prompt + other)
        known = [(row.get("margin") or 0.0, row.get("weight", 1.0), *_shares(row, config)) for row in chunk]
        labels.append(np.array(known, np.float64))
    return EncodedPairs(chosen.written(), rejected.written(), np.concatenate(labels))


def _shares(row: PreferencePair, config: RewardConfig) -> tuple[float, ...]:
    if config.objectives:
        votes = row.get("objectives") or {}
        return tuple(NO_VOTES if (share := votes.get(name)) is None else share for name in config.heads)
    share = row.get("soft_label")
    return (1.0 if share is None or config.labels == "majority" else share,)


def check_votes(rows: Sequence[PreferencePair], config: RewardConfig, file: str) -> None:
    """Refuse rows of `file` in which nobody voted on what `config` trains on.

    Raises:
        UserError: no row has a share of votes for one of `reward.objectives`, or, with `reward.labels: shares`, at all.
    """
    said = f"{file}: none of its {len(rows)} rows, from row 1 on, has"
    for name in config.heads:
        if all((row.get("objectives") or {}).get(name) is None for row in rows):
            raise UserError(
                f"{said} objectives.{name}, a share of votes for the chosen response, and reward.objectives asks for "
                f"it. Give votes on {name}, or take it out of reward.objectives."
            )
    if config.labels == "shares" and all(row.get("soft_label") is None for row in rows):
        raise UserError(
            f"{said} soft_label, the share of votes for the chosen response, and reward.labels=shares asks for it. "
            "Give pairs with votes, or use reward.labels=majority."
        )


def member_rows(rows: Sequence[PreferencePair], share: float, seed: int, member: int) -> NDArray[np.int64]:
    """Indices (m,), in their order, of the rows of a random `share` of the prompts: what model `member` trains on."""
    of_row = np.frombuffer(b"".join(hash8(str(row["prompt"])) for row in rows), np.uint64)
    _, first, same = np.unique(of_row, return_index=True, return_inverse=True)
    prompts = np.sort(first)  # in order of first appearance, which is what is drawn from
    drawn = seeded(seed, "reward", "share", member).sample(range(len(prompts)), max(1, round(share * len(prompts))))
    return np.flatnonzero(np.isin(first[same], prompts[drawn]))
