"""After an outage MLflow shows what it shows without one: nothing lost, nothing doubled, nobody kept waiting."""

import json
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tasks.runs.journal import Sent
from tasks.runs.points import points_file, read_points
from tasks.runs.status import load_status
from tasks.tracking import mlflow_sync
from tests.servers import MlflowServer

RUN = "20261122-000000-cafe"

WRITES = {
    "create_experiment", "create_run", "update_run_info", "log_batch", "set_tag", "log_inputs", "log_outputs",
    "create_logged_model", "finalize_logged_model", "set_logged_model_tags", "delete_logged_model", "delete_run",
    "create_registered_model", "create_model_version", "set_model_version_tag", "set_registered_model_alias",
    "set_registered_model_tag",
}  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the process gets to answer it."""


@pytest.fixture
def left(pipeline, home, empty_mlflow, monkeypatch):
    """A home with one run of which MLflow has nothing yet."""
    with monkeypatch.context() as patch:
        patch.setattr("tasks.tracking.recorder.connect", _refuse)
        pipeline(run=RUN)
    assert (home / "mlflow.db").read_bytes() == empty_mlflow.read_bytes()
    return home


def _refuse(home):
    raise ConnectionError("refused")


def carry(home):
    assert [error for _, error in mlflow_sync.sync(home)] == [None]


def copy(home, folder, empty_mlflow):
    """The same runs in another home, MLflow told of none."""
    shutil.copytree(home / "runs", folder / "runs")
    for path in folder.glob("runs/*"):
        sent = Sent.load(path)
        Sent(project=sent.project, code=sent.code).save(path)
    shutil.copy(empty_mlflow, folder)
    return folder


def shown(home):
    """All that MLflow shows of the run, its own ids replaced by what they stand for, and points checked."""
    from tasks.tracking.mlflow_client import connect

    client, sent = connect(home), Sent.load(home / "runs" / RUN)
    runs = client.search_runs([sent.experiment])
    models = client.search_logged_models([sent.experiment])
    names = {sent.parent: "parent", **{run: stage for stage, run in sent.stages.items()}}
    names |= {model.model_id: f"model {model.name}" for model in models}
    assert len(names) == len(runs) + len(models), "one run for each stage, one model for each artifact"

    def plain(value):
        text = json.dumps(value, sort_keys=True, default=str)
        for id_, name in names.items():
            text = text.replace(id_, name)
        return json.loads(re.sub(r"#/experiments/\d+/", "#/", text))

    document = {"runs": {}, "models": {}, "versions": {}}
    for run in (client.get_run(each.info.run_id) for each in runs):
        tags = {k: v for k, v in run.data.tags.items() if k not in ("mlflow.user", "mlflow.source.name")}
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        document["runs"][names[run.info.run_id]] = {
            "info": [run.info.run_name, run.info.status, run.info.start_time, run.info.end_time],
            "params": run.data.params,
            "tags": tags,
            "metrics": {k: [(m.step, m.timestamp, m.value) for m in points] for k, points in history.items()},
            "datasets": sorted((each.dataset.name, each.dataset.digest) for each in run.inputs.dataset_inputs),
            "models": sorted(names[each.model_id] for each in run.inputs.model_inputs),
            "outputs": sorted(names[each.model_id] for each in run.outputs.model_outputs),
            "artifacts": sorted(each.path for each in client.list_artifacts(run.info.run_id)),
        }
    for stage in sent.stages:
        local = points_of(home, stage)
        history = document["runs"][stage]["metrics"]
        assert {name: history[name][: len(points)] for name, points in local.items()} == local
        assert all(len(history[name]) <= len(points) + 1 for name, points in local.items()), "a final value, no more"
    for model in models:
        document["models"][model.name] = [model.tags, model.params, str(model.status), model.source_run_id]
    for registered in client.search_registered_models():
        versions = client.search_model_versions(f"name='{registered.name}'")
        aliases = {alias: int(version) for alias, version in registered.aliases.items()}
        found = [[int(each.version), each.tags, each.run_id, each.description, each.source] for each in versions]
        document["versions"][registered.name] = [aliases, registered.tags, found]
    return plain(document)


def points_of(home, stage):
    """Metric to its points on disk, as MLflow gives them."""
    found = {}
    for point in read_points(points_file(home / "runs" / RUN, stage)):
        for name, value in point["metrics"].items():
            found.setdefault(name, []).append((point["step"], point["time"], value))
    return found


def test_a_kill_after_any_write_to_mlflow_leaves_no_trace(left, empty_mlflow, tmp_path, monkeypatch):
    carry(copy(left, tmp_path / "undisturbed", empty_mlflow))
    expected = shown(tmp_path / "undisturbed")
    assert set(expected["runs"]) == {"parent", "validate", "sft", "ppo", "human_eval"}
    assert set(expected["versions"]["tether-policy"][0]) == {"candidate", "champion"}
    assert expected["runs"]["parent"]["info"][1] == "FINISHED"
    assert len(expected["runs"]["ppo"]["metrics"]["ppo/kl"]) == 6

    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Tracking

    allowed = [10**9]

    def dying(write):
        def call(*args, **kwargs):
            result = write(*args, **kwargs)
            allowed[0] -= 1
            if allowed[0] == 0:
                raise Killed
            return result

        return call

    for store in (Registry, Tracking):
        for name in WRITES & set(vars(store)):
            monkeypatch.setattr(store, name, dying(getattr(store, name)))

    home, kills, writes, before = copy(left, tmp_path / "killed", empty_mlflow), 0, 0, None
    client = mlflow_sync.Recorder(home)._client
    monkeypatch.setattr("tasks.tracking.recorder.connect", lambda home: client)
    while mlflow_sync.left_behind(home):
        sent = Sent.load(home / "runs" / RUN)
        writes = writes + 1 if sent == before else 1  # one write further than last time, until it is noted
        before, allowed[0] = sent, writes
        try:
            carry(home)
        except Killed:
            kills += 1
    allowed[0] = 10**9
    assert kills > 40
    assert shown(home) == expected


def test_what_an_outage_held_back_does_not_take_an_alias_from_a_newer_version(left, client, home, start, kit, tmp_path):
    folder = left / "runs" / RUN
    held = shutil.move(folder, tmp_path / "held")
    from tasks.execution.runner import run_stage

    with start(track=True, config={"gates": kit.judged}) as ctx:
        run_stage(kit.toy("ppo"), kit.ToyJob(value=7), {}, ctx)
    shutil.move(held, folder)
    newest = client().get_model_version_by_alias("tether-policy", "candidate").tags["lineage.digest"]
    carry(home)
    versions = client().search_model_versions("name='tether-policy'")
    assert len(versions) == 2
    assert client().get_model_version_by_alias("tether-policy", "candidate").tags["lineage.digest"] == newest
    assert client().get_model_version_by_alias("tether-policy", "champion").tags["lineage.digest"] != newest


def test_the_status_names_mlflow_runs_only_once_mlflow_has_them(left, home):
    assert {stage.mlflow_run for stage in load_status(home).stages} == {None}
    carry(home)
    assert all(len(stage.mlflow_run) == 32 for stage in load_status(home).stages)


def test_a_run_that_was_killed_while_mlflow_was_away_is_carried_and_ended_as_killed(left, home, client):
    folder = left / "runs" / RUN
    status = json.loads((folder / "run.json").read_text())
    status |= {"finished": None, "process": {**status["process"], "started": "1"}}
    for stage in status["stages"]:
        stage |= {"ppo": {"state": "running"}, "human_eval": {"state": "not_run", "started": None}}.get(
            stage["name"], {}
        )
    (folder / "run.json").write_text(json.dumps(status))
    (folder / "done" / "human_eval.json").unlink()
    half = (folder / "done" / "ppo.json").rename(folder / "done" / ".ppo.json.x.y.tmp")
    half.write_text(half.read_text()[:50])
    carry(home)
    sent, mlflow = Sent.load(folder), client()
    assert [mlflow.get_run(sent.stages[name]).info.status for name in ("sft", "ppo")] == ["FINISHED", "KILLED"]
    assert "ppo/proxy_reward" in mlflow.get_run(sent.stages["ppo"]).data.metrics
    assert mlflow.get_run(sent.parent).info.status != "RUNNING"
    assert mlflow_sync.left_behind(home) == []


def test_one_run_that_mlflow_refuses_holds_back_no_other(left, home, start, kit, client, monkeypatch):
    from tasks.execution.runner import run_stage

    Sent(experiment="1", project="tether", parent="0" * 32).save(left / "runs" / RUN)
    with monkeypatch.context() as patch, start(track=True) as ctx:
        patch.setattr("tasks.tracking.recorder.connect", _refuse)
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    client().create_experiment("tether")
    found = dict(mlflow_sync.sync(home))
    assert "not found" in str(found[RUN])
    assert found[ctx.run] is None
    assert [folder.name for folder in mlflow_sync.left_behind(home)] == [RUN]


@pytest.mark.whole
@pytest.mark.parametrize("server", ["refuses", "never answers"])
def test_a_dead_server_delays_a_run_by_no_more_than_seconds_and_sync_says_so(
    server, pipeline, home, empty_mlflow, monkeypatch, said, caplog
):
    home.mkdir()
    shutil.copy(empty_mlflow, home)
    began = time.monotonic()
    pipeline()  # imports, plots
    usual = time.monotonic() - began
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if server == "refuses":
            silent.close()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        began = time.monotonic()
        ctx, results = pipeline(steps=4, run=RUN)
        seconds = time.monotonic() - began
        from flows.cli.__main__ import app

        monkeypatch.setenv("TETHER_HOME", str(home))
        done = CliRunner().invoke(app, ["sync"])
    assert results["ppo"].state == "passed"
    assert seconds < usual + 20, "two requests of 3 s at the most, and the stages; a request a fact would be 42"
    assert "MLflow does not have all of this run yet. The next run or `tether sync` sends the rest." in " ".join(
        said(ctx).split()
    )
    assert caplog.text.count("What it does not have yet stays in") == 1
    assert done.exit_code == 1 and "MLflow does not answer" in done.output and "Traceback" not in done.output
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    carry(home)
    assert mlflow_sync.left_behind(home) == []


@pytest.fixture
def server(tmp_path, home, start, monkeypatch):
    server = MlflowServer(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    yield server
    server.kill()


def during_ppo(home, action):
    """Do something once MLflow has some of PPO's points; the thread that does."""

    def wait():
        deadline = time.monotonic() + 60
        while not Sent.load(home / "runs" / RUN).points.get("ppo") and time.monotonic() < deadline:
            time.sleep(0.05)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def check_against_an_undisturbed_run(home, empty_mlflow, tmp_path, monkeypatch):
    with_outage = shown(home)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    carry(copy(home, tmp_path / "undisturbed", empty_mlflow))
    without = shown(tmp_path / "undisturbed")
    for run, fields in without["runs"].items():
        for name, value in fields.items():
            assert with_outage["runs"][run][name] == value, (run, name)
    assert with_outage == without


@pytest.mark.servers
def test_a_server_that_is_down_at_the_start_gets_the_whole_run_later(
    server, pipeline, home, empty_mlflow, tmp_path, monkeypatch
):
    pipeline(run=RUN)
    server.start()
    carry(home)
    check_against_an_undisturbed_run(home, empty_mlflow, tmp_path, monkeypatch)


@pytest.mark.servers
def test_a_server_killed_among_points_and_started_again_has_them_all_once(
    server, pipeline, home, empty_mlflow, tmp_path, monkeypatch
):
    server.start()
    monkeypatch.setattr(mlflow_sync, "EVERY_SECONDS", 0.2)
    monkeypatch.setattr(mlflow_sync, "RETRY_SECONDS", 1.0)

    def kill_and_start():
        server.kill()
        time.sleep(2)
        server.start()

    thread = during_ppo(home, kill_and_start)
    pipeline(run=RUN, steps=600, pause=0.02)
    thread.join()
    if mlflow_sync.left_behind(home):
        carry(home)
    check_against_an_undisturbed_run(home, empty_mlflow, tmp_path, monkeypatch)


@pytest.mark.servers
@pytest.mark.long
def test_a_server_that_hangs_among_points_delays_nothing_and_has_them_all_once(
    server, pipeline, home, empty_mlflow, tmp_path, monkeypatch
):
    server.start()
    monkeypatch.setattr(mlflow_sync, "EVERY_SECONDS", 0.2)
    hangs = list[float]()
    thread = during_ppo(home, lambda: (server.signal(signal.SIGSTOP), hangs.append(time.monotonic())))
    pipeline(run=RUN, steps=300, pause=0.02)
    seconds = time.monotonic() - hangs[0]
    thread.join()
    assert mlflow_sync.left_behind(home)
    assert seconds < 6 + 20, "its own 6 s, and what the end waits"
    server.signal(signal.SIGCONT)
    time.sleep(2)
    carry(home)
    check_against_an_undisturbed_run(home, empty_mlflow, tmp_path, monkeypatch)


def test_a_full_disk_under_mlflows_database_is_one_line(
    empty_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow printed SQLAlchemy's stack trace. The database may not grow, as on a full disk."""
    from sqlalchemy import Engine, event

    from tasks.tracking.mlflow_client import connect, experiment, in_short

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_mlflow, tmp_path / "mlflow.db")

    def full(connection: Any, _: object) -> None:
        connection.execute("pragma max_page_count = 1")  # no less than it has

    event.listen(Engine, "connect", full)
    try:
        client = connect(tmp_path)
        with pytest.raises(Exception, match="database or disk is full") as refused:
            name = experiment(client, tmp_path, "x")
            for _ in range(2000):
                client.create_run(name, tags={"note": "x" * 5000})
    finally:
        event.remove(Engine, "connect", full)
    assert in_short(refused.value).startswith("No space left on device. Make room there")
    assert "Traceback" not in capfd.readouterr().err
