"""`tether people` in this process: links, files and numbers, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from components.base.jsonl import read_rows, write_rows
from flows.cli.people import people
from flows.review.database.connect import open_database
from flows.review.rater_votes import Voting
from tests.flows.review.conftest import answer


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of three pairs, in a home of its own."""
    monkeypatch.setenv("TETHER_HOME", str(tmp_path / "home"))
    rows = [{"id": str(n), "prompt": f"question {n}", "a": "left", "b": f"right {n}"} for n in range(3)]
    write_rows(tmp_path / "batch" / "pairs.jsonl", rows)
    return str(tmp_path / "batch")


def tether(*words: str, code: int = 0) -> str:
    """What a command prints."""
    done = CliRunner().invoke(people, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_links_are_printed_once_and_open_the_batch_and_its_answers_are_exported(batch: str, tmp_path: Path) -> None:
    made = tether(
        "page", batch, "--links", "--rater", "ada", "--rater", "bob", "--overlap", "2", "--address", "https://review.example"
    )
    tokens = dict(re.findall(r"(\w+): https://review\.example/r/(\S+)", made))
    assert list(tokens) == ["administrator", "ada", "bob"]
    assert tether("page", batch, "--links").split() == ["1", "ada", "2", "bob"], "and no link again"
    (file,) = (tmp_path / "home" / "review").glob("*.db")
    engine = open_database(file)
    voting = Voting.open(engine, 1)
    person = voting.person(tokens["ada"])
    assert person is not None and voting.batch.overlap == 2
    while (pair := voting.next_pair(person)) is not None:
        voting.take(person, pair.ticket, answer("tie"))
    engine.dispose()
    exported = tether("answers", batch).strip()
    assert [row["votes"] for row in read_rows(Path(exported))] == [[{"annotator": "rater_1", "label": "tie"}]] * 3
    told = json.loads(tether("status", batch, "--json"))
    assert (told["answered"], told["asked"], told["page"]["bound"]) == (3, 6, None)
    assert "1. ada: 3 answered" in tether("status", batch)
    renewed = tether("page", batch, "--links", "--renew", "ada")
    assert tokens["ada"] not in renewed and "ada: http" in renewed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "{}"), "no page has been served"), (("answers", "{}"), "no page has been served"),
        (("status", "{}", "--watch", "9"), "Leave them out"), (("answers", "no-run"), "no such run"),
        (("page", "{}", "--links", "--rater", " "), "not a valid name"),
        (("page", "{}", "--links", "--renew", "eve"), "not a rater"),
        (("page", "{}", "--links", "--database", "mysql://x"), "SQLite or PostgreSQL"),
        (("page", "{}", "--guidelines", "/nowhere"), "can't be read"),
        (("page", "{}", "--host", "192.0.2.1"), "port 9430"),
    ],
)  # fmt: skip
def test_what_can_not_be_done_is_one_sentence(batch: str, words: tuple[str, ...], said: str) -> None:
    assert said in tether(*(word.format(batch) for word in words), code=2)
