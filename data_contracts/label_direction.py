"""Self-check of validate: a published pair prefers the response that its source row calls chosen."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from components.data.splits import SPLITS
from components.data.tables.published import read_split
from components.gates.self_checks import SelfChecks
from data_contracts.rows.gather import RowSource

FIRST = 64  # rows of each source that are read again


def check_direction(checks: SelfChecks, artifact: Path, sources: Sequence[RowSource]) -> None:
    """Judge that no pair of `artifact` has `chosen` and `rejected` of its source row exchanged.

    The first rows of each source are read again and found by number and texts. Rows that state no label by these
    fields (votes, rankings), that are not published, or whose texts were changed are left out.

    Raises:
        CheckFailed: a pair has them exchanged.
    """
    published, compared, turned = dict[tuple[str, int], tuple[str, ...]](), 0, list[str]()
    for split in SPLITS:
        rows = read_split(artifact / f"pairs.{split}")
        numbers = rows.dataset.data.column("row").to_numpy()  # type: ignore[attr-defined]
        for row in rows.choose(np.flatnonzero(numbers <= FIRST + 1)):  # type: ignore[attr-defined]
            published[row["source"], row["row"]] = row["chosen"].strip(), row["rejected"].strip()
    for source in sources:
        columns = {side: str(source.columns.get(side, side)) for side in ("chosen", "rejected")}
        others = {str(column) for name, column in source.columns.items() if name not in columns}
        for raw in islice(source.rows, 0 if others.intersection(columns.values()) else FIRST):  # new votes decide
            named = [raw.data.get(column) for column in columns.values()]
            texts = published.get((str(raw.data.get("source") or source.file).strip(), raw.number), ("", ""))
            responses = [_last_text(value) for value in named]
            right, wrong = (all(map(str.endswith, responses, some)) for some in (texts, texts[::-1]))
            compared += right != wrong
            turned += [f"row {raw.number} of {source.file}"] if wrong and not right else []
    if not compared:
        checks.skip("validate.direction", "no row that was read again is a published pair with `chosen` and `rejected`")
        return
    numbers = f"chosen and rejected are exchanged in {', '.join([f'{len(turned)} of {compared} pairs', *turned[:1]])}"
    checks.judge("validate.direction", not turned, numbers)


def _last_text(value: object) -> str:
    """Return a text, or that of the last message of a list, without white space around it; empty for other values."""
    last = value[-1] if isinstance(value, list) and value else value
    text = last.get("content", last.get("value")) if isinstance(last, dict) else last
    return text.strip() if isinstance(text, str) else ""
