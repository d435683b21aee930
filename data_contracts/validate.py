"""The validate stage: read, judge, quarantine, split.

Rows are judged one by one (bad ones go to `quarantine.jsonl` with their number and reasons), the good ones are split by
prompt, and the whole is judged again. The stage ends well on bad data: the gates decide whether the rest may go on.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from components.base.errors import UserError, naming
from components.base.jsonl import json_line, write_json
from components.base.observe import Observe
from components.data.splits import SPLITS
from components.stats.intervals import Interval
from data_contracts.config import ValidateJob
from data_contracts.examine import Examination, Examined
from data_contracts.expectations.pages import write_data_docs
from data_contracts.expectations.suites import JudgedCheck
from data_contracts.findings.whole import TRAIN
from data_contracts.rows.ledger import BIT, ROW_CHECKS, combined

logger = logging.getLogger(__name__)

ANNOTATORS = "annotators.json"
"""Each annotator's agreement with the others, where the votes name them."""
FOR_PEOPLE = ("quarantine.jsonl", "review.jsonl", ANNOTATORS)
"""Files of the artifact that people read beside the Data Docs, and so in MLflow too."""


def run(job: ValidateJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Validate the data of `job`.

    Args:
        inputs: `preferences`, `demonstrations` and `prompts`, each a file or saved folder, and `base`, a pretrained
            model's folder, where `job` names one.
        out: gets `artifact/` (pairs, demonstrations and prompts by split, quarantine, report) and `attachments/`.

    Raises:
        UserError: a source can't be read, or holds not one valid row; no artifact is written then.
    """
    scratch = out / "rows"
    try:
        found = Examination(job, inputs, scratch, lambda read: observe(read, {"data/read": float(read)}))
        _refuse_nothing(found)
        checks, context = found.judge()
        shutil.rmtree(out / "artifact", ignore_errors=True)
        sizes = write_splits(found, out / "artifact")
        kept_out = write_quarantine(found, out / "artifact")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # it holds something
            out.rmdir()
    write_json(out / "artifact" / "report.json", checks)
    write_json(out / "artifact" / "task.json", {"name": "none" if "preferences" in inputs else "support-desk"})
    final = metrics(found, checks, kept_out) | sizes
    simulated = "the support desk's generator (simulated)"
    taught = "chosen responses" if "preferences" in inputs else simulated
    shown = {
        "preferences": str(inputs.get("preferences", simulated)),
        "demonstrations": str(inputs.get("demonstrations", taught)),
        "pairs kept": f"{final['data/pairs']:.0f}",
        "rows quarantined": f"{final['data/quarantined']:.0f}",
    }
    write_data_docs(context, out / "attachments" / "data_docs", checks, shown)
    for name in FOR_PEOPLE:
        if (out / "artifact" / name).exists():
            shutil.copyfile(out / "artifact" / name, out / "attachments" / name)
    observe(found.read, final)
    logger.info("kept %d pairs; quarantined %s", final["data/pairs"], quarantine_reasons(found) or "nothing")
    return final


def _refuse_nothing(found: Examination) -> None:
    pairs, taught, asked = found.only_pairs, found.taught, asked_of(found)
    heldout = [split for split in range(len(SPLITS)) if split != TRAIN]
    needed = [
        (pairs, "pair", "to train on", [TRAIN], "train"),
        (taught, "demonstration", "to train on", [TRAIN], "train"),
        (taught, "demonstration", "to evaluate on", heldout, "test"),
        *((asked, "prompt", f"in the split {name}", [split], name) for split, name in enumerate(SPLITS)),
    ]
    for examined, what, use, splits, share in needed:
        if not np.isin(examined.facts["split"], splits).any():
            raise UserError(
                f"After quarantine and splitting no {what} is left {use} ({len(examined.facts)} valid {what}s of "
                f"{examined.ledger.count()} rows). Give more data, or a larger data.split.{share}."
            )


def asked_of(found: Examination) -> Examined:
    """The rows whose prompts SFT, reward model and PPO are asked: `data.prompts`, or the pairs."""
    return found.sources.get("prompts") or found.only_pairs


def metrics(found: Examination, checks: Sequence[JudgedCheck], quarantined: int) -> dict[str, float]:
    """What the gates and MLflow see of the whole."""
    pairs, agreement = found.only_pairs.facts, found.agreement
    values: dict[str, float | None] = {
        "data/pairs": len(pairs),
        "data/quarantined": quarantined,
        "data/leaked_prompts": (found.leaks > 1).sum(),
        "data/contract": all(check["passed"] for check in checks if check["severity"] == "error"),
        **_named("data/length_preference", found.longer_wins),
        **_named("data/annotator_agreement", agreement.kappa),
        **_named("data/krippendorff_alpha", agreement.alpha),
    }
    values |= {f"data/check_{check['name']}": check["value"] for check in checks if check["suite"] == "whole"}
    return {name: float(value) for name, value in values.items() if value is not None}


def _named(name: str, found: Interval | None) -> dict[str, float | None]:
    return {} if found is None else found.named(name)


def write_splits(found: Examination, artifact: Path) -> dict[str, float]:
    """Pairs, demonstrations and prompts of each split, and how many there are, as metrics."""
    artifact.mkdir(parents=True)
    pairs, taught, asked = found.only_pairs, found.taught, asked_of(found)
    said = taught.ledger.facts
    weights = weights_of_rankings(pairs)
    demonstrations = _first_of(taught, combined(said["prompt"], said["chosen"]))
    prompts = _first_of(asked, asked.ledger.facts["prompt"])
    sizes: dict[str, float] = {}
    with naming(artifact), ExitStack() as files:

        def open_(name: str) -> IO[bytes]:
            return files.enter_context((artifact / f"{name}.jsonl").open("wb"))

        pair_files = [open_(f"pairs.{split}") for split in SPLITS]
        prompt_files = [open_(f"prompts.{split}") for split in SPLITS]
        train, heldout = open_("demonstrations.train"), open_("demonstrations.heldout")
        for examined in found.sources.values():
            ledger, nothing = examined.ledger, np.zeros_like(examined.kept)
            is_taught = demonstrations if examined is taught else nothing
            is_asked = prompts if examined is asked else nothing
            for index, line in ledger.lines():
                split = ledger.facts["split"][index]
                if examined is pairs and examined.kept[index]:
                    if weight := weights.get(index):
                        line = json_line(json.loads(line) | {"weight": weight})
                    pair_files[split].write(line)
                if not (is_taught[index] or is_asked[index]):
                    continue
                item = json.loads(line)
                if is_asked[index]:
                    prompt_files[split].write(json_line({"prompt": item["prompt"], "category": item["category"]}))
                if is_taught[index]:
                    response = item.get("response", item.get("chosen"))
                    row = {"response": response} | {name: item[name] for name in ("prompt", "source", "row")}
                    (train if split == TRAIN else heldout).write(json_line(row))
    for name, facts in (("pairs", pairs.facts), ("prompts", asked.ledger.facts[prompts])):
        counts = np.bincount(facts["split"], minlength=len(SPLITS))
        sizes |= {f"data/{name}_{split}": float(n) for split, n in zip(SPLITS, counts, strict=True)}
    return sizes | {"data/demonstrations": float(demonstrations.sum())}


def weights_of_rankings(examined: Examined) -> dict[int, float]:
    """By index, the weight of each kept pair of a ranking that lost some: those that are left count once together."""
    rows, kept = examined.ledger.facts["row"], np.flatnonzero(examined.kept)
    numbers, made = np.unique(rows, return_counts=True)
    left = np.zeros_like(made)
    of_row = np.searchsorted(numbers, rows[kept])
    np.add.at(left, of_row, 1)
    fewer = left[of_row] < made[of_row]
    return {int(index): 1 / int(n) for index, n in zip(kept[fewer], left[of_row[fewer]], strict=True)}


def _first_of(examined: Examined, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """The kept rows (n,) that are the first with their hash."""
    places = np.flatnonzero(examined.kept)
    _, first = np.unique(hashes[places], return_index=True)
    out = np.zeros_like(examined.kept)
    out[places[first]] = True
    return out


def write_quarantine(found: Examination, artifact: Path) -> int:
    """The rows that were kept out, with number and reasons; those without a majority also in `review.jsonl`. Beside
    them `annotators.json`, where the votes name them.

    Returns:
        how many rows were kept out; a ranking of which pairs were is one.
    """
    undecided = BIT["decided"]
    if found.annotators:
        write_json(artifact / ANNOTATORS, found.annotators)
    with (
        naming(artifact / "quarantine.jsonl"),
        (artifact / "quarantine.jsonl").open("wb") as out,
        (artifact / "review.jsonl").open("wb") as review,
    ):
        for examined in found.sources.values():
            for index, line in examined.ledger.quarantined(examined.source.name):
                out.write(line)
                if examined.ledger.facts["failed"][index] & undecided:
                    review.write(line)
    return sum(len(examined.ledger.rows(~examined.ledger.good())) for examined in found.sources.values())


def quarantine_reasons(found: Examination) -> dict[str, int]:
    """How many of the rows that were kept out fail each check, most first."""
    out = [(source.ledger, ~source.ledger.good()) for source in found.sources.values()]
    counts = {name: sum(len(ledger.rows(bad & ~ledger.passes(name))) for ledger, bad in out) for name in ROW_CHECKS}
    return dict(sorted(((name, n) for name, n in counts.items() if n), key=lambda found: -found[1]))
