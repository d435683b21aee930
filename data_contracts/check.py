"""`tether data check`: apply the contract to a file without starting a run."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from data_contracts.config import ValidateJob
from data_contracts.contract import contract_result
from data_contracts.examine import Examination, Progress, examine
from data_contracts.expectations.pages import write_data_docs
from data_contracts.expectations.suites import JudgedCheck
from data_contracts.findings.agreement import AgreementReport, AnnotatorRow, PairwiseRow, pairwise_table
from data_contracts.findings.strengths import ModelRow, model_table
from data_contracts.rows.measuring import length_preference
from data_contracts.rows.schemas import SourceReading
from data_contracts.validate import write_quarantine

SHOWN = 10
"""The largest number of quarantined rows whose reasons a report shows."""


class LabelNoiseReport(TypedDict):
    """An estimate, from the pairs, of the share of flipped labels."""

    share: float | None
    """None if the model is right too rarely for an estimate."""
    interval: list[float] | None
    accuracy: float
    """Share of pairs on which a cross-validated model of words and lengths agrees with the label."""


class KeptOut(TypedDict):
    """A quarantined row."""

    file: str
    """The kind of data, or the label of the file if there are several."""
    row: int
    reasons: list[str]


class FileReport(AgreementReport):
    """What `tether data check --json` prints."""

    # long: a report, whose fields users read by name

    rows: int
    pairs: int
    single_labels: NotRequired[dict[str, int]]
    """Number of kept single labels (KTO), by `desirable` and `undesirable`; absent without any."""
    quarantined: int
    kept_out: NotRequired[list[KeptOut]]
    """The first quarantined rows."""
    checks: Sequence[JudgedCheck]
    longer_wins: float | None
    """Share of decided rows, duplicates included, in which the longer response (in words) wins."""
    passed: bool
    reasons: NotRequired[list[str]]
    """Why the file did not pass, if no check explains it."""
    unjudged: NotRequired[list[str]]
    """Names of a user's expectations that judged no value: they need a tokenizer, or their column has no value."""
    read: NotRequired[list[SourceReading]]
    """How each file was read."""
    unread: NotRequired[dict[str, dict[str, int]]]
    """For each kind of data, the number of rows with something in a field that is not read (`prompt[].name`)."""
    annotators: NotRequired[list[AnnotatorRow]]
    pairwise: NotRequired[list[PairwiseRow]]
    """Agreement of each pair of annotators with enough rows in common, lowest agreement first."""
    models: NotRequired[list[ModelRow]]
    """Models that voted or whose responses were compared, the strongest first."""
    inseparable: NotRequired[str]
    """Why model strengths cannot be estimated."""
    label_noise: NotRequired[LabelNoiseReport]
    languages: NotRequired[dict[str, float]]
    """Share of each language (ISO 639-1) in a sample of the kept responses, or of prompts, the most frequent first."""


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
    """
    data = examine(job, inputs, scratch, progress, alone=True, tokenized=tokenized)
    checks = contract_result(data).checks
    folder = scratch if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    quarantined = write_quarantine(data, folder)
    report = _report(data, checks, quarantined)
    with (folder / "quarantine.jsonl").open(encoding="ascii") as lines:
        rows = [json.loads(line) for line in islice(lines, SHOWN)]
    report["kept_out"] = [KeptOut(file=row["file"], row=row["row"], reasons=row["reasons"]) for row in rows]
    if out is not None:
        counts = {"pairs kept": str(report["pairs"]), "rows quarantined": str(quarantined)}
        summary = {name: str(path) for name, path in inputs.items()} | counts
        write_data_docs(data.context, out / "data_docs", checks, summary)
    return report


def _report(data: Examination, checks: Sequence[JudgedCheck], quarantined: int) -> FileReport:
    pairs = data.kinds.get("preferences")
    report: FileReport = {
        "rows": sum(examined.ledger.count() for examined in data.kinds.values()),
        "pairs": 0 if pairs is None else int(pairs.selected.sum()),
        "quarantined": quarantined,
        "checks": checks,
        **data.agreement.as_json(),
        "longer_wins": None,
        "passed": not data.invalid and all(check["passed"] for check in checks if check["severity"] == "error"),
        "reasons": list(data.invalid.values()),
        "unread": data.unread,
    }
    if labels := data.label_counts:
        report["single_labels"] = labels
    if pairs is not None:
        words = pairs.ledger.facts["words"]
        readable = (words > 0).all(1) & pairs.ledger.passes("decided")
        report["longer_wins"] = length_preference(words[readable])
        if data.annotators:
            report["annotators"] = data.annotators
            report["pairwise"] = pairwise_table(pairs.ledger)
        if pairs.ledger.models:
            report["models"], why = model_table(pairs.ledger, data.job.seed)
            report |= {"inseparable": why} if why else {}
    noise = data.label_noise
    if isinstance(noise, float):
        report["label_noise"] = {"share": None, "interval": None, "accuracy": noise}
    elif noise is not None:
        interval = [noise.low, noise.high]
        report["label_noise"] = {"share": noise.value, "interval": interval, "accuracy": noise.accuracy}
    if unjudged := [name for examined in data.kinds.values() for name in examined.judge.unjudged]:
        report["unjudged"] = unjudged
    if languages := data.languages:
        report["languages"] = languages
    return report


def threshold_text(check: JudgedCheck) -> str:
    """Return a check's threshold as text for reports."""
    return " to ".join(f"{end:g}" for end in np.atleast_1d(check["threshold"]))
