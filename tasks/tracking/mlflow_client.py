"""Open MLflow: quietly, and safely if several processes are the first at once. Imports mlflow when called."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.base.errors import UserError, disk_error
from components.base.files import replacing, sweep_drafts
from components.base.redaction import redacted
from components.store.leases import leased

logger = logging.getLogger(__name__)

VARIABLE = "MLFLOW_TRACKING_URI"
_ENVIRONMENT = {
    # MLflow reads these at import.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # By default a call stalls for minutes if a server is down. Our own retries first check what the earlier call did;
    # MLflow's would create a second run if a slow server is still creating the first.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    # Otherwise the end of a run prints two lines with its address over the progress bar.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}

_OWN_TRUST = (
    "MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "MLFLOW_TRACKING_INSECURE_TLS",
)  # fmt: skip
"""Variables that say whose certificates MLflow's client trusts."""


def tracking_uri(home: Path) -> str:
    """Return `MLFLOW_TRACKING_URI` if it is set, otherwise the URI of a SQLite file in `home`."""
    return os.environ.get(VARIABLE) or f"sqlite:///{(home / 'mlflow.db').resolve()}"


def database_file(home: Path) -> Path | None:
    """Return the SQLite file of MLflow's runs; None if the URI names a server or another kind of database."""
    uri = tracking_uri(home)
    if VARIABLE not in os.environ:
        return home / "mlflow.db"
    if not uri.startswith("sqlite:"):
        return None
    from sqlalchemy.engine import make_url

    return Path(make_url(uri).database or "")


def load_mlflow() -> Any:
    """Import MLflow (1 to 4 s) and return it."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # MLflow's client (requests) does not read SSL_CERT_FILE, as Prefect's does, and could send nothing to a server with
    # a private CA.
    if not any(os.environ.get(name) for name in _OWN_TRUST) and (ca := os.environ.get("SSL_CERT_FILE")):
        os.environ[_OWN_TRUST[0]] = ca
    import mlflow

    # It prints the stack trace of each error of its database, which is raised as well, and reported in one line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    return mlflow


def connect(home: Path) -> Any:
    """Return an `MlflowClient` for the tracking store, whose tables are created if it is new (1 to 5 s).

    Raises:
        UserError: the file of its runs is not a SQLite database, or the server rejects us.
    """
    check_database(home)
    mlflow = load_mlflow()
    uri = tracking_uri(home)
    home.mkdir(parents=True, exist_ok=True)
    # Fluent calls read the process's URI, and the client has no call for an external model.
    named = os.environ.get(VARIABLE)
    mlflow.set_tracking_uri(uri)
    if named is None:  # MLflow sets the variable too, and `tracking_uri` would then use it for any home
        os.environ.pop(VARIABLE, None)
    # If several processes migrate the same fresh SQLite file, they crash and leave it broken.
    with leased(home / "mlflow.lock"):
        if named is None:
            _make_database(home / "mlflow.db")
        client = mlflow.MlflowClient(tracking_uri=uri)
        try:
            client.search_experiments(max_results=1)
        except Exception as error:
            if (refused := _refused(error)) is not None:
                raise UserError(f"{VARIABLE} = {redacted(uri)}: {refused}") from error
            raise
    return client


def check_access(home: Path) -> None:
    """Check that the MLflow server, if one is set, accepts our credentials, before a run computes for hours.

    A server that is away is no error, because a run can continue without it.

    Raises:
        UserError: it rejects us, or its certificate is not trusted.
    """
    if not tracking_uri(home).startswith("http"):
        return
    try:
        connect(home)
    except UserError:
        raise
    except Exception as error:  # any exception of MLflow and its transports
        logger.debug("MLflow: %s", in_short(error))


@contextmanager
def permitted(action: str) -> Iterator[None]:
    """Turn an MLflow error 403 in the block into a UserError that names `action` and the user.

    Raises:
        UserError: the server answers 403. Other errors are passed on.
    """
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException

        if not isinstance(error, MlflowException) or error.get_http_status_code() != 403:
            raise
        user = os.environ.get("MLFLOW_TRACKING_USERNAME")
        raise UserError(
            f"{action}: MLflow does not let {f'the user {user}' if user else 'us'} do that (403). Ask for MANAGE on "
            "the registered model (docs/operations/access.md), or set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD to those of a user who has it; then run the command again."
        ) from error


def _refused(error: Exception) -> str | None:
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        return None
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            "its certificate is signed by a CA that is not trusted here. Set SSL_CERT_FILE to the file of that CA's "
            "certificate (PEM), or MLFLOW_TRACKING_SERVER_CERT_PATH for MLflow alone."
        )
    if (status := error.get_http_status_code()) not in (401, 403):
        return None
    return (
        f"MLflow refuses this user ({status}). Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
        "MLFLOW_TRACKING_TOKEN) to those of a user who may read experiments."
    )


def _make_database(path: Path) -> None:
    """Create MLflow's tables in a new database file, which gets its name once it has all of them.

    MLflow creates them in many transactions, and can't continue if it is killed between two.
    """
    if path.is_file() and path.stat().st_size:
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    sweep_drafts(path)
    with replacing(path) as temporary:
        made = SqlAlchemyStore(f"sqlite:///{temporary.resolve()}", "./mlruns")
        made.engine.dispose()


def check_database(home: Path) -> None:
    """Raise UserError if the file of MLflow's runs is not a SQLite database or is damaged."""
    path = database_file(home)
    if path is None or not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            database.execute("select count(*) from sqlite_master").fetchone()
    except sqlite3.OperationalError as error:  # for example locked: MLflow waits and reports it itself
        logger.debug("%s: %s", path, error)
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{path} is damaged: {error}. Restore it, or move it away: MLflow then starts empty, without the earlier "
            "runs."
        ) from error


def in_short(error: Exception) -> str:
    """Return an error's type and the first line of its message; for a UserError, or a full disk, the message."""
    if isinstance(error := disk_error(error) or error, UserError):
        return str(error)
    return f"{type(error).__name__}: {redacted((str(error).splitlines() or ['no reason given'])[0])[:300]}"


def experiment(client: Any, home: Path, name: str) -> str:
    """Return the id of the experiment `name`, created if it is new. Artifacts are in `home` unless a server has
    them."""
    existing = client.get_experiment_by_name(name)
    if existing is not None:
        return existing.experiment_id
    local = tracking_uri(home).startswith("sqlite:")
    location = (home / "mlartifacts").resolve().as_uri() if local else None
    return client.create_experiment(name, artifact_location=location)
