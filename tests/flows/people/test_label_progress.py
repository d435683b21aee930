"""How far people are with a run's labels, who is told, and what the last label starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Mistakes, UserError
from components.store.store import ArtifactStore
from flows.people.label_progress import begin_waiting, progress_of_files, show_progress, subprocess, when_complete
from flows.people.rater_sheets import give_out
from flows.review.database.connect import database_file, open_database
from flows.review.personal_links import add_raters, enter_batch
from flows.review.rater_votes import Voting
from flows.review.review_batches import find_batch
from tasks.runs.awaited_labels import LabelProgress, read_progress
from tests.flows.review.conftest import answer
from tests.sheets import write_sample
from tests.stored_run import stored_run


@pytest.fixture
def waiting(tmp_path: Path) -> str:
    """A run that waits for two raters' labels of four items, whose files are given out."""
    return waits(tmp_path)


def waits(home: Path, *changes: str) -> str:
    run = stored_run(home, upto="ppo", changes=["human_eval.judges=people", *changes])
    out = write_sample(home / "sample", 4)
    about = {"stage": "human_eval.sample", "run": run, "job": {}, "inputs": {}, "parts": {}, "metrics": {}}
    record = ArtifactStore(home).publish("5" * 64, out, None, about)
    path = home / "runs" / run / "run.json"
    document = json.loads(path.read_text())
    human = next(each for each in document["stages"] if each["name"] == "human_eval")
    part = {"human_eval.sample": {"key": record.key, "digest": record.digest}}
    human.update(state="awaiting_labels", key=record.key, digest=record.digest, parts=part)
    path.write_text(json.dumps(document))
    give_out(ArtifactStore(home).path(record), home / "runs" / run)
    return run


def fill(home: Path, run: str, rater: int, items: int) -> None:
    """A rater's first items get the answer `a`."""
    path = home / "runs" / run / "raters" / f"rater_{rater}.csv"
    lines = path.read_bytes().decode("utf-8-sig").split("\r\n")
    left = items
    for number, line in enumerate(lines):
        if line.endswith(',""') and left:
            lines[number], left = line[:-2] + '"a"', left - 1
    path.write_bytes("\r\n".join(lines).encode())


def test_progress_counts_each_raters_answers_in_the_files_that_were_given_out(tmp_path: Path, waiting: str) -> None:
    assert progress_of_files(tmp_path, waiting) == LabelProgress(0, 8, "", {"rater 1": (0, 4), "rater 2": (0, 4)})
    fill(tmp_path, waiting, 2, 3)
    assert progress_of_files(tmp_path, waiting).raters == {"rater 1": (0, 4), "rater 2": (3, 4)}
    fill(tmp_path, waiting, 1, 4)
    fill(tmp_path, waiting, 2, 1)
    assert progress_of_files(tmp_path, waiting).complete


def test_what_is_wrong_in_a_file_is_told_while_its_rater_can_still_mend_it(tmp_path: Path, waiting: str) -> None:
    path = tmp_path / "runs" / waiting / "raters" / "rater_1.csv"
    path.write_bytes(path.read_bytes().replace(b"question 2", b"question two").replace(b"question 3", b"question 4"))
    with pytest.raises(Mistakes, match="2 mistakes"):
        progress_of_files(tmp_path, waiting)


def test_a_run_without_a_sample_has_no_labels_to_count(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no sheet to judge \(human_eval: not_run\)"):
        progress_of_files(tmp_path, stored_run(tmp_path, upto="ppo"))


def test_servers_that_are_away_are_named_and_the_folder_has_the_progress_and_keeps_the_address(
    tmp_path: Path, waiting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / waiting / "run.json"
    page = "http://127.0.0.1:9/runs/flow-run/00000000-0000-0000-0000-000000000001"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prefect": page}))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    told: list[str] = []
    show_progress(tmp_path, waiting, LabelProgress(1, 8, "http://127.0.0.1:8800"), told.append)
    assert len(told) == 1 and told[0].startswith(f"Prefect did not receive the progress of run {waiting}'s labels")
    monkeypatch.delenv("PREFECT_API_URL")
    show_progress(tmp_path, waiting, LabelProgress(5, 8), told.append)
    assert len(told) == 1, "no server is named, so none is missed"
    kept = read_progress(tmp_path / "runs" / waiting)
    assert kept is not None and (kept.answered, kept.address) == (5, "http://127.0.0.1:8800")


def test_a_run_that_is_taken_up_again_waits_though_a_rater_has_spoilt_their_file(tmp_path: Path, waiting: str) -> None:
    (tmp_path / "runs" / waiting / "raters" / "rater_2.csv").write_text("item,rating\nq0001,left\n")
    told: list[str] = []
    begin_waiting(tmp_path, waiting, told.append)
    assert len(told) == 1 and "rater_2.csv" in told[0] and read_progress(tmp_path / "runs" / waiting) is None


class Started:
    """Takes note of the processes that would be started."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.homes: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> None:
        self.commands.append(command[1:])
        self.homes.append(options["env"]["TETHER_HOME"])


def test_the_last_label_starts_the_scoring_or_names_its_command_as_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started()
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    by_itself, by_hand = waits(tmp_path / "a"), waits(tmp_path / "b", "human_eval.when_complete=wait")
    sheets = tmp_path / "sheets"
    said = when_complete(tmp_path / "a", by_itself, sheets)
    words = ["-m", "flows.cli", "people", "score", str(sheets), "--run", by_itself]
    assert (started.commands, started.homes) == ([words], [str(tmp_path / "a")]) and "scoring.log" in said
    assert f"tether people score {sheets} --run {by_hand}" in when_complete(tmp_path / "b", by_hand, sheets)
    assert len(started.commands) == 1


def test_a_run_that_is_being_scored_is_not_scored_at_the_same_time(
    tmp_path: Path, waiting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started()
    monkeypatch.setattr(subprocess, "Popen", started)
    path = tmp_path / "runs" / waiting / "run.json"
    document = json.loads(path.read_text())
    document["stages"][-1]["state"] = "running"
    path.write_text(json.dumps(document))
    assert "can't be scored now" in when_complete(tmp_path, waiting, tmp_path)
    assert not started.commands


def test_a_look_at_another_sheet_counts_the_page_and_writes_nothing(
    tmp_path: Path, waiting: str, tether_here: Any
) -> None:
    show_progress(tmp_path, waiting, LabelProgress(7, 9, "https://page"), lambda _: None)
    other = tmp_path / "runs" / waiting / "raters" / "rater_1.csv"
    before = read_progress(tmp_path / "runs" / waiting)
    engine = open_database(database_file(tmp_path, waiting))
    number, _ = enter_batch(engine, find_batch(tmp_path, waiting))
    (link,) = add_raters(engine, number, ["ada"])
    voting = Voting.open(engine, number)
    person = voting.person(link.token)
    assert person is not None
    for _ in range(3):
        pair = voting.next_pair(person)
        assert pair is not None and voting.take(person, pair.ticket, answer("tie"))
    engine.dispose()
    done = tether_here("people", "status", waiting, "--json", "--sheet", str(other), home=tmp_path)
    status = json.loads(done.stdout)
    assert (status["answered"], status["asked"], status["complete"]) == (3, 8, False)
    assert [rater["name"] for rater in status["page"]["raters"]] == ["ada"] and status["page"]["bound"]["items"] == 0
    assert read_progress(tmp_path / "runs" / waiting) == before
    text = tether_here("people", "status", waiting, home=tmp_path).stdout
    assert f"Run {waiting}: 3 of 8 labels (37 %)" in text and "1. ada: 3 answered" in text and "always valid" in text
