"""Frames with measures of kept rows and of the data set: row numbers and numbers, never texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from components.data.splits import SPLITS
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import places


def pair_frame(
    ledger: Ledger, selected: NDArray[np.bool_], splits_of_prompt: NDArray[Any], near_training: NDArray[Any]
) -> pd.DataFrame:
    """Return a frame with a row for each kept pair, identified by `row_id`, and by `file` if there are several.

    Args:
        selected: which pairs of the ledger are kept.
        splits_of_prompt: number of splits in which each pair's prompt occurs, including demonstrations (n,).
        near_training: for held-out pairs, 1 if the prompt nearly repeats a training prompt, else 0; NaN for training
            pairs (n,).
    """
    facts = ledger.facts[selected]
    file, numbers = places(facts["row"])
    first_wins = np.where(facts["first_wins"] < 0, np.nan, facts["first_wins"])
    return pd.DataFrame(
        {
            "row_id": numbers,
            **({"file": np.array(ledger.files)[file]} if len(ledger.files) > 1 else {}),
            "split": pd.Categorical.from_codes(facts["split"], pd.Index(list(SPLITS))),
            "splits_of_prompt": splits_of_prompt,
            "near_training": near_training,
            "longer_wins": longer_wins(facts["words"]),
            "first_wins": first_wins.astype(float),
        }
    )


def measure_frame(measures: Mapping[str, float]) -> pd.DataFrame:
    """Return a frame of one row with a column for each dataset-level measure."""
    return pd.DataFrame({"row_id": [0], **{name: [float(value)] for name, value in measures.items()}})


def longer_wins(words: NDArray[Any]) -> NDArray[np.float64]:
    """Return for word counts (n, 2) of chosen and rejected: 1 if the chosen response has more words, 0 if fewer, NaN if
    equal; (n,)."""
    chosen, rejected = words[:, 0], words[:, 1]
    return np.where(chosen == rejected, np.nan, (chosen > rejected).astype(float))


def length_preference(words: NDArray[Any]) -> float | None:
    """Return the share of pairs in which the longer response wins, leaving out pairs of equal length; None if no pair
    is left."""
    wins = longer_wins(words)
    return None if np.isnan(wins).all() else float(np.nanmean(wins))


def splits_of(ledgers: Sequence[tuple[Ledger, NDArray[np.bool_]]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the distinct prompts (hashes, sorted) of the kept rows of `ledgers`, and the number of splits that each
    occurs in."""
    prompts = np.concatenate([ledger.facts["prompt"][selected] for ledger, selected in ledgers])
    splits = np.concatenate([ledger.facts["split"][selected] for ledger, selected in ledgers])
    distinct, place = np.unique(prompts, return_inverse=True)
    stands = np.zeros((len(distinct), len(SPLITS)), bool)
    stands[place, splits] = True
    return distinct, stands.sum(1)
