"""`tether data check`: the contract on a file, without a run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from components.base.errors import UserError
from components.data.config import DataConfig
from components.data.formats import demonstrations, pairs
from components.data.readers import read_source
from components.data.rows import RawRow
from data_contracts.config import ValidateJob
from data_contracts.examine import Examination, FileReport, Progress
from data_contracts.expectations.pages import write_data_docs
from data_contracts.expectations.suites import FIRST_ROWS, JudgedCheck
from data_contracts.rows.frames import length_preference
from data_contracts.rows.gather import DETECT_ON, RowSource, renamed
from data_contracts.sheets import is_sheet
from data_contracts.validate import write_quarantine


def check(
    job: ValidateJob,
    inputs: Mapping[str, Path],
    scratch: Path,
    out: Path | None,
    progress: Progress,
    tokenized: bool = True,
) -> FileReport:
    """Judge the files of `inputs`.

    Args:
        scratch: a folder for what is too large for memory.
        out: gets what `write_quarantine` writes and `data_docs/`; None writes nothing.
        tokenized: whether `job` is a run's, so that its tokenizer and lengths mean something.

    Raises:
        UserError: a file can't be read, or holds not one valid row.
    """
    found = Examination(job, inputs, scratch, progress, alone=True, tokenized=tokenized)
    checks, context = found.judge()
    folder = scratch if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    quarantined = write_quarantine(found, folder)
    report = _report(found, checks, quarantined)
    if out is not None:
        counts = {"pairs kept": str(report["pairs"]), "rows quarantined": str(quarantined)}
        write_data_docs(context, out / "data_docs", checks, {name: str(path) for name, path in inputs.items()} | counts)
    return report


def _report(found: Examination, checks: Sequence[JudgedCheck], quarantined: int) -> FileReport:
    report: FileReport = {
        "rows": sum(examined.ledger.count() for examined in found.sources.values()),
        "pairs": 0 if found.pairs is None else int(found.pairs.kept.sum()),
        "quarantined": quarantined,
        "checks": checks,
        **found.agreement.as_json(),
        "longer_wins": None,
        "passed": all(check["passed"] for check in checks if check["severity"] == "error"),
    }
    if found.pairs is not None:
        words = found.pairs.ledger.facts["words"]
        readable = (words > 0).all(1) & found.pairs.ledger.passes("decided")
        report["longer_wins"] = length_preference(words[readable])
    if found.annotators:
        report["annotators"] = found.annotators
    return report


def kind_of(path: Path, data: DataConfig) -> str:
    """What a file is by the fields of its first rows: `preferences`, `demonstrations`, `prompts` or a rating `sheet`.

    The first three are looked for under the names that `data` has for their columns, then under the standard ones.

    Raises:
        UserError: it can't be read, or is none of these.
    """
    first = list(islice(read_source(path, data.hub.split), DETECT_ON))
    if is_sheet(first):
        return "sheet"

    def readings(name: str) -> Iterator[list[RawRow]]:
        with suppress(UserError):  # it lacks a column that is named for another file
            yield list(renamed(RowSource.named(name, path, data)._replace(rows=first)))
        yield first

    for name, detect in (("preferences", pairs.detect), ("demonstrations", demonstrations.detect)):
        for rows in readings(name):
            with suppress(UserError):
                detect(rows, path)
                return name
    if any("prompt" in row.data for rows in readings("prompts") for row in rows):
        return "prompts"
    pairs.detect(first, path)
    raise AssertionError("unreachable: no format was found")


def first_rows(check: JudgedCheck) -> str:
    """The first row numbers of a check for people."""
    numbers = check["row_numbers"]
    more = f" … {len(numbers) - FIRST_ROWS} more" if len(numbers) > FIRST_ROWS else ""
    return ", ".join(map(str, numbers[:FIRST_ROWS])) + more


def threshold_text(check: JudgedCheck) -> str:
    """A threshold for people."""
    return " to ".join(f"{end:g}" for end in np.atleast_1d(check["threshold"]))
