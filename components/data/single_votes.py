"""Vote tables of one row a vote, turned into rows of one pair each.

The votes on a pair may stand anywhere in the table, and the sides be swapped from one annotator to the next. The pairs
are held in memory until the table is read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from components.data.formats import side_of
from components.data.rows import BadRow, RawRow, blank

_OWN = ("annotator", "label", "vote")
_AS_SHOWN = {"first": "a", "second": "b", "equal": "equal"}
_SWAPPED = {"first": "b", "second": "a", "equal": "equal"}


def gather_votes(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """A row with `votes` for each pair that `rows` vote on, its sides and its number those of the pair's first row.

    A row with an empty label adds no vote; one that has `votes` comes out as it is. One that can't be read, has an
    unknown label, or is an annotator's second vote on a pair, comes out by itself with its problem.
    """
    pairs: dict[str, RawRow] = {}
    voted: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.problem is None and "votes" not in row.data:
            key = _key(row.data)
            kept = {name: value for name, value in row.data.items() if name not in _OWN}
            pair = pairs.setdefault(key, row._replace(data=kept | {"votes": []}))
            try:
                pair.data["votes"] += _vote(row, swapped=row.data.get("a") != pair.data.get("a"), key=key, voted=voted)
                continue
            except BadRow as bad:
                row = row._replace(problem=bad.problem)
        yield row
    yield from pairs.values()


def _vote(row: RawRow, swapped: bool, key: str, voted: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    label, annotator = (row.data.get(name) for name in ("label", "annotator"))
    label = row.data.get("vote") if label is None else label
    if label is None or blank(str(label)):
        return []
    vote = {"label": (_SWAPPED if swapped else _AS_SHOWN)[side_of(label)]}
    if annotator is None or blank(str(annotator)):
        return [vote]
    first = voted.setdefault((key, str(annotator)), row.number)
    if first != row.number:
        raise BadRow("votes_valid", f"annotator {str(annotator)!r} votes twice on this pair, first in row {first}")
    return [vote | {"annotator": annotator}]


def _key(data: Mapping[str, Any]) -> str:
    """The same for the same prompt and responses, whichever of them is `a`."""
    sides = sorted(json.dumps(data.get(side), sort_keys=True, default=str) for side in ("a", "b"))
    return json.dumps([data.get("prompt"), data.get("stance"), sides], sort_keys=True, default=str)
