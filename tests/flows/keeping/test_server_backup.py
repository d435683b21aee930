"""Which servers a backup includes, and what a restore asks for. With real servers: tests/test_operations.py."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.hashing import digest_json
from flows.keeping.manifest import MANIFEST
from flows.keeping.server_backup import DATABASES, named_servers, servers_elsewhere
from tests.keeping import Writer, backed_up, dangling, restored

ARTIFACTS = "MLFLOW_ARTIFACTS_DESTINATION"


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    for name in (*DATABASES.values(), ARTIFACTS, "TETHER_STORE", "PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    writer = Writer(tmp_path / "home")
    writer.whole_run()
    return writer


def test_the_addresses_are_those_that_the_servers_read(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "auth.ini").write_text("[mlflow]\ndatabase_uri = postgresql+psycopg://users@db/mlflow_auth\n")
    monkeypatch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(tmp_path / "auth.ini"))
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", f"sqlite:///{writer.home}/mlflow.db")
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql+asyncpg://prefect:pw@db:5433/prefect")
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example")
    found = named_servers()
    assert {name: (url.host, url.database) for name, url in found.databases.items()} == {
        "mlflow_auth": ("db", "mlflow_auth"), "prefect": ("db", "prefect"),
    }  # fmt: skip
    [told] = servers_elsewhere(found)
    assert told.startswith("MLflow is at https://") and "MLFLOW_BACKEND_STORE_URI" in told and "secret" not in told


@pytest.mark.parametrize("variable", list(DATABASES.values()))
def test_an_address_that_cannot_be_read_is_named_but_not_shown(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "hunter2")
    with pytest.raises(UserError, match=f"^{variable}: the address of a database can't be read") as error:
        named_servers()
    assert "hunter2" not in str(error.value)


@pytest.mark.skipif(shutil.which("pg_dump") is None, reason="PostgreSQL's clients are not installed")
def test_a_database_that_does_not_answer_ends_a_backup_in_one_sentence(
    writer: Writer, tether_here: Any, tmp_path: Path
) -> None:
    url = "postgresql+psycopg://mlflow:hunter2@127.0.0.1:1/mlflow"
    done = tether_here("backup", str(tmp_path / "backup"), home=writer.home, MLFLOW_BACKEND_STORE_URI=url)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "hunter2" not in done.stderr
    assert "MLFLOW_BACKEND_STORE_URI: pg_dump fails on the database mlflow" in done.stderr
    assert not list(tmp_path.glob("backup*"))


def test_artifacts_in_a_folder_are_backed_up_and_restored(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARTIFACTS, str(tmp_path / "artifacts"))
    (tmp_path / "artifacts/1/run").mkdir(parents=True)
    (tmp_path / "artifacts/1/run/report.html").write_text("a page")
    backed_up(writer.home, tmp_path / "backup")
    monkeypatch.delenv(ARTIFACTS)
    with pytest.raises(UserError, match=f"Set {ARTIFACTS} as MLflow's server has it"):
        restored(tmp_path / "backup", tmp_path / "again")
    monkeypatch.setenv(ARTIFACTS, str(tmp_path / "new"))
    restored(tmp_path / "backup", tmp_path / "again")
    assert (tmp_path / "new/1/run/report.html").read_text() == "a page"


def test_a_backup_of_a_stack_wants_its_databases_and_its_store(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Format 1, which the last release wrote."""
    backed_up(writer.home, tmp_path / "backup")
    body = json.loads((tmp_path / "backup" / MANIFEST).read_text())["backup"]
    (tmp_path / "backup/stack").mkdir()
    (tmp_path / "backup/home/store").rename(tmp_path / "backup/stack/store")
    files = json.loads(json.dumps(body["files"]).replace('"home/store/', '"stack/store/'))
    body |= {"schema_version": 1, "stack": {"folder": None}, "files": files}

    def write(changes: dict[str, Any]) -> None:
        document = body | {"files": body["files"] | changes}
        (tmp_path / "backup" / MANIFEST).write_text(json.dumps({"backup": document, "sha256": digest_json(document)}))

    write({})
    with pytest.raises(UserError, match="Set TETHER_STORE to the folder or bucket"):
        restored(tmp_path / "backup", tmp_path / "again")
    monkeypatch.setenv("TETHER_STORE", str(tmp_path / "store"))
    write({"stack/databases/prefect.dump": body["files"]["home/mlflow.db"]})
    with pytest.raises(UserError, match="Set PREFECT_API_DATABASE_CONNECTION_URL"):
        restored(tmp_path / "backup", tmp_path / "again")
    write({})
    restored(tmp_path / "backup", tmp_path / "again")
    assert list((tmp_path / "store/objects").iterdir()) and (tmp_path / "again/runs/r001/run.json").exists()


def test_a_home_that_is_a_mount_point_is_filled_and_not_replaced(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backed_up(writer.home, tmp_path / "backup")
    (tmp_path / "again").mkdir()
    number = (tmp_path / "again").stat().st_ino
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "again")
    restored(tmp_path / "backup", tmp_path / "again")
    assert (tmp_path / "again").stat().st_ino == number and dangling(tmp_path / "again") == []
    assert not list((tmp_path / "again").glob("*restored*"))
