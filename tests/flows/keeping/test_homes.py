"""Homes that releases wrote (tests/homes): each is read and upgraded, and a stage rerun from it."""

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.gates.candidacy import why_no_alias
from components.gates.judging import Waiver
from flows.config.profiles import parse_override
from flows.keeping.upgrade import due, upgrade
from flows.launch.begin import rerun
from flows.launch.request import Request
from flows.reports.diff import diff
from flows.rlhf import pipeline
from tasks.execution.context import Reporting
from tasks.execution.runner import run_stage
from tasks.runs.config import run_values
from tasks.runs.status import load_status
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


def test_former_names_in_a_releases_home_are_read_under_the_present_ones(tether_here: Tether, home: Path) -> None:
    """The home's config, gates and metrics say `ppo.kl` and `ppo/kl`; the waiver and the option are a user's."""
    upgrade(home)
    (first,) = (path.name for path in (home / "runs").iterdir())
    assert "ppo.kl" in (home / "runs" / first / "run.json").read_text()
    before = load_status(home, first).stage("ppo")
    assert {"policy/kl_high", "ppo/beta"} < before.metrics.keys() and "ppo/kl_high" not in before.metrics
    names = [gate.name for gate in before.gates]
    assert {"policy.kl", "ppo.stopped"} < set(names) and "ppo.kl" not in names
    overrides = [parse_override("gates.ppo.kl=-1")]
    request = Request(waivers=[Waiver(gate="ppo.kl", user="ada", reason="x")])
    launch = rerun(home, "human_eval", overrides=overrides, request=request)
    assert launch.config.gates.model_dump()["policy"]["length_ratio"] == (0.2, 5)
    launch.ctx.track, launch.ctx.at_end = False, None
    with launch.ctx as ctx:
        pipeline(launch.config, launch.sources, partial(run_stage, ctx=ctx))
    stage = load_status(home, ctx.run).stage("ppo")
    assert (stage.state, stage.metrics) == ("waived", before.metrics)
    assert [waiver.gate for waiver in stage.waivers] == ["policy.kl"]
    changed = diff(home, first, ctx.run)
    assert changed.options["gates.policy.kl"] == (5.0, -1.0) and changed.stages[3].metrics == {}
    assert changed.stages[3].gates["policy.kl"] == ("PASS", "WAIVED")
    done = tether_here("status", first, "--html", home=home)
    page = (home / "runs" / first / "report.html").read_text()
    assert not done.returncode and "bound of the gate policy.kl 5" in page and "ppo.kl_floor" not in page
    assert why_no_alias(run_values(home, first) | {"promote": True}, before.metrics) == (
        "its run does not judge reward accuracy, gain in reward, policy violations, win rate: set "
        "gates.reward.accuracy_low, gates.policy.reward_gain_low, gates.policy.violations_excess, "
        "gates.human_eval.win_rate_low, and rerun human_eval"
    )
    assert tether_here("promote", "tether-policy/1", home=home).returncode == 0
