"""The narrow frames that the contract judges: row numbers, booleans and lengths, never a text."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from components.data.rows import Item, Row
from components.data.splits import SPLITS, loose_key, prompt_key
from data_contracts.suites import ROW_CHECKS

if TYPE_CHECKING:
    import pandas as pd


def row_frame(rows: Sequence[Row]) -> "pd.DataFrame":
    """A line a source row: `row_id` and, for each row check, whether the row passes it."""
    import pandas as pd

    failed = [{problem.check for problem in row.problems} for row in rows]
    columns: dict[str, list] = {"row_id": [row.number for row in rows]}
    columns |= {name: [name not in checks for checks in failed] for name, _, _ in ROW_CHECKS}
    return pd.DataFrame(columns)


def pair_frame(
    pairs: Mapping[str, Sequence[Item]], stands_in: Mapping[str, set[str]], first_wins: Mapping[int, bool]
) -> "pd.DataFrame":
    """A line a kept pair.

    Args:
        pairs: the pairs of each split.
        stands_in: the key of each prompt -> the splits that it stands in, demonstrations counted too.
        first_wins: source row number -> whether the response shown first is preferred, where there is an order.
    """
    import pandas as pd

    learned = {loose_key(json.loads(key)): key for key, splits in stands_in.items() if "train" in splits}
    lines = []
    for split in SPLITS:
        for item in pairs[split]:
            key = prompt_key(item["prompt"])
            near = split == "test" and learned.get(loose_key(item["prompt"]), key) != key
            lines.append(
                {
                    "row_id": item["row"], "split": split, "splits_of_prompt": len(stands_in[key]),
                    "near_duplicate": near, "pairs_in_test": len(pairs["test"]), "longer_wins": longer_wins(item),
                    "first_wins": float(first_wins[item["row"]]) if item["row"] in first_wins else None,
                }
            )  # fmt: skip
    return pd.DataFrame(lines).astype({"longer_wins": float, "first_wins": float})


def longer_wins(item: Item) -> float | None:
    """1 if the chosen response has more words than the rejected, 0 if fewer, None if as many."""
    chosen, rejected = len(item["chosen"].split()), len(item["rejected"].split())
    return None if chosen == rejected else float(chosen > rejected)


def length_preference(pairs: Sequence[Item]) -> float | None:
    """Share of pairs in which the longer response wins, pairs of equal length left out; None if there is no other."""
    wins = [win for item in pairs if (win := longer_wins(item)) is not None]
    return sum(wins) / len(wins) if wins else None


def quarantine_reasons(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows fail each check, most first."""
    return dict(Counter(problem.check for row in rows for problem in row.problems).most_common())
