"""MLflow: a parent run for a pipeline run, a child run for a stage. What fails here is said and fails nothing."""

import functools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tasks import gate_report
from tasks.lineage import Lineage, log_attachments
from tasks.mlflow_client import connect, experiment, tracking_uri
from tasks.process import is_alive, this_process
from tasks.result import StageResult
from tasks.spool import Point, Ship, ship_file
from tasks.status import list_runs, load_status

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 2
"""Failed calls in a row after which this process stops trying: each may cost seconds."""

TABLE_ROWS = 200
TABLES = ("samples.jsonl", "evaluation.jsonl")
"""Files of an artifact that are shown as tables."""

_ENDED = {"failed": "FAILED", "gate_failed": "FAILED", "interrupted": "KILLED"}

P = ParamSpec("P")
R = TypeVar("R")


def _never_fails(
    method: "Callable[Concatenate[Tracker, P], R]",
) -> "Callable[Concatenate[Tracker, P], R | None]":
    """Whatever MLflow raises is said; the call then gives None. After some failures in a row nothing is tried."""

    @functools.wraps(method)
    def guarded(self: "Tracker", *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.failures >= GIVE_UP_AFTER:
            return None
        try:
            result = method(self, *args, **kwargs)
        except Exception as error:  # any store, any transport: the run goes on, and this is said
            self.failures += 1
            logger.debug("MLflow", exc_info=True)
            logger.warning("MLflow, %s: %s: %s", method.__name__, type(error).__name__, _first_line(error))
            if self.failures >= GIVE_UP_AFTER:
                logger.warning("MLflow is left alone for the rest of this run; metrics by step stay in %s", self.home)
            return None
        self.failures = 0
        return result

    return guarded


class Tracker:
    """Records one pipeline run. Every public call is safe while MLflow is down."""

    def __init__(self, home: Path, project: str, run: str) -> None:
        self.home = home
        self.project = project
        self.run = run
        self.failures = 0
        self.parent: str | None = None
        self._client: Any = None
        self._experiment = ""
        self._lineage: Any = None

    @_never_fails
    def open(self, profile: str, config: Mapping[str, Any], existing: str | None = None) -> str:
        """Begin (or take up) the parent run; runs of processes that died are ended as KILLED. Returns its id."""
        self._client = connect(self.home)
        self._experiment = experiment(self._client, self.home, self.project)
        self._lineage = Lineage(self._client, self._experiment, self.project)
        self._mend()
        self._replay()
        if existing is not None:
            self._client.update_run(existing, status="RUNNING")
            self.parent = existing
            return existing
        tags = {"tether.run": self.run, "tether.profile": profile, **self._process_tag()}
        made = self._client.create_run(self._experiment, run_name=self.run, tags=tags)
        self.parent = made.info.run_id
        self._params(self.parent, config)
        self._client.log_dict(self.parent, dict(config), "config.json")
        return made.info.run_id

    @_never_fails
    def begin_stage(self, stage: str, existing: str | None = None) -> str | None:
        """Begin (or take up) a stage's child run. Returns its id."""
        if self.parent is None:
            return None
        if existing is not None:
            self._client.update_run(existing, status="RUNNING")
            return existing
        tags = {
            "mlflow.parentRunId": self.parent,
            "tether.run": self.run,
            "tether.stage": stage,
            **self._process_tag(),
        }
        return self._client.create_run(self._experiment, run_name=stage, tags=tags).info.run_id

    def address(self, run: str) -> str | None:
        """Where a person finds the run, if MLflow is a server (a database has no page of its own)."""
        uri = tracking_uri(self.home)
        return f"{uri.rstrip('/')}/{self._lineage.run_link(run)}" if uri.startswith("http") and self._lineage else None

    def shipper(self, child: str) -> Ship:
        """What a spool hands its points to."""

        def ship(points: list[Point]) -> None:
            from mlflow.entities import Metric

            metrics = [
                Metric(name, value, point["time"], point["step"])
                for point in points
                for name, value in point["metrics"].items()
            ]
            for chunk in _chunks(metrics, 1000):
                self._client.log_batch(child, metrics=chunk)

        return ship

    @_never_fails
    def record(self, child: str, result: StageResult, step: int, attachments: Mapping[str, Path]) -> None:
        """Write down a stage that is done: params, final metrics, lineage, gates, tables, plots.

        Args:
            child: the stage's run.
            result: what came out; on a hit no table or plot again, but a link to the run that has them.
            step: where final metrics stand: after the last step of the curves.
            attachments: files by name (empty on a hit).
        """
        computed_by = self._computing_run(result) if result.cached else None
        model = self._lineage.output_model(result, computed_by or child)
        rows = self._lineage.link_inputs(result, child)
        if model is not None:
            self._lineage.link_output(child, model)
        self._params(child, result.record.job)
        self._metrics(child, result, step, model)
        self._gates(child, result)
        log_attachments(self._client, child, attachments)
        if not result.cached:
            self._tables(child, result)
        note = self._lineage.table(result, model, rows)
        if result.cached:
            source = f"[that run]({self._lineage.run_link(computed_by)})" if computed_by else "a run not in this store"
            note = f"From the cache: computed by `{result.record.run}`, {source}.\n\n{note}"
        self._tags(child, result, note, computed_by)
        if result.stage.final:
            self._register(result, model, computed_by or child)

    @_never_fails
    def end_stage(self, child: str, state: str) -> None:
        """End a stage's run in one of our states."""
        self._client.set_tag(child, "tether.state", state)
        self._client.set_terminated(child, _ENDED.get(state, "FINISHED"))

    @_never_fails
    def close(self, state: str, stages: Iterable[Mapping[str, Any]]) -> None:
        """End the parent run with a table of its stages."""
        if self.parent is None:
            return
        lines = ["| stage | state | artifact |", "|---|---|---|"]
        for stage in stages:
            run = stage["mlflow_run"]
            name = f"[{stage['name']}]({self._lineage.run_link(run)})" if run else stage["name"]
            lines.append(f"| {name} | {stage['state']} | `{(stage['digest'] or '')[:16]}` |")
        self._set_tags(self.parent, {"tether.state": state, "mlflow.note.content": "\n".join(lines)})
        self._client.set_terminated(self.parent, _ENDED.get(state, "FINISHED"))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _process_tag(self) -> dict[str, str]:
        return {"tether.process": json.dumps(this_process())}

    def _mend(self) -> None:
        """MLflow leaves a killed run RUNNING for ever."""
        for run in self._client.search_runs([self._experiment], "attributes.status = 'RUNNING'", max_results=200):
            process = run.data.tags.get("tether.process")
            if process and not is_alive(json.loads(process)):
                self._client.set_terminated(run.info.run_id, "KILLED")

    def _replay(self) -> None:
        """Ship the points that earlier runs, done or dead, left in their spools while MLflow was away."""
        for run in list_runs(self.home):
            status = load_status(self.home, run)
            if run == self.run or status["state"] == "running":
                continue
            for stage in status["stages"]:
                path = self.home / "runs" / run / "metrics" / f"{stage['name']}.jsonl"
                if stage["mlflow_run"] and ship_file(path, self.shipper(stage["mlflow_run"])):
                    logger.info("points of %s of run %s have reached MLflow now", stage["name"], run)

    def _computing_run(self, result: StageResult) -> str | None:
        found = self._client.search_runs(
            [self._experiment],
            f"tags.`tether.key.{result.stage.name}` = '{result.key}' and tags.cache_hit = 'false'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return found[0].info.run_id if found else None

    def _params(self, run: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:6000]) for name, value in flatten(config).items()]
        for chunk in _chunks(params, 100):
            self._client.log_batch(run, params=chunk)

    def _metrics(self, child: str, result: StageResult, step: int, model: str | None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        data = result.lineage.get("data")
        about = {"model_id": model, "dataset_name": "data", "dataset_digest": data[:32]} if model and data else {}
        finals = [Metric(name, value, now, step, **about) for name, value in result.metrics.items()]
        self._client.log_batch(child, metrics=finals)
        # On the parent too, so that pipeline runs can be compared in one table.
        self._client.log_batch(
            self.parent, metrics=[Metric(name, value, now, 0) for name, value in result.metrics.items()]
        )

    def _gates(self, child: str, result: StageResult) -> None:
        if not result.verdicts:
            return
        verdicts = [verdict.model_dump(mode="json") for verdict in result.verdicts]
        self._client.log_text(child, json.dumps(verdicts, indent=1), "gates.json")
        self._client.log_text(child, gate_report.markdown(result.verdicts), "gates.md")

    def _tables(self, child: str, result: StageResult) -> None:
        """What `log_table` writes, without the pandas it goes through."""
        shown = []
        for name in TABLES:
            path = result.path / name
            if path.is_file():
                rows = [json.loads(line) for line in path.read_text().splitlines()[:TABLE_ROWS]]
                columns = list(dict.fromkeys(key for row in rows for key in row))
                table = {"columns": columns, "data": [[_cell(row.get(column)) for column in columns] for row in rows]}
                shown.append({"path": f"{path.stem}.json", "type": "table"})
                self._client.log_text(child, json.dumps(table), f"{path.stem}.json")
        if shown:
            self._client.set_tag(child, "mlflow.loggedArtifacts", json.dumps(shown))

    def _tags(self, child: str, result: StageResult, note: str, computed_by: str | None) -> None:
        tags = {
            f"tether.key.{result.stage.name}": result.key,
            f"tether.digest.{result.stage.name}": result.digest,
            "cache_hit": str(result.cached).lower(),
            "mlflow.note.content": note,
            **{f"lineage.{name}_digest": digest for name, digest in result.lineage.items()},
        }
        if result.cached:
            tags |= {"cached_from": result.record.run, "cached_from_run": computed_by or ""}
        waived = {v.name: {"user": v.user, "reason": v.reason} for v in result.verdicts if v.waived}
        if waived:
            tags["tether.waivers"] = json.dumps(waived)
        self._set_tags(child, tags)

    def _set_tags(self, run: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(run, tags=[RunTag(name, value) for name, value in tags.items()])

    def _register(self, result: StageResult, model: str | None, run: str) -> None:
        """Versions only of what its gates let through; the policy is promoted by human_eval's alone."""
        if any(verdict.stops for verdict in result.verdicts):
            return
        if model is not None:
            self._lineage.register(result, model, run, "candidate")
        elif result.name == "human_eval" and not any(verdict.waived for verdict in result.verdicts):
            self._lineage.promote(result)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _cell(value: Any) -> Any:
    """A list of chat messages as text; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
        return "\n".join(f"{each.get('role', '')}: {each['content']}" for each in value)
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _chunks(items: list[Any], size: int) -> Iterable[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
