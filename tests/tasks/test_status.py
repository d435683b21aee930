"""Scripts read the status: its fields, its states, and no dead run that looks alive."""

import json
import os
import subprocess
import sys

import pytest

from components.errors import UserError
from components.gates import judge
from components.process import is_alive, this_process
from tasks.status import WORST_FIRST, RunStatus, list_runs, load_status, metrics_json, verdict_json, worst


@pytest.fixture
def begin(tmp_path):
    def start(run="r1", stages=("sft", "ppo")):
        return RunStatus.start(tmp_path / "runs" / run, run, "tiny", stages)

    return start


def test_the_status_has_exactly_the_fields_that_scripts_rely_on(begin, tmp_path):
    begin()
    status = load_status(tmp_path, "r1")
    assert set(status) == {"run", "profile", "state", "seconds", "stages"}
    fields = {"name", "state", "seconds", "cached", "key", "digest", "mlflow_run", "metrics", "gates"}
    assert all(set(stage) == fields for stage in status["stages"])
    assert [stage["state"] for stage in status["stages"]] == ["not_run", "not_run"]
    json.dumps(status, allow_nan=False)


def test_a_gate_in_the_status_has_exactly_its_fields_and_no_nan(begin):
    off = {"labels_complete": None, "items": 10.0, "fleiss_kappa": None, "win_rate_low": 0.5}
    shown = verdict_json(judge("human_eval", {"human_eval/items": float("nan")}, off))
    assert {tuple(sorted(each)) for each in shown} == {
        ("metric", "name", "op", "passed", "threshold", "value", "waived")
    }
    assert json.loads(json.dumps(shown, allow_nan=False))[1]["value"] is None


def test_a_living_run_is_running_until_it_finishes(begin, tmp_path):
    status = begin()
    assert load_status(tmp_path)["state"] == "running"
    status.update("sft", state="passed")
    assert load_status(tmp_path)["state"] == "running"
    status.update("ppo", state="cached")
    status.finish()
    assert load_status(tmp_path)["state"] == "passed"


@pytest.mark.parametrize(
    ("states", "run"),
    [
        (("cached", "cached"), "cached"),
        (("cached", "passed"), "passed"),
        (("passed", "gate_failed", "not_run"), "gate_failed"),
        (("waived", "passed"), "waived"),
        (("waived", "awaiting_labels"), "awaiting_labels"),
        (("passed", "failed", "not_run"), "failed"),
        (("not_run", "not_run"), "not_run"),
        (("interrupted", "not_run"), "interrupted"),
    ],
)
def test_the_run_is_as_bad_as_its_worst_stage(states, run):
    assert worst(states) == run


def test_the_states_are_those_of_the_design():
    running = {"running", "awaiting_labels", "interrupted", "not_run"}
    assert set(WORST_FIRST) == running | {"passed", "cached", "failed", "gate_failed", "waived"}


def test_a_run_whose_process_died_reads_as_interrupted(begin, tmp_path):
    code = (
        "import os, pathlib, signal, sys; from tasks.status import RunStatus\n"
        "s = RunStatus.start(pathlib.Path(sys.argv[1]) / 'runs' / 'dead', 'dead', 'tiny', ('sft', 'ppo'))\n"
        "s.update('sft', state='running', began=0.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": "."}, check=False)
    status = load_status(tmp_path, "dead")
    assert status["state"] == "interrupted"
    assert [stage["state"] for stage in status["stages"]] == ["interrupted", "not_run"]


def test_a_process_id_that_is_used_again_is_not_the_old_process():
    me = this_process()
    assert is_alive(me)
    assert not is_alive({**me, "started": "1"})
    assert is_alive({**me, "host": "elsewhere", "started": "1"})


def test_a_zombie_is_dead():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive({**this_process(), "pid": child.pid, "started": "1"})
    child.wait()


def test_the_newest_run_is_the_default(begin, tmp_path):
    for run in ("b", "a", "c"):
        begin(run).finish()
    assert list_runs(tmp_path) == ["c", "a", "b"]
    assert load_status(tmp_path)["run"] == "c"


@pytest.mark.parametrize("run", ["nothing", "../r1", "", ".r1"])
def test_an_unknown_run_is_the_users_mistake(begin, tmp_path, run):
    begin()
    with pytest.raises(UserError):
        load_status(tmp_path, run)


def test_no_run_at_all_says_how_to_start_one(tmp_path):
    with pytest.raises(UserError, match="tether run"):
        load_status(tmp_path)


def test_a_finished_run_has_no_running_stage(begin, tmp_path):
    status = begin()
    status.update("sft", state="running")
    assert status.finish() == "interrupted"
    assert load_status(tmp_path)["stages"][0]["state"] == "interrupted"


def test_metrics_that_are_not_finite_are_null():
    assert metrics_json({"a": float("nan"), "b": float("inf"), "c": 1.0}) == {"a": None, "b": None, "c": 1.0}
