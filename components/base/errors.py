"""All of Tether's exceptions. An exception's class determines the exit code of the command that it ends."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from components.base.redaction import has_credentials, redacted


class TetherError(Exception):
    """A fault of Tether itself (exit code 1). Credentials are removed from the message."""

    exit_code = 1

    def __init__(self, *parts: object) -> None:
        super().__init__(*(redacted(part) if isinstance(part, str) else part for part in parts))


class UserError(TetherError):
    """A mistake of the user (exit code 2). The message names the file, row or field and says what to do."""

    exit_code = 2


class Mistakes(UserError):
    """Several mistakes of the user. `str` shows the first ones, a line each, and says how many more there are."""

    MOST = 20

    def __str__(self) -> str:
        mistakes = [str(mistake) for mistake in self.args]
        if len(mistakes) == 1:
            return mistakes[0]
        more = [f"and {len(mistakes) - self.MOST} more"] if len(mistakes) > self.MOST else []
        return "\n  ".join([f"{len(mistakes)} mistakes:", *mistakes[: self.MOST], *more])


class MachineMismatch(UserError):
    """This machine is not the one that the run's config was resolved for."""


class GateFailed(TetherError):
    """A gate did not pass and was not waived (exit code 3)."""

    exit_code = 3


class CheckFailed(TetherError):
    """A check made during training (finite losses, matching log-probabilities, ...) failed."""


class LeaseLost(TetherError):
    """Another process took over this one's computation, since its lock was lost."""


class Unreachable(UserError):
    """A connection to a service that a stage needs failed. It may succeed if tried again later."""


class WorkerDied(TetherError):
    """The process that computed a stage on another worker died, or the worker did. The stage's checkpoint is kept."""


class StageTimeout(TetherError):
    """A stage took longer than its config allows."""


_UNREACHABLE = {
    "httpx": ("TransportError",),
    "requests": ("ConnectionError", "Timeout"),
    "urllib3": ("MaxRetryError", "TimeoutError", "ProtocolError"),
    "botocore": ("HTTPClientError", "ConnectionError"),
    "aiohttp": ("ClientConnectionError",),
}
"""Maps a library to its exceptions for a failed connection, by name, so that no library is imported here."""


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a failed connection."""
    while error is not None:
        if isinstance(error, (Unreachable, ConnectionError)):
            return not isinstance(error, BrokenPipeError)  # the reader of our output has closed the pipe
        for kind in type(error).__mro__:
            if kind.__name__ in _UNREACHABLE.get(kind.__module__.partition(".")[0], ()):
                return True
        error = error.__cause__
    return False


def refuse_credentials(what: str, text: str) -> None:
    """Refuse a text that contains a credential, since it would be stored with the run and in MLflow.

    Raises:
        UserError: `text` contains a credential; the message begins with `what`, which names where the text was given.
    """
    if has_credentials(text):
        raise UserError(
            f"{what} holds a password or another secret, and would be stored with the run. Leave it out, and give it "
            "in an environment variable of the library that needs it."
        )


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """Begin the message of a user's mistake in this block with `option`, which names the file, unless it does so
    already.

    Raises:
        UserError: the mistake.
    """
    try:
        yield
    except UserError as error:
        if str(error).startswith(f"{option}: "):
            raise
        raise type(error)(f"{option}: {error}") from error


_DISK = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Make room there, or ask for a larger quota",
    errno.EROFS: "Make it writable, or set TETHER_HOME to a place that is",
    errno.EACCES: "Give yourself read and write permission there, or set TETHER_HOME to a folder where you have it",
    errno.ENAMETOOLONG: "Choose a shorter name or path",
    errno.ELOOP: "Its symbolic links form a loop: name the file or folder itself",
    errno.EISDIR: "A folder is where a file must be: move it away, or name another file",
    errno.EFBIG: "The file exceeds the size limit there: raise it (`ulimit -f`), or use another file system",
    errno.EIO: "The disk reports an error: check it, or name another place",
    errno.EPERM: "Give yourself write permission there, or name another place",
    errno.ENOTDIR: "A file is where a folder must be: move it away, or name another folder",
}
_OF_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add `path` to an OSError of a write in this block that names no file.

    A full disk is found out about when the bytes of an open file go there, and the system doesn't say which file that
    is. An error that some library of Rust's raises tells the number in its message alone.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else _number_in(error)
        if number in _DISK and getattr(error, "filename", None) is None:
            error.filename = os.fspath(path)  # type: ignore[attr-defined]
        raise


_SQLITE = {"database or disk is full": errno.ENOSPC, "attempt to write a readonly database": errno.EROFS}


def _number_in(error: BaseException) -> int | None:
    for text, number in _SQLITE.items():
        if text in str(error):
            return number
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def disk_error(error: BaseException) -> UserError | None:
    """Return the error of a write on a full or unwritable disk, or into a file that must be a folder, as one that the
    user can correct; None for any other error.

    safetensors, which writes in Rust, tells the number in its message alone.
    """
    if isinstance(error, TetherError):
        return None
    number = error.errno if isinstance(error, OSError) and error.errno is not None else _number_in(error)
    where = getattr(error, "filename", None)
    if number in _OF_WRITES:
        where = getattr(error, "filename2", None) or where  # of a copy, the second is where it went
    where = f"{where[:97]}..." if isinstance(where, str) and len(where) > 200 else where
    if number == errno.EEXIST and where and os.path.isfile(where):  # what mkdir says of a file
        number = errno.ENOTDIR
    if number not in _DISK:
        return None
    place = f"{where}: " if where else ""
    return UserError(
        f"{place}{os.strerror(number)}. {_DISK[number]}, then run the same command again. A run continues from its "
        "last checkpoint."
    )
