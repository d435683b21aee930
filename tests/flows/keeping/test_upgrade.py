"""Formats of a home: which are read and upgraded, and how those of other versions are refused."""

import json
import re
import shutil
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.store.records import RECORD_SCHEMA, Miss, parse_record, record_text
from components.store.store import ArtifactStore
from flows import doctor
from flows.keeping.upgrade import due, upgrade
from tasks.runs.schema import HOME_FILE, HOME_SCHEMA, RUN_SCHEMA, home_schema, mark_home
from tasks.runs.status import load_readable, load_status
from tasks.tracking.database import is_outdated
from tests.keeping import Writer, publish


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TETHER_STORE", raising=False)
    writer = Writer(tmp_path / "home")
    writer.whole_run()
    (writer.home / "mlflow.db").unlink()
    return writer.home


def downgraded(home: Path) -> Path:
    """Give a home the kept release's MLflow with tables of the version before the installed one. Return the file."""
    from alembic import command
    from mlflow.store.db import utils

    kept = sorted((Path(__file__).resolve().parents[2] / "homes").glob("*.tar.gz"))[-1]
    with tarfile.open(kept) as tar:
        tar.extract("home/mlflow.db", home.parent, filter="data")
    upgrade(home)  # of what a later MLflow than the kept home's has
    command.downgrade(utils._get_alembic_config(f"sqlite:///{home / 'mlflow.db'}"), "-1")
    return home / "mlflow.db"


def test_only_a_home_without_runs_gets_this_versions_number(home: Path, tmp_path: Path) -> None:
    for folder, number in ((home, None), (tmp_path / "nothing", HOME_SCHEMA)):
        assert home_schema(folder) is None
        mark_home(folder)
        assert home_schema(folder) == number, "a run of another format has to be found by that release's upgrade"


def test_nothing_is_upgraded_under_a_run_at_work(
    tether_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TETHER_STORE", raising=False)
    writer = Writer(tmp_path / "home")
    for _ in range(3):
        writer.step()
    database = downgraded(writer.home)
    done = tether_here("upgrade", home=writer.home)
    assert done.returncode == 2 and "r001 is running" in done.stderr and is_outdated(database)


def test_check_says_what_is_due_and_changes_nothing(tether_here: Any, home: Path) -> None:
    database = downgraded(home)
    before = database.read_bytes()
    done = tether_here("upgrade", "--check", home=home)
    assert done.returncode == 1 and "mlflow.db: the tables" in done.stdout and "tether backup" in done.stdout
    assert database.read_bytes() == before
    (finding,) = doctor._home(home)
    assert finding.level == "note" and "`tether upgrade` is due" in finding.text
    text = (Path(__file__).resolve().parents[3] / "docs" / "operations" / "upgrade.md").read_text()
    check, commands = re.findall(r"```sh\n(.*?)```", text, re.S)  # what the page says to do
    for line in commands.splitlines():
        words = line.replace("/backups", str(home.parent)).split()[1:]
        assert tether_here(*words, home=home).returncode == 0, line
    assert (home.parent / "before-upgrade" / "manifest.json").exists()
    assert tether_here(*check.split()[1:], home=home).returncode == 0
    assert doctor._home(home) == []


@pytest.mark.parametrize(
    "command", [("runs",), ("status",), ("run", "tiny"), ("store", "gc"), ("upgrade",), ("backup", "b")]
)
def test_a_newer_home_is_refused_in_one_sentence(tether_here: Any, home: Path, command: tuple[str, ...]) -> None:
    (home / HOME_FILE).write_text(json.dumps({"schema_version": HOME_SCHEMA + 1}))
    done = tether_here(*command, home=home)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        f"home schema {HOME_SCHEMA + 1}; this one reads up to {HOME_SCHEMA}" in done.stderr and "Install" in done.stderr
    )
    assert [finding.exit_code for finding in doctor._home(home)] == [2], "tether doctor says it too"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"schema_version": RUN_SCHEMA + 1}, r"newer Tether \(run schema 3; this one reads up to 2\)"),
        ({}, r"before 0\.1\.0 \(run schema 1; this one reads 2\)\. Run `tether upgrade` of release 0\.1\.0"),
    ],
)
def test_a_run_of_another_format_is_named_and_the_others_read(home: Path, schema: dict[str, int], why: str) -> None:
    path = home / "runs" / "r001" / "run.json"
    shutil.copytree(path.parent, home / "runs" / "r002")
    other = json.loads(path.read_text())
    (home / "runs" / "r002" / "run.json").write_text(json.dumps({**other, "run": "r002"}))
    path.write_text(json.dumps({**schema, "run": "r001", "what": "it holds then"}))
    with pytest.raises(UserError, match=why):
        load_status(home, "r001")
    readable, unreadable = load_readable(home)
    assert [each.run for each in readable] == ["r002"] and list(unreadable) == ["r001"]


def test_a_newer_record_is_a_miss_that_says_so(tmp_path: Path) -> None:
    record = publish(ArtifactStore(tmp_path, alone=True), "sft", "r1", {})
    document = json.loads(record_text(record))
    assert parse_record(json.dumps(document), record.key) == record
    found = parse_record(json.dumps({**document, "schema": RECORD_SCHEMA + 1}), record.key)
    assert isinstance(found, Miss) and "newer Tether" in found.reason


def test_a_damaged_number_hides_no_run_and_upgrade_names_the_file(tether_here: Any, home: Path) -> None:
    (home / "home.json").write_text("{}")
    done = tether_here("status", home=home)
    assert done.returncode == 0 and "r001" in done.stdout
    done = tether_here("upgrade", home=home)
    assert done.returncode == 2 and "home.json is damaged" in done.stderr
    done = tether_here("backup", str(home.parent / "backup"), home=home)
    assert done.returncode == 0 and (home.parent / "backup/home/home.json").read_text() == "{}"


def test_mlflows_tables_of_an_earlier_version_are_upgraded(home: Path) -> None:
    database = downgraded(home)
    with closing(sqlite3.connect(database)) as opened:
        before = opened.execute("select name, key, value from registered_model_tags order by 1, 2").fetchall()
        versions = opened.execute("select count(*) from model_versions").fetchone()
    assert is_outdated(database) and due(home) == ["mlflow.db: the tables of the installed MLflow"]
    upgrade(home)
    assert not is_outdated(database) and due(home) == []
    with closing(sqlite3.connect(database)) as opened:
        assert opened.execute("select name, key, value from registered_model_tags order by 1, 2").fetchall() == before
        assert opened.execute("select count(*) from model_versions").fetchone() == versions and versions[0] > 0
    assert not list(home.glob(".mlflow*"))
