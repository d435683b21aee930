"""Combine rows about one pair, or about one prompt, into one row. They may stand anywhere in a file, and are kept in
memory until it is read."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from components.data.formats.labels import side_of
from components.data.formats.transcripts import SYSTEMS
from components.data.rows import BadRow, RawRow, blank, shown
from components.data.words import seen

Fields = Mapping[str, Any]
_OWN = ("annotator", "label", "vote")
_AS_SHOWN = {"first": "a", "second": "b", "equal": "equal"}
_SWAPPED = {"first": "b", "second": "a", "equal": "equal"}


def gathered(
    rows: Iterable[RawRow],
    key: Callable[[Fields], str | None],
    add: Callable[[RawRow, RawRow, dict[Any, Any]], None],
    whole: Callable[[Fields, dict[Any, Any]], Fields],
) -> Iterator[RawRow]:
    """Yield one row for each group of `rows` with the same key, with the number of the group's first row.

    A row that cannot be read, has no key, or is refused by `add` is passed on by itself, with its problem.

    Args:
        add: adds a row's part to the parts of its group, whose first row is its second argument.
        whole: returns the fields of the group's row, from those of the first row and the parts.
    """
    groups: dict[str, tuple[RawRow, dict[Any, Any], list[int]]] = {}
    for row in rows:
        name = key(row.data) if row.problem is None else None
        if name is not None:
            group = groups.get(name, (row, {}, []))
            try:
                add(row, *group[:2])
                group[2].extend([row.number] if name in groups else [])
                groups[name] = group
                continue
            except BadRow as bad:
                row = row._replace(problem=bad.problem)
        yield row
    for first, parts, others in groups.values():
        yield first._replace(data=whole(first.data, parts), others=tuple(others))


def as_seen(value: object) -> str:
    """Return a key that is equal for values that look the same."""
    return seen(json.dumps(value, sort_keys=True, default=str, ensure_ascii=False))


def gather_votes(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield a row with `votes` for each pair in `rows`, with the sides of the pair's first row; sides may be swapped
    between annotators.

    A row with an empty label adds no vote; a row that already has `votes` is passed on. A row with an unknown label,
    or with an annotator's second vote on a pair, is passed on by itself with its problem.
    """
    return gathered(rows, _pair_of, _add_vote, _with_votes)


def _pair_of(data: Fields) -> str | None:
    """Return a key that is equal for the same prompt and responses, in either order."""
    if "votes" in data:
        return None
    sides = sorted(as_seen(data.get(side)) for side in ("a", "b"))
    return as_seen([[data.get(name) for name in ("prompt", "stance", "history", *SYSTEMS)], sides])


def _add_vote(row: RawRow, first: RawRow, votes: dict[Any, Any]) -> None:
    label, annotator = (row.data.get(name) for name in ("label", "annotator"))
    label = row.data.get("vote") if label is None else label
    if label is None or blank(str(label)):
        return
    swapped = as_seen(row.data.get("a")) != as_seen(first.data.get("a"))
    vote = {"label": (_SWAPPED if swapped else _AS_SHOWN)[side_of(label)]}
    if annotator is None or blank(str(annotator)):
        votes[row.number] = row.number, vote
        return
    number, _ = votes.setdefault(str(annotator), (row.number, vote | {"annotator": annotator}))
    if number != row.number:
        text = f"annotator {shown(str(annotator))} votes twice on this pair, first in row {number}"
        raise BadRow("votes_once", text)


def _with_votes(data: Fields, votes: dict[Any, Any]) -> Fields:
    pair = {name: value for name, value in data.items() if name not in _OWN}
    return pair | {"votes": [vote for _, vote in votes.values()]}
