"""Record runs in MLflow: a run's folder becomes a parent run, with a child run for each stage.

Every call can be repeated, because a kill can happen between its effect and the note that it is done. What is created
is first looked for, times come from disk (MLflow keeps one of two points with equal name, time, step and value), and
existing params and outputs are left alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from components.base.nested import flatten
from components.gates import gate_text
from components.gates.candidacy import why_no_alias
from tasks.lineage.of_run import graph_of
from tasks.lineage.picture import draw
from tasks.runs.awaited_labels import read_progress
from tasks.runs.config import run_values
from tasks.runs.journal import REPORT, REPORT_TEXT, Done, Sent, read_done
from tasks.runs.points import points_after, points_file, read_points
from tasks.runs.samples import as_table
from tasks.runs.status import RunStatus, StageStatus, load_status
from tasks.tracking import mlflow_notes
from tasks.tracking.address import run_link
from tasks.tracking.mlflow_client import connect, experiment
from tasks.tracking.model_links import DIGEST_SHOWN, MODELS, Lineage, log_attachments, model_name
from tasks.tracking.model_versions import Versions
from tasks.tracking.registered_weights import Weights, wanted

TABLE_ROWS = 200
ITEM_ROWS = 5000
"""Most documents or prompts of a model's evaluation in a table."""
TABLES = ("samples.jsonl", "evaluation.jsonl", "worst.jsonl")
"""Files of an artifact that MLflow shows as tables."""
EVALUATION_TABLES = ("evaluation.json", "items.jsonl", "responses.jsonl")
"""Those of the stage `evaluation`. Its sub-stages share an MLflow run, so their tables have their names."""
WATCHED = "watched.json"
"""The table of the samples that a stage shows while it computes."""
WATCHED_TABLE = {"path": WATCHED, "type": "table"}
TABLES_TAG = "mlflow.loggedArtifacts"
DATA_DOCS = "data_docs/index.html"
"""The path of Data Docs among the attachments of validate."""
CARD = "model_card.md"
"""The file name of the model card in the MLflow run of the stage that trained the model."""
BATCH_POINTS = 200

FAILED_GATES_TAG = "tether.failed_gates"
"""The tag that names the failed gates of a stage or run, beside its `tether.state`."""
_ENDED = {"failed": "FAILED", "gate_failed": "FAILED", "interrupted": "KILLED"}

_ORIGIN = {"round": "round", "votes": "votes_from", "until": "until"}
"""Maps entries of a run's origin (a round of `tether iterate`, `--until`) to their tags."""


class Recorder:
    """Brings MLflow up to date with runs' folders. Every method passes on MLflow's errors."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._client = connect(home)
        self._found: list[Any] | None = None
        """The MLflow runs of the run that `synchronize` sends, once they have been searched."""
        self._models: dict[str, str] = {}
        """The LoggedModels that this call of `synchronize` has found, by digest (`Lineage`)."""

    def check(self) -> None:
        """Raise an error if MLflow does not answer."""
        self._client.search_experiments(max_results=1)

    def synchronize(self, folder: Path, over: bool) -> None:
        """Send MLflow what the run in `folder` has so far. `over`: the run has ended and its folder is complete."""
        # In this order: a stage writes its result when it ends, after all its points.
        status, done = load_status(self._home, folder.name), read_done(folder)
        sent = Sent.load(folder)
        self._found, self._models = None, {}
        if sent.experiment is None:
            if not sent.project:
                sent.project = str(run_values(self._home, folder.name).get("project", ""))
            sent.experiment = experiment(self._client, self._home, sent.project)
        if sent.parent is None:
            self._open(folder, status, sent)
        for stage in status.stages:
            if stage.started is not None:
                self._synchronize_stage(folder, status, stage, done, sent)
        if not over:
            self._set_state(folder, sent, "", "running", 0)
        elif status.state != "running" and sent.whole != status.updated:
            self._close(folder, status, done, sent)

    def send_points(self, folder: Path, stage: str, sent: Sent) -> None:
        """Send the points of a stage that MLflow lacks."""
        from mlflow.entities import Metric

        while True:
            points, end = points_after(points_file(folder, stage), sent.points.get(stage, 0), BATCH_POINTS)
            if not points:
                return
            metrics = [
                Metric(name, value, point.get("time", 0), point["step"])
                for point in points
                for name, value in point["metrics"].items()
            ]
            self._client.log_batch(sent.stages[stage], metrics=metrics)
            if any(point.get("samples") for point in points):
                table = as_table(read_points(points_file(folder, stage)))
                self._client.log_text(sent.stages[stage], table, WATCHED)
                self._client.set_tag(sent.stages[stage], TABLES_TAG, json.dumps([WATCHED_TABLE]))
            sent.points[stage] = end
            sent.save(folder)

    def _open(self, folder: Path, status: RunStatus, sent: Sent) -> None:
        started = _milliseconds(status.started)
        origin = {f"tether.{tag}": status.origin[name] for name, tag in _ORIGIN.items() if name in status.origin}
        tags = {**status.tags, "tether.profile": status.profile, **origin, **_prefect_tag(status.prefect)}
        parent = self._run(status.name or status.run, tags, started, status, sent)
        config = run_values(self._home, status.run)
        log_params(self._client, self._client.get_run(parent), config)
        self._client.log_dict(parent, config, "config.json")
        sent.parent = parent
        sent.save(folder)

    def _synchronize_stage(
        self, folder: Path, status: RunStatus, stage: StageStatus, done: Sequence[Done], sent: Sent
    ) -> None:
        if stage.name not in sent.stages:
            assert sent.parent is not None and stage.started is not None
            tags = {"mlflow.parentRunId": sent.parent, "tether.stage": stage.name}
            sent.stages[stage.name] = self._run(stage.name, tags, round(stage.started * 1000), status, sent)
            sent.save(folder)
        if stage.state == "running":
            self._set_state(folder, sent, stage.name, stage.state, 0)
        self.send_points(folder, stage.name, sent)
        ended = _milliseconds(status.finished or status.updated)
        for result in (result for result in done if result.group == stage.name):
            if sent.done.get(result.record.stage) != result.time:
                earlier = [one for one in done if one.time <= result.time]
                lineage = Lineage(self._client, sent, self._models)
                _Stage(self._client, self._home, sent, result, earlier, stage.prefect, lineage).record()
                sent.done[result.record.stage] = result.time
                sent.save(folder)
            if stage.state not in ("failed", "interrupted"):
                ended = result.time
        if stage.state != "running":
            self._set_state(folder, sent, stage.name, stage.state, ended, _failed_gates([stage]))

    def _set_state(
        self, folder: Path, sent: Sent, stage: str, state: str, time: int, failed_gates: Sequence[str] = ()
    ) -> None:
        """Set the state of a stage, or of the run itself (''), and its failed gates, if MLflow has others."""
        before, id_ = sent.states.get(stage), sent.stages[stage] if stage else sent.parent
        state_text = " ".join([state, *failed_gates])
        if state_text == before:
            return
        if state != "running":
            self._client.set_tag(id_, "tether.state", state)
            if failed_gates:
                self._client.set_tag(id_, FAILED_GATES_TAG, ", ".join(failed_gates))
            elif FAILED_GATES_TAG in self._client.get_run(id_).data.tags:  # it has been judged again
                self._client.delete_tag(id_, FAILED_GATES_TAG)
            self._client.set_terminated(id_, _ENDED.get(state, "FINISHED"), end_time=time)
        elif before is not None:
            self._client.update_run(id_, status="RUNNING")
        sent.states[stage] = state_text
        sent.save(folder)

    def _run(self, name: str, tags: dict[str, str], started: int, status: RunStatus, sent: Sent) -> str:
        if self._found is None:
            self._found = self._runs(status.run, sent)
        stage = tags.get("tether.stage")
        if run_ids := [run.info.run_id for run in self._found if run.data.tags.get("tether.stage") == stage]:
            return min(run_ids)
        tags |= {"tether.run": status.run, "mlflow.source.name": "tether", "mlflow.source.type": "LOCAL", **sent.code}
        tags |= {"mlflow.user": status.user} if status.user else {}
        return self._client.create_run(sent.experiment, run_name=name, tags=tags, start_time=started).info.run_id

    def _runs(self, run: str, sent: Sent) -> list[Any]:
        return list(self._client.search_runs([sent.experiment], f"tags.`tether.run` = '{run}'", max_results=1000))

    def _close(self, folder: Path, status: RunStatus, done: Sequence[Done], sent: Sent) -> None:
        assert sent.parent is not None and sent.experiment is not None
        log_picture(self._client, sent.parent, sent, done)
        report = path.read_text(encoding="utf-8") if (path := folder / REPORT_TEXT).is_file() else ""
        links = self._links(folder, status, done, sent)
        note = mlflow_notes.run_note(status, links, sent.parent, report)
        self._client.set_tag(sent.parent, "mlflow.note.content", note)
        for stage, card in _cards(folder, sent).items():
            self._client.log_text(sent.stages[stage], card.read_text(encoding="utf-8"), CARD)
        if (page := folder / REPORT).is_file():
            self._client.log_artifact(sent.parent, str(page))
        ended = _milliseconds(status.finished or status.updated)
        self._set_state(folder, sent, "", status.state, ended, _failed_gates(status.stages))
        ours = {sent.parent, *sent.stages.values()}
        for double in self._runs(folder.name, sent):  # a slow server created one after we had created another
            if double.info.run_id not in ours and not double.data.params and not double.data.metrics:
                self._client.delete_run(double.info.run_id)
        sent.whole = status.updated
        sent.save(folder)

    def _links(self, folder: Path, status: RunStatus, done: Sequence[Done], sent: Sent) -> dict[str, str]:
        assert sent.experiment is not None and sent.parent is not None
        report = run_link(sent.experiment, sent.parent, REPORT) if (folder / REPORT).is_file() else ""
        links = {"Report with its charts": report, "Flow run in Prefect": status.prefect}
        for validate in (result for result in done if result.record.stage == "validate"):
            links["Data Docs"] = data_docs(folder.parent, validate)
        for stage, card in _cards(folder, sent).items():
            links[f"Card of {card.stem}"] = run_link(sent.experiment, sent.stages[stage], CARD)
        progress = read_progress(folder)
        if progress and progress.address.startswith(("http://", "https://")):
            links["Review page"] = progress.address
        return links


@dataclass
class _Stage:
    """Records a finished stage in its MLflow run: params, final metrics, lineage, gates, tables and plots."""

    _client: Any
    _home: Path
    _sent: Sent
    _done: Done
    _so_far: Sequence[Done]
    """The results of the run up to this one."""
    _prefect: str
    _lineage: Lineage

    def __post_init__(self) -> None:
        assert self._sent.experiment is not None and self._sent.parent is not None
        self._experiment, self._parent = self._sent.experiment, self._sent.parent
        self._run = self._sent.stages[self._done.group]
        self._waivers = {gate: by for one in self._so_far for gate, by in one.waived.items()}

    def record(self) -> None:
        done = self._done
        record = done.record
        there = self._client.get_run(self._run)
        recorded_already = there.data.tags.get(f"tether.digest.{record.stage}") == record.digest
        computed_by = self._computing_run() if done.hit else self._run
        new = computed_by in (self._run, None)
        model = self._lineage.output_model(done, computed_by or self._run)
        self._lineage.link_inputs(done, self._run, self._parent)
        if model is not None:
            self._lineage.link_output(there, model)
            self._lineage.link_output(self._client.get_run(self._parent), model)
        log_params(self._client, there, record.job)
        if not recorded_already:
            self._metrics(model, new)
        if done.verdicts:
            document = [verdict.model_dump(mode="json") for verdict in done.verdicts]
            self._client.log_text(self._run, json.dumps(document, indent=1), "gates.json")
            self._client.log_text(self._run, gate_text.markdown(done.verdicts), "gates.md")
        log_attachments(self._client, self._run, done.attachments)
        if not done.hit:
            self._tables()
        link = run_link(self._experiment, computed_by) if computed_by else ""
        note = mlflow_notes.stage_note(done, link, self._lineage.rows(done, model), self._links(), self._run)
        self._tags(note, computed_by)
        if model is not None and new:  # a hit's model has the note of the run that computed it
            self._client.set_logged_model_tags(model, {"mlflow.note.content": note})
        if done.ends_group:
            self._register(model, computed_by or self._run)
        log_picture(self._client, self._run, self._sent, self._so_far)  # it names the version that is registered

    def _links(self) -> dict[str, str]:
        links = {"The whole run": run_link(self._experiment, self._parent), "This stage in Prefect": self._prefect}
        if self._done.group == "validate":
            links["Data Docs"] = data_docs(self._home / "runs", self._done)
        return links

    def _computing_run(self) -> str | None:
        runs = self._client.search_runs(
            [self._experiment],
            f"tags.`tether.key.{self._done.record.stage}` = '{self._done.record.key}' and tags.cache_hit = 'false'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
        return runs[0].info.run_id if runs else None

    def _metrics(self, model: str | None, new: bool) -> None:
        """Log final values on the stage's run and on the parent; `new` ones also as values of a model on a dataset.

        A hit's model has them already. MLflow would add them once more with every hit, and reads all of them whenever
        it looks for a model.
        """
        from mlflow.entities import Metric

        done = self._done
        if done.group == "human_eval":
            model = self._lineage.find_model(done.lineage["ppo"]) if "ppo" in done.lineage else None
        dataset = "sheet" if "sheet" in done.lineage else "data"
        digest = done.lineage.get(dataset, "")[:DIGEST_SHOWN]
        about = {}
        if new and model and digest:
            about = {"model_id": model, "dataset_name": dataset, "dataset_digest": digest}
        # On the parent too, so that pipeline runs can be compared in one table.
        for run, step, of in ((self._run, done.step, about), (self._parent, 0, {})):
            finals = [Metric(name, value, done.time, step, **of) for name, value in done.record.metrics.items()]
            self._client.log_batch(run, metrics=finals)

    def _tables(self) -> None:
        """Log tables as `log_table` does, but without pandas."""
        listed = json.loads(self._client.get_run(self._run).data.tags.get(TABLES_TAG, "[]"))
        group, _, part = self._done.record.stage.partition(".")
        of_evaluation = group == "evaluation"
        tables = listed if of_evaluation else [WATCHED_TABLE] if WATCHED_TABLE in listed else []
        for name in EVALUATION_TABLES if of_evaluation else TABLES:
            path = self._done.path / name
            if path.is_file():
                rows = _rows(path, ITEM_ROWS if of_evaluation else TABLE_ROWS)
                columns = list(dict.fromkeys(key for row in rows for key in row))
                table = {"columns": columns, "data": [[_cell(row.get(column)) for column in columns] for row in rows]}
                logged = f"{part}_{path.stem}.json".removeprefix("_")
                tables += [entry] if (entry := {"path": logged, "type": "table"}) not in tables else []
                self._client.log_text(self._run, json.dumps(table), logged)
        if tables:
            self._client.set_tag(self._run, TABLES_TAG, json.dumps(tables))

    def _tags(self, note: str, computed_by: str | None) -> None:
        from mlflow.entities import RunTag

        done, record = self._done, self._done.record
        tags = {
            f"tether.key.{record.stage}": record.key,
            f"tether.digest.{record.stage}": record.digest,
            "cache_hit": str(done.hit).lower(),
            "mlflow.note.content": note,
            **done.tags,
            **_prefect_tag(self._prefect),
            "tether.libraries": json.dumps(record.parts.get("libraries", {})),
            "tether.machine": json.dumps(record.machine),
        }
        if done.hit:
            tags |= {"cached_from": record.run, "cached_from_run": computed_by or ""}
        if done.group == "validate":
            tags["tether.quarantined"] = json.dumps(mlflow_notes.quarantined(done))
        if done.waived:
            tags["tether.waivers"] = json.dumps(done.waived)
            self._client.set_tag(self._parent, "tether.waivers", json.dumps(self._waivers))
        self._client.log_batch(self._run, tags=[RunTag(name, value) for name, value in tags.items()])

    def _register(self, model: str | None, run: str) -> None:
        done, withheld = self._done, self._withheld()
        versions = Versions(self._client, Weights(self._client, self._home, wanted(self._home, done.run)))
        if done.group == "human_eval":
            name = model_name(self._sent.project, MODELS["ppo"])
            trained = [gate for one in self._so_far for gate in one.verdicts if not gate.skipped]
            waived = [gate.name for gate in trained if gate.waived]
            self._sent.decision = versions.judge(done, name, self._waivers, withheld, self._run, waived)
        elif model is not None and not any(verdict.stops or verdict.withheld for verdict in done.verdicts):
            name = model_name(self._sent.project, MODELS[done.group])
            self._sent.decision = versions.register(done, name, model, run, self._waivers, withheld, self._run)

    def _withheld(self) -> str:
        """Return why the run gives no alias to the result's model; empty if it may."""
        run = self._done.run
        values = run_values(self._home, run)
        if self._done.group not in ("ppo", "human_eval"):
            return why_no_alias(values)
        why = why_no_alias(values, {name for one in self._so_far for name in one.record.metrics})
        if gates := [verdict.name for one in self._so_far for verdict in one.verdicts if verdict.withheld]:
            waive = f"tether rerun human_eval --from {run} --waive {' --waive '.join(gates)} --because TEXT"
            skipped = f"a stage was skipped, so {', '.join(gates)} did not pass. To waive them: `{waive}`"
            why = "; ".join(filter(None, (why, skipped)))
        return why


def _cards(folder: Path, sent: Sent) -> dict[str, Path]:
    """Return the files of the run's model cards, by stage."""
    cards = {stage: folder / "cards" / f"{model_name(sent.project, kind)}.md" for stage, kind in MODELS.items()}
    return {stage: card for stage, card in cards.items() if card.is_file()}


def log_picture(client: Any, run: str, sent: Sent, done: Sequence[Done]) -> None:
    """Log a picture of what the stages in `done` were made of, with the versions of their models in MLflow."""
    named = {}
    for result in done:
        if result.group in MODELS:
            digest, name = result.record.digest, model_name(sent.project, MODELS[result.group])
            versions = client.search_model_versions(f"name='{name}' and tags.`lineage.digest`='{digest}'")
            if versions:
                named[digest] = f"version {max(int(one.version) for one in versions)}"
    client.log_text(run, draw(graph_of(done, named)), mlflow_notes.PICTURE)


def data_docs(runs: Path, done: Done) -> str:
    """Return the address of the Data Docs of validate's result, in the run that computed it; empty if MLflow lacks
    them."""
    sent = Sent.load(runs / done.record.run)
    if sent.experiment is None or "validate" not in sent.stages:
        return ""
    return run_link(sent.experiment, sent.stages["validate"], f"attachments/{DATA_DOCS}")


def log_params(client: Any, run: Any, config: Mapping[str, JsonValue]) -> None:
    """Log nested values as params of a run by dotted name. MLflow refuses to change params that `run` has already."""
    from mlflow.entities import Param

    there = run.data.params
    params = [Param(name, str(value)[:6000]) for name, value in flatten(config).items() if name not in there]
    if params:
        client.log_batch(run.info.run_id, params=params)


def _prefect_tag(address: str) -> dict[str, str]:
    return {"tether.prefect": address} if address else {}


def _failed_gates(stages: Sequence[StageStatus]) -> list[str]:
    return [gate.name for stage in stages if stage.state == "gate_failed" for gate in stage.gates if gate.stops]


def _milliseconds(stamp: str) -> int:
    return round(datetime.fromisoformat(stamp).timestamp() * 1000)


def _rows(path: Path, most: int) -> list[Any]:
    """Return the first rows of a JSONL file, or of a list in a JSON file."""
    with path.open("rb") as file:  # lines end only at \n here
        return json.load(file)[:most] if path.suffix == ".json" else [json.loads(line) for line in islice(file, most)]


def _cell(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, dict) and "content" in item for item in value):
        return "\n".join(f"{item.get('role', '')}: {item['content']}" for item in value)
    return json.dumps(value) if isinstance(value, (list, dict)) else value
