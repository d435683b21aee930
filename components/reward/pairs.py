"""Preference pairs as a reward model trains on them: token ids, labels, and which pairs each member gets."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from components.base.errors import UserError
from components.base.hashing import hash8
from components.data.rows import CanonicalRow
from components.data.tables.published import characters_of, rows_at
from components.models.batching import LazyLengths, encode_prompts, encode_responses
from components.models.config import GenerationConfig
from components.reward.config import RewardConfig
from components.training.loop import seeded
from components.training.tokens import CHUNK, TokenLists, TokenStore, TokenWriter, chunks

NO_VOTES = math.nan
"""The share of votes if nobody voted."""


PreferencePair = CanonicalRow
"""A row of a validate artifact's `pairs.<split>`."""


class Pair(NamedTuple):
    """Token ids of prompt and response, for the chosen and the rejected one, with the labels."""

    chosen: list[int]
    rejected: list[int]
    weight: float = 1.0
    """The pair's weight in the loss: the weights of one ranking's pairs sum to 1."""
    shares: tuple[float, ...] = (1.0,)
    """For each head, the share of votes for the chosen response; `NO_VOTES` if there are none."""
    source_weight: float = 1.0
    """What its source's weight multiplies its training loss by; on average 1. Nothing else depends on it."""


class EncodedPairs(Sequence[Pair]):
    """n pairs, whose tokens are read on access."""

    def __init__(self, chosen: TokenLists, rejected: TokenLists, labels: NDArray[np.float64]) -> None:
        """`labels` (n, 2 + heads): weight, source's weight, and the share of votes of each head."""
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
        weight, source_weight, *shares = self._labels[which].tolist()
        return Pair(self.chosen[which], self.rejected[which], weight, tuple(shares), source_weight)

    def choose(self, which: NDArray[np.int64]) -> "EncodedPairs":
        """Return the pairs at the indices `which` (m,)."""
        return EncodedPairs(self.chosen.choose(which), self.rejected.choose(which), self._labels[which])

    @property
    def weights(self) -> NDArray[np.float64]:
        """Return the pairs' weights (n,)."""
        return self._labels[:, 0]


def encode_pairs(
    tokenizer: Any,
    rows: Sequence[PreferencePair],
    generation: GenerationConfig,
    config: RewardConfig = RewardConfig(),  # noqa: B008  (it is frozen)
    folder: Path | None = None,
) -> EncodedPairs:
    """Encode pairs as token ids, cut to the lengths of `generation` and labelled as `config` says.

    Args:
        folder: where to write a file of the tokens; None keeps them in memory.
    """
    chosen, rejected = TokenWriter(folder), TokenWriter(folder)
    labels = [np.empty((0, 2 + max(len(config.heads), 1)))]
    for chunk in chunks(rows):
        encoded = _encode(tokenizer, chunk, generation, config)
        for writer, lists in ((chosen, encoded.chosen), (rejected, encoded.rejected)):
            for ids in lists:
                writer.append(ids)
        labels.append(encoded.labels)
    return EncodedPairs(chosen.written(), rejected.written(), np.concatenate(labels))


class _Encoded(NamedTuple):
    chosen: list[list[int]]
    rejected: list[list[int]]
    labels: NDArray[np.float64]
    """As of `EncodedPairs`."""


def _encode(
    tokenizer: Any, rows: Sequence[PreferencePair], generation: GenerationConfig, config: RewardConfig
) -> _Encoded:
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in rows], generation.max_prompt_tokens)
    good = encode_responses(tokenizer, [row["chosen"] for row in rows], generation.max_new_tokens)
    bad = encode_responses(tokenizer, [row["rejected"] for row in rows], generation.max_new_tokens)
    labels = [(row.get("weight", 1.0), row.get("source_weight", 1.0), *_shares(row, config)) for row in rows]
    chosen, rejected = ([p + ids for p, ids in zip(prompts, side, strict=True)] for side in (good, bad))
    return _Encoded(chosen, rejected, np.array(labels, np.float64))


class LazyPairs(Sequence[Pair]):
    """n pairs whose rows are read and tokenised on first access, and only once. So training on millions of pairs starts
    without delay, and gives the same bytes."""

    def __init__(
        self, tokenizer: Any, rows: Sequence[PreferencePair], generation: GenerationConfig, config: RewardConfig,
        folder: Path,
    ) -> None:  # fmt: skip
        """A file in `folder` takes the tokens. Memory use is 48 bytes per pair, and 8 more for each head."""
        self.rows = rows
        self._encode = partial(_encode, tokenizer, generation=generation, config=config)
        self._sides = TokenStore(folder, len(rows)), TokenStore(folder, len(rows))
        self._labels = np.zeros((len(rows), 2 + max(len(config.heads), 1)))

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, which: Sequence[int]) -> list[Pair]:
        """Return the pairs `which`; those that are not encoded yet are encoded together."""
        self._encode_at(which)
        return [self._known(place) for place in which]

    def weight(self, which: int) -> float:
        """Return how often a pair counts."""
        self._encode_at([which])
        return float(self._labels[which, 0])

    def _encode_at(self, which: Sequence[int]) -> None:
        asked = np.array(which, np.int64)
        asked = asked if self._sides[0].known(asked).all() else np.unique(asked)
        new = asked[~self._sides[0].known(asked)]
        for start in range(0, len(new), CHUNK):
            some = new[start : start + CHUNK]
            found = self._encode(list(rows_at(self.rows, some.tolist())))
            self._labels[some] = found.labels
            for side, lists in zip(reversed(self._sides), (found.rejected, found.chosen), strict=True):
                side.set(some, lists)

    def _known(self, which: int) -> Pair:
        weight, source_weight, *shares = self._labels[which].tolist()
        chosen, rejected = (side[which] for side in self._sides)
        return Pair(chosen, rejected, weight, tuple(shares), source_weight)

    @overload
    def __getitem__(self, which: int) -> Pair: ...
    @overload
    def __getitem__(self, which: slice) -> list[Pair]: ...
    def __getitem__(self, which: int | slice) -> Any:
        return self.at(range(len(self))[which]) if isinstance(which, slice) else self.at([which])[0]

    def choose(self, which: NDArray[np.int64]) -> "LazyPairs | ChosenPairs":
        """Return the pairs at the indices `which` (m,), in ascending order."""
        return self if len(which) == len(self) else ChosenPairs(self, which)

    def longest(self, count: int) -> list[Pair]:
        """Return the `count` pairs with the longest texts, in characters."""
        sizes = characters_of(self.rows)
        return self.at(np.argsort(sizes, kind="stable")[-count:].tolist())


class ChosenPairs(LazyPairs):
    """A subset of lazy pairs."""

    def __init__(self, pairs: LazyPairs, which: NDArray[np.int64]) -> None:
        """`which` (m,) are their indices."""
        self._pairs, self._which = pairs, which
        self.rows = rows_at(pairs.rows, which.tolist())

    def at(self, which: Sequence[int]) -> list[Pair]:
        """Return the pairs `which`."""
        return self._pairs.at(self._which[np.array(which, np.int64)].tolist())

    def weight(self, which: int) -> float:
        """Return how often a pair counts."""
        return self._pairs.weight(int(self._which[which]))


class PairLengths(LazyLengths):
    """Lengths by which training sorts lazy pairs into batches; 4 bytes per pair."""

    def __init__(self, pairs: LazyPairs, of_pair: Callable[[Pair], int]) -> None:
        self._pairs, self._of_pair = pairs, of_pair
        self._known = np.full(len(pairs), -1, np.int32)

    def __len__(self) -> int:
        return len(self._pairs)

    def at(self, which: Sequence[int]) -> list[int]:
        """Return the lengths of the pairs `which`."""
        places = np.array(which, np.int64)
        new = places[self._known[places] < 0]
        self._known[new] = [self._of_pair(pair) for pair in self._pairs.at(new.tolist())]
        found: list[int] = self._known[places].tolist()
        return found

    @overload
    def __getitem__(self, which: int) -> int: ...
    @overload
    def __getitem__(self, which: slice) -> list[int]: ...
    def __getitem__(self, which: int | slice) -> Any:
        return self.at(range(len(self))[which]) if isinstance(which, slice) else self.at([which])[0]


class PairWeights(Sequence[float]):
    """The weights of lazy pairs."""

    def __init__(self, pairs: LazyPairs) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, which: int) -> float: ...
    @overload
    def __getitem__(self, which: slice) -> list[float]: ...
    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            return [self._pairs.weight(place) for place in range(len(self))[which]]
        return self._pairs.weight(which)


def _shares(row: PreferencePair, config: RewardConfig) -> tuple[float, ...]:
    if config.objectives:
        votes = row.get("objectives") or {}
        return tuple(NO_VOTES if (share := votes.get(name)) is None else share for name in config.heads)
    share = row.get("soft_label")
    return (1.0 if share is None or config.labels == "majority" else share,)


def check_votes(rows: Sequence[PreferencePair], config: RewardConfig, file: str) -> None:
    """Refuse rows of `file` without the votes that `config` trains on.

    Raises:
        UserError: no row has votes on one of `reward.objectives`, or, with `reward.labels: shares`, any votes.
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
    """Return the sorted indices (m,) of the rows on which `member` trains: those of a random `share` of the prompts."""
    if share == 1:
        return np.arange(len(rows))
    of_row = np.frombuffer(b"".join(hash8(str(row["prompt"])) for row in rows), np.uint64)
    _, first, same = np.unique(of_row, return_index=True, return_inverse=True)
    prompts = np.sort(first)  # the draw is over prompts in order of first appearance
    drawn = seeded(seed, "reward", "share", member).sample(range(len(prompts)), max(1, round(share * len(prompts))))
    return np.flatnonzero(np.isin(first[same], prompts[drawn]))
