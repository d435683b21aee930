"""The contract for a completed rating sheet."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from components.base.errors import UserError, naming
from components.data.checks_config import ChecksConfig
from components.data.rows import Problem
from components.data.words import words_of
from components.human_eval.batch.returned_sheets import sheet_records
from components.human_eval.sheet import rating_of
from data_contracts.check import FileReport
from data_contracts.expectations import suites
from data_contracts.expectations.pages import write_data_docs
from data_contracts.findings.agreement import agreement_of_counts
from data_contracts.rows.ledger import quarantine_line
from data_contracts.rows.measuring import length_preference
from data_contracts.rows.reading_report import is_sheet as is_sheet

_RATING = re.compile(r"rating_\d+")
_SIDES = ("a", "b")


def check_sheet(path: Path, valid: Sequence[str], checks: ChecksConfig, out: Path | None = None) -> FileReport:
    """Judge a completed sheet, of all raters or one; `valid` are the allowed ratings.

    Args:
        out: a folder that gets `data_docs/` and `quarantine.jsonl` with the rows that fail a check other than a
            warning.

    Raises:
        UserError: the sheet can't be read, or has no rating column.
    """
    records = sheet_records(path)
    # All rows are scanned, because a JSON Lines row may leave out an absent rating.
    columns = list(dict.fromkeys(name for _, record in records for name in record if _RATING.fullmatch(name)))
    if not columns:
        raise UserError(f"{path} has no column rating_1, nor `rating`. Give a sheet that a run wrote.")
    items = Counter(record.get("item", "") for _, record in records)
    ratings = [[rating_of(record.get(name)) for name in columns] for _, record in records]
    counts = np.array([[*map(row.count, _SIDES), row.count("tie") + row.count("both_bad")] for row in ratings])
    for_a_side = counts[:, :2].sum(1)
    frame = pd.DataFrame(
        {
            "row_id": [number for number, _ in records],
            "item_named": [bool(record.get("item")) for _, record in records],
            "item_once": [items[record.get("item", "")] == 1 or not record.get("item") for _, record in records],
            "rating_known": [all(rating in ("", *valid) for rating in row) for row in ratings],
            "responses_kept": [all(r.get(f"response_{side}", "").strip() for side in _SIDES) for _, r in records],
            "rated": [all(row) for row in ratings],
            "side_position": np.where(for_a_side, counts[:, 0] / np.maximum(for_a_side, 1), np.nan),
        }
    )
    applicable = [check for check in suites.sheet_checks(checks) if frame[str(check.options["column"])].notna().any()]
    context = suites.context()
    outcomes = suites.judge(context, suites.Suite("rating_sheet", frame, applicable))
    reasons: dict[int, list[Problem]] = {}
    for check in outcomes:
        check["source"] = "sheet"
        for number in check["row_numbers"] if check["severity"] != "warn" else ():
            text = f"fails {check['name']}: {check['description']}"
            reasons.setdefault(number, []).append(Problem(check["name"], text))
    if out is not None:
        lines = (quarantine_line("sheet", n, reasons[n], dict(record)) for n, record in records if n in reasons)
        with naming(out / "quarantine.jsonl"):
            (out / "quarantine.jsonl").write_bytes(b"".join(lines))
        write_data_docs(context, out / "data_docs", outcomes, {"sheet": str(path)})
    words = np.array([[len(words_of(r.get(f"response_{side}", ""))) for side in _SIDES] for _, r in records])
    wins = counts[:, 0] - counts[:, 1]
    preferred_first = np.where((wins < 0)[:, None], words[:, ::-1], words)[wins != 0]
    return {
        "rows": len(records), "pairs": len(records) - len(reasons), "quarantined": len(reasons),
        "checks": outcomes,
        **agreement_of_counts(counts, np.arange(len(counts))).as_json(),
        "longer_wins": length_preference(preferred_first),
        "passed": all(check["passed"] for check in outcomes if check["severity"] == "error"),
    }  # fmt: skip
