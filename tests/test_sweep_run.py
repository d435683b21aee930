"""The real `tether sweep` on the tiny profile: stages that cells share are computed once, and a kill loses nothing."""

import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.runs.status import list_runs, load_status
from tasks.tracking.mlflow_client import connect, load_mlflow
from tests.conftest import Tether
from tests.faults.homes import Home, Moment
from tests.waiting import PATIENCE, until

OVER = ("sweep", "tiny", "--over", "ppo.kl.coefficient=0.1,0.3")


def records(home: Path) -> Counter[str]:
    """The number of records of each stage."""
    paths = home.glob("store/records/*/*.json")
    return Counter(json.loads(path.read_text())["record"]["stage"] for path in paths)


def test_a_sweep_computes_what_its_cells_share_once(
    tether: Tether, whole: tuple[Home, list[Moment]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cell is the profile's own run, whose results the home has."""
    home = whole[0].copy(tmp_path / "home").path
    before = records(home)
    done = tether(*OVER, "--json", home=home)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert records(home) - before == {"ppo": 1} and before["sft"] == before["reward"] == before["ppo"] == 1
    (first,), (second,) = (cells["cells"] for cells in outcome["groups"])
    assert (first["state"], second["state"]) == ("cached", "passed")
    metrics = load_status(home, second["run"]).metrics
    assert second["measures"]["policy/kl"] == metrics["policy/kl"]
    assert second["measures"]["policy/gold_gain"] == pytest.approx(metrics["policy/gold"] - metrics["policy/sft_gold"])
    assert 0 < second["measures"]["memory"] < 8 and 0 < second["measures"]["seconds"] < 600
    assert (home / "sweeps" / outcome["sweep"] / "sweep.html").is_file()
    assert done.stdout == (home / "sweeps" / outcome["sweep"] / "sweep.json").read_text() + "\n"
    again = tether(*OVER, home=home)
    assert again.returncode == 0 and records(home) - before == {"ppo": 1} and len(list_runs(home)) == 3
    assert re.search(r"ppo\.kl\.coefficient +0\.1 +0\.3\n", again.stdout)
    assert re.search(r"gold gain \(simulated\) +-?0\.", again.stdout)
    listed = tether("runs", "--tag", f"sweep={outcome['sweep']}", "--json", home=home)
    assert {run["run"] for run in json.loads(listed.stdout)} == {first["run"], second["run"]}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    connect(home)
    runs = load_mlflow().search_runs(
        search_all_experiments=True, filter_string=f"tags.sweep = '{outcome['sweep']}'", output_format="list"
    )
    assert {run.data.tags["tether.run"] for run in runs} >= {first["run"], second["run"]}


@pytest.mark.whole
def test_a_cell_that_is_killed_goes_on_from_its_checkpoint(
    tether: Tether, start_tether: Callable[..., subprocess.Popen[str]], whole: tuple[Home, list[Moment]],
    prefect: dict[str, str], tmp_path: Path,
) -> None:  # fmt: skip
    home = whole[0].copy(tmp_path / "home").path
    command = [*OVER, "--set", "ppo.updates=30"]
    sweep = start_tether(*command, home=home, **prefect)
    until("a checkpoint of the second cell", lambda: len(list_runs(home)) == 3 and any(
        (home / "work").glob("*/**/checkpoint/ppo/step-*.json")
    ), failed=sweep.poll)  # fmt: skip
    sweep.send_signal(signal.SIGKILL)
    sweep.communicate(timeout=PATIENCE * 60)
    killed = list_runs(home)[0]
    assert load_status(home, killed).state == "interrupted"
    done = tether(*command, "--sheet", "16", home=home)
    assert done.returncode == 0, done.stderr
    assert "ppo: resuming at step" in done.stdout, done.stdout
    cells, sheet = list_runs(home)[1], list_runs(home)[0]
    assert load_status(home, cells).tags == load_status(home, killed).tags
    assert f"Run {sheet} compares the policies on a blind sheet." in done.stdout
    assert load_status(home, sheet).stage("human_eval").state in ("passed", "gate_failed")
    undisturbed = tether("run", "tiny", "--set", "ppo.updates=30", "--set", "ppo.kl.coefficient=0.3", "--until", "ppo",
                         "--refresh", "ppo", home=home)  # fmt: skip
    assert undisturbed.returncode == 0, undisturbed.stderr
    digests = [load_status(home, run).stage("ppo").digest for run in (list_runs(home)[0], cells)]
    assert digests[0] == digests[1]
