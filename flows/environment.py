"""What has to hold before anything heavy is imported: where state lives, that nothing phones home, whose code runs."""

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
    """`TETHER_HOME`, else `.tether` in the current directory (absolute; not created).

    Raises:
        UserError: the path can't be a folder, or can't stand in the addresses of the databases below it.
    """
    try:
        path = user_path(os.environ.get("TETHER_HOME") or ".tether", "TETHER_HOME").absolute()
    except FileNotFoundError as error:
        raise UserError("the current directory no longer exists. Change to another one.") from error
    if "?" in str(path.resolve()):
        raise UserError(
            f"TETHER_HOME = {path}: its path has a question mark. MLflow and Prefect would cut the addresses of their "
            "databases off there and write beside it. Set TETHER_HOME to a folder without one."
        )
    return path


def prepare_environment(home: Path) -> None:
    """Set, where the user has not, what Prefect, MLflow, Great Expectations and Hugging Face read at import.

    Raises:
        UserError: `TETHER_LOG_FORMAT` names no format.
    """
    _name_the_user(home)
    for name, value in _defaults(home).items():
        os.environ.setdefault(name, value)
    # A home is made by the first run; Prefect is imported before that where a server is asked.
    warnings.filterwarnings("ignore", "Failed to create the Prefect home")
    # Whatever level Prefect gives the root logger, our own warnings are said.
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.WARNING)
    logging.setLogRecordFactory(_LogRecord)
    if os.environ.get("TETHER_LOG_FORMAT"):
        from tasks.execution import logs

        logs.install()
    # It sets its level to INFO when imported, and tells of every temporary folder; a filter stays.
    logging.getLogger("great_expectations.data_context.types.base").addFilter(_warnings_only)


class _LogRecord(logging.LogRecord):
    """A log record without credentials, whose text commands no terminal: it may name what others wrote."""

    def getMessage(self) -> str:
        return plain(redacted(super().getMessage()))


def _name_the_user(home: Path) -> None:
    """Give a process without `HOME` or without an entry among the users (a container's number) what libraries ask for
    when they are imported, and fail without."""
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
        # Nothing phones home.
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GX_ANALYTICS_ENABLED": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Our own lines are the output; theirs only where something breaks.
        # (Prefect logs each failed task as an error, and a failed gate is said once already.)
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
        # Other libraries' lines, in the embedded server too: SQLAlchemy prints a stack trace where it is ended midway.
        "PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "TRANSFORMERS_VERBOSITY": "error",
        # Its profiles file and the ephemeral server: several may start at once on a busy machine.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        # Threads that spin while they wait for each other starve on a machine that does anything else: beside one busy
        # process a training step of two spinning threads took over ten times as long as of two that sleep.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Libraries' progress bars on a terminal only; a log would get a line of every step.
        **({} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}),
        # Forking after tokenizers used threads only warns; deterministic cuBLAS needs its workspace fixed.
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def package_folders() -> dict[str, Path | None]:
    """Return the folder that each of our packages would be imported from; None where there is none."""
    found: dict[str, Path | None] = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found[name] = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
    return found


def check_packages() -> None:
    """Refuse to run where `tasks` or `components` come from another project.

    Raises:
        TetherError: the four packages do not come from one folder.
    """
    folders = package_folders()
    home = Path(__file__).resolve().parent.parent
    strangers = [f"{name} from {folder}" for name, folder in folders.items() if folder != home / name]
    if strangers:
        raise TetherError(
            f"another package hides Tether's: {', '.join(strangers)}; expected below {home}. Run "
            f"Tether from its own environment, without PYTHONPATH, or from another directory."
        )
