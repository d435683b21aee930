"""A run's report leads to the pages of MLflow and Prefect, for every stage that has one."""

import re
from pathlib import Path

import pytest

from flows.reports.page import page
from flows.reports.run_facts import run_facts
from flows.reports.terminal import markdown
from tasks.runs.journal import Sent
from tasks.runs.status import StatusFile
from tests.stored_run import stored_run

BEGUN = ("validate", "sft", "reward", "ppo")
PAGES = "http://prefect:4200/runs"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run whose stages have pages on both servers; human_eval did not begin."""
    run = stored_run(tmp_path, upto="ppo")
    folder = tmp_path / "runs" / run
    status = StatusFile.resume(folder)
    status.name_page(f"{PAGES}/flow-run/f1")
    for stage in BEGUN:
        status.update(stage, prefect=f"{PAGES}/task-run/{stage}")
    status.finish()
    ids = {stage: f"id-{stage}" for stage in BEGUN}
    Sent(project="x", code={}, experiment="7", parent="whole", stages=ids).save(folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:geheim@mlflow:5000/")
    return run


def test_every_stage_links_to_both_servers_in_the_page_and_in_the_markdown(tmp_path: Path, run: str) -> None:
    facts = run_facts(tmp_path)
    source = page(facts)
    found = set(re.findall(r'href="([^#"][^"]*)"', source))
    mlflow = "http://mlflow:5000/#/experiments/7/runs/{}?workflowType=machine_learning"
    expected = {mlflow.format("whole"), f"{PAGES}/flow-run/f1"}
    for stage in BEGUN:
        expected |= {mlflow.format(f"id-{stage}"), f"{PAGES}/task-run/{stage}"}
    expected.add(mlflow.format("id-validate").replace("?", "/artifacts/attachments/data_docs/index.html?"))
    assert found == expected
    assert source.count('target="_blank"') == 11, "MLflow shows the page in a frame, which another page would replace"
    text = markdown(facts.status, False, facts.links)
    assert f"| sft | passed | [MLflow]({mlflow.format('id-sft')}) · [Prefect]({PAGES}/task-run/sft) |" in text
    assert "geheim" not in source + text


def test_a_page_in_a_run_file_that_is_no_address_of_a_server_is_no_link(tmp_path: Path, run: str) -> None:
    StatusFile.resume(tmp_path / "runs" / run).update("sft", prefect="javascript:alert(1)")
    assert "javascript" not in page(run_facts(tmp_path))


def test_without_servers_there_are_no_links_and_no_column_for_them(tmp_path: Path) -> None:
    stored_run(tmp_path, upto="validate")
    facts = run_facts(tmp_path)
    assert not any(facts.links.values()) and "pages" not in markdown(facts.status, False, facts.links)
