"""However a run is stopped, it says so, reads as interrupted, and the same command goes on."""

import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.runs.status import load_status
from tests.conftest import Tether
from tests.faults.homes import Home, Moment
from tests.waiting import PATIENCE

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(start_tether: Start) -> Start:
    """`start(home=...)` starts `tether run tiny`."""
    return functools.partial(start_tether, "run", "tiny", stderr=subprocess.PIPE)


def read_to(run: subprocess.Popen[str], text: str) -> None:
    """Read its output up to a line with `text`."""
    assert run.stdout is not None
    assert any(text in line for line in run.stdout), f"it never said {text!r}: {run.communicate()}"


def end(run: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said on standard error."""
    said = run.communicate(timeout=PATIENCE * 200)[1]
    return run.returncode, said


def states(home: Path) -> list[str]:
    """The newest run's state, then its stages'."""
    status = load_status(home)
    return [status.state, *(stage.state for stage in status.stages)]


def forget(home: Home, stage: str) -> Path:
    """Drop a stage's record: it is computed again, to the same bytes, so that later stages are still hits."""
    for key in home.keys(stage):
        shutil.rmtree(home.path / "store" / "records" / key)
    return home.path


def servers(home: Path) -> list[int]:
    """Processes whose environment names the home's Prefect folder: those that the run started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PREFECT_HOME={home}/prefect".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.whole
def test_ctrl_c_in_a_terminal_reaches_the_run_and_not_its_server_and_leaves_none(
    start: Start, whole: tuple[Home, list[Moment]], tmp_path: Path
) -> None:
    home = whole[0].before("sft", tmp_path / "home").path
    run = start(home=home)
    read_to(run, "sft: computing")
    assert len(servers(home)) == 2, "Prefect's and the one that sends to MLflow; the run got its variables later"
    os.killpg(run.pid, signal.SIGINT)
    code, said = end(run)
    assert code == 130 and "tether: interrupted. Run the same command again" in said and "Traceback" not in said, said
    assert states(home)[:3] == ["interrupted", "cached", "interrupted"]
    assert servers(home) == []


@pytest.mark.faults
@pytest.mark.kind("told to stop")
def test_a_closed_pipe_a_full_disk_and_a_closed_terminal_interrupt_a_run_that_then_goes_on(
    start: Start, prefect: dict[str, str], whole: tuple[Home, list[Moment]], tmp_path: Path
) -> None:
    home = forget(whole[0].before("ppo", tmp_path / "home"), "validate")
    run = start(home=home, **prefect)
    read_to(run, "validate: computing")
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()  # as `| head -1` does
    said, code = run.stderr.read(), run.wait(PATIENCE * 200)
    assert code == 141 and "interrupted: what it prints can't be written (Broken pipe)" in said, said
    assert states(home) == ["interrupted", "passed", "interrupted", "not_run", "not_run", "not_run"]

    run = start(home=home, **prefect)
    read_to(run, "ppo: computing")
    run.send_signal(signal.SIGHUP)
    code, said = end(run)
    assert code == 129 and "tether: interrupted" in said, said
    assert states(home)[3:5] == ["cached", "interrupted"]

    run = start(home=home, ignored=(signal.SIGHUP,), **prefect)  # as under nohup
    read_to(run, "ppo: computing")
    for _ in range(3):
        run.send_signal(signal.SIGHUP)
        time.sleep(0.2)
    code, said = end(run)
    assert code == 0 and "interrupted" not in said and states(home)[0] == "passed", said


@pytest.mark.faults
@pytest.mark.kind("told to stop")
def test_a_second_ctrl_c_ends_at_once(
    start: Start, prefect: dict[str, str], whole: tuple[Home, list[Moment]], tmp_path: Path
) -> None:
    run = start(home=whole[0].before("ppo", tmp_path / "home").path, **prefect)
    read_to(run, "ppo: computing")
    read_to(run, "ppo 1")
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    code, said = end(run)
    assert code == 130 and time.monotonic() - began < PATIENCE * 15, said
    assert "Traceback" not in said, said


@pytest.mark.faults
@pytest.mark.kind("told to stop")
def test_a_prefect_server_that_cannot_start_costs_its_pages_and_not_the_run(
    tether: Tether, whole: tuple[Home, list[Moment]], tmp_path: Path
) -> None:
    home = whole[0].before("human_eval", tmp_path / "home").path
    (home / "prefect").mkdir()
    (home / "prefect" / "prefect.db").write_bytes(b"no database" * 1000)
    done = tether("run", "tiny", home=home, embedded=True, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE="false")
    assert done.returncode == 0 and "Prefect's server did not start" in done.stdout, done
    assert states(home)[0] == "passed"
