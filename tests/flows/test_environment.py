"""Nothing phones home, state stays in one folder, and no stranger's package is run for ours."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.base.errors import TetherError, UserError
from flows import environment
from flows.deployment.local_servers import free_port
from flows.doctor import diagnose
from tasks.prefect_flow.server import no_answer


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment._defaults(Path("/x")):
        monkeypatch.setenv(name, "kept")  # so that what the test sets is undone
        monkeypatch.delenv(name)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_telemetry_is_off_and_prefect_lives_in_our_home(bare: None, tmp_path: Path) -> None:
    environment.prepare_environment(tmp_path)
    expected = {
        "PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true", "GX_ANALYTICS_ENABLED": "false", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    assert {name: os.environ[name] for name in expected} == expected
    assert "HF_HUB_OFFLINE" not in os.environ


def test_what_the_user_has_set_stays(bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", "/elsewhere")
    environment.prepare_environment(tmp_path)
    assert os.environ["PREFECT_HOME"] == "/elsewhere"


def test_the_home_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TETHER_HOME", raising=False)
    assert environment.tether_home() == tmp_path / ".tether"
    monkeypatch.setenv("TETHER_HOME", "state")
    assert environment.tether_home() == tmp_path / "state"


@pytest.mark.parametrize(
    ("home", "said"),
    [
        ("what?/home", "question mark.*MLflow and Prefect"),
        ("a" * 5000, "can't be opened: File name too long"),
        ("~nobody-of-that-name/x", "can't be opened: Could not determine home directory"),
        ("/dev/null", "a device, a pipe or a socket"),
    ],
)
def test_a_home_that_cannot_be_one_is_refused_in_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TETHER_HOME", home)
    with pytest.raises(UserError, match=f"TETHER_HOME = .*{said}") as error:
        environment.tether_home()
    assert len(str(error.value)) < 500 and not list(tmp_path.iterdir())


def test_a_directory_that_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.delenv("TETHER_HOME", raising=False)
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match="the current directory no longer exists"):
        environment.tether_home()


NOBODY = """
import os, pwd, runpy, sys
for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
def unknown(*_):
    raise KeyError("uid not found")
pwd.getpwuid = pwd.getpwnam = unknown
sys.argv = ["tether", *sys.argv[1:]]
runpy.run_module("flows.cli", run_name="__main__")
"""


@pytest.mark.whole
def test_a_user_without_a_name_and_a_home_is_no_obstacle(tmp_path: Path) -> None:
    """As in a container that was given a number for its user."""
    (tmp_path / "pairs.jsonl").write_text(
        "".join(f'{{"prompt": "q {n}", "chosen": "good {n}", "rejected": "bad"}}\n' for n in range(30))
    )
    root = Path(__file__).resolve().parents[2]
    variables = {**os.environ, "TETHER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(root)}
    for arguments in (["data", "check", "pairs.jsonl"], ["doctor"]):
        done = subprocess.run(
            [sys.executable, "-c", NOBODY, *arguments],
            env=variables, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_a_strangers_package_in_the_place_of_ours_is_refused(tmp_path: Path, tether) -> None:
    (tmp_path / "data_contracts").mkdir()
    (tmp_path / "data_contracts" / "__init__.py").write_text("")
    done = tether("status", home=tmp_path / "home", cwd=tmp_path)  # -m puts the current directory first
    assert done.returncode == 1
    assert f"data_contracts from {tmp_path / 'data_contracts'}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_our_own_packages_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.check_packages()
    monkeypatch.setattr(environment, "package_folders", lambda: {"tasks": None})
    with pytest.raises(TetherError, match="tasks from None"):
        environment.check_packages()


def test_help_imports_nothing_heavy(tmp_path: Path, tether) -> None:
    done = tether("--help", home=tmp_path / "home", cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "pandas", "prefect", "mlflow", "great_expectations", "pydantic"}


def test_doctor_says_what_it_found_and_fails_on_a_silent_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port(0)}/api")
    findings = {finding.what: finding for finding in diagnose(tmp_path / "home")}
    assert {"torch", "GPU", "a run here", "disk", "store", "versions", "MLflow", "Prefect"} <= set(findings)
    assert findings["Prefect"].level == "fail"
    assert [name for name, finding in findings.items() if finding.level == "fail"] == ["Prefect"]


def test_a_port_that_is_taken_is_not_offered(listening: int) -> None:
    assert free_port(listening) != listening
    free = free_port(0)
    assert free_port(free) == free


def test_a_server_that_never_answers_is_no_server(listening: int) -> None:
    assert no_answer(f"http://127.0.0.1:{listening}/health", timeout=0.3)
    assert no_answer("no url")


def test_a_line_that_a_library_logs_loses_credentials_and_what_could_command_a_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREFECT_HOME", "TQDM_DISABLE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    before = logging.getLogRecordFactory()
    try:
        environment.prepare_environment(tmp_path)
        logging.getLogger("urllib3").warning("retry of %s \x1b[2J", "http://me:geheim-4711@host/x")
    finally:
        logging.setLogRecordFactory(before)
    assert [record.getMessage() for record in caplog.records] == [r"retry of http://host/x \x1b[2J"]
