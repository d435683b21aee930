"""Preference pairs as a reward model trains on them: token ids, what people said of them, whose pairs they are."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.data.rows import CanonicalRow
from components.models.batching import encode_prompt, encode_response
from components.models.config import GenerationConfig
from components.reward.config import RewardConfig
from components.training.loop import seeded

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


def encode_pairs(
    tokenizer: Any,
    rows: Sequence[PreferencePair],
    generation: GenerationConfig,
    config: RewardConfig = RewardConfig(),  # noqa: B008  (it is frozen)
) -> list[Pair]:
    """Token ids of pairs, cut to the lengths of `generation`, labelled as `config` says."""
    out = []
    for row in rows:
        prompt = encode_prompt(tokenizer, row["prompt"], generation.max_prompt_tokens)
        chosen, rejected = (
            prompt + encode_response(tokenizer, text, generation.max_new_tokens)
            for text in (row["chosen"], row["rejected"])
        )
        margin, weight = row.get("margin") or 0.0, row.get("weight", 1.0)
        out.append(Pair(chosen, rejected, margin, weight, _shares(row, config)))
    return out


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


def member_rows(rows: Sequence[PreferencePair], share: float, seed: int, member: int) -> list[int]:
    """Indices, in their order, of the rows of a random `share` of the prompts: what reward model `member` trains on."""
    of_row = [str(row["prompt"]) for row in rows]
    prompts = list(dict.fromkeys(of_row))
    drawn = set(seeded(seed, "reward", "share", member).sample(prompts, max(1, round(share * len(prompts)))))
    return [i for i, prompt in enumerate(of_row) if prompt in drawn]
