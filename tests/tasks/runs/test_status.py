"""Scripts read the status: its fields, its states, and no dead run that looks alive."""

import json
import os
import subprocess
import sys

import pytest

from components.base.errors import UserError
from components.base.process import is_alive, this_process
from components.gates.judging import GatesConfig, judge
from tasks.runs.journal import Sent
from tasks.runs.status import (
    WORST_FIRST,
    StatusFile,
    finite,
    gates_json,
    list_runs,
    load_readable,
    load_status,
    worst,
)
from tasks.tracking.mlflow_sync import left_behind
from tests.waiting import PATIENCE


@pytest.fixture
def begin(tmp_path):
    def start(run="r1", stages=("sft", "ppo")):
        return StatusFile.start(tmp_path / "runs" / run, run, "tiny", stages)

    return start


def test_the_status_has_exactly_the_fields_that_scripts_rely_on(begin, tmp_path):
    begin()
    status = load_status(tmp_path, "r1").as_json()
    assert set(status) == {"run", "profile", "state", "seconds", "stages"}
    fields = {"name", "state", "seconds", "cached", "key", "digest", "mlflow_run", "metrics", "gates"}
    assert all(set(stage) == fields for stage in status["stages"])
    assert [stage["state"] for stage in status["stages"]] == ["not_run", "not_run"]
    json.dumps(status, allow_nan=False)


def test_a_gate_in_the_status_has_exactly_its_fields_and_no_nan(begin):
    gates = GatesConfig.model_validate({"human_eval": {"items": 10.0, "win_rate_low": 0.5}})
    shown = gates_json(judge("human_eval", {"human_eval/items": float("nan")}, gates))
    assert {tuple(sorted(each)) for each in shown} == {
        ("metric", "name", "op", "passed", "threshold", "value", "waived")
    }
    assert json.loads(json.dumps(shown, allow_nan=False))[1]["value"] is None


def test_a_living_run_is_running_until_it_finishes(begin, tmp_path):
    status = begin()
    assert load_status(tmp_path).state == "running"
    status.update("sft", state="passed")
    assert load_status(tmp_path).state == "running"
    status.update("ppo", state="cached")
    status.finish()
    assert load_status(tmp_path).state == "passed"


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
    assert set(WORST_FIRST) == running | {"passed", "cached", "failed", "gate_failed", "waived", "skipped"}


def test_a_run_whose_process_died_reads_as_interrupted(begin, tmp_path):
    code = (
        "import os, pathlib, signal, sys; from tasks.runs.status import StatusFile\n"
        "s = StatusFile.start(pathlib.Path(sys.argv[1]) / 'runs' / 'dead', 'dead', 'tiny', ('sft', 'ppo'))\n"
        "s.update('sft', state='running', began=0.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": "."}, check=False)
    status = load_status(tmp_path, "dead")
    assert status.state == "interrupted"
    assert [stage.state for stage in status.stages] == ["interrupted", "not_run"]


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
    assert load_status(tmp_path).run == "c"


@pytest.mark.parametrize("run", ["nothing", "../r1", "", ".r1"])
def test_an_unknown_run_is_the_users_mistake(begin, tmp_path, run):
    begin()
    with pytest.raises(UserError):
        load_status(tmp_path, run)


def test_a_name_in_place_of_an_id_is_answered_with_the_ids_of_the_runs_of_that_name(begin, tmp_path):
    """A newcomer who names a run with `--name` types that name next."""
    for run, name in (("r1", "β cut"), ("r2", "β cut"), ("r3", "other")):
        begin(run)
        path = tmp_path / "runs" / run / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"name": name}))
    with pytest.raises(UserError, match=r"no run β cut in .*\. Runs of that name: (r1, r2|r2, r1)\. Give an id\."):
        load_status(tmp_path, "β cut")
    with pytest.raises(UserError, match="`tether runs` lists their ids"):
        load_status(tmp_path, "βcut")


def test_no_run_at_all_says_how_to_start_one(tmp_path):
    with pytest.raises(UserError, match="tether run"):
        load_status(tmp_path)


def test_a_finished_run_has_no_running_stage(begin, tmp_path):
    status = begin()
    status.update("sft", state="running")
    assert status.finish() == "interrupted"
    assert load_status(tmp_path).stages[0].state == "interrupted"


def test_metrics_that_are_not_finite_are_null():
    assert finite({"a": float("nan"), "b": float("inf"), "c": 1.0}) == {"a": None, "b": None, "c": 1.0}


def edited(folder, **fields):
    """Write other fields into the run.json in `folder`."""
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_damaged_run_is_named_with_what_to_do_and_hides_no_other(begin, tmp_path, caplog):
    for run in ("whole", "damaged"):
        begin(run).finish()
        Sent(project="p").save(tmp_path / "runs" / run)
    edited(tmp_path / "runs" / "damaged", stages=1)
    with pytest.raises(UserError, match=r"damaged/run\.json is damaged .*move the folder"):
        load_status(tmp_path, "damaged")
    readable, damaged = load_readable(tmp_path)
    assert [status.run for status in readable] == ["whole"] and list(damaged) == ["damaged"]
    assert [folder.name for folder in left_behind(tmp_path)] == ["whole"]
    assert "It is not sent to MLflow" in caplog.text


def test_what_a_later_version_wrote_survives_being_taken_up(begin, tmp_path):
    begin().finish()
    folder = tmp_path / "runs" / "r1"
    edited(folder, later={"field": 1})
    StatusFile.resume(folder).finish()
    assert json.loads((folder / "run.json").read_text())["later"] == {"field": 1}


def test_the_bound_of_a_null_is_in_the_json_of_the_gates_that_have_one_and_survives_run_json(begin, tmp_path):
    status = begin(stages=("reward",))
    metrics = {"reward/ece": 0.0553, "reward/ece_null_95": 0.0732, "reward/accuracy_low": 0.9}
    gates = GatesConfig.model_validate({"reward": {"ece": 0.05, "accuracy_low": 0.5}})
    status.update("reward", state="passed", gates=judge("reward", metrics, gates))
    status.finish()
    (stage,) = load_status(tmp_path, "r1").as_json()["stages"]
    within = {gate["name"]: gate.get("within") for gate in stage["gates"] if gate["threshold"] is not None}
    assert within == {"reward.ece": 0.0732, "reward.accuracy_low": None}


@pytest.mark.parametrize(
    "change",
    [
        b"", b"[]", b"null", b"5", b"\xff", b'{"run": "r1"', {"started": "soon"}, {"updated": "soon"},
        {"finished": "soon"}, {"run": "r2"}, {"stages": 5}, {"process": 5}, {"started": 5}, {"started": "5"},
        {"started": ""}, {"started": "0001-01-01T00:00:00"}, {"started": None}, "a pipe",
        *({"stages": [{"name": "sft", "gates": gates}]} for gates in (None, 5, [[]], [{"name": []}])),
    ],
)  # fmt: skip
@pytest.mark.timeout(PATIENCE * 20)
def test_a_damaged_run_json_is_named_in_a_warning_and_the_newest_readable_run_is_shown(begin, tmp_path, caplog, change):
    begin("r1").finish()
    begin("r2").finish()
    path = tmp_path / "runs" / "r1" / "run.json"
    if change == "a pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        text = path.read_text()
        path.write_bytes(change if isinstance(change, bytes) else json.dumps(json.loads(text) | change).encode())
    assert list_runs(tmp_path) == ["r2"] and load_status(tmp_path).run == "r2"
    readable, damaged = load_readable(tmp_path)
    assert [each.run for each in readable] == ["r2"] and list(damaged) == ["r1"] and str(path) in caplog.text
    with pytest.raises(UserError, match=r"r1/run\.json is damaged|there is no run r1"):
        load_status(tmp_path, "r1")


def test_a_status_without_its_process_is_of_a_run_that_died(begin, tmp_path):
    begin("r1")
    path = tmp_path / "runs" / "r1" / "run.json"
    document = json.loads(path.read_text())
    del document["process"]["pid"], document["updated"]
    path.write_text(json.dumps(document))
    assert load_status(tmp_path, "r1").state == "interrupted"


def test_a_run_json_of_any_size_is_not_read_whole(begin, tmp_path):
    begin("r1").finish()
    begin("r2").finish()
    os.truncate(tmp_path / "runs" / "r1" / "run.json", 1 << 40)
    assert list_runs(tmp_path) == ["r2"]
    with pytest.raises(UserError, match=r"r1/run\.json is damaged .*more than 67,108,864 bytes"):
        load_status(tmp_path, "r1")
