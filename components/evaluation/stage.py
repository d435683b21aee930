"""The stage `evaluation`: the policy against the SFT model on tasks and probes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from components.base.jsonl import write_json
from components.base.observe import Observe
from components.evaluation.comparison import (
    Measured,
    PairedResult,
    beyond,
    compare_all,
    gate_of,
    read_probes,
    read_tasks,
)
from components.evaluation.config import COMPARISONS, EvaluationJob


def run(job: EvaluationJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Compare the results of `inputs`: `sft_tasks` and `policy_tasks`, `sft_probes` and `policy_probes`, or one pair.

    `artifact/evaluation.json` is a list of `comparison.PairedResult`, the smallest distance between bound and margin
    first.

    Raises:
        CheckFailed: the two models were not measured on the same documents.
    """
    sides: dict[str, list[Measured]] = {"sft": [], "policy": []}
    for side, measured in sides.items():
        for kind, read in (("tasks", read_tasks), ("probes", read_probes)):
            if (folder := inputs.get(f"{side}_{kind}")) is not None:
                measured += read(folder)
    rows = compare_all(sides["sft"], sides["policy"], job.evaluation)
    write_json(out / "artifact" / COMPARISONS, rows)
    observe(1, {}, total=1)
    return _metrics(rows)


def _metrics(rows: Sequence[PairedResult]) -> dict[str, float]:
    """Return each comparison's numbers, and for each gate the worst interval of difference minus margin."""
    metrics: dict[str, float] = {}
    for row in rows:  # the tightest first, so that the first of a gate is its worst
        name = f"{row['kind']}_from/{row['name']}"
        for field in ("sft", "policy", "difference", "high"):
            if (value := row[field]) is not None:
                metrics[f"evaluation/{field}_of_{name}"] = value
        gate = gate_of(row["kind"], row["name"])
        if f"evaluation/{gate}" not in metrics:
            metrics |= beyond(row).metrics(f"evaluation/{gate}")
    return metrics
