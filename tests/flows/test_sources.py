"""An earlier run's reward model and data, found by the run's id or folder; and what enters the key of them."""

import shutil
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.store.store import ArtifactStore, digest_folder
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from flows.sources import find_sources
from tasks.execution.computing import Work
from tasks.execution.dispatch import _order
from tasks.runs.status import StatusFile
from tasks.stages import PIPELINE, STAGES


def publish(store: ArtifactStore, name: str) -> str:
    made = store.home / "made" / name
    (made / "inner").mkdir(parents=True)
    (made / "inner" / "name.txt").write_text(name)
    return store.publish(name * 8, made, None, {"stage": name}).digest


def earlier(home: Path, run: str = "r1", **digests: str | None) -> dict[str, str | None]:
    """A run in `home` whose validate and reward stages have results."""
    store = ArtifactStore(home)
    found = {name: digests.get(name, publish(store, name)) for name in ("validate", "reward")}
    status = StatusFile.start(home / "runs" / run, run, "tiny", PIPELINE)
    for name, digest in found.items():
        status.update(name, digest=digest)
    status.finish()
    return found


def refreshing(run: str | Path) -> RunConfig:
    return load_config("tiny", [parse_override(f"reward.refresh.from_run={run}")]).resolved()


def test_a_run_is_named_by_its_id_or_its_folder_and_neither_enters_the_key(tmp_path: Path) -> None:
    digests = earlier(tmp_path / "home")
    by_id, by_folder = (
        find_sources(refreshing(named), tmp_path / "home") for named in ("r1", tmp_path / "home" / "runs" / "r1")
    )
    assert by_id == by_folder
    found = by_id.previous
    assert {name: source.digest for name, source in found.items()} == {
        "previous_reward": digests["reward"], "previous_data": digests["validate"]
    }  # fmt: skip
    assert (found["previous_reward"].path / "inner" / "name.txt").read_text() == "reward"
    jobs = [refreshing(named).stage_job(STAGES["reward"]) for named in ("r1", "r2")]
    assert keyed_values(jobs[0]) == keyed_values(jobs[1])
    assert keyed_values(jobs[0])["reward"]["refresh"] == {"replay": 0.25}
    assert find_sources(load_config("tiny"), tmp_path / "home").previous == {}


def test_a_run_of_another_home_is_copied_and_outlives_it(tmp_path: Path) -> None:
    digests = earlier(tmp_path / "theirs")
    found = find_sources(refreshing(tmp_path / "theirs" / "runs" / "r1"), tmp_path / "home").previous
    shutil.rmtree(tmp_path / "theirs")
    for name, stage in (("previous_reward", "reward"), ("previous_data", "validate")):
        assert found[name].digest == digests[stage] == digest_folder(found[name].path)
        assert found[name].path.is_relative_to(tmp_path / "home")


def test_a_worker_finds_a_stored_artifact_by_its_digest_and_a_copy_by_its_path(tmp_path: Path) -> None:
    earlier(tmp_path / "home")
    earlier(tmp_path / "theirs", run="r2")
    job = refreshing("r1").stage_job(STAGES["reward"])
    for named, stored in (("r1", True), (tmp_path / "theirs" / "runs" / "r2", False)):
        inputs = find_sources(refreshing(named), tmp_path / "home").previous
        ordered = _order(Work(STAGES["reward"], job, inputs, "k", {}, "r"), refresh=False).inputs
        assert {name: given.stored for name, given in ordered.items()} == dict.fromkeys(inputs, stored)


def test_a_run_that_is_not_there_or_has_no_reward_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.refresh\.from_run = r9: there is no run r9 in .*HOME/runs/ID"):
        find_sources(refreshing("r9"), tmp_path / "home")
    earlier(tmp_path / "home", reward=None)
    with pytest.raises(UserError, match=r"reward\.refresh\.from_run = r1: that run has no reward model"):
        find_sources(refreshing("r1"), tmp_path / "home")
