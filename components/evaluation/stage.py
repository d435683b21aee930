"""The stage `evaluation`: the policy against the SFT model on tasks and probes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from components.base.jsonl import write_json
from components.base.observe import Observe
from components.evaluation.comparison import PairedResult, beyond, compare_all, gate_of, read_measured
from components.evaluation.config import COMPARISONS, ITEM_FIELDS, EvaluationJob


def run(job: EvaluationJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Compare the results of `inputs`: `sft_tasks` and `policy_tasks`, `sft_probes` and `policy_probes`, or one pair.

    `artifact/evaluation.json` is a list of `comparison.PairedResult`, the smallest distance between bound and margin
    first.

    Raises:
        CheckFailed: the two models were not measured on the same documents.
    """
    sft, policy = (
        [one for kind in ITEM_FIELDS if f"{side}_{kind}s" in inputs
         for one in read_measured(kind, inputs[f"{side}_{kind}s"])]
        for side in ("sft", "policy")
    )  # fmt: skip
    rows = compare_all(sft, policy, job.evaluation)
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
