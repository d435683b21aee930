"""Set up the process before heavy imports: the home, no telemetry, and a check that Tether's own packages are used."""

import getpass
import importlib.util
import logging
import os
import sys
import warnings
from pathlib import Path

from components.base.errors import TetherError, UserError
from components.base.paths import user_path
from components.base.redaction import redacted
from components.base.text import plain

PACKAGES = ("flows", "tasks", "components", "data_contracts")


def tether_home() -> Path:
    """Return `TETHER_HOME`, or `.tether` in the current directory, as an absolute path. It is not created.

    Raises:
        UserError: the path can't be a folder, or has a question mark, which database URLs can't contain.
    """
    try:
        path = user_path(os.environ.get("TETHER_HOME") or ".tether", "TETHER_HOME").absolute()
    except FileNotFoundError as error:
        raise UserError("the current directory no longer exists. Change to another one.") from error
    if "?" in str(path.resolve()):
        raise UserError(
            f"TETHER_HOME = {path}: the path has a question mark. MLflow and Prefect would cut their database URLs off "
            "there and write to another folder. Set TETHER_HOME to a folder without a question mark."
        )
    return path


def prepare_environment(home: Path) -> None:
    """Set the variables that Prefect, MLflow, Great Expectations and Hugging Face read at import, unless the user has.

    Raises:
        UserError: `TETHER_LOG_FORMAT` is not a known format.
    """
    _name_the_user(home)
    for name, value in _defaults(home).items():
        os.environ.setdefault(name, value)
    # The first run creates the home, but asking a server imports Prefect before that.
    warnings.filterwarnings("ignore", "Failed to create the Prefect home")
    # Show our own warnings at whatever level Prefect sets the root logger to.
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.WARNING)
    logging.setLogRecordFactory(_LogRecord)
    if os.environ.get("TETHER_LOG_FORMAT"):
        from tasks.execution import logs

        logs.install()
    # This logger sets its own level to INFO at import and reports every temporary folder. A filter stays in place.
    logging.getLogger("great_expectations.data_context.types.base").addFilter(_warnings_only)


class _LogRecord(logging.LogRecord):
    """A log record without credentials and without terminal escape codes, because it may quote untrusted text."""

    def getMessage(self) -> str:
        return plain(redacted(super().getMessage()))


def _name_the_user(home: Path) -> None:
    """Set `HOME` and `USER` in a process that has no home or no entry in the user database, as in a container with a
    numeric user: some libraries fail at import without them."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(home)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


def _warnings_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def _defaults(home: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home / "prefect"),
        # No telemetry.
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GX_ANALYTICS_ENABLED": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Tether prints its own messages. Show those of libraries only if something breaks.
        # (Prefect logs each failed task as an error, but we already report a failed gate.)
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        # The same for other libraries in the embedded server: SQLAlchemy prints a stack trace if it is interrupted.
        "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "TRANSFORMERS_VERBOSITY": "error",
        # For the ephemeral server: a busy machine may start several at once.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # Threads that spin while they wait are slow if the machine is busy; threads that sleep are slow to wake up. So
        # they spin for some microseconds, then sleep (docs/decisions/learning.md).
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "1000",
        # Show libraries' progress bars only on a terminal; in a log each step would add a line.
        **({} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}),
        # Tokenizers warns when a process forks after using threads; deterministic cuBLAS needs a fixed workspace.
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def package_folders() -> dict[str, Path | None]:
    """Return the folder that each of Tether's packages would be imported from; None if it is not found."""
    folders: dict[str, Path | None] = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        folders[name] = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
    return folders


def check_packages() -> None:
    """Check that Python imports all four packages from this installation.

    Raises:
        TetherError: at least one package comes from another folder.
    """
    folders = package_folders()
    home = Path(__file__).resolve().parent.parent
    strangers = [f"{name} from {folder}" for name, folder in folders.items() if folder != home / name]
    if strangers:
        raise TetherError(
            f"another package hides Tether's: {', '.join(strangers)}; expected below {home}. Run "
            f"Tether from its own environment, without PYTHONPATH, or from another directory."
        )
