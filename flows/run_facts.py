"""What there is to say of a run, read from what it stored: the facts of its report, as plain values.

Nothing here computes a number anew: a fact that no status, record or artifact holds is None, and the page says so.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.artifacts import ArtifactStore, Record
from components.canonical import digest_json
from components.gates import GATES
from flows.bases import run_values
from flows.config import default_values
from flows.report import outcome, rule
from tasks import explanation, journal
from tasks.recording import flatten
from tasks.spool import curves, points_file, read_points
from tasks.status import load_explanations, load_status

Facts = dict[str, Any]
Curve = Sequence[tuple[float, float]]

SAMPLES = 6
"""Pairs of responses that are shown as they come, beside those that are picked out."""
EXAMPLES = 5
"""Quarantined rows that are shown."""


@dataclass(frozen=True)
class Taken:
    """A stage of a run, with the record and the files of what it took."""

    home: Path
    run: str
    stage: Mapping[str, Any]
    """Its entry in the run's status."""
    store: ArtifactStore
    record: Record | None
    """None where it has no artifact, or where the store has lost its record."""

    @property
    def name(self) -> str:
        """The stage's."""
        return str(self.stage["name"])

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Final metrics; None for one that isn't finite."""
        return self.stage["metrics"]

    def text(self, name: str) -> str | None:
        """A file of the artifact; None where there is none, or where it is damaged."""
        path = self.store.file(self.record, name) if self.record is not None else None
        return path.read_text(encoding="utf-8") if path is not None else None

    def document(self, name: str) -> Any:
        """A JSON file of the artifact; None as `text`."""
        text = self.text(name)
        return None if text is None else json.loads(text)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file of the artifact; none as `text`."""
        return [json.loads(line) for line in (self.text(name) or "").splitlines()]

    def curves(self) -> dict[str, Curve]:
        """Metric name to (step, value) pairs, those of the run that computed it; empty where nothing has them."""
        found = curves(read_points(self._points()))
        return {name: [(x, y) for x, y in curve if math.isfinite(y)] for name, curve in found.items()}

    def _points(self) -> Path:
        attached = self.store.attachment(self.record, "points.jsonl") if self.record is not None else None
        by = self.record.run if self.record is not None else self.run
        return attached or points_file(self.home / "runs" / by, self.name)


def run_facts(home: Path, run: str | None = None) -> Facts:
    """All that the report of a run (None: the newest) says, in the order in which it says it.

    Raises:
        UserError: there is no such run.
    """
    status = load_status(home, run)
    run = status["run"]
    folder, store = home / "runs" / run, ArtifactStore(home)
    values = run_values(home, run)
    told = load_explanations(home, run)
    taken = {stage["name"]: Taken(home, run, stage, store, _record(store, stage)) for stage in status["stages"]}
    reasons = {stage["name"]: stage["explained"] for stage in told["stages"]}
    started = json.loads((folder / "run.json").read_text(encoding="utf-8"))["started"]
    return {
        **{name: status[name] for name in ("run", "profile", "state", "seconds")},
        "started": started,
        "origin": told["origin"],
        "project": values.get("project"),
        "seed": values.get("seed"),
        "simulated": values["data"]["preferences"] is None,
        "stages": [_stage(each, reasons[name]) for name, each in taken.items()],
        "gates": _gates(folder, taken.values()),
        "data": _data(taken["validate"], values),
        "sft": _training(taken["sft"]),
        "reward": _reward(taken["reward"]),
        "ppo": _ppo(taken["ppo"], values),
        "human_eval": _human_eval(taken["human_eval"]),
        "config": _config(values, status["profile"]),
        "environment": [_environment(each) for each in taken.values() if each.record is not None],
    }


def _record(store: ArtifactStore, stage: Mapping[str, Any]) -> Record | None:
    """The record that a run took for a stage, though the same key may have been computed to other bytes since."""
    found = store.published(stage["key"]) if stage["key"] and stage["digest"] else []
    return next((record for record in found if record.digest == stage["digest"]), None)


def _stage(taken: Taken, explained: Mapping[str, Any]) -> Facts:
    """A stage for the pipeline's picture; `by` is the run that computed it, `why` a line for each of its steps."""
    judged = [outcome(gate) for gate in taken.stage["gates"]]
    return {
        **{name: taken.stage[name] for name in ("name", "state", "seconds", "cached", "digest", "metrics")},
        "by": taken.record.run if taken.record is not None else None,
        "computed_seconds": taken.record.seconds if taken.record is not None else None,
        "why": {name: explanation.in_a_line(each) for name, each in explained.items()},
        "judged": {word: judged.count(word) for word in ("PASS", "WAIVED", "WARN", "FAIL") if word in judged},
    }


def _gates(folder: Path, taken: Iterable[Taken]) -> list[Facts]:
    """Every gate as it was judged, and of a waived one who waived it and why."""
    waivers = {each.gate: each for each in journal.waivers(folder)}
    found = []
    for stage in taken:
        for gate in stage.stage["gates"]:
            known, waiver = GATES.get(gate["name"]), waivers.get(gate["name"]) if gate["waived"] else None
            within = known.or_within if known is not None and gate["threshold"] is not None else None
            found.append(
                {
                    **{name: gate[name] for name in ("name", "metric", "value")},
                    "stage": stage.name,
                    "outcome": outcome(gate),
                    "rule": rule(gate),
                    "or_within": {"metric": within, "value": stage.metrics.get(within)} if within else None,
                    "description": known.description if known is not None else "",
                    "user": waiver.user if waiver is not None else None,
                    "reason": waiver.reason if waiver is not None else None,
                }
            )
    return found


def _data(taken: Taken, values: Mapping[str, Any]) -> Facts:
    """What was read, what was kept out and why, and how it was split."""
    checks = [_check(each) for each in taken.document("report.json") or ()]
    record, config = taken.record, values["data"]
    digests = record.inputs if record is not None else {}
    named = {name: config.get(name) for name in ("preferences", "demonstrations", "prompts")}
    lines = (taken.text("quarantine.jsonl") or "").splitlines()
    return {
        "sources": [
            {"name": name, "path": path, "digest": digests.get(name)}
            for name, path in named.items()
            if path is not None or name in digests
        ],
        "generated": config.get("generator") if config["preferences"] is None else None,
        "metrics": taken.metrics,
        "checks": checks,
        "quarantined": len(lines) if taken.record is not None else None,
        "examples": [json.loads(line) for line in lines[:EXAMPLES]],
    }


def _check(check: Mapping[str, Any]) -> Facts:
    """A check of the contract's report; an earlier version called its source, name and rows otherwise."""
    fields = ("name", "source", "description", "severity", "passed", "value", "threshold", "rows", "row_numbers")
    earlier = {"name": check.get("check"), "source": check["suite"], "row_numbers": check.get("first_rows", [])}
    return {name: check.get(name, earlier.get(name)) for name in fields}


def _training(taken: Taken) -> Facts:
    return {"metrics": taken.metrics, "curves": taken.curves(), "by": _other_run(taken)}


def _reward(taken: Taken) -> Facts:
    """Accuracy and calibration on held-out pairs: the artifact's bins and slices, and what raises scores by itself."""
    calibration = taken.document("calibration.json") or {}
    slices = ("kind", "slice", "pairs", "accuracy", "accuracy_low", "ece", "ece_null_joint")
    return {
        **_training(taken),
        "bins": calibration.get("bins", []),
        "slices": [{name: each.get(name) for name in slices} for each in calibration.get("slices", ())],
        "probes": (taken.document("robustness.json") or {}).get("probes", {}),
    }


def _ppo(taken: Taken, values: Mapping[str, Any]) -> Facts:
    """The course of training, its tether, and responses beside those of SFT."""
    config = taken.record.job["ppo"] if taken.record is not None and "ppo" in taken.record.job else values["ppo"]
    found: Mapping[str, Curve] = taken.curves()
    if not found:  # the artifact holds the course too, if not its speed
        rows = taken.rows("history.jsonl")
        found = curves({"step": row.pop("update"), "metrics": row} for row in rows)
    threshold = next((gate["threshold"] for gate in taken.stage["gates"] if gate["name"] == "ppo.kl"), None)
    return {
        "metrics": taken.metrics,
        "curves": found,
        "by": _other_run(taken),
        "kl": {name: config["kl"].get(name) for name in ("control", "coefficient", "target", "unit", "stop_above")},
        "bound": threshold,
        **_samples(taken.rows("evaluation.jsonl")),
    }


def _samples(rows: Sequence[Mapping[str, Any]]) -> Facts:
    """Of the evaluation's rows the one farthest from SFT, the one that the reward model likes best, and the first few.

    `{evaluated, samples}`; a sample is a row with its `number` (from 1) and `picked`, why it is shown.
    """
    picked: dict[int, list[str]] = {}
    for why, name in (("the worst KL", "kl"), ("the highest reward", "score")):
        finite = [index for index, row in enumerate(rows) if math.isfinite(row["policy"][name])]
        if finite:
            picked.setdefault(max(finite, key=lambda index: rows[index]["policy"][name]), []).append(why)
    first = [index for index in range(len(rows)) if index not in picked][:SAMPLES]
    return {
        "evaluated": len(rows),
        "samples": [{**rows[i], "number": i + 1, "picked": picked.get(i, [])} for i in (*picked, *first)],
    }


def _human_eval(taken: Taken) -> Facts:
    """The result of the comparison; where labels are awaited, of how many items."""
    return {
        "metrics": taken.metrics,
        "state": taken.stage["state"],
        "result": taken.document("result.json"),
        "sheet": taken.document("sheet.json"),
        "bound": next((g["threshold"] for g in taken.stage["gates"] if g["name"] == "human_eval.win_rate_low"), None),
    }


def _other_run(taken: Taken) -> str | None:
    """The run that computed the stage, if that is another one."""
    return taken.record.run if taken.record is not None and taken.record.run != taken.run else None


def _config(values: Mapping[str, Any], profile: str) -> Facts:
    """Every option by its dotted name, with the profile's value where that is another."""
    against, defaults = default_values(profile)
    plain = flatten(defaults)
    return {
        "against": against,
        "options": [
            {
                "name": name,
                "value": value,
                "default": plain.get(name),
                # The machine is resolved for every run; that is no change of somebody's.
                "changed": value != plain.get(name) and not name.startswith(("runtime.", "runners.")),
            }
            for name, value in flatten(values).items()
        ],
    }


def _environment(taken: Taken) -> Facts:
    """Where, when and by which code a stage was computed."""
    record = taken.record
    assert record is not None
    machine = {name: value for name, value in record.environment.items() if name != "code"}
    return {
        "stage": taken.name,
        "run": record.run,
        "started": record.started,
        "seconds": record.seconds,
        "seed": record.job.get("seed"),
        "code": record.environment.get("code") or {},
        "source": digest_json(record.parts["source"]) if "source" in record.parts else None,
        "machine": {**machine, **record.job.get("runtime", {})},
        "libraries": record.parts.get("libraries", {}),
        "inputs": record.inputs,
        "key": record.key,
        "digest": record.digest,
    }
