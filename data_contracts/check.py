"""`tether data check`: apply the contract to a file without starting a run."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from components.base.errors import UserError
from data_contracts.config import ValidateJob
from data_contracts.examine import Examination, FileReport, KeptOut, Progress
from data_contracts.expectations.pages import write_data_docs
from data_contracts.expectations.suites import JudgedCheck
from data_contracts.findings.agreement import pairwise_table
from data_contracts.findings.strengths import model_table
from data_contracts.rows.frames import length_preference
from data_contracts.validate import write_quarantine

SHOWN = 10
"""The largest number of quarantined rows whose reasons a report shows."""


class NothingValid(UserError):
    """A source has no valid row. `report` still has every finding and is written."""

    def __init__(self, text: str, report: FileReport) -> None:
        super().__init__(text)
        self.report = report


def check(
    job: ValidateJob,
    inputs: Mapping[str, Path],
    scratch: Path,
    out: Path | None,
    progress: Progress,
    tokenized: bool = True,
) -> FileReport:
    """Judge the files of `inputs` and return the findings.

    Args:
        scratch: a folder for data that is too large for memory.
        out: gets what `write_quarantine` writes, and `data_docs/`; None writes nothing.
        tokenized: whether `job` comes from a run, so that its tokenizer and token limits apply.

    Raises:
        UserError: a file can't be read.
        NothingValid: a file has no valid row.
    """
    found = Examination(job, inputs, scratch, progress, alone=True, tokenized=tokenized)
    checks, context = found.judge()
    folder = scratch if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    quarantined = write_quarantine(found, folder)
    report = _report(found, checks, quarantined)
    report["kept_out"] = _first_kept_out(folder / "quarantine.jsonl")
    if out is not None:
        counts = {"pairs kept": str(report["pairs"]), "rows quarantined": str(quarantined)}
        write_data_docs(context, out / "data_docs", checks, {name: str(path) for name, path in inputs.items()} | counts)
    if found.nothing:
        raise NothingValid(" ".join(found.nothing.values()), report)
    return report


def _report(found: Examination, checks: Sequence[JudgedCheck], quarantined: int) -> FileReport:
    report: FileReport = {
        "rows": sum(examined.ledger.count() for examined in found.sources.values()),
        "pairs": 0 if found.pairs is None else int(found.pairs.kept.sum()),
        "quarantined": quarantined,
        "checks": checks,
        **found.agreement.as_json(),
        "longer_wins": None,
        "passed": not found.nothing and all(check["passed"] for check in checks if check["severity"] == "error"),
        "reasons": list(found.nothing.values()),
        "unread": found.unread,
    }
    if found.pairs is not None:
        words = found.pairs.ledger.facts["words"]
        readable = (words > 0).all(1) & found.pairs.ledger.passes("decided")
        report["longer_wins"] = length_preference(words[readable])
    if found.annotators:
        report["annotators"] = found.annotators
        report["pairwise"] = pairwise_table(found.only_pairs.ledger)
    if found.pairs is not None and found.pairs.ledger.models:
        report["models"], why = model_table(found.pairs.ledger, found.job.seed)
        report |= {"inseparable": why} if why else {}
    noise = found.label_noise
    if isinstance(noise, float):
        report["label_noise"] = {"share": None, "interval": None, "accuracy": noise}
    elif noise is not None:
        report["label_noise"] = {
            "share": noise.value, "interval": [noise.low, noise.high], "accuracy": noise.accuracy
        }  # fmt: skip
    if unjudged := [name for examined in found.sources.values() for name in examined.judge.unjudged]:
        report["unjudged"] = unjudged
    if languages := found.languages:
        report["languages"] = languages
    return report


def _first_kept_out(path: Path) -> list[KeptOut]:
    with path.open(encoding="ascii") as lines:
        rows = [json.loads(line) for line in islice(lines, SHOWN)]
    return [KeptOut(file=row["file"], row=row["row"], reasons=row["reasons"]) for row in rows]


def threshold_text(check: JudgedCheck) -> str:
    """Return a check's threshold as text for reports."""
    return " to ".join(f"{end:g}" for end in np.atleast_1d(check["threshold"]))
