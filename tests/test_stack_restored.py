"""A `tether stack` that was lost with a run at work, restored from a backup of that moment: `make test-stack`."""

import shutil
import time

import pytest

from tasks.runs.status import load_status
from tests.stack import Running, started
from tests.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]

UPDATES = 60
"""PPO's: it has to be at work while the backup is taken."""


def test_a_run_at_work_when_the_backup_was_taken_ends_by_itself_in_the_restored_stack() -> None:
    with started() as running:
        running.deploy()
        flow = running.begin(updates=UPDATES)
        until("it computes PPO", lambda: _ppo(running) == "running", 400)
        folder = running.home.parent / "backup"
        done = running.client("backup", str(folder), "--config", str(running.config))
        assert done.returncode == 0, done.stderr.decode()
        assert _ppo(running) == "running", "it went on meanwhile"
        before = load_status(running.home)
        assert running.command("down").returncode == 0
        shutil.rmtree(running.home)
        shutil.rmtree(running.stack.folder)

        began = time.monotonic()
        done = running.client_without_stack("restore", str(folder), "--config", str(running.config))
        assert done.returncode == 0, done.stderr.decode()
        print(f"{time.monotonic() - began:6.1f} s  restored")
        up = running.command("up")
        assert up.returncode == 0, (up.stderr + up.stdout).decode()
        ended = running.ended(flow, 900)
        assert ended["state_name"] == "Completed" and ended["run_count"] == 2, ended["state"]["message"]
        after = load_status(running.home, before.run)
        assert after.state in ("passed", "waived", "cached")
        assert [each.digest for each in after.stages[:3]] == [each.digest for each in before.stages[:3]]


def _ppo(running: Running) -> str:
    try:
        return load_status(running.home).stage("ppo").state
    except Exception:  # it has no run yet, or writes it
        return ""
