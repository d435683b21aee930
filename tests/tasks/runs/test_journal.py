"""A damaged file about MLflow, or about what a stage gave, is said and costs nothing else."""

from pathlib import Path

import pytest

from components.base.errors import UserError
from tasks.runs.config import run_values, write_values
from tasks.runs.journal import Sent, current_user, read_done, recorded_paths

DAMAGED = (b"", b"[]", b"null", b"5", b'{"project": "o', bytes(range(256)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "one"
    path.mkdir(parents=True)
    write_values(path, {"project": "ours"})
    return path


@pytest.mark.parametrize("data", DAMAGED)
def test_of_a_damaged_mlflow_json_the_project_is_known_and_nothing_counts_as_sent(
    folder: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "mlflow.json").write_bytes(data)
    assert Sent.load(folder) == Sent(project="ours")
    assert "mlflow.json is damaged" in caplog.text


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_result_is_named_and_the_inputs_of_other_runs_are_found(
    folder: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "done").mkdir()
    (folder / "done" / "ppo.json").write_bytes(data)
    with pytest.raises(UserError, match=r"done/ppo\.json is damaged"):
        read_done(folder)
    assert recorded_paths(folder.parent.parent, ["one"]) == {}
    assert "done/ppo.json is damaged" in caplog.text


NO_CONFIG = (b"- a", b"a: [", b"\xff", b"a: " + b"[" * 3000, b"a: !!bool x", b"a: !!int", b"a: !!timestamp soon")


@pytest.mark.parametrize("data", [*DAMAGED, *NO_CONFIG])
def test_a_damaged_config_is_named(folder: Path, data: bytes) -> None:
    (folder / "config.yaml").write_bytes(data)
    with pytest.raises(UserError, match=r"config\.yaml is damaged"):
        run_values(folder.parent.parent, "one")


@pytest.mark.parametrize(
    ("variables", "who"),
    [
        ({}, "ada"),
        ({"MLFLOW_TRACKING_USERNAME": "promoter", "PREFECT_API_AUTH_STRING": "ops:geheim-4711"}, "ada as promoter"),
        ({"PREFECT_API_AUTH_STRING": "ops:geheim:4711"}, "ada as ops"),
        ({"PREFECT_API_AUTH_STRING": "geheim-4711"}, "ada"),
        ({"MLFLOW_TRACKING_USERNAME": "ada"}, "ada"),
        ({"MLFLOW_TRACKING_USERNAME": "a\nb\x1b[2J"}, "ada as a b\\x1b[2J"),
    ],
)
def test_who_did_it_has_the_name_that_the_servers_let_in_and_never_a_password(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], who: str
) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "PREFECT_API_AUTH_STRING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOGNAME": "ada", **variables}.items():
        monkeypatch.setenv(name, value)
    assert current_user() == who
