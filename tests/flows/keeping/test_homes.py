"""Homes that releases wrote (tests/homes): each is read and upgraded, and a stage rerun from it."""

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flows.keeping.upgrade import due, upgrade
from flows.launch.begin import rerun
from flows.rlhf import pipeline
from tasks.execution.context import Reporting
from tasks.execution.runner import run_stage
from tests.conftest import Tether

HOMES = sorted((Path(__file__).resolve().parents[2] / "homes").glob("*.tar.gz"))
SHOWN = (("runs", "--json"), ("status", "--json"), ("status", "--why", "--json"), ("store", "ls", "--json"))


@pytest.fixture(params=HOMES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TETHER_STORE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with tarfile.open(request.param) as tar:
        tar.extractall(tmp_path, filter="data")
    return tmp_path / "home"


def test_there_is_a_small_kept_home_of_this_release() -> None:
    import importlib.metadata

    names = [path.name for path in HOMES]
    assert f"{importlib.metadata.version('tether')}.tar.gz" in names, "run tests/homes/make.py"
    assert all(path.stat().st_size < 300_000 for path in HOMES)


def test_a_releases_home_is_read_and_says_the_same_after_an_upgrade(tether_here: Tether, home: Path) -> None:
    (run,) = (path.name for path in (home / "runs").iterdir())

    def told() -> list[Any]:
        found = []
        for command in (*SHOWN, ("lineage", run, "--json")):
            done = tether_here(*command, home=home)
            assert done.returncode == 0 and not done.stderr, f"{command}: {done.stderr}"
            found.append(json.loads(done.stdout))
        return found

    before = told()
    assert before[0][0]["state"] == before[1]["state"] == "passed"
    assert [stage["name"] for stage in before[1]["stages"]] == ["validate", "sft", "reward", "ppo", "human_eval"]
    upgrade(home)
    assert due(home) == [] and told() == before


def test_a_stage_is_rerun_from_a_releases_home(home: Path) -> None:
    upgrade(home)
    launch = rerun(home, "human_eval")
    launch.ctx.reporting = Reporting(track=False)
    with launch.ctx as ctx:
        result = pipeline(launch.config, launch.sources, partial(run_stage, ctx=ctx))
    assert result is not None and result.state == "passed" and not result.cached
    assert [each.cached for name, each in ctx.results.items() if not name.startswith("human_eval")] == [True] * 4
