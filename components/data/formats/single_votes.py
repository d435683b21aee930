"""Combine tables with one row per vote into one row per pair.

The votes on a pair may be anywhere in the table, and sides may be swapped between annotators. The pairs are kept in
memory until the table is read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from components.data.formats.labels import side_of
from components.data.formats.transcripts import SYSTEMS
from components.data.rows import BadRow, RawRow, blank, shown
from components.data.words import seen

_OWN = ("annotator", "label", "vote")
_AS_SHOWN = {"first": "a", "second": "b", "equal": "equal"}
_SWAPPED = {"first": "b", "second": "a", "equal": "equal"}


def gather_votes(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield a row with `votes` for each pair in `rows`, with the sides and the number of the pair's first row.

    A row with an empty label adds no vote; a row that already has `votes` is passed on. A row that cannot be read, has
    an unknown label, or is an annotator's second vote on a pair is passed on by itself with its problem.
    """
    pairs: dict[str, _Pair] = {}
    for row in rows:
        if row.problem is None and "votes" not in row.data:
            try:
                _take(row, pairs)
                continue
            except BadRow as bad:
                row = row._replace(problem=bad.problem)
        yield row
    for pair in pairs.values():
        yield pair.first._replace(others=tuple(pair.others))


class _Pair(NamedTuple):
    """The rows that vote on one pair."""

    first: RawRow
    """The pair's first row."""
    votes: list[dict[str, object]]
    others: list[int]
    voted: dict[str, int]
    """Maps an annotator to the number of the row with the vote."""


def _take(row: RawRow, pairs: dict[str, _Pair]) -> None:
    """Add the vote of `row`, if any, to its pair. Raises `BadRow` if it is invalid or the annotator's second one."""
    key, data = _key(row.data), {name: value for name, value in row.data.items() if name not in _OWN}
    earlier = pairs.get(key)
    votes: list[dict[str, object]] = []
    pair = earlier or _Pair(row._replace(data=data | {"votes": votes}), votes, [], {})
    swapped = _as_seen(data.get("a")) != _as_seen(pair.first.data.get("a"))
    label, annotator = (row.data.get(name) for name in ("label", "annotator"))
    label = row.data.get("vote") if label is None else label
    if label is not None and not blank(str(label)):
        vote: dict[str, object] = {"label": (_SWAPPED if swapped else _AS_SHOWN)[side_of(label)]}
        if annotator is not None and not blank(str(annotator)):
            first = pair.voted.setdefault(str(annotator), row.number)
            if first != row.number:
                text = f"annotator {shown(str(annotator))} votes twice on this pair, first in row {first}"
                raise BadRow("votes_once", text)
            vote["annotator"] = annotator
        pair.votes.append(vote)
    if earlier is None:
        pairs[key] = pair
    else:
        pair.others.append(row.number)


def _key(data: Mapping[str, object]) -> str:
    """Return a key that is equal for the same prompt and responses, in either order."""
    sides = sorted(_as_seen(data.get(side)) for side in ("a", "b"))
    return _as_seen([[data.get(name) for name in ("prompt", "stance", "history", *SYSTEMS)], sides])


def _as_seen(value: object) -> str:
    return seen(json.dumps(value, sort_keys=True, default=str, ensure_ascii=False))
