"""MLflow's side: a run's facts become a parent run for the pipeline run and a child run for each stage.

Every call may be made twice, since a kill can fall between its effect and the note that it is done: what is made is
looked for first, times are those of the facts (MLflow keeps one of two points that agree in name, time, step and
value), and params and outputs that are there already are left alone.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from components.process import is_alive
from tasks import gate_report, notes
from tasks.journal import REPORT, Done, Fact, Sent
from tasks.lineage import Lineage, log_attachments, run_link
from tasks.mlflow_client import connect, experiment
from tasks.spool import Point
from tasks.versions import Versions

TABLE_ROWS = 200
TABLES = ("samples.jsonl", "evaluation.jsonl")
"""Files of an artifact that are shown as tables."""
CARD = "model_card.md"
"""What the run of a stage that gave a model has it under."""

_ENDED = {"failed": "FAILED", "gate_failed": "FAILED", "interrupted": "KILLED"}


class Recorder:
    """Writes one run's facts into MLflow. Everything here raises what MLflow raises."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._client = connect(home)
        self._mended: set[str] = set()

    def check(self) -> None:
        """Raises where MLflow doesn't answer."""
        self._client.search_experiments(max_results=1)

    def apply(self, fact: Fact, folder: Path, sent: Sent) -> None:
        """Write one fact of the run in `folder`; new ids go into `sent`."""
        if sent.experiment is None:
            sent.project = fact["project"]
            sent.experiment = experiment(self._client, self._home, sent.project)
        self._mend(sent.experiment)
        match fact["kind"]:
            case "open":
                self._open(fact, folder, sent)
            case "begin":
                self._begin(fact, folder, sent)
            case "record":
                done = Done.model_validate(fact["done"])
                _Stage(self._client, sent, done, fact["time"]).record()
            case "card":
                if (path := folder / fact["path"]).is_file():
                    self._client.log_text(sent.stages[fact["stage"]], path.read_text(encoding="utf-8"), CARD)
            case "end":
                self._end(sent.stages[fact["stage"]], fact)
            case "close":
                self._close(fact, folder, sent)

    def ship(self, run: str, points: list[Point]) -> None:
        """Write points of a stage's run."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, point["time"], point["step"])
            for point in points
            for name, value in point["metrics"].items()
        ]
        for chunk in _chunks(metrics, 1000):
            self._client.log_batch(run, metrics=chunk)

    def _mend(self, experiment_id: str) -> None:
        """MLflow leaves a killed run RUNNING for ever."""
        if experiment_id in self._mended:
            return
        for run in self._client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=200):
            process = run.data.tags.get("tether.process")
            if process and not is_alive(json.loads(process)):
                self._client.set_terminated(run.info.run_id, "KILLED")
        self._mended.add(experiment_id)

    def _open(self, fact: Fact, folder: Path, sent: Sent) -> None:
        tags = {"tether.run": folder.name, "tether.profile": fact["profile"]}
        sent.parent = self._run(sent.parent, folder.name, tags, fact, sent)
        config = yaml.safe_load((folder / "config.yaml").read_text()) or {}
        log_params(self._client, sent.parent, config)
        self._client.log_dict(sent.parent, config, "config.json")

    def _begin(self, fact: Fact, folder: Path, sent: Sent) -> None:
        stage = fact["stage"]
        assert sent.parent is not None  # `open` comes first
        tags = {"mlflow.parentRunId": sent.parent, "tether.run": folder.name, "tether.stage": stage}
        sent.stages[stage] = self._run(sent.stages.get(stage), stage, tags, fact, sent)

    def _run(self, known: str | None, name: str, tags: dict[str, str], fact: Fact, sent: Sent) -> str:
        """The MLflow run with these tags, running: known, found or made."""
        if known is None:
            found = [run for run in self._runs(tags["tether.run"], sent) if _stage_of(run) == tags.get("tether.stage")]
            known = min((run.info.run_id for run in found), default=None)
        process = json.dumps(fact["process"])
        if known is None:
            tags = {**tags, "tether.process": process}
            made = self._client.create_run(sent.experiment, run_name=name, tags=tags, start_time=fact["time"])
            return made.info.run_id
        self._client.set_tag(known, "tether.process", process)
        self._client.update_run(known, status="RUNNING")
        return known

    def _runs(self, run: str, sent: Sent) -> list[Any]:
        return list(self._client.search_runs([sent.experiment], f"tags.`tether.run` = '{run}'", max_results=1000))

    def _end(self, run: str, fact: Fact) -> None:
        self._client.set_tag(run, "tether.state", fact["state"])
        self._client.set_terminated(run, _ENDED.get(fact["state"], "FINISHED"), end_time=fact["time"])

    def _close(self, fact: Fact, folder: Path, sent: Sent) -> None:
        """End the parent run with a table of its stages, and its report."""
        assert sent.parent is not None and sent.experiment is not None
        found = self._client.get_run(sent.parent).data
        links = {stage: run_link(sent.experiment, run) for stage, run in sent.stages.items()}
        note = notes.run_note(found.tags, found.metrics, fact["stages"], links)
        self._client.set_tag(sent.parent, "mlflow.note.content", note)
        if (page := folder / REPORT).is_file():
            self._client.log_artifact(sent.parent, str(page))
        self._end(sent.parent, fact)
        self._drop_doubles(folder.name, sent)

    def _drop_doubles(self, run: str, sent: Sent) -> None:
        """A server that hung may make a run after we had given up waiting, and had it make another."""
        ours = {sent.parent, *sent.stages.values()}
        for found in self._runs(run, sent):
            if found.info.run_id not in ours and not found.data.params and not found.data.metrics:
                self._client.delete_run(found.info.run_id)


class _Stage:
    """A stage that is done, into its run: params, final metrics, lineage, gates, tables, plots."""

    def __init__(self, client: Any, sent: Sent, done: Done, time: int) -> None:
        assert sent.experiment is not None and sent.parent is not None
        self._client = client
        self._experiment = sent.experiment
        self._parent = sent.parent
        self._run = sent.stages[done.shown]
        self._done = done
        self._time = time
        self._lineage = Lineage(client, sent.experiment, sent.project, sent.stages)
        self._versions = Versions(client)

    def record(self) -> None:
        done = self._done
        hit = done.cached and done.run != done.by  # a run that is taken up, to score labels, meets what it computed
        known = self._client.get_run(self._run).data.tags.get(f"tether.digest.{done.name}") == done.digest
        computed_by = self._computing_run() if hit else self._run
        model = self._lineage.output_model(done, computed_by or self._run)
        self._lineage.link_inputs(done, self._run, self._parent)
        if model is not None:
            self._lineage.link_output(self._run, model)
            self._lineage.link_output(self._parent, model)
        log_params(self._client, self._run, done.job)
        if hit or not known:
            self._metrics(model)
        self._gates()
        log_attachments(self._client, self._run, done.attachments)
        if not done.cached:
            self._tables()
        link = run_link(self._experiment, computed_by) if computed_by else ""
        note = notes.stage_note(done, link, self._lineage.rows(done, model))
        self._tags(note, computed_by, hit)
        if model is not None and computed_by in (self._run, None):  # a hit's model has the note of its computing
            self._client.set_logged_model_tags(model, {"mlflow.note.content": note})
        if done.final:
            self._register(model, computed_by or self._run)

    def _computing_run(self) -> str | None:
        found = self._client.search_runs(
            [self._experiment],
            f"tags.`tether.key.{self._done.name}` = '{self._done.key}' and tags.cache_hit = 'false'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return found[0].info.run_id if found else None

    def _metrics(self, model: str | None) -> None:
        """Final values: on the stage's run, as those of a model on a dataset, and on the parent."""
        from mlflow.entities import Metric

        done = self._done
        if done.shown == "human_eval":
            model = self._lineage.find_model(done.lineage["ppo"]) if "ppo" in done.lineage else None
        dataset = "sheet" if "sheet" in done.lineage else "data"
        digest = done.lineage.get(dataset)
        about = {"model_id": model, "dataset_name": dataset, "dataset_digest": digest[:32]} if model and digest else {}
        finals = [Metric(name, value, self._time, done.step, **about) for name, value in done.metrics.items()]
        self._client.log_batch(self._run, metrics=finals)
        # On the parent too, so that pipeline runs can be compared in one table.
        finals = [Metric(name, value, self._time, 0) for name, value in done.metrics.items()]
        self._client.log_batch(self._parent, metrics=finals)

    def _gates(self) -> None:
        verdicts = self._done.verdicts
        if not verdicts:
            return
        document = [verdict.model_dump(mode="json") for verdict in verdicts]
        self._client.log_text(self._run, json.dumps(document, indent=1), "gates.json")
        self._client.log_text(self._run, gate_report.markdown(verdicts), "gates.md")

    def _tables(self) -> None:
        """What `log_table` writes, without the pandas it goes through."""
        shown = []
        for name in TABLES:
            path = self._done.path / name
            if path.is_file():
                rows = [json.loads(line) for line in path.read_text().splitlines()[:TABLE_ROWS]]
                columns = list(dict.fromkeys(key for row in rows for key in row))
                table = {"columns": columns, "data": [[_cell(row.get(column)) for column in columns] for row in rows]}
                shown.append({"path": f"{path.stem}.json", "type": "table"})
                self._client.log_text(self._run, json.dumps(table), f"{path.stem}.json")
        if shown:
            self._client.set_tag(self._run, "mlflow.loggedArtifacts", json.dumps(shown))

    def _tags(self, note: str, computed_by: str | None, hit: bool) -> None:
        from mlflow.entities import RunTag

        done = self._done
        tags = {
            f"tether.key.{done.name}": done.key,
            f"tether.digest.{done.name}": done.digest,
            "cache_hit": str(hit).lower(),
            "mlflow.note.content": note,
            **{f"lineage.{name}_digest": digest for name, digest in done.lineage.items()},
            **done.code_tags(),
            "tether.libraries": json.dumps(done.libraries),
            "tether.machine": json.dumps(done.machine),
        }
        if hit:
            tags |= {"cached_from": done.run, "cached_from_run": computed_by or ""}
        if done.shown == "validate":
            tags["tether.quarantined"] = json.dumps(notes.quarantined(done))
        if waived := _waived(done):
            tags["tether.waivers"] = json.dumps(waived)
            self._client.set_tag(self._parent, "tether.waivers", json.dumps({**self._run_waivers(), **waived}))
        self._client.log_batch(self._run, tags=[RunTag(name, value) for name, value in tags.items()])

    def _register(self, model: str | None, run: str) -> None:
        """Versions only of what its gates let through; the policy is promoted by human_eval's alone."""
        done, lineage = self._done, self._lineage
        if done.shown == "human_eval":
            self._versions.judge(done, lineage.model_name("ppo"), self._run_waivers(), self._time)
        elif model is not None and not any(verdict.stops for verdict in done.verdicts):
            name = lineage.model_name(done.shown)
            self._versions.register(done, name, model, run, self._run_waivers(), self._time)

    def _run_waivers(self) -> dict[str, Any]:
        """Of the whole run so far."""
        return json.loads(self._client.get_run(self._parent).data.tags.get("tether.waivers", "{}"))


def _waived(done: Done) -> dict[str, dict[str, str]]:
    """Gate to who waived it and why."""
    return {v.name: {"user": str(v.user), "reason": str(v.reason)} for v in done.verdicts if v.waived}


def log_params(client: Any, run: str, config: Mapping[str, Any]) -> None:
    """Write nested values as params by dotted name; MLflow refuses to change one that is there, so that one stays."""
    from mlflow.entities import Param

    there = client.get_run(run).data.params
    params = [Param(name, str(value)[:6000]) for name, value in flatten(config).items() if name not in there]
    for chunk in _chunks(params, 100):
        client.log_batch(run, params=chunk)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _stage_of(run: Any) -> str | None:
    return run.data.tags.get("tether.stage")


def _cell(value: Any) -> Any:
    """A list of chat messages as text; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "content" in each for each in value):
        return "\n".join(f"{each.get('role', '')}: {each['content']}" for each in value)
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _chunks(items: list[Any], size: int) -> Iterable[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
