"""Preference pairs as a reward model trains on them: token ids, labels, and which pairs each member gets."""

import math
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.base.errors import UserError
from components.base.hashing import hash8
from components.data.rows import CanonicalRow
from components.data.tables.published import characters_of, rows_at
from components.models.batching import Lazy, encode_prompts, encode_responses
from components.models.config import GenerationConfig
from components.reward.config import RewardConfig
from components.training.loop import seeded
from components.training.tokens import CHUNK, TokenStore

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


def shared_tokens(pair: Pair) -> int:
    """Return the number of first tokens that both sequences share, leaving at least one token to each."""
    common = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(pair.chosen, pair.rejected, strict=False)))
    return min(common, len(pair.chosen) - 1, len(pair.rejected) - 1)


def packed_length(pair: Pair) -> int:
    """Return the number of tokens in a pair's packed row."""
    return len(pair.chosen) + len(pair.rejected) - shared_tokens(pair)


def longer(pair: Pair) -> int:
    """Return the number of tokens of a pair's longer sequence."""
    return max(len(pair.chosen), len(pair.rejected))


class Pairs(Lazy[Pair]):
    """n pairs whose rows are read and tokenised on first access, and only once. So training on millions of pairs starts
    without delay, and gives the same bytes."""

    def __init__(
        self, tokenizer: Any, rows: Sequence[PreferencePair], generation: GenerationConfig, config: RewardConfig,
        folder: Path,
    ) -> None:  # fmt: skip
        """Cut pairs to the lengths of `generation`, and label them as `config` says.

        A file in `folder` takes the tokens. Memory use is 52 bytes per pair, and 8 more for each head.
        """
        self.tokenizer, self.rows, self.generation, self.config, self.folder = (
            tokenizer, rows, generation, config, folder
        )  # fmt: skip
        self.chosen, self.rejected = TokenStore(folder, len(rows)), TokenStore(folder, len(rows))
        self._labels = np.zeros((len(rows), 2 + max(len(config.heads), 1)))
        """(n, 2 + heads): weight, source's weight, and the share of votes of each head."""
        self._lengths = np.zeros(len(rows), np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Lazy[int]:
        """Return the number of tokens (n,) computed for each pair, by which training sorts pairs into batches."""
        return _Column(self, self._lengths)

    @property
    def weights(self) -> Lazy[float]:
        """Return the weights (n,) of the pairs in the loss."""
        return _Column(self, self._labels[:, 0])

    def at(self, which: Sequence[int]) -> list[Pair]:
        """Return the pairs `which`; those that are not encoded yet are encoded together."""
        self.encode(which)
        pairs = []
        for place in which:
            weight, source_weight, *shares = self._labels[place].tolist()
            pairs.append(Pair(self.chosen[place], self.rejected[place], weight, tuple(shares), source_weight))
        return pairs

    def encode(self, which: Sequence[int]) -> None:
        """Read and tokenise those of the pairs `which` that are not encoded yet."""
        places = np.array(which, np.int64)
        new = np.unique(places[~self.chosen.known(places)])
        computed = packed_length if self.config.shared_prompts else longer
        for start in range(0, len(new), CHUNK):
            some = new[start : start + CHUNK]
            pairs = self._encoded(list(rows_at(self.rows, some.tolist())))
            self._labels[some] = [(pair.weight, pair.source_weight, *pair.shares) for pair in pairs]
            self._lengths[some] = [computed(pair) for pair in pairs]
            self.rejected.set(some, [pair.rejected for pair in pairs])
            self.chosen.set(some, [pair.chosen for pair in pairs])

    def _encoded(self, rows: Sequence[PreferencePair]) -> list[Pair]:
        prompts = encode_prompts(self.tokenizer, [row["prompt"] for row in rows], self.generation.max_prompt_tokens)
        chosen, rejected = (
            encode_responses(self.tokenizer, texts, self.generation.max_new_tokens)
            for texts in ([row["chosen"] for row in rows], [row["rejected"] for row in rows])
        )
        return [
            Pair(p + c, p + r, row.get("weight", 1.0), _shares(row, self.config), row.get("source_weight", 1.0))
            for row, p, c, r in zip(rows, prompts, chosen, rejected, strict=True)
        ]

    def choose(self, which: NDArray[np.int64]) -> "Pairs":
        """Return the pairs at the indices `which` (m,), in ascending order; a part of the pairs is encoded anew."""
        if len(which) == len(self):
            return self
        return Pairs(self.tokenizer, rows_at(self.rows, which.tolist()), self.generation, self.config, self.folder)

    def longest(self, count: int) -> list[Pair]:
        """Return the `count` pairs with the longest texts, in characters."""
        sizes = characters_of(self.rows)
        return self.at(np.argsort(sizes, kind="stable")[-count:].tolist())


class _Column(Lazy[Any]):
    """Numbers (n,) that are known of the pairs that are encoded."""

    def __init__(self, pairs: Pairs, values: NDArray[Any]) -> None:
        self._pairs, self._values = pairs, values

    def __len__(self) -> int:
        return len(self._values)

    def at(self, which: Sequence[int]) -> list[Any]:
        self._pairs.encode(which)
        numbers: list[Any] = self._values[np.array(which, np.int64)].tolist()
        return numbers


def encode_pairs(
    tokenizer: Any,
    rows: Sequence[PreferencePair],
    generation: GenerationConfig,
    config: RewardConfig = RewardConfig(),  # noqa: B008  (it is frozen)
    folder: Path | None = None,
) -> Pairs:
    """Return `Pairs` that are all encoded. `folder` None is the system's folder of temporary files."""
    pairs = Pairs(tokenizer, rows, generation, config, folder or Path(tempfile.gettempdir()))
    pairs.encode(range(len(rows)))
    return pairs


def _votes(row: PreferencePair, config: RewardConfig) -> tuple[float, ...]:
    """Return the share of votes for the chosen response of each head; `NO_VOTES` if there are none."""
    by_objective = row.get("objectives") or {}
    shares = [by_objective.get(name) for name in config.heads] if config.objectives else [row.get("soft_label")]
    return tuple(NO_VOTES if share is None else share for share in shares)


def _shares(row: PreferencePair, config: RewardConfig) -> tuple[float, ...]:
    votes = _votes(row, config)
    return votes if config.objectives or (config.labels == "shares" and not math.isnan(votes[0])) else (1.0,)


def check_votes(rows: Sequence[PreferencePair], config: RewardConfig, file: str) -> None:
    """Refuse rows of `file` without the votes that `config` trains on.

    Raises:
        UserError: no row has votes on one of `reward.objectives`, or, with `reward.labels: shares`, any votes.
    """
    wanted = [(f"objectives.{name}", "reward.objectives", f"take {name} out of it") for name in config.heads]
    if config.labels == "shares":
        wanted.append(("soft_label", "reward.labels=shares", "use reward.labels=majority"))
    for head, (name, option, remedy) in enumerate(wanted):
        if all(math.isnan(_votes(row, config)[head]) for row in rows):
            raise UserError(
                f"{file}: none of its {len(rows)} rows, from row 1 on, has {name}, a share of votes for the chosen "
                f"response, and {option} asks for it. Give pairs with these votes, or {remedy}."
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
