"""The narrow frames of what is kept, and of the whole: row numbers and measures, never a text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from components.data.splits import SPLITS
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import places


def named_rows(ledger: Ledger, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the columns that name `rows` (n,), codes of `Ledger.place`: `row_id` and, of several files, `file`."""
    file, numbers = places(rows)
    return {"row_id": numbers} | ({"file": np.array(ledger.files)[file]} if len(ledger.files) > 1 else {})


def pair_frame(
    ledger: Ledger, kept: NDArray[np.bool_], splits_of_prompt: NDArray[Any], near_training: NDArray[Any]
) -> pd.DataFrame:
    """Return a frame with a row for each kept pair.

    Args:
        kept: which pairs of the ledger they are.
        splits_of_prompt: how many splits each pair's prompt stands in, demonstrations counted too (n,).
        near_training: of held-out pairs, 1 where the prompt is nearly one of training, else 0; else NaN (n,).
    """
    facts = ledger.facts[kept]
    first_wins = np.where(facts["first_wins"] < 0, np.nan, facts["first_wins"])
    return pd.DataFrame(
        {
            **named_rows(ledger, facts["row"]),
            "split": pd.Categorical.from_codes(facts["split"], pd.Index(list(SPLITS))),
            "splits_of_prompt": splits_of_prompt,
            "near_training": near_training,
            "longer_wins": longer_wins(facts["words"]),
            "first_wins": first_wins.astype(float),
        }
    )


def measure_frame(measures: Mapping[str, float]) -> pd.DataFrame:
    """One line: a column a measure of the whole."""
    return pd.DataFrame({"row_id": [0], **{name: [float(value)] for name, value in measures.items()}})


def longer_wins(words: NDArray[Any]) -> NDArray[np.float64]:
    """For words (n, 2) of chosen and rejected: 1 if the chosen has more, 0 if fewer, NaN if as many; (n,)."""
    chosen, rejected = words[:, 0], words[:, 1]
    return np.where(chosen == rejected, np.nan, (chosen > rejected).astype(float))


def length_preference(words: NDArray[Any]) -> float | None:
    """Share of pairs in which the longer response wins, pairs of equal length left out; None if there is no other."""
    wins = longer_wins(words)
    return None if np.isnan(wins).all() else float(np.nanmean(wins))


def splits_of(ledgers: Sequence[tuple[Ledger, NDArray[np.bool_]]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the distinct prompts (hashes, sorted) of the kept rows of `ledgers`, and how many splits each stands
    in."""
    prompts = np.concatenate([ledger.facts["prompt"][kept] for ledger, kept in ledgers])
    splits = np.concatenate([ledger.facts["split"][kept] for ledger, kept in ledgers])
    distinct, place = np.unique(prompts, return_inverse=True)
    stands = np.zeros((len(distinct), len(SPLITS)), bool)
    stands[place, splits] = True
    return distinct, stands.sum(1)
