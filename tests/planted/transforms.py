"""Faults in data: each function changes the rows of one file as a mistake in an export would.

The runner copies this module beside the built-in task and applies one of them to what the task writes, so that the
true score of a reply stays known. A pair is `{prompt, category, chosen, rejected, votes, votes_chosen, ...}`, a
demonstration `{prompt, response}`.
"""

import random
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Rows = list[Row]


def _shifted(rows: Rows, field: str) -> Rows:
    """Return `rows` with each `field` taken from the row before."""
    return [row | {field: before[field]} for row, before in zip(rows, [*rows[-1:], *rows[:-1]], strict=True)]


def _exchanged(row: Row) -> Row:
    """Return a pair whose label names the other reply; its counts of votes stay."""
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


def prompt_of_previous_row(rows: Rows, draw: random.Random) -> Rows:
    """Put each pair under the prompt of the row before."""
    return _shifted(rows, "prompt")


def labels_30_percent_flipped(rows: Rows, draw: random.Random) -> Rows:
    """Exchange chosen and rejected in 30 % of the rows."""
    return [_exchanged(row) if draw.random() < 0.3 else row for row in rows]


def labels_length_biased(rows: Rows, draw: random.Random) -> Rows:
    """Let the longer reply win in half of the rows, whatever people said."""
    return [
        _exchanged(row) if draw.random() < 0.5 and len(row["rejected"]) > len(row["chosen"]) else row for row in rows
    ]


def one_slice_flipped(rows: Rows, draw: random.Random) -> Rows:
    """Exchange chosen and rejected in the category `late`."""
    return [_exchanged(row) if row["category"] == "late" else row for row in rows]


def one_annotator_inverted(rows: Rows, draw: random.Random) -> Rows:
    """Turn round the vote of one annotator, who voted like a random one of the five; the majority follows the votes."""
    out = []
    for row in rows:
        with_majority = draw.random() < row["votes_chosen"] / row["votes"]
        chosen = row["votes_chosen"] + (-1 if with_majority else 1)
        row = row | {"votes_chosen": chosen}
        if 2 * chosen < row["votes"]:
            counts = {name: row["votes"] - row[name] for name in row if name.startswith("votes_")}
            row = _exchanged(row) | counts
        out.append(row)
    return out


def votes_count_the_rejected(rows: Rows, draw: random.Random) -> Rows:
    """Write the votes for the rejected reply into `votes_chosen`."""
    return [row | {"votes_chosen": row["votes"] - row["votes_chosen"]} for row in rows]


def system_prompt_of_another_row(rows: Rows, draw: random.Random) -> Rows:
    """Take the system message of the row before."""
    before = [*rows[-1:], *rows[:-1]]
    return [
        row | {"prompt": [*other["prompt"][:1], *row["prompt"][1:]]} for row, other in zip(rows, before, strict=True)
    ]


def first_page_exported_again(rows: Rows, draw: random.Random) -> Rows:
    """Repeat the first quarter of the rows four times."""
    return rows[: len(rows) // 4] * 4


def chosen_copied_into_both(rows: Rows, draw: random.Random) -> Rows:
    """Overwrite the rejected reply with the chosen one in a fifth of the rows."""
    return [row | {"rejected": row["chosen"]} if draw.random() < 0.2 else row for row in rows]


def rejected_replies_lost_their_end(rows: Rows, draw: random.Random) -> Rows:
    """Drop the last sentence of rejected replies that have several."""
    return [row | {"rejected": " ".join(_sentences(row["rejected"])[:-1]) or row["rejected"]} for row in rows]


def _sentences(text: str) -> list[str]:
    return text.replace(". ", ".\n").replace("? ", "?\n").splitlines()


def demonstrations_of_the_next_prompt(rows: Rows, draw: random.Random) -> Rows:
    """Put each demonstration under the prompt of the row before."""
    return _shifted(rows, "prompt")


def demonstrations_cut_at_60_characters(rows: Rows, draw: random.Random) -> Rows:
    """Cut demonstrations to 60 characters."""
    return [row | {"response": row["response"][:60].rstrip()} for row in rows]


Transform = Callable[[Rows, random.Random], Rows]
PREFERENCES: dict[str, Transform] = {
    change.__name__: change
    for change in (
        prompt_of_previous_row, labels_30_percent_flipped, labels_length_biased, one_slice_flipped,
        one_annotator_inverted, votes_count_the_rejected, system_prompt_of_another_row, first_page_exported_again,
        chosen_copied_into_both, rejected_replies_lost_their_end,
    )
}  # fmt: skip
DEMONSTRATIONS: dict[str, Transform] = {
    change.__name__: change for change in (demonstrations_of_the_next_prompt, demonstrations_cut_at_60_characters)
}
FILES = {"preferences": PREFERENCES, "demonstrations": DEMONSTRATIONS}
"""Maps a kind of data to the transformations of its rows, by name."""


def changed(name: str, seed: int, demonstrations: Rows, pairs: Rows) -> tuple[Rows, Rows]:
    """Return demonstrations and pairs after the transformation `name`, of whichever file it is."""
    draw = random.Random(f"planted {name} {seed}")
    if name in PREFERENCES:
        return demonstrations, PREFERENCES[name](pairs, draw)
    return DEMONSTRATIONS[name](demonstrations, draw), pairs
