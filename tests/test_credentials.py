"""Wrong passwords and private certificates: what is said of them, by which command, and with which exit code."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_SSL_CERT_FILE, temporary_settings

from components.base.errors import TetherError, UserError
from flows.doctor import Finding, print_findings, servers
from tasks.prefect_flow.server import check_server, is_answering
from tasks.tracking.mlflow_client import check_access
from tests.conftest import Tether
from tests.guarded import Guarded, certificate
from tests.servers import PrefectServer

VARIABLES = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "MLFLOW_TRACKING_SERVER_CERT_PATH",
    "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "PREFECT_API_AUTH_STRING", "PREFECT_API_SSL_CERT_FILE",
    "MLFLOW_TRACKING_URI", "PREFECT_API_URL",
)  # fmt: skip
RIGHT = {"PREFECT_API_AUTH_STRING": "ops:right", "MLFLOW_TRACKING_USERNAME": "ops", "MLFLOW_TRACKING_PASSWORD": "right"}
WRONG = {name: value.replace("right", "geheim-4711") for name, value in RIGHT.items()}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials and certificates but a test's own, and what MLflow's loading sets goes with the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server() -> Iterator[Guarded]:
    with Guarded() as found:
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def private(pem: Path) -> Iterator[Guarded]:
    """The same server behind a private CA."""
    with Guarded(pem=pem) as found:
        yield found
        found.shutdown()


def both(server: Guarded) -> dict[str, str]:
    """The addresses of both servers."""
    return {"PREFECT_API_URL": f"{server.url}/api", "MLFLOW_TRACKING_URI": server.url}


Say = Callable[..., dict[str, Finding]]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """`look(**environment)`: what doctor finds of the servers there, by name."""

    def look(**environment: str) -> dict[str, Finding]:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            # A process of ours reads the environment when it imports Prefect; this one has done so.
            names = {"PREFECT_API_AUTH_STRING": PREFECT_API_AUTH_STRING, "SSL_CERT_FILE": PREFECT_API_SSL_CERT_FILE}
            settings = {setting: environment.get(name) for name, setting in names.items()}
            with temporary_settings(settings):
                return {each.what: each for each in servers(tmp_path)}

    return look


def test_doctor_names_credentials_that_are_missing_or_wrong(look: Say, server: Guarded) -> None:
    found = look(**both(server))
    assert [each.level for each in found.values()] == ["fail"] * 2 and print_findings(list(found.values())) == 2
    assert "Set PREFECT_API_AUTH_STRING" in found["Prefect"].text
    assert "Set MLFLOW_TRACKING_USERNAME" in found["MLflow"].text
    found = look(**both(server), **WRONG)
    assert "refuses this user (401). Set PREFECT_API_AUTH_STRING" in found["Prefect"].text
    assert "refuses this user (401). Set MLFLOW_TRACKING_USERNAME" in found["MLflow"].text
    assert "geheim-4711" not in str(found)
    found = look(**both(server), **RIGHT)
    assert print_findings(list(found.values())) == 0
    assert {"/api/flows/filter", "/api/2.0/mlflow/experiments/search"} <= set(server.asked), "it has asked"


@pytest.mark.parametrize("variable", ["MLFLOW_TRACKING_URI", "PREFECT_API_URL"])
@pytest.mark.parametrize("url", ["http://me:kT/9pQ==@127.0.0.1:9/api", "postgresql://me:a#b/kT?9pQ@db:5432/x"])
def test_doctor_shows_no_password_whatever_its_characters(look: Say, variable: str, url: str) -> None:
    told = str(look(**{variable: url}))
    assert "9pQ" not in told and "kT" not in told and ("127.0.0.1:9" in told or "db:5432" in told)


def test_a_401_is_the_users_to_mend_in_one_line(tether_here: Tether, server: Guarded, tmp_path: Path) -> None:
    done = tether_here("deploy", "tiny", home=tmp_path / "home", PREFECT_API_URL=f"{server.url}/api")
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr and done.stderr.startswith("tether: PREFECT_API_URL") and "401" in done.stderr


@pytest.mark.parametrize(
    ("variable", "path", "said"),
    [
        ("PREFECT_API_URL", "/api", "Set PREFECT_API_AUTH_STRING"),
        ("MLFLOW_TRACKING_URI", "", "refuses this user (401). Set MLFLOW_TRACKING_USERNAME"),
    ],
)
def test_a_run_that_a_server_refuses_does_not_begin(
    variable: str, path: str, said: str, tether_here: Tether, server: Guarded, tmp_path: Path
) -> None:
    wrong = {name: value for name, value in WRONG.items() if name.startswith("MLFLOW")}
    done = tether_here("run", "tiny", home=tmp_path / "home", **wrong, **{variable: f"{server.url}{path}"})
    assert done.returncode == 2, done
    assert done.stderr.startswith(f"tether: {variable}") and said in done.stderr and done.stderr.count("\n") < 6
    assert list((tmp_path / "home" / "runs").glob("*")) == [], "nothing is left of it"


def test_an_mlflow_that_is_away_keeps_no_run_from_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    check_access(tmp_path)


def test_what_prefects_server_answers_is_said_by_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    for status, kind, said in (
        (403, UserError, "may read flows"),
        (404, UserError, "ends in /api"),
        (500, TetherError, "answers 500"),
    ):
        with Guarded(status=status) as server:
            monkeypatch.setenv("PREFECT_API_URL", f"{server.url}/api")
            with pytest.raises(TetherError, match=said) as told:
                check_server()
            server.shutdown()
        assert isinstance(told.value, UserError) == (kind is UserError), status


def test_one_certificate_file_is_enough_for_prefect_and_mlflow(look: Say, private: Guarded, pem: Path) -> None:
    found = look(**both(private), **RIGHT)
    assert print_findings(list(found.values())) == 2
    assert all("certificate" in each.text and "SSL_CERT_FILE" in each.text for each in found.values())
    found = look(**both(private), **RIGHT, SSL_CERT_FILE=str(pem))
    assert print_findings(list(found.values())) == 0, found


def test_a_certificate_file_that_is_not_there_is_named(look: Say, tmp_path: Path) -> None:
    found = look(REQUESTS_CA_BUNDLE=str(tmp_path / "gone.pem"))
    assert "REQUESTS_CA_BUNDLE" in found["certificates"].text and print_findings(list(found.values())) == 2


def test_the_ca_that_prefects_own_variable_names_is_trusted_when_we_ask_whether_it_answers(
    private: Guarded, pem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each stage is said to be missing on its pages, which Prefect's client reaches."""
    monkeypatch.setenv("PREFECT_API_URL", f"{private.url}/api")
    assert not is_answering()
    monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(pem))
    assert is_answering()


def test_mlflow_gets_the_ca_where_its_user_named_none(
    private: Guarded, pem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.tracking.mlflow_client import connect, load_mlflow

    for name, value in {**both(private), **RIGHT}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="SSL_CERT_FILE"):
        connect(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    connect(tmp_path)
    assert os.environ["MLFLOW_TRACKING_SERVER_CERT_PATH"] == str(pem)
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", "chosen.pem")
    load_mlflow()
    assert os.environ["MLFLOW_TRACKING_SERVER_CERT_PATH"] == "chosen.pem"


def test_sync_against_a_wrong_password_is_the_users_to_mend(
    server: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.tracking.mlflow_client import connect, in_short

    for name, value in {**both(server), **WRONG}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="refuses this user") as refused:
        connect(tmp_path)
    assert "geheim-4711" not in str(refused.value) and in_short(refused.value) == str(refused.value)


@pytest.mark.servers
def test_a_real_server_with_a_password_is_asked_with_it(
    tether: Tether, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = PrefectServer(tmp_path, PREFECT_SERVER_API_AUTH_STRING="ops:right", PREFECT_API_AUTH_STRING="ops:right")
    server.start()
    try:
        monkeypatch.setenv("PREFECT_API_URL", server.api)
        for given in (None, "ops:wrong"):
            refused = pytest.raises(UserError, match="refuses this user")
            with temporary_settings({PREFECT_API_AUTH_STRING: given}), refused:
                check_server()
        variables = {"PREFECT_API_URL": server.api, "PREFECT_API_AUTH_STRING": "ops:right"}
        done = tether("deploy", "tiny", home=tmp_path / "home", **variables)
        assert done.returncode == 0, done
    finally:
        server.stop()
