"""`tether data check`: the contract on a file, without a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.base.errors import UserError
from components.data.config import DataConfig
from data_contracts.config import ValidateJob
from data_contracts.examine import Examination, FileReport, Progress
from data_contracts.expectations.pages import write_data_docs
from data_contracts.expectations.suites import FIRST_ROWS, JudgedCheck
from data_contracts.rows.frames import length_preference
from data_contracts.rows.gather import RowSource
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.reading import reading_of
from data_contracts.validate import write_quarantine


class NothingValid(UserError):
    """A source holds not one valid row. `report` says all that was found nevertheless, and is written."""

    def __init__(self, text: str, report: FileReport) -> None:
        super().__init__(text)
        self.report = report


class Contract(Examination):
    """The contract on the sources that are given, and no others."""

    given_alone = True

    def __init__(
        self, job: ValidateJob, inputs: Mapping[str, Path], folder: Path, progress: Progress, tokenized: bool
    ) -> None:
        """`tokenized`: whether `job` is a run's, so that its tokenizer and lengths mean something."""
        self.tokenized = tokenized
        self.nothing: dict[str, str] = {}
        """Why a source has not one valid row, by its name."""
        super().__init__(job, inputs, folder, progress)

    def _tokenizer(self) -> Any:
        return super()._tokenizer() if self.tokenized and not self.nothing else None

    def _need_one(self, source: RowSource, ledger: Ledger) -> None:
        """Note that there is none: that is what the contract finds, where a run can't go on."""
        try:
            super()._need_one(source, ledger)
        except UserError as error:
            self.nothing.setdefault(source.name, str(error))

    def report(self, checks: Sequence[JudgedCheck], quarantined: int) -> FileReport:
        """What `--json` prints: `rows` and `row_numbers` (1-based, of the source file) by check, and the votes."""
        found: FileReport = {
            "rows": sum(examined.ledger.count() for examined in self.sources.values()),
            "pairs": 0 if self.pairs is None else int(self.pairs.kept.sum()),
            "quarantined": quarantined,
            "checks": checks,
            **self.agreement.as_json(),
            "longer_wins": self.longer_of_all(),
            "passed": not self.nothing and all(check["passed"] for check in checks if check["severity"] == "error"),
            "reasons": list(self.nothing.values()),
        }
        if self.annotators:
            found["annotators"] = self.annotators
        return found

    def longer_of_all(self) -> float | None:
        """Share of all decided rows in which the longer response (in words) wins, rows that repeat others too."""
        if self.pairs is None:
            return None
        facts = self.pairs.ledger.facts
        readable = (facts["words"] > 0).all(1) & self.pairs.ledger.passes("decided")
        return length_preference(facts["words"][readable])


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
        tokenized: as for `Contract`.

    Raises:
        UserError: a file can't be read. NothingValid: one holds not one valid row.
    """
    found = Contract(job, inputs, scratch, progress, tokenized)
    checks, context = found.judge()
    folder = scratch if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    quarantined = write_quarantine(found, folder)
    report = found.report(checks, quarantined)
    if out is not None:
        counts = {"pairs kept": str(report["pairs"]), "rows quarantined": str(quarantined)}
        write_data_docs(context, out / "data_docs", checks, {name: str(path) for name, path in inputs.items()} | counts)
    if found.nothing:
        raise NothingValid(" ".join(found.nothing.values()), report)
    return report


def kind_of(path: Path, data: DataConfig) -> str:
    """What a file is: `preferences`, `demonstrations`, `prompts` or a rating `sheet` (`reading_of`)."""
    return reading_of(path, data).kind


def first_rows(check: JudgedCheck) -> str:
    """The first row numbers of a check for people."""
    numbers = check["row_numbers"]
    more = f" … {len(numbers) - FIRST_ROWS} more" if len(numbers) > FIRST_ROWS else ""
    return ", ".join(map(str, numbers[:FIRST_ROWS])) + more


def threshold_text(check: JudgedCheck) -> str:
    """A threshold for people."""
    return " to ".join(f"{end:g}" for end in np.atleast_1d(check["threshold"]))
