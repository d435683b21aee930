"""A run that has not imported MLflow has a process that sends its folder: all of it, and no longer than the run."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tasks.execution.runner import run_stage
from tasks.runs.journal import Sent
from tasks.runs.points import points_file, read_points
from tasks.runs.status import load_status
from tasks.tracking import mlflow_process, mlflow_sync
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def apart(monkeypatch, empty_mlflow):
    """MLflow has not been imported here, as in a command's process."""
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)


def process_of_sender():
    """The process that sends this process's run."""
    (process,) = (child for child in psutil.Process().children() if "serve()" in " ".join(child.cmdline()))
    return process


def test_a_run_that_has_not_imported_mlflow_is_recorded_whole_and_does_not_import_it(apart, pipeline, client, home):
    ctx, _ = pipeline()
    assert "mlflow" not in sys.modules
    mlflow, sent = client(), Sent.load(ctx.folder)
    assert sorted(sent.stages) == ["human_eval", "ppo", "sft", "validate"]
    assert {mlflow.get_run(run).info.status for run in (sent.parent, *sent.stages.values())} == {"FINISHED"}
    assert [each.step for each in mlflow.get_metric_history(sent.stages["ppo"], "ppo/kl")] == [1, 2, 3, 4, 5, 6]
    assert mlflow.get_model_version_by_alias("tether-policy", "champion").run_id == sent.stages["ppo"]
    assert mlflow_sync.left_behind(home) == []


def test_a_process_that_is_started_early_sends_the_run_and_only_one_is_started(apart, home, start, kit, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow_process.begin_early(home)
    waiting = mlflow_process._early
    mlflow_process.begin_early(home)
    assert mlflow_process._early is waiting
    with start(track=True, stages=("sft",)) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        assert ctx.tracker()._thread is waiting
    assert mlflow_process._early is None and not waiting.is_alive()
    assert mlflow_sync.left_behind(ctx.home) == []


def test_a_run_goes_on_where_no_process_can_be_started(apart, start, kit, monkeypatch, caplog):
    def none(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with start(track=True, stages=("sft",)) as ctx, monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", none)
        ctx.tracker()
        until("it says so", lambda: "Resource temporarily unavailable" in caplog.text)
        patch.undo()
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert mlflow_sync.left_behind(ctx.home) == [ctx.folder]


def test_the_process_finds_libraries_in_folders_that_a_script_added_itself(apart, start, kit, monkeypatch):
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))  # outside the virtual environment
    with start(track=True, stages=("sft",)) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert "mlflow" not in sys.modules
    assert Sent.load(ctx.folder).whole


def test_a_run_whose_sender_cannot_start_ends_and_does_not_wait_for_it(apart, start, monkeypatch):
    def none(self):
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError), start(track=True, stages=("sft",)) as ctx, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        ctx.tracker()
    assert load_status(ctx.home, ctx.run).state == "failed"


@pytest.mark.parametrize("named", ["http://127.0.0.1:9", None])
def test_no_process_is_started_early_where_the_run_imports_mlflow_itself(apart, home, monkeypatch, named):
    """With a server the run checks its access to it, for which it imports MLflow."""
    if named is None:
        monkeypatch.setitem(sys.modules, "mlflow", object())
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", named)
    mlflow_process.begin_early(home)
    assert mlflow_process._early is None


def test_signals_for_the_run_do_not_end_its_process_which_still_has_to_tell_how_the_run_ended(
    apart, start, kit, client
):
    with pytest.raises(KeyboardInterrupt), start(track=True, stages=("sft",)) as ctx:
        ctx.begin_stage("sft")
        until("the process has begun", lambda: "sft" in Sent.load(ctx.folder).stages)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process_of_sender().send_signal(number)
        raise KeyboardInterrupt
    sent = Sent.load(ctx.folder)
    assert client().get_run(sent.stages["sft"]).info.status == "KILLED"
    assert sent.whole


def test_a_process_that_dies_is_reported_once_and_its_run_goes_on_and_the_next_one_sends_the_rest(
    apart, start, kit, client, home, caplog
):
    with start(track=True, stages=("sft",)) as ctx:
        ctx.begin_stage("sft")
        until("the process has begun", lambda: "sft" in Sent.load(ctx.folder).stages)
        process_of_sender().kill()
        until("its end is noticed", lambda: "ended" in caplog.text)
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    said = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(said) == 1 and "exit code -9" in said[0]
    assert load_status(home, ctx.run).state == "passed"
    assert "MLflow does not have all of this run yet" in ctx.reporting.console.file.getvalue()
    with start(track=True, stages=("sft",)) as again:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, again)
    assert mlflow_sync.left_behind(home) == []
    points = [each["step"] for each in read_points(points_file(ctx.folder, "sft"))]
    history = client().get_metric_history(Sent.load(ctx.folder).stages["sft"], "ppo/kl")
    assert [each.step for each in history] == points == [1, 2, 3]


def test_what_mlflow_refuses_is_said_once_whatever_is_printed(apart, start, kit, caplog, tmp_path, monkeypatch):
    """The run says it, though another process hears it; what that process prints is not read as an answer."""
    (tmp_path / "sitecustomize.py").write_text("import os; print('hello'); os.write(1, b'no end of a line')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with start(track=True, stages=("sft",)) as ctx:
        (ctx.home / "mlflow.db").write_text("no database")
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        until("it says so", lambda: "file is not a database" in caplog.text, seconds=15)
    said = [each for each in caplog.records if "file is not a database" in each.message]
    assert [(each.name, each.levelname) for each in said] == [("tasks.tracking.mlflow_process", "WARNING")]


RUN = """
import sys, time
from pathlib import Path
sys.path.append({root!r})
from tasks.tracking.mlflow_process import MlflowThread
thread = MlflowThread(Path({home!r}))
{begin}
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("begin", ["", 'thread.tell("r")', 'thread.tell("r"); thread.end()'])
def test_a_killed_run_leaves_no_process(tmp_path, begin):
    """It dies while it imports MLflow, while it waits for more, and at the run's end."""
    (folder := tmp_path / "home" / "runs" / "r").mkdir(parents=True)
    code = RUN.format(root=str(ROOT), home=str(tmp_path / "home"), begin=begin)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        run.stdout.readline()
        until("its process has begun", lambda: psutil.Process(run.pid).children())
        (child,) = psutil.Process(run.pid).children()
        if begin:
            until("it sends", (folder / "mlflow.lock").exists)
        run.kill()
        until("the process ends", lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_mlflow_hears_from_the_process_of_a_killed_run_that_it_was_interrupted(apart, start, client, monkeypatch):
    """The process reads the end of its pipe, whatever ended the run."""
    with start(track=True, stages=("sft",)) as ctx:
        ctx.begin_stage("sft")
        until("the process has begun", lambda: "sft" in Sent.load(ctx.folder).stages)
        document = ctx.status.document
        document.process = {**document.process, "pid": 2**22 + 1}
        ctx.status.update("sft", seconds=1.0)
        assert ctx.tracker().close()
        assert client().get_run(Sent.load(ctx.folder).stages["sft"]).info.status == "KILLED"
        ctx._tracker = None
