"""How a rank ended, as JSON on disk, and the error that the stage's process raises. Importable without torch."""

import builtins
import json
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from components.base import errors
from components.base.errors import TetherError, WorkerDied, disk_error
from components.base.files import replacing
from components.base.redaction import redacted

_OF_RANKS = re.compile(r"gloo/|ProcessGroup|NCCL|c10d|TCPStore|Connection reset by peer", re.IGNORECASE)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Ended:
    """How a rank ended that raised an error."""

    rank: int
    kind: str
    """Name of the error's class."""
    message: str
    trace: str
    at: float
    """Seconds since the epoch."""
    signal: int = 0
    """The signal that told it to stop; 0 for an error."""
    of_ranks: bool = False
    """Whether the cause is another rank that ended or did not answer."""


def failed(rank: int, error: BaseException) -> Ended:
    """Describe the error with which a rank ends."""
    disk = disk_error(error) if isinstance(error, Exception) else None
    kind, message = type(disk or error).__name__, str(disk or error)
    number = getattr(error, "number", signal.SIGINT) if isinstance(error, KeyboardInterrupt) else 0
    trace = "".join(traceback.format_exception(error))
    blames = not isinstance(error, TetherError) and bool(_OF_RANKS.search(message))
    return Ended(rank, kind, message, trace, time.time(), int(number), blames)


def write_ended(folder: Path, ended: Ended) -> None:
    """Write how a rank ended into `folder`."""
    with replacing(folder / f"ended-{ended.rank}.json") as temporary:
        temporary.write_text(json.dumps(asdict(ended)), encoding="utf-8")


def read_ended(folder: Path) -> list[Ended]:
    """Return how ranks ended, the earliest first."""
    endings = [Ended(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("ended-*.json")]
    return sorted(endings, key=lambda ending: ending.at)


def told_to_stop(ended: list[Ended], died: Mapping[int, int]) -> int:
    """Return the signal by which the ranks were told to stop; 0 if something else ended them. See `error_of`.

    Signals that the agent sends, after a rank died or lost another rank, do not count.
    """
    causes = [ending for ending in ended if not ending.of_ranks]
    if not causes:
        return signal.SIGTERM if set(died.values()) == {-signal.SIGTERM} else 0  # before they could handle signals
    number, first = causes[0].signal, ended[0]
    killed = any(code < 0 and -code != number for code in died.values())
    return 0 if killed or first.of_ranks else number


def error_of(stage: str, ended: list[Ended], died: Mapping[int, int], silent: Sequence[int] = ()) -> Exception:
    """Return the error that ends the stage: that of the rank that failed first, not of the ranks that then lost it.

    Args:
        ended: what the ranks wrote, the earliest first.
        died: the nonzero exit codes, in the order in which the ranks were found to have ended. The agent ends the
            others once one has failed.
        silent: ranks that ended first and wrote nothing. Used instead of `died` if the agent was killed before it could
            write the exit codes, because the other ranks did not end in time.
    """
    causes = [ending for ending in ended if not ending.of_ranks and not ending.signal]
    if causes:
        return _raised(stage, causes[0])
    missed = next((ending for ending in ended if ending.of_ranks), None)
    if missed is not None and _TIMED_OUT.search(missed.message):
        return _with_trace(
            missed, f"{stage}: rank {missed.rank} waited for another rank for longer than runtime.rank_timeout"
        )
    killed = next(((rank, -code) for rank, code in died.items() if code < 0), None)
    if killed is not None:
        rank, number = killed
        why = " The kernel kills a process that takes too much memory." if number == signal.SIGKILL else ""
        return WorkerDied(f"{stage}: rank {rank} was ended by {signal.Signals(number).name}.{why} {_RESUMES}")
    if missed is not None:
        return _with_trace(missed, f"{stage}: rank {missed.rank} lost its connection to another rank")
    if silent and not died:
        return WorkerDied(
            f"{stage}: rank {silent[0]} ended without an error message; it was probably killed. {_RESUMES}"
        )
    codes = ", ".join(f"rank {rank} with exit code {code}" for rank, code in sorted(died.items())) or "nobody knows why"
    return WorkerDied(f"{stage}: its ranks ended, {codes}. {_RESUMES}")


_RESUMES = "Run the same command again to continue from the last checkpoint."


def _with_trace(ended: Ended, what: str) -> WorkerDied:
    error = WorkerDied(f"{what}: {_short(ended.message)}. {_RESUMES}")
    error.add_note(f"In rank {ended.rank}:\n{ended.trace}")
    return error


def _short(message: str) -> str:
    return redacted(message.strip().splitlines()[0].rstrip("."))[:300] if message.strip() else "no message"


def _raised(stage: str, ended: Ended) -> Exception:
    kind = getattr(errors, ended.kind, None)
    if isinstance(kind, type) and issubclass(kind, TetherError):
        return kind(ended.message)
    where = f"{stage}, rank {ended.rank}"
    error: Exception = TetherError(f"{where}: {ended.kind}: {ended.message}")
    kind = MemoryError if ended.kind == "OutOfMemoryError" else getattr(builtins, ended.kind, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        error = kind(f"{where}: {ended.message}")
    error.add_note(f"In rank {ended.rank}:\n{ended.trace}")
    return error
