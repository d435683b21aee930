"""Whole runs of `validate` on a user's files: a suite, earlier data to compare with, a hub dataset; and again."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from components.base.hashing import digest_file
from components.base.jsonl import write_rows
from components.data.support_desk.desk import SupportDeskConfig, generate
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from flows.launch.begin import new_run
from flows.launch.request import Request
from flows.models.lineage import lineage
from flows.models.lineage_text import text
from flows.models.reproduce import reproduce
from flows.reports.run_facts import run_facts
from flows.rlhf import pipeline
from flows.sources import find_sources
from tasks.execution.keying import key_of
from tasks.execution.runner import run_stage
from tasks.runs.journal import read_done
from tasks.runs.status import load_status
from tasks.stages import STAGES
from tasks.tracking.mlflow_client import connect

SUITE = {
    "expectations": [{"type": "expect_column_values_to_be_between", "kwargs": {"column": "turns", "max_value": 99}}]
}
HUB = f"owner/name@{'7' * 40}"


def _config(*changes: str) -> RunConfig:
    return load_config("tiny", [parse_override(text) for text in changes]).resolved()


class Place(NamedTuple):
    """A folder with a home, and files of pairs of the same name in two folders."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def pairs(self, name: str, seed: int) -> Path:
        """Write pairs to a file in the folder `name`."""
        path = self.folder / name / "pairs.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_rows(path, generate(seed, SupportDeskConfig(demonstrations=50, pairs=200))[1][:60])
        return path

    def run(self, *changes: str) -> str:
        """Run `validate` without Prefect, and return the run's id."""
        launch = new_run(self.home, "tiny", _config(*changes), request=Request(until="validate"))
        with launch.ctx:
            pipeline(launch.config, launch.sources, partial(run_stage, ctx=launch.ctx), "validate")
        return launch.ctx.run

    def key(self, *changes: str) -> str:
        """The key that `validate` has now."""
        config, stage = _config(*changes), STAGES["validate"]
        return key_of(stage, config.stage_job(stage), find_sources(config, self.home).data)[0]

    def state(self, run: str) -> tuple[str, str | None]:
        """The state and key of a run's `validate`."""
        stage = load_status(self.home, run).stage("validate")
        return stage.state, stage.key


@pytest.fixture
def place(tmp_path: Path, empty_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = Place(tmp_path)
    made.home.mkdir()
    shutil.copy(empty_mlflow, made.home)
    return made


def test_a_suite_and_earlier_data_are_in_key_lineage_and_mlflow_and_data_of_one_name_are_reproduced(
    place: Place,
) -> None:
    first, second = place.pairs("a", 1), place.pairs("b", 2)
    suite = place.folder / "mine.json"
    suite.write_text(json.dumps(SUITE))
    earlier = place.run(f"data.preferences={first}")
    changes = (f"data.preferences={second}", f"data.suite={suite}")
    run = place.run(*changes, f"data.reference={earlier}")
    state, key = place.state(run)
    reference = load_status(place.home, earlier).stage("validate").digest
    assert state == "passed"
    made_of = {"preferences": digest_file(second), "suite": digest_file(suite), "reference": reference}
    (done,) = read_done(place.home / "runs" / run)
    assert done.record.inputs == made_of and done.lineage == made_of
    found = lineage(place.home, run)
    assert {edge.name: edge.made_of for edge in found.edges if edge.to == done.record.digest} == made_of
    sources = {each.name: each.digest for each in run_facts(place.home, run).data.sources}
    assert sources == made_of

    _check_mlflow(place.home, run, made_of)
    assert place.state(place.run(*changes, f"data.reference={earlier}")) == ("cached", key)
    assert place.key(*changes, f"data.reference={earlier}") == key
    suite.write_text(json.dumps(SUITE).replace("99", "98"))
    assert place.key(*changes, f"data.reference={earlier}") != key
    suite.write_text(json.dumps(SUITE))
    place.pairs("a", 3)
    later = place.run(f"data.preferences={first}")
    assert place.key(*changes, f"data.reference={later}") != key

    place.pairs("a", 1)
    (place.folder / "moved").mkdir()
    for name in ("a", "b"):
        (place.folder / name).rename(place.folder / "moved" / name)
    moved = [("preferences", place.folder / "moved" / name / "pairs.jsonl") for name in ("a", "b")]
    assert reproduce(place.home, run, moved).same


def _check_mlflow(home: Path, run: str, made_of: dict[str, str]) -> None:
    """MLflow has the inputs of validate, and the Data Docs with the user's expectation; the report links to them."""
    client, status = connect(home), load_status(home, run)
    logged = client.get_run(status.stage("validate").mlflow_run)
    given = {
        each.dataset.name: {tag.key: tag.value for tag in each.tags}["lineage.digest"]
        for each in logged.inputs.dataset_inputs
    }
    assert made_of.items() <= given.items()
    page = Path(client.download_artifacts(logged.info.run_id, "attachments/data_docs/index.html"))
    folder = Path(client.download_artifacts(logged.info.run_id, "attachments/data_docs"))
    assert page.is_file() and any("turns" in each.read_text() for each in folder.rglob("*.html"))
    assert "Data Docs" in client.get_run(logged.data.tags["mlflow.parentRunId"]).data.tags["mlflow.note.content"]


def test_a_runs_record_report_lineage_and_mlflow_name_the_commit_of_a_hub_dataset_and_no_key_holds_it(
    place: Place,
) -> None:
    copy = place.home / "datasets" / "owner--name--train.jsonl"
    copy.parent.mkdir()
    shutil.copy(place.pairs("a", 1), copy)
    copy.with_suffix(".commit").write_text(HUB.partition("@")[2] + "\n")
    run = place.run("data.preferences=owner/name")
    (done,) = read_done(place.home / "runs" / run)
    assert [given.hub for given in done.inputs] == [HUB]
    assert find_sources(load_config("tiny", [parse_override("data.preferences=owner/name")]), place.home,
                        taken={"validate": done.record}).data["preferences"].hub == HUB  # fmt: skip
    assert [source.path for source in run_facts(place.home, run).data.sources] == [HUB]
    found = lineage(place.home, run)
    assert found.as_json()["nodes"][0]["hub"] == HUB and f"a copy of the hub dataset {HUB}" in text(found)
    logged = connect(place.home).get_run(load_status(place.home, run).stage("validate").mlflow_run)
    tags = {tag.key: tag.value for each in logged.inputs.dataset_inputs for tag in each.tags}
    assert tags["tether.hub"] == HUB and f"preferences ({HUB})" in logged.data.tags["mlflow.note.content"]
    assert HUB.partition("@")[2] not in json.dumps(done.record.model_dump(mode="json"))
    assert place.state(place.run(f"data.preferences={copy}")) == ("cached", place.state(run)[1])
