"""Log lines for machines: with `TETHER_LOG_FORMAT=json`, each line on standard error is one JSON object.

Its fields are `time` (ISO 8601, UTC), `level`, `logger`, `message`, `run`, `stage`, `flow_run` (Prefect's id),
`worker`, `pid` and `exception`; unknown fields are null.
"""

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from pythonjsonlogger.json import JsonFormatter

from components.base.errors import UserError
from components.base.redaction import redacted
from components.base.text import plain

VARIABLE = "TETHER_LOG_FORMAT"
FORMATS = ("text", "json")

logger = logging.getLogger("tether")
"""The logger for messages of a run."""

_about: dict[str, str | None] = {"run": None, "stage": None, "flow_run": None}
"""Per process, not per thread, because a process computes one run at a time and libraries log from other threads."""


def as_json() -> bool:
    """Return whether log lines are JSON.

    Raises:
        UserError: the variable is not a known format.
    """
    form = os.environ.get(VARIABLE) or FORMATS[0]
    if form not in FORMATS:
        raise UserError(f"{VARIABLE} = {form}: no such format. Set it to {' or '.join(FORMATS)}.")
    return form == "json"


def bind(**fields: str | None) -> None:
    """Set the `run`, `stage` or `flow_run` of all following lines."""
    _about.update(fields)


@contextmanager
def of_stage(name: str) -> Iterator[None]:
    """Set the `stage` of lines that are logged inside the block."""
    before = _about["stage"]
    bind(stage=name)
    try:
        yield
    finally:
        bind(stage=before)


class LineFormatter(JsonFormatter):
    """A log record as one JSON object, without credentials."""

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        exception = message_dict.get("exc_info")
        flow_run = getattr(record, "flow_run_id", None) or _about["flow_run"] or os.environ.get("PREFECT__FLOW_RUN_ID")
        log_data |= {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": plain(redacted(record.getMessage())),
            "run": _about["run"],
            "stage": _about["stage"],
            "flow_run": None if flow_run is None else str(flow_run),
            "worker": os.environ.get("PREFECT__WORKER_NAME"),
            "pid": record.process,
            "exception": None if exception is None else redacted(str(exception)),
        }


class JsonHandler(logging.StreamHandler[TextIO]):
    """Writes JSON lines to standard error. Prefect creates one instead of its own console handler."""

    def __init__(self, **_: object) -> None:  # Prefect passes a stream and colours
        super().__init__(sys.stderr)
        super().setFormatter(LineFormatter())

    @property
    def stream(self) -> TextIO:
        """Return the current standard error, which a library may have replaced."""
        return sys.stderr

    @stream.setter
    def stream(self, to: TextIO) -> None:
        pass

    def setFormatter(self, fmt: logging.Formatter | None) -> None:
        """Ignore formats that libraries configure."""


class LogLines(io.StringIO):
    """A text file that logs each line written to it."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__()
        self._log = log
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, lines):
            self._log(line)
        return len(text)


_PREFECT = f"{__name__}.{JsonHandler.__name__}"
ENVIRONMENT = {
    # Prefect's own processes (servers and workers) read these when they start logging.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_CLASS": _PREFECT,
    "PREFECT_LOGGING_HANDLERS_DEBUG_CLASS": _PREFECT,
    "MLFLOW_CONFIGURE_LOGGING": "false",  # so its records reach the root logger
    "TQDM_DISABLE": "1",
}
"""Variables that make libraries, and processes that this one starts, log in the same format."""


def install() -> None:
    """Let this process, and those it starts, log JSON lines if `TETHER_LOG_FORMAT` says so.

    Raises:
        UserError: as `as_json`.
    """
    if not as_json():
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    root = logging.getLogger()
    if not any(isinstance(handler, JsonHandler) for handler in root.handlers):
        root.addHandler(JsonHandler())
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda thrown: _uncaught(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)
    take_over()


def take_over() -> None:
    """With JSON lines, remove the handlers for standard output and error that libraries added to loggers."""
    if not as_json():
        return
    loggers = (target for target in logging.Logger.manager.loggerDict.values() if isinstance(target, logging.Logger))
    for target in (logging.getLogger(), *loggers):
        for handler in list(target.handlers):
            ours = isinstance(handler, JsonHandler)
            if not ours and isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                target.removeHandler(handler)
                target.propagate = True


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
