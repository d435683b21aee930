"""A run's state as one JSON file, `runs/<run>/run.json`, replaced in one step at every change."""

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.errors import TetherError, UserError
from components.files import temporary_beside
from components.gates import Verdict
from components.process import is_alive, this_process
from tasks.journal import Sent

WORST_FIRST = (
    "failed",
    "gate_failed",
    "interrupted",
    "running",
    "awaiting_labels",
    "waived",
    "passed",
    "cached",
    "not_run",
)
"""States by how bad they are; a run's state is the worst of its stages'."""


def worst(states: Iterable[str]) -> str:
    """The worst of some states (`not_run` of none)."""
    return min(states, key=WORST_FIRST.index, default="not_run")


class RunStatus:
    """The status file of the run that this process computes."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self.folder = folder
        self._document = document
        self._lock = threading.Lock()

    @classmethod
    def start(
        cls, folder: Path, run: str, profile: str, stages: Sequence[str], origin: Mapping[str, str] | None = None
    ) -> "RunStatus":
        """Begin a new run: every stage `not_run`. `origin` says what began it: `flow_run`, `from` and `stage`."""
        document = {
            "run": run,
            "profile": profile,
            "started": _now(),
            "finished": None,
            "process": this_process(),
            "origin": dict(origin or {}),
            "stages": [_fresh(name) for name in stages],
        }
        status = cls(folder, document)
        folder.mkdir(parents=True, exist_ok=True)
        status._write()
        return status

    @classmethod
    def resume(cls, folder: Path) -> "RunStatus":
        """Take up a run that ended (to score people's labels), under this process."""
        status = cls(folder, {**_read(folder), "finished": None, "process": this_process()})
        status._write()
        return status

    @property
    def state(self) -> str:
        """The run's own state so far."""
        return worst(stage["state"] for stage in self._document["stages"])

    def stage(self, name: str) -> dict[str, Any]:
        """A copy of one stage's entry."""
        return dict(self._entry(name))

    def stages(self) -> list[dict[str, Any]]:
        """Copies of every stage's entry, in order."""
        return [dict(stage) for stage in self._document["stages"]]

    def update(self, name: str, **fields: Any) -> None:
        """Change fields of one stage's entry; the file is replaced."""
        with self._lock:
            self._entry(name).update(fields)
            self._write()

    def finish(self) -> str:
        """End the run; a stage still `running` was interrupted. Returns the run's state."""
        with self._lock:
            for stage in self._document["stages"]:
                if stage["state"] == "running":
                    stage["state"] = "interrupted"
            self._document["finished"] = _now()
            self._write()
        return self.state

    def _entry(self, name: str) -> dict[str, Any]:
        for stage in self._document["stages"]:
            if stage["name"] == name:
                return stage
        raise TetherError(f"this run has no stage {name}")

    def _write(self) -> None:
        self._document["updated"] = _now()
        target = self.folder / "run.json"
        temporary = temporary_beside(target)
        temporary.write_text(json.dumps(self._document, indent=1, allow_nan=False))
        os.replace(temporary, target)


def load_status(home: Path, run_id: str | None = None) -> dict[str, Any]:
    """One run's status, in exactly the fields that `tether status --json` prints.

    A run whose process died reads as `interrupted`; `mlflow_run` is None until MLflow has the stage.

    Args:
        home: the `TETHER_HOME`.
        run_id: a run; None for the newest.

    Raises:
        UserError: there is no such run.
    """
    folder = _folder(home, run_id)
    return _shown(_read(folder), Sent.load(folder).stages)


def load_statuses(home: Path) -> list[dict[str, Any]]:
    """Every run's status as `load_status` gives it, newest first, but that MLflow's ids are not looked up."""
    documents = [_read(path.parent) for path in (home / "runs").glob("*/run.json")]
    return [_shown(each, {}) for each in sorted(documents, key=lambda each: each["started"], reverse=True)]


def _shown(document: Mapping[str, Any], in_mlflow: Mapping[str, str]) -> dict[str, Any]:
    dead = document["finished"] is None and not is_alive(document["process"])
    running = document["finished"] is None and not dead
    stages = []
    for stage in document["stages"]:
        state = "interrupted" if dead and stage["state"] == "running" else stage["state"]
        seconds = stage["seconds"]
        if state == "running" and stage["began"] is not None:
            seconds += time.time() - stage["began"]
        mlflow_run = in_mlflow.get(stage["name"], stage.get("mlflow_run"))
        shown = {**stage, "state": state, "seconds": round(seconds, 3), "mlflow_run": mlflow_run}
        stages.append({name: shown[name] for name in _STAGE_FIELDS})
    extra = ["interrupted"] if dead else ["running"] if running else []
    end = _seconds(_now() if running else document["finished"] or document["updated"])
    return {
        "run": document["run"],
        "profile": document["profile"],
        "state": worst([*extra, *(stage["state"] for stage in stages)]),
        "seconds": round(end - _seconds(document["started"]), 3),
        "stages": stages,
    }


def list_runs(home: Path) -> list[str]:
    """Every run's id, newest first."""
    folders = [path.parent for path in (home / "runs").glob("*/run.json")]
    return [folder.name for folder in sorted(folders, key=lambda folder: _read(folder)["started"], reverse=True)]


def load_explanations(home: Path, run_id: str | None = None) -> dict[str, Any]:
    """Why each stage of a run was computed or not, as `tether explain --json` prints it.

    Returns:
        `{run, origin, stages: [{name, state, explained}]}`; `explained` goes from (sub-)stage to what
        `tasks.explanation` made, and is empty for a stage that was not looked up.

    Raises:
        UserError: there is no such run.
    """
    document = _read(_folder(home, run_id))
    states = {stage["name"]: stage["state"] for stage in load_status(home, document["run"])["stages"]}
    stages = [
        {"name": stage["name"], "state": states[stage["name"]], "explained": stage.get("explained", {})}
        for stage in document["stages"]
    ]
    return {"run": document["run"], "origin": document.get("origin", {}), "stages": stages}


def run_of_flow(home: Path, flow_run: str) -> str | None:
    """The run that a Prefect flow run began, if it is tried again; None at its first try."""
    return next(
        (run for run in list_runs(home) if load_explanations(home, run)["origin"].get("flow_run") == flow_run), None
    )


def verdict_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as the status shows them; a gate that is off has threshold null."""
    names = ("name", "metric", "value", "op", "threshold", "passed", "waived")
    return [{name: value for name, value in each.model_dump(mode="json").items() if name in names} for each in verdicts]


def metrics_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON can hold them: what isn't finite is null."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


_STAGE_FIELDS = ("name", "state", "seconds", "cached", "key", "digest", "mlflow_run", "metrics", "gates")


def _fresh(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": "not_run",
        "seconds": 0.0,
        "began": None,
        "cached": False,
        "key": None,
        "digest": None,
        "metrics": {},
        "gates": [],
        "explained": {},
    }


ENTRY = tuple(_fresh(""))
"""The fields of a stage in run.json."""


def _folder(home: Path, run_id: str | None) -> Path:
    if run_id is None:
        runs = list_runs(home)
        if not runs:
            raise UserError(f"there is no run in {home / 'runs'} yet; start one with `tether run demo`.")
        run_id = runs[0]
    folder = home / "runs" / run_id
    if "/" in run_id or run_id.startswith(".") or not (folder / "run.json").is_file():
        raise UserError(f"there is no run {run_id} in {home / 'runs'}.")
    return folder


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
