"""Forms of a home: which are read, which are migrated, and how a newer one is refused."""

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
from tasks.runs.schema import HOME_SCHEMA, RUN_SCHEMA, home_schema, mark_home
from tasks.runs.status import StatusFile, load_readable, load_status
from tasks.tracking.database import is_outdated
from tests.keeping import Writer, publish


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TETHER_STORE", raising=False)
    writer = Writer(tmp_path / "home")
    mark_home(writer.home)
    writer.whole_run()
    (writer.home / "mlflow.db").unlink()
    return writer.home


@pytest.fixture
def outdated(home: Path, tmp_path: Path) -> Path:
    """A home whose mlflow.db has the tables of an earlier MLflow."""
    from alembic import command
    from mlflow.store.db import utils

    kept = sorted((Path(__file__).resolve().parents[2] / "homes").glob("[0-9]*.tar.gz"))[-1]
    with tarfile.open(kept) as tar:
        tar.extract("home/mlflow.db", tmp_path, filter="data")
    upgrade(home)  # of what a later MLflow than the kept home's has
    command.downgrade(utils._get_alembic_config(f"sqlite:///{home / 'mlflow.db'}"), "-1")
    return home


def test_a_home_without_a_number_is_of_form_1_only_where_it_has_runs(home: Path, tmp_path: Path) -> None:
    (home / "home.json").unlink()
    assert home_schema(home) == 1 and home_schema(tmp_path / "nothing") is None
    mark_home(home)
    assert home_schema(home) == 1, "marking is for new homes"
    mark_home(tmp_path / "nothing")
    assert home_schema(tmp_path / "nothing") == HOME_SCHEMA


def test_a_home_from_before_the_first_release_is_refused_with_what_to_do(tether_here: Any, home: Path) -> None:
    (home / "home.json").unlink()
    done = tether_here("upgrade", home=home)
    assert done.returncode == 2 and "Upgrade it with Tether 0.1.0 first" in done.stderr
    assert tether_here("status", home=home).returncode == 0


def test_nothing_is_upgraded_under_a_run_at_work(tether_here: Any, outdated: Path) -> None:
    StatusFile.start(outdated / "runs" / "r009", "r009", "demo", ["sft"])
    done = tether_here("upgrade", home=outdated)
    assert done.returncode == 2 and "r009 is running" in done.stderr and is_outdated(outdated / "mlflow.db")


def test_check_says_what_is_due_and_changes_nothing(tether_here: Any, outdated: Path) -> None:
    before = (outdated / "mlflow.db").read_bytes()
    done = tether_here("upgrade", "--check", home=outdated)
    assert done.returncode == 1 and "tables of the installed MLflow" in done.stdout and "tether backup" in done.stdout
    assert (outdated / "mlflow.db").read_bytes() == before
    (finding,) = doctor._form(outdated)
    assert finding.level == "note" and "`tether upgrade` is due" in finding.text
    text = (Path(__file__).resolve().parents[3] / "docs" / "operations" / "upgrade.md").read_text()
    check, commands = re.findall(r"```sh\n(.*?)```", text, re.S)  # what the page says to do
    for line in commands.splitlines():
        words = line.replace("/backups", str(outdated.parent)).split()[1:]
        assert tether_here(*words, home=outdated).returncode == 0, line
    assert (outdated.parent / "before-upgrade" / "manifest.json").exists()
    assert tether_here(*check.split()[1:], home=outdated).returncode == 0
    assert doctor._form(outdated)[0].level == "ok"


@pytest.mark.parametrize(
    "command", [("runs",), ("status",), ("run", "tiny"), ("store", "gc"), ("upgrade",), ("backup", "b")]
)
def test_a_newer_home_is_refused_in_one_sentence(tether_here: Any, home: Path, command: tuple[str, ...]) -> None:
    (home / "home.json").write_text(json.dumps({"schema_version": HOME_SCHEMA + 1}))
    done = tether_here(*command, home=home)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        f"home schema {HOME_SCHEMA + 1}; this one reads up to {HOME_SCHEMA}" in done.stderr and "Install" in done.stderr
    )
    assert doctor._form(home)[0].level == "fail"


def test_a_newer_run_is_named_and_the_others_are_read(home: Path) -> None:
    path = home / "runs" / "r001" / "run.json"
    shutil.copytree(path.parent, home / "runs" / "r002")
    other = json.loads(path.read_text())
    (home / "runs" / "r002" / "run.json").write_text(json.dumps({**other, "run": "r002"}))
    path.write_text(json.dumps({"schema_version": RUN_SCHEMA + 1, "run": "r001", "what": "it holds by then"}))
    with pytest.raises(UserError, match=r"newer Tether \(run schema 3; this one reads up to 2\)"):
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


def test_mlflows_tables_of_an_earlier_version_are_brought_up(outdated: Path) -> None:
    database = outdated / "mlflow.db"

    def stored() -> list[Any]:
        with closing(sqlite3.connect(database)) as opened:
            tags = opened.execute("select name, key, value from registered_model_tags order by 1, 2").fetchall()
            return [tags, opened.execute("select count(*) from model_versions").fetchone()]

    before = stored()
    assert is_outdated(database) and due(outdated) == ["mlflow.db: the tables of the installed MLflow"]
    upgrade(outdated)
    assert not is_outdated(database) and due(outdated) == [] and stored() == before and before[1] > (0,)
    assert not list(outdated.glob(".mlflow*"))
