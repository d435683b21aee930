"""Opening MLflow: where it is, quietly, and safely for several first processes at once. Imports mlflow when called."""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.base.errors import UserError
from components.base.files import replacing, sweep_drafts
from components.base.redaction import redacted

logger = logging.getLogger(__name__)

VARIABLE = "MLFLOW_TRACKING_URI"
SQLITE = b"SQLite format 3\0"
"""How its files begin."""
_ENVIRONMENT = {
    # Read by mlflow at import.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    # The defaults stall a call for minutes where a server is down. A retry of ours looks first at what the first try
    # did; MLflow's own would make a second run where a slow server makes the first one yet.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3",
    # The end of a run prints two lines with its address, over the progress.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}

_OWN_TRUST = (
    "MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "MLFLOW_TRACKING_INSECURE_TLS",
)  # fmt: skip
"""What says whose certificates MLflow's client trusts."""


def tracking_uri(home: Path) -> str:
    """`MLFLOW_TRACKING_URI` where it is set, else SQLite below `home`."""
    return os.environ.get(VARIABLE) or f"sqlite:///{(home / 'mlflow.db').resolve()}"


def database_file(home: Path) -> Path | None:
    """Return the SQLite file that holds MLflow's runs; None where its address is a server's or another database's."""
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
    _trust_the_ca()
    import mlflow

    return mlflow


def _trust_the_ca() -> None:
    """Have MLflow trust the CA that `SSL_CERT_FILE` names, as Prefect does, where nothing else is said for MLflow.

    Its client (requests) does not read that variable: behind a private CA it would send nothing.
    """
    if not any(os.environ.get(name) for name in _OWN_TRUST) and (ca := os.environ.get("SSL_CERT_FILE")):
        os.environ[_OWN_TRUST[0]] = ca


def connect(home: Path) -> Any:
    """Return an `MlflowClient` on the tracking store, its tables made where it is new (1 to 5 s).

    Raises:
        UserError: the file of its runs is no SQLite database, or the server refuses us.
    """
    check_database(home)
    mlflow = load_mlflow()
    uri = tracking_uri(home)
    home.mkdir(parents=True, exist_ok=True)
    # Fluent calls (there's no client's call for an external model) read the process's URI.
    named = os.environ.get(VARIABLE)
    mlflow.set_tracking_uri(uri)
    if named is None:  # it writes there too, and `tracking_uri` would take that for the user's word about any home
        os.environ.pop(VARIABLE, None)
    # Several processes that migrate one fresh SQLite file crash and leave it broken for ever.
    with (home / "mlflow.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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

    One that is away is no mistake: a run goes on without it.

    Raises:
        UserError: it refuses us, or its certificate is not trusted.
    """
    if not tracking_uri(home).startswith("http"):
        return
    try:
        connect(home)
    except UserError:
        raise
    except Exception as error:  # whatever MLflow and its transports raise
        logger.debug("MLflow: %s", in_short(error))


@contextmanager
def permitted(action: str) -> Iterator[None]:
    """Turn MLflow's error 403 in the block into one that names `action` and the user.

    Raises:
        UserError: the server refuses it; and whatever else the block raises.
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
    """Return what the user can do about an error of MLflow's client; None where it is none of theirs."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        return None
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            "its certificate is signed by a CA that is not trusted here. Set SSL_CERT_FILE to the file of that CA's "
            "certificate (PEM), or MLFLOW_TRACKING_SERVER_CERT_PATH for MLflow alone."
        )
    status = error.get_http_status_code()
    if status == 403:
        return (
            "This user lacks permissions in MLflow that Tether needs (403). Give it permission to read experiments, or "
            "set another user's credentials."
        )
    if status != 401:
        return None
    names = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    if os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return f"MLflow refuses the token in MLFLOW_TRACKING_TOKEN (401). Set a valid one, or {names}."
    if os.environ.get("MLFLOW_TRACKING_USERNAME"):
        return f"MLflow refuses the credentials in {names} (401). Set valid ones."
    return f"MLflow wants credentials, and none are set here (401). Set {names}."


def _make_database(path: Path) -> None:
    """Make MLflow's tables in a new database, which gets its name when it has them all.

    MLflow makes them in many transactions, and can't go on where a kill came between two.
    """
    if path.is_file() and path.stat().st_size:
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    sweep_drafts(path)
    with replacing(path) as temporary:
        made = SqlAlchemyStore(f"sqlite:///{temporary.resolve()}", "./mlruns")
        made.engine.dispose()


def check_database(home: Path) -> None:
    """Raise UserError if the file of MLflow's runs is no SQLite database, or one that lacks a part."""
    path = database_file(home)
    if path is None or not path.is_file():
        return
    with path.open("rb") as file:
        beginning = file.read(len(SQLITE))
    what = (
        None if beginning in (b"", SQLITE) else "it is not a SQLite database"
    )  # empty where its first process was killed
    try:
        if what is None:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
                database.execute("select count(*) from sqlite_master").fetchone()
    except sqlite3.OperationalError as error:  # it is locked, say: MLflow has its own patience, and says so
        logger.debug("%s: %s", path, error)
    except sqlite3.DatabaseError as error:
        what = str(error)
    if what is not None:
        raise UserError(
            f"{path} is damaged: {what}. Restore it, or move it away: MLflow then starts empty, without the earlier "
            "runs."
        )


def in_short(error: Exception) -> str:
    """Return the type of an error and the first line of its message; of a `UserError` the message."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {redacted((str(error).splitlines() or ['no reason given'])[0])[:300]}"


def experiment(client: Any, home: Path, name: str) -> str:
    """Return the id of the experiment `name`, made where it is new; artifacts are below `home` unless a server has
    them."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    local = tracking_uri(home).startswith("sqlite:")
    location = (home / "mlartifacts").resolve().as_uri() if local else None
    return client.create_experiment(name, artifact_location=location)
