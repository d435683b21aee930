"""A stored run with an evaluation: a task and two probes on which the policy is worse, compared by the stage itself."""

import json
from pathlib import Path
from typing import Any

from components.base.jsonl import write_json, write_rows
from components.base.observe import unobserved
from components.evaluation.config import EvaluationConfig, EvaluationJob
from components.evaluation.stage import run as compare
from components.gates.judging import judge
from components.store.store import ArtifactStore, Record
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tasks.runs.journal import Done, write_done
from tasks.runs.status import Part, RunFile, StageStatus, load_status
from tests.stored_run import HOSTILE

SIDES = ("sft", "policy")
CONFIG = EvaluationConfig(margins={"sums": 0.9, "codes": 1.0})


def task_rows(side: str) -> list[dict[str, Any]]:
    """Ten sums: SFT has all right but the last, the policy is wrong on the first four."""
    right = [i < 9 if side == "sft" else i >= 4 for i in range(10)]
    return [
        {"task": "sums", "document": str(i), "metric": "acc", "value": float(right[i]), "prompt": f"What is {i} + 1?",
         "target": str(i + 1), "response": str(i + 1 if right[i] else i)}
        for i in range(10)
    ]  # fmt: skip


def probe_rows(side: str) -> list[dict[str, Any]]:
    """Forty harmful prompts of which the policy answers twenty, and SFT one; one prompt of the team's own."""
    violates = [i < 20 if side == "policy" else i == 39 for i in range(40)]
    rows = [
        {"probe": "harmful", "id": f"h{i}", "category": "locks", "prompt": [{"role": "user", "content": f"harm {i}"}],
         "response": f"{side} says {HOSTILE if i == 0 and side == 'policy' else i}", "violation": violates[i],
         "rule": "complies"}
        for i in range(40)
    ]  # fmt: skip
    return [*rows, rows[30] | {"probe": "codes", "id": "one", "violation": False, "rule": "clears"}]


def add_evaluation(home: Path, run: str, *changes: str) -> dict[str, Record]:
    """Put the evaluation, with its four sub-stages, into a stored run before `human_eval`; return the records."""
    store, records, work = ArtifactStore(home), dict[str, Record](), home / "evaluating"
    for side in SIDES:
        tasks, probes = (work / f"{side}_{kind}" / "artifact" for kind in ("tasks", "probes"))
        score = sum(row["value"] for row in task_rows(side)) / 10
        write_json(tasks / "tasks.json", {"harness": "0.4.13", "tasks": [
            {"task": "sums", "version": "1", "metric": "acc", "higher_is_better": True, "items": 10, "score": score}
        ]})  # fmt: skip
        write_rows(tasks / "items.jsonl", task_rows(side))
        write_rows(probes / "responses.jsonl", probe_rows(side))
    names = [f"{side}_{kind}" for kind in ("tasks", "probes") for side in SIDES]
    inputs = {name: work / name / "artifact" for name in names}
    metrics = compare(EvaluationJob(seed=0, evaluation=CONFIG), inputs, work / "evaluation", unobserved)
    folder = home / "runs" / run
    for name in (*names, "evaluation"):
        stage = name if name == "evaluation" else f"evaluation.{name}"
        fields = {
            "stage": stage, "run": run, "metrics": metrics if name == stage else {}, "seconds": 1.5, "job": {},
            "inputs": {of: records[of].digest for of in records} if name == stage else {"model": "e" * 64},
            "started": "2026-01-01T00:00:01+00:00",
        }  # fmt: skip
        key = f"{name:x<64}".replace("_", "x")
        records[name] = store.publish(key, work / name / "artifact", None, fields)
        write_done(folder, Done(
            time=len(records), record=records[name], path=store.path(records[name]), run=run, user="ada", step=0,
            verdicts=[], inputs=[], attachments={},
        ))  # fmt: skip
    gates = load_config("tiny", [parse_override(text) for text in changes]).effective_gates
    verdicts = list(judge("evaluation", metrics, gates, []))
    stage = StageStatus(
        name="evaluation", state="gate_failed" if any(v.stops for v in verdicts) else "passed", metrics=dict(metrics),
        key=records["evaluation"].key, digest=records["evaluation"].digest, gates=verdicts, seconds=1.5, started=1.0,
        parts={f"evaluation.{name}": Part(key=records[name].key, digest=records[name].digest) for name in names},
    )  # fmt: skip
    status = load_status(home, run)
    stages = [one for one in status.stages if one.name != "human_eval"]
    rest = [one for one in status.stages if one.name == "human_eval"]
    written = json.loads((folder / "run.json").read_text())
    written["stages"] = [one.model_dump(mode="json") for one in (*stages, stage, *rest)]
    RunFile.model_validate(written)
    (folder / "run.json").write_text(json.dumps(written))
    return records
