"""Compute a stage: from a key that the store lacks to its record, in any process.

The process that computes (that of the run, or a worker) needs only a `Work` and the store, nothing of the run that
wants it. Nothing here imports torch before the stage does.
"""

import gc
import logging
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from components.base.errors import UserError, naming
from components.base.files import make_folder, sync
from components.base.settings import Settings
from components.keys.changes import KeyParts
from components.keys.code_version import code_version
from components.models.runtime import activate, cpu_instruction_set, release_memory
from components.store.leases import Lease
from components.store.records import Environment
from components.store.store import ArtifactStore, Miss, Record
from tasks import rank_processes
from tasks.execution import logs, plots
from tasks.execution.attempts import time_limit
from tasks.execution.keying import whole_job
from tasks.result import Input, InputChanged
from tasks.runs.points import Point, Spool, read_points
from tasks.stages import Run, Stage

logger = logging.getLogger(__name__)

Show = Callable[[Point], None]
"""Called with every point of a stage, in order from the stage's start, even if the stage was resumed midway."""

POINTS = "points.jsonl"

ASKED = "asked for, by rerun or --refresh"
"""The reason for recomputing a stage that the store has."""


_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
"""Errors that reading a file of another format can raise."""


@dataclass(frozen=True)
class Work:
    """A stage with everything needed to compute it."""

    stage: Stage
    job: Settings
    """The stage's config, with a resolved runtime."""
    inputs: Mapping[str, Input]
    key: str
    parts: KeyParts
    """The parts of the key."""
    run: str
    """The run that wants the result, for the record."""
    because: str = ""
    """Why the store lacks the result, in one line for people."""
    timeout: float | None = None
    """Seconds that one attempt may take."""


def look_up(store: ArtifactStore, key: str, refresh: bool, run: str, pinned: Record | None = None) -> Record | Miss:
    """Return the record of `key` in the store (if given, only `pinned`); with `refresh` only one that `run`
    computed."""
    result = store.lookup(key, pinned.digest if pinned is not None else None)
    return Miss(ASKED) if refresh and isinstance(result, Record) and result.run != run else result


def compute_once(
    work: Work, store: ArtifactStore, show: Show, say: Callable[[str], None], refresh: bool = False
) -> tuple[Record, bool]:
    """Compute under the key's lock, unless another process has stored the result by then. Raises as `compute` does.

    Returns:
        The record, and whether it was computed here.
    """
    name = work.stage.name
    with store.lock(work.key, lambda: say(f"{name}: another process computes this result; waiting for it")) as lease:
        result = look_up(store, work.key, refresh, work.run)
        if isinstance(result, Record):
            return result, False
        say(f"{name}: computing ({work.because or result.reason})")
        return compute(work, store, show, lease), True


def compute(work: Work, store: ArtifactStore, show: Show, lease: Lease) -> Record:
    """Compute and publish. The caller holds the key's lock. An unfinished earlier attempt is continued.

    Raises:
        LeaseLost: another process took the key over, because this one was suspended.
        UserError: an option or input is wrong. Other errors of the stage are passed on; a checkpoint stays.
    """
    folder = store.work_folder(work.key)
    out = _take_up(folder, lease.number)
    started, clock = datetime.now(UTC), time.monotonic()

    def check() -> None:
        for source in work.inputs.values():
            source.check()
        lease.check()

    try:
        check()
        with time_limit(work.timeout, work.stage.name):
            metrics = _call(work, out, folder / POINTS, show, lease)
        _plot(work, metrics, out, folder / POINTS)
        record = store.publish(
            work.key,
            out / "artifact",
            out / "attachments",
            {
                "stage": work.stage.name,
                "inputs": work.parts["inputs"],
                "job": work.parts["job"],
                "parts": work.parts,
                "metrics": {name: float(value) for name, value in metrics.items()},
                "environment": {**_environment(), "whole": whole_job(work.job, work.inputs)},
                "run": work.run,
                "started": started.isoformat(timespec="milliseconds"),
                "seconds": round(time.monotonic() - clock, 3),
            },
            before_commit=check,
        )
    except BaseException as error:
        if lease.is_lost():
            shutil.rmtree(out, ignore_errors=True)
            if isinstance(error, Exception):
                lease.check()  # the lost lease explains any other error
        elif isinstance(error, InputChanged) or not _has_checkpoint(out):
            shutil.rmtree(folder, ignore_errors=True)
        imported = ", ".join(f"{name} {made.digest[:12]}" for name, made in work.inputs.items() if made.imported)
        if imported and isinstance(error, _MALFORMED):
            raise UserError(
                f"{work.stage.name} can't use {imported}, which was computed elsewhere and imported "
                f"({type(error).__name__}: {error}). Its files are not what this version of Tether writes. Rerun from "
                "the stage before, so that it is computed here."
            ) from error
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return record


def _reset_peak_memory() -> None:
    """Begin a new peak of this process's resident memory (Linux), as `activate` does on a GPU: the peak of an earlier
    stage, or of an earlier run in this process, is not this stage's."""
    release_memory("cpu")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _call(work: Work, out: Path, points: Path, show: Show, lease: Lease) -> dict[str, float]:
    """Call the stage's function. Its points are kept next to its checkpoint, so a resumed stage shows its whole
    curve."""
    runtime = getattr(work.job, "runtime", None)
    if work.stage.spreads and runtime is not None and runtime.ranks > 1:
        run: Run = partial(rank_processes.run, work.stage, check=lease.check)
    else:
        if runtime is not None and "torch" in work.stage.libraries:
            _reset_peak_memory()
            activate(runtime)
        run = work.stage.load_run()
    gc.set_threshold(700)  # Python's own number, which the command line raises while it imports
    logs.take_over()  # imports may have added log handlers
    with closing(Spool(points)) as spool:
        for point in read_points(points):
            show(point)

        def observe(
            step: int, metrics: Mapping[str, float], total: int | None = None, *,
            tokens: float | None = None, resumed: bool = False,
            samples: Sequence[Mapping[str, object]] | None = None, doing: str | None = None,
        ) -> None:  # fmt: skip
            lease.check()
            more = {"total": total, "tokens": tokens, "resumed": resumed or None, "samples": samples, "doing": doing}
            show(spool.append(step, metrics, **more))

        with naming(out):
            return run(work.job, {name: source.path for name, source in work.inputs.items()}, out, observe)


def _plot(work: Work, metrics: Mapping[str, float], out: Path, points: Path) -> None:
    if read_points(points):
        (out / "attachments").mkdir(exist_ok=True)
        shutil.copyfile(points, out / "attachments" / POINTS)
    with naming(out / "attachments"):
        plots.render(work.stage.name, work.job, metrics, points, out)


def _take_up(folder: Path, number: int) -> Path:
    """Return the folder in which holder `number` of the key computes, with the newest checkpoint of an earlier attempt.

    Each holder has its own folder, and takes the previous one's by renaming it. A process that was wrongly taken for
    dead then finds its paths gone and can't write among its successor's files. Incomplete results are removed, because
    they would become part of the artifact.
    """
    out = folder / f"{number:09d}"
    earlier = sorted((path for path in folder.glob("[0-9]*") if path.is_dir()), reverse=True)
    newest = next(filter(_has_checkpoint, earlier), None)
    for path in earlier:
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)
    if newest not in (None, out):  # it is `out` already if the numbers began again, with a new lock file
        newest.rename(out)
        sync(folder)
    if not out.exists():
        (folder / POINTS).unlink(missing_ok=True)
    for name in ("artifact", "attachments"):
        shutil.rmtree(out / name, ignore_errors=True)
    make_folder(out)
    return out


def _has_checkpoint(out: Path) -> bool:
    return (out / "checkpoint").is_dir() and any((out / "checkpoint").iterdir())


def _environment() -> Environment:
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "instruction_set": cpu_instruction_set(),
        "cpu": _cpu_model(),
        "code": code_version(),
    }


def _cpu_model() -> str:
    """Return the processor's name; two with the same instruction set may still round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
