"""Read what the report shows of the evaluation: each comparison, and prompts on which only the policy fails."""

from collections.abc import Iterator
from typing import NamedTuple

from components.base.hashing import canonical_json
from components.evaluation.config import COMPARISONS, ITEM_FIELDS, RESULTS, Kind
from components.evaluation.probe_prompts import LabelAgreement
from flows.reports.run_facts import Document, RunFacts, on_the_sheet

FAILURES = 3
"""The largest number of failures that are shown of a task or a probe."""


class Evaluated(NamedTuple):
    """A task or a probe with what both models made of it."""

    row: Document
    """The row of `evaluation.json` (`components.evaluation.comparison.PairedResult`)."""
    worse: int | None
    """Number of documents or prompts on which the policy is worse than SFT; None if the store has lost the items."""
    better: int | None
    failures: list[tuple[Document, Document]]
    """SFT's row of `items.jsonl` or `responses.jsonl` and the policy's, the largest falls first."""
    judge: dict[str, float | None]
    """How a probe's judge agrees with people (`LabelAgreement`); all None without a judge or labels."""


def evaluation_facts(facts: RunFacts) -> list[Evaluated]:
    """Return the comparisons of a run's evaluation, the tightest first; empty if there is no result.

    Prompts that people judge now are not shown, as in the samples.
    """
    if "evaluation" not in [stage.name for stage in facts.stages]:
        return []
    stage = facts.stage("evaluation")
    scores = (stage.document(RESULTS, "evaluation.sft_tasks") or {}).get("tasks", [])
    signs = {score["task"]: 1 if score["higher_is_better"] else -1 for score in scores}
    hidden = on_the_sheet(facts.stage("human_eval"))

    def falls(kind: Kind, name: str) -> Iterator[tuple[float, tuple[Document, Document]]]:
        file, _, value = ITEM_FIELDS[kind]
        sides = (stage.rows(file, f"evaluation.{side}_{kind}s") for side in ("sft", "policy"))
        sign = signs.get(name, 1) if kind == "task" else -1
        for sft, policy in zip(*sides, strict=False):  # the store may have lost one
            if sft[kind] == name:
                yield sign * (sft[value] - policy[value]), (sft, policy)

    comparisons = []
    for row in stage.document(COMPARISONS) or []:
        ordered = sorted(falls(row["kind"], row["name"]), key=lambda pair: -pair[0])
        alone = [pair for fall, pair in ordered if fall > 0 and canonical_json(pair[1]["prompt"]) not in hidden]
        worse, better = (sum(sign * fall > 0 for fall, _ in ordered) if ordered else None for sign in (1, -1))
        name = f"evaluation/judge_{{}}_of_{row['kind']}_from/{row['name']}".format
        judge = {field: stage.metrics.get(name(field)) for field in LabelAgreement._fields}
        comparisons.append(Evaluated(row, worse, better, alone[:FAILURES], judge))
    return comparisons
