"""The validate stage: read, judge, quarantine and split the data.

Rows are judged one by one, and bad ones go to `quarantine.jsonl` with their number and reasons. Good rows are split by
prompt, and then the data set is judged as a whole. The stage succeeds even on bad data; the gates decide whether the
run continues.
"""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from components.base.errors import UserError, naming
from components.base.jsonl import write_json
from components.base.observe import Observe
from components.base.text import counted
from components.data.inputs import of_kind
from components.data.rows import OF_MODEL, listed
from components.data.splits import SPLITS
from components.gates.table import OF_SOURCE
from data_contracts.config import ValidateJob
from data_contracts.contract import contract_result
from data_contracts.examine import Examination, Examined, Progress, Sources, examine, sources_of
from data_contracts.expectations.own import as_document
from data_contracts.expectations.pages import write_data_docs
from data_contracts.expectations.suites import JudgedCheck, first_rows
from data_contracts.findings.noise import LabelNoise
from data_contracts.findings.whole import TRAIN
from data_contracts.published_splits import write_splits

logger = logging.getLogger(__name__)

ANNOTATORS = "annotators.json"
"""Each annotator's agreement with the others, if votes name their annotators."""
SOURCES = "sources.json"
"""The number of rows from each preference file, if there are several or `data.sources` names the only one."""
SUITE_JSON = "suite.json"
"""Every expectation on the data, in Great Expectations' format."""
FOR_PEOPLE = ("quarantine.jsonl", "review.jsonl", ANNOTATORS, SOURCES, SUITE_JSON)
"""Files of the artifact that people read, in addition to Data Docs; they are also logged to MLflow."""


def run(
    job: ValidateJob, inputs: Mapping[str, Path], out: Path, observe: Observe, sources: Sources = sources_of
) -> dict[str, float]:
    """Validate the data of `job`.

    Args:
        inputs: `preferences` (each of several `preferences/LABEL`), `demonstrations` and `prompts`, each a file or
            saved folder, and `base`, a pretrained model's folder, where `job` names one.
        out: gets `artifact/` (pairs, demonstrations and prompts by split, quarantine, report, and `sources.json` if
            there are several preference files) and `attachments/`.
        sources: returns the sources of each kind of data.

    Raises:
        UserError: a source can't be read, or has no valid row. No artifact is written then.
    """
    with _work(out / "checkpoint" / "rows") as scratch:
        progress: Progress = lambda read, total: observe(read, {"data/read": float(read)}, total=total)  # noqa: E731
        data = examine(job, inputs, scratch, progress, sources=sources)
        _refuse_nothing(data)
        shutil.rmtree(out / "artifact", ignore_errors=True)
        (out / "artifact").mkdir(parents=True)
        observe(0, {}, doing="judging all rows and writing the splits")
        checks, expectations = contract_result(data)
        quarantined = write_quarantine(data, out / "artifact")
        counts, reasons = source_counts(data), quarantine_reasons(data)
        final = metrics(data, checks, quarantined) | write_splits(data, out / "artifact")
    write_json(out / "artifact" / "report.json", checks)
    write_json(out / "artifact" / SUITE_JSON, as_document(expectations))
    files = of_kind(inputs, "preferences")
    write_json(out / "artifact" / "task.json", {"name": "none" if files else "support-desk"})
    if counts:
        write_json(out / "artifact" / SOURCES, counts)
        final |= {f"data/pairs{OF_SOURCE}{source['source']}": float(source["pairs"]) for source in counts}
    simulated = "the support desk's generator (simulated)"
    taught = "chosen responses" if files else simulated
    summary = {
        "preferences": ", ".join(map(str, files.values())) or simulated,
        "demonstrations": str(inputs.get("demonstrations", taught)),
        "pairs kept": f"{final['data/pairs']:.0f}",
        "rows quarantined": f"{final['data/quarantined']:.0f}",
        **{f"{label} single labels": str(count) for label, count in data.label_counts.items()},
        **{f"pairs of {source['source']}": count_text(source) for source in counts},
        **{f"not read in {kind}": unread_text(fields) for kind, fields in data.unread.items()},
    }
    write_data_docs(data.context, out / "attachments" / "data_docs", checks, summary)
    for name in FOR_PEOPLE:
        if (out / "artifact" / name).exists():
            shutil.copyfile(out / "artifact" / name, out / "attachments" / name)
    observe(data.rows_read, final)
    for check in checks:
        if check["severity"] == "error" and not check["passed"]:
            rows = f"{counted(check['rows'], 'row')} ({first_rows(check)})" if check["rows"] else "the data as a whole"
            logger.warning("the contract fails: %s: %s: %s", check["name"], check["description"].rstrip("."), rows)
    for kind, fields in data.unread.items():
        logger.warning("%s: fields that are not read: %s", kind, unread_text(fields))
    for source in counts:
        if source.get("left_out"):
            logger.info("%s: %s", source["source"], count_text(source))
    logger.info("kept %d pairs; quarantined %s", final["data/pairs"], reasons or "nothing")
    return final


@contextmanager
def _work(folder: Path) -> Iterator[Path]:
    """Provide `folder`; remove it at the end, or after an error. It stays if the process is interrupted or killed, so
    that the next attempt continues there: the next holder of the key takes up what has a checkpoint."""
    try:
        yield folder
    except Exception:
        _clear(folder)
        raise
    _clear(folder)


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not empty
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def _refuse_nothing(data: Examination) -> None:
    pairs, demonstrations, prompts = data.pairs, data.demonstrations, data.prompts
    heldout = [split for split in range(len(SPLITS)) if split != TRAIN]
    needed = [
        (pairs, "pair", "to train on", [TRAIN], "train"),
        (demonstrations, "demonstration", "to train on", [TRAIN], "train"),
        (demonstrations, "demonstration", "to evaluate on", heldout, "test"),
        *((prompts, "prompt", f"in the split {name}", [split], name) for split, name in enumerate(SPLITS)),
    ]
    for examined, what, use, splits, share in needed:
        if not np.isin(examined.facts["split"], splits).any():
            failed = ", ".join(f"{name} {rows}" for name, rows in quarantine_reasons(data).items())
            undesirable = int((examined.ledger.good() & (examined.ledger.facts["desirable"] == 0)).sum())
            raise UserError(
                f"After quarantine and splitting no {what} is left {use} "
                f"({counted(len(examined.facts), f'valid {what}')} "
                f"of {counted(examined.ledger.count(), 'row')}"
                + (f", {undesirable} labelled undesirable). " if undesirable else "). ")
                + (f"Rows kept out, by check: {failed}; `tether data check FILE` names them. " if failed else "")
                + f"Give more data, or a larger data.split.{share}."
            )


def metrics(data: Examination, checks: Sequence[JudgedCheck], quarantined: int) -> dict[str, float]:
    """Return the dataset metrics for gates and MLflow."""
    pairs, agreement = data.pairs.facts, data.agreement
    values: dict[str, float | None] = {
        "data/pairs": len(pairs),
        "data/quarantined": quarantined,
        "data/leaked_prompts": (data.splits_of_prompts[1] > 1).sum(),
        "data/contract": all(check["passed"] for check in checks if check["severity"] == "error"),
    }
    values |= {"data/unread_fields": sum(map(len, data.unread.values()))} if data.unread else {}
    contaminated = [check["rows"] for check in checks if check["name"] == "uncontaminated"]
    values |= {"data/contaminated": sum(contaminated)} if contaminated else {}
    noise = data.label_noise
    if isinstance(noise, LabelNoise):
        ends = {"data/label_noise_low": noise.low, "data/label_noise_high": noise.high}
        values |= {"data/label_noise": noise.value} | ends
    for name, interval in (
        ("data/length_preference", data.longer_wins),
        ("data/annotator_agreement", agreement.kappa),
        ("data/krippendorff_alpha", agreement.alpha),
    ):
        values |= interval.named(name) if interval is not None else {}
    values |= model_shares(data.pairs)
    values |= {f"data/check_{check['name']}": check["value"] for check in checks if check["suite"] == "whole"}
    return {name: float(value) for name, value in values.items() if value is not None}


def model_shares(pairs: Examined) -> dict[str, float]:
    """Return the models' shares of votes on the kept pairs; empty if people cast every vote.

    `data/model_votes` is the models' share of votes (a pair without votes counts as one vote of a person).
    `data/model_pairs` is the share of pairs without a person's vote. `data/model_votes_from/NAME` is one model's share
    of votes; with several models, the total is divided in proportion to their votes in the whole file.
    """
    of_models, votes = pairs.facts["of_models"], np.maximum(pairs.facts["ballot"].sum(1), 1)
    if not of_models.any():
        return {}
    share, counts = float(of_models.sum() / votes.sum()), pairs.ledger.model_votes
    of_each = {
        f"data/model_votes{OF_SOURCE}{metric_name(name)}": share * n / counts.total() for name, n in counts.items()
    }
    return {"data/model_votes": share, "data/model_pairs": float((of_models == votes).mean()), **of_each}


def metric_name(annotator: str) -> str:
    """Return a model's name in a form that can be part of a metric's name."""
    return re.sub(r"[^\w./ -]", "_", annotator.removeprefix(OF_MODEL)).strip() or "unnamed"


def write_quarantine(data: Examination, artifact: Path) -> int:
    """Write the quarantined rows, with number and reasons; those without a majority also go to `review.jsonl`. Write
    `annotators.json` if votes name their annotators. Return the number of quarantined rows; a ranking with some kept
    pairs counts as one."""
    if data.annotators:
        write_json(artifact / ANNOTATORS, data.annotators)
    with (
        naming(artifact / "quarantine.jsonl"),
        (artifact / "quarantine.jsonl").open("wb") as out,
        (artifact / "review.jsonl").open("wb") as review,
    ):
        for examined in data.kinds.values():
            undecided = ~examined.ledger.passes("decided")
            for index, line in examined.ledger.quarantined():
                out.write(line)
                if undecided[index]:
                    review.write(line)
    return sum(len(examined.ledger.rows(~examined.ledger.good())) for examined in data.kinds.values())


class SourceCounts(TypedDict):
    """An entry of `sources.json`, for one of several preference files."""

    source: str
    """Its label. Its rows have it as `file` in `quarantine.jsonl`, and as `source` unless they name one."""
    rows: int
    quarantined: int
    pairs: int
    """Number of kept pairs; a ranking's row gives several."""
    splits: dict[str, int]
    """Number of kept pairs by split."""
    weight: NotRequired[float]
    """The file's weight as in `data.sources`, if it is named there."""
    left_out: NotRequired[int]
    """Number of valid pairs that a `max_pairs` left out, if `data.sources` names the file."""


def count_text(counts: SourceCounts) -> str:
    """Return a file's counts for people."""
    left_out = f", {counted(counts['left_out'], 'valid pair')} left out by max_pairs" if counts.get("left_out") else ""
    return f"{counts['pairs']} of {counted(counts['rows'], 'row')}{left_out}"


def unread_text(fields: Mapping[str, int]) -> str:
    """Return the names of fields that are not read, with their numbers of rows, for people."""
    return listed([f"{name} ({counted(rows, 'row')})" for name, rows in fields.items()])


def source_counts(data: Examination) -> list[SourceCounts]:
    """Return the counts of each preference file; empty if there is only one and `data.sources` does not name it."""
    ledger, selected, counts = data.pairs.ledger, data.pairs.selected, []
    options = data.job.data.sources
    for file in ledger.files if len(ledger.files) > 1 or options else ():
        of = ledger.of(file)
        splits = np.bincount(ledger.facts["split"][of & selected], minlength=len(SPLITS)).tolist()
        counts.append(
            SourceCounts(
                source=file, rows=ledger.count(of), quarantined=ledger.count(of & ~ledger.good()), pairs=sum(splits),
                splits=dict(zip(SPLITS, splits, strict=True)),
            )
        )  # fmt: skip
        if (option := options.get(file)) is not None:
            counts[-1]["weight"] = option.weight
            counts[-1]["left_out"] = int((of & ledger.good() & ~selected).sum())
    return counts


def quarantine_reasons(data: Examination) -> dict[str, int]:
    """Return the number of quarantined rows that fail each check, largest first."""
    out = [(source.ledger, ~source.ledger.good()) for source in data.kinds.values()]
    names = dict.fromkeys(name for ledger, _ in out for name in ledger.named_by)
    counts = {name: sum(len(ledger.rows(bad & ~ledger.passes(name))) for ledger, bad in out) for name in names}
    return dict(sorted(((name, n) for name, n in counts.items() if n), key=lambda item: -item[1]))
