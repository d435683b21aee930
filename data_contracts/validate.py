"""The validate stage: read, judge, quarantine, split.

Rows are judged one by one (bad ones go to `quarantine.jsonl` with their number and reasons), the good ones are split by
prompt, and the whole is judged again. The stage ends well on bad data: the gates decide whether the rest may go on.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.data.config import DataConfig, ValidateJob
from components.data.jsonl import write_json, write_rows
from components.data.rows import Item, RawRow, Row
from components.data.splits import SPLITS, choose, prompt_key, split_of, standing
from components.data.support_desk import generate
from components.errors import CheckFailed, UserError
from components.stats import fleiss_kappa
from data_contracts.frames import length_preference, pair_frame, quarantine_reasons, row_frame
from data_contracts.gather import Source, gather_demonstrations, gather_pairs
from data_contracts.schemas import QuarantinedRow

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

Report = Callable[..., None]


def run(job: ValidateJob, inputs: Mapping[str, Path], out: Path, report: Report) -> dict[str, float]:
    """Validate the data of `job`.

    Args:
        inputs: `preferences` and `demonstrations`, each a file or saved folder, where `job.data` names one.
        out: gets `artifact/` (pairs, demonstrations and prompts by split, quarantine, report) and `attachments/`.

    Raises:
        UserError: a source can't be read, or holds not one valid row; nothing is written then.
    """
    data = job.data
    pair_rows, demonstration_rows = _read(job, inputs, report)
    kept = choose([row for row in pair_rows if not row.problems], _pair_key, data.max_pairs, job.seed)
    pairs = _by_split(kept, data)
    taught = [row for row in demonstration_rows if not row.problems]
    demonstrations = _by_split(taught, data) if demonstration_rows else _chosen_responses(pairs)
    if not pairs["train"] or not demonstrations["train"]:
        missing = "pair" if not pairs["train"] else "demonstration"
        raise UserError(
            f"After quarantine and splitting no {missing} is left to train on ({len(kept)} valid pairs of "
            f"{len(pair_rows)} rows). Give more data, or a larger data.split.train."
        )
    stands_in = standing({name: [*pairs[name], *demonstrations[name]] for name in SPLITS})
    first_wins = {row.number: row.first_wins for row in kept if row.first_wins is not None}
    frame = pair_frame(pairs, stands_in, first_wins)
    checks, context = _judge(data, pair_rows, demonstration_rows, frame)

    quarantined = [row for row in [*pair_rows, *demonstration_rows] if row.problems]
    prompts = {name: distinct_prompts(pairs[name]) for name in SPLITS}
    shutil.rmtree(out / "artifact", ignore_errors=True)
    _write(out / "artifact", pairs, demonstrations, prompts)
    write_quarantine(out / "artifact" / "quarantine.jsonl", quarantined)
    write_json(out / "artifact" / "report.json", checks)
    write_json(out / "artifact" / "task.json", {"name": "none" if "preferences" in inputs else "support-desk"})

    sizes = {f"data/pairs_{name}": len(pairs[name]) for name in SPLITS}
    metrics = {
        "data/pairs": sum(sizes.values()),
        "data/quarantined": len(quarantined),
        "data/demonstrations": sum(map(len, demonstrations.values())),
        "data/leaked_prompts": sum(len(splits) > 1 for splits in stands_in.values()),
        "data/contract": all(check["passed"] for check in checks if check["severity"] == "error"),
        "data/length_preference": length_preference([item for name in SPLITS for item in pairs[name]]),
        "data/annotator_agreement": annotator_agreement(pair_rows),
        **sizes,
        **{f"data/prompts_{name}": len(prompts[name]) for name in SPLITS},
    }
    final = {name: float(value) for name, value in metrics.items() if value is not None}
    _show(context, out / "attachments" / "data_docs", checks, inputs, final)
    report(len(pair_rows) + len(demonstration_rows), final)
    logger.info("kept %d pairs; quarantined %s", len(kept), quarantine_reasons(quarantined) or "nothing")
    return final


def _read(job: ValidateJob, inputs: Mapping[str, Path], report: Report) -> tuple[list[Row], list[Row]]:
    """The rows of both sources; no demonstrations where the chosen responses serve."""
    data = job.data
    for name, value in (("preferences", data.preferences), ("demonstrations", data.demonstrations)):
        if value is not None and name not in inputs:
            raise CheckFailed(f"data.{name} is {value!r}, but the stage was given no input of that name")
    generated: tuple[list[Item], list[Item]] = ([], [])
    if "preferences" not in inputs:
        generated = generate(job.seed, data.generator)

    def source(name: str, rows: Sequence[Item]) -> Source:
        if name not in inputs:
            return Source("support-desk", "the support desk's generator", _numbered(rows), {}, "")
        return Source.named(name, inputs[name], data)

    def progress(rows: int) -> None:
        report(rows, {"data/rows": float(rows)})

    pairs = gather_pairs(source("preferences", generated[1]), data.max_characters, progress)
    if "demonstrations" not in inputs and not generated[0]:
        return pairs, []
    taught = source("demonstrations", generated[0])
    return pairs, gather_demonstrations(taught, data.max_characters, lambda rows: progress(len(pairs) + rows))


def _numbered(rows: Sequence[Item]) -> Iterable[RawRow]:
    return (RawRow(number, row) for number, row in enumerate(rows, 1))


def _pair_key(row: Row) -> str:
    item = row.item or {}
    return f"{prompt_key(item['prompt'])} {item['chosen']} {item['rejected']}"


def _by_split(rows: Iterable[Row], data: DataConfig) -> dict[str, list[Item]]:
    out: dict[str, list[Item]] = {name: [] for name in SPLITS}
    for row in rows:
        if row.item:
            out[split_of(row.item["prompt"], data.split)].append(row.item)
    return out


def _chosen_responses(pairs: Mapping[str, Sequence[Item]]) -> dict[str, list[Item]]:
    """The chosen responses of each split as demonstrations, each once."""
    out: dict[str, list[Item]] = {}
    for name in SPLITS:
        once: dict[str, Item] = {}
        for pair in pairs[name]:
            item = {"prompt": pair["prompt"], "response": pair["chosen"], "source": pair["source"], "row": pair["row"]}
            once.setdefault(f"{prompt_key(pair['prompt'])} {pair['chosen']}", item)
        out[name] = list(once.values())
    return out


def distinct_prompts(pairs: Iterable[Item]) -> list[Item]:
    """The prompts of `pairs`, each once, in the order of their first pair, with its category."""
    out: dict[str, Item] = {}
    for pair in pairs:
        out.setdefault(prompt_key(pair["prompt"]), {"prompt": pair["prompt"], "category": pair["category"]})
    return list(out.values())


def _judge(
    data: DataConfig, pair_rows: Sequence[Row], demonstration_rows: Sequence[Row], kept: "pd.DataFrame"
) -> tuple[list[dict[str, Any]], Any]:
    """Every check's outcome, and the context that knows them."""
    from data_contracts import suites

    contract = [suites.Suite("pair_rows", row_frame(pair_rows), suites.row_checks(data.tolerated_share, pairs=True))]
    if demonstration_rows:
        checks = suites.row_checks(data.tolerated_share, pairs=False)
        contract.append(suites.Suite("demonstration_rows", row_frame(demonstration_rows), checks))
    contract.append(suites.Suite("kept_pairs", kept, suites.pair_checks(kept)))
    context = suites.context()
    return [outcome for suite in contract for outcome in suites.judge(context, suite)], context


def _write(
    artifact: Path,
    pairs: Mapping[str, Sequence[Item]],
    demonstrations: Mapping[str, Sequence[Item]],
    prompts: Mapping[str, Sequence[Item]],
) -> None:
    heldout = sorted([*demonstrations["calibration"], *demonstrations["test"]], key=lambda item: item["row"])
    write_rows(artifact / "demonstrations.train.jsonl", demonstrations["train"])
    write_rows(artifact / "demonstrations.heldout.jsonl", heldout)
    for name in SPLITS:
        write_rows(artifact / f"pairs.{name}.jsonl", pairs[name])
        write_rows(artifact / f"prompts.{name}.jsonl", prompts[name])


def write_quarantine(path: Path, rows: Sequence[Row]) -> None:
    """The rows that were kept out, one JSON object a line, in ASCII: they may hold what UTF-8 can't."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="ascii") as out:
        for row in rows:
            reasons = [problem.text.encode("ascii", "backslashreplace").decode() for problem in row.problems]
            kept_out = QuarantinedRow(file=row.source, row=row.number, reasons=reasons, data=row.data)
            out.write(_line(kept_out) + "\n")


def _line(row: QuarantinedRow) -> str:
    """`row` as JSON; what JSON doesn't know (dates and bytes of a Parquet file) as text."""
    return json.dumps({name: getattr(row, name) for name in type(row).model_fields}, sort_keys=True, default=str)


def annotator_agreement(rows: Sequence[Row]) -> float | None:
    """Fleiss' kappa of all readable votes, also those on ties and on pairs quarantined for their texts; None without.

    Each pair counts in both orders: which response stands first means nothing, and with the winner always first chance
    agreement would be overstated.
    """
    ballots = [row.ballot for row in rows if row.ballot]
    kappa = fleiss_kappa([*ballots, *((second, first, equal) for first, second, equal in ballots)] or [[0, 0, 0]])
    return None if math.isnan(kappa) else kappa


def _show(
    context: Any,
    folder: Path,
    checks: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Path],
    metrics: Mapping[str, float],
) -> None:
    from data_contracts.data_docs import write_data_docs

    simulated = "the support desk's generator (simulated)"
    otherwise = {
        "preferences": simulated,
        "demonstrations": "chosen responses" if "preferences" in inputs else simulated,
    }
    sources = {name: str(inputs.get(name, instead)) for name, instead in otherwise.items()}
    counts = {"pairs kept": f"{metrics['data/pairs']:.0f}", "rows quarantined": f"{metrics['data/quarantined']:.0f}"}
    write_data_docs(context, folder, checks, sources | counts)
