"""Computing a stage: from a key that the store lacks to its record, wherever that happens.

Whoever computes (the process of the run, or a worker that it was dispatched to) needs a `Work` and the store, and
nothing of the run that wants it. Nothing here imports torch before the stage does.
"""

import logging
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from components.base.errors import UserError, naming
from components.base.files import make_folder, replacing, sync
from components.base.settings import Settings
from components.keys.changes import KeyParts
from components.keys.code_version import code_version
from components.models.runtime import activate, cpu_instruction_set
from components.store.leases import Lease
from components.store.records import Environment
from components.store.store import ArtifactStore, Miss, Record
from tasks import ranks
from tasks.execution import logs, plots
from tasks.execution.attempts import time_limit
from tasks.result import Input, InputChanged
from tasks.runs.points import Point, Spool, is_point, read_points
from tasks.stages import Run, Stage

logger = logging.getLogger(__name__)

Show = Callable[[Point], None]
"""Called with every point of a stage as it comes, from the stage's start though it may have been resumed midway."""

POINTS = "points.jsonl"

ASKED = "asked for, by rerun or --refresh"
"""Why a stage that the store has is computed all the same."""


_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
"""What reading a file of another form ends in."""


@dataclass(frozen=True)
class Work:
    """A stage with all that its computing needs."""

    stage: Stage
    job: Settings
    """The stage's config, its runtime resolved."""
    inputs: Mapping[str, Input]
    key: str
    parts: KeyParts
    """What the key was made of."""
    run: str
    """The run that wants it, for the record."""
    because: str = ""
    """Why the store lacks it, in a line for people."""
    timeout: float | None = None
    """Seconds that one attempt may take."""

    def check_inputs(self) -> None:
        """Raise `InputChanged` if an external input is no longer the one in the key."""
        for given in self.inputs.values():
            given.check()


def look_up(store: ArtifactStore, key: str, refresh: bool, run: str, pinned: Record | None = None) -> Record | Miss:
    """Return what the store has of `key`, or of `pinned` alone; with `refresh` only what `run` itself has computed."""
    found = store.lookup(key, pinned.digest if pinned is not None else None)
    return Miss(ASKED) if refresh and isinstance(found, Record) and found.run != run else found


def compute_once(
    work: Work, store: ArtifactStore, show: Show, say: Callable[[str], None], refresh: bool = False
) -> tuple[Record, bool]:
    """Compute under the key's lock, unless the store has it by then; raises as `compute`.

    Returns the record, and whether it was computed here.
    """
    name = work.stage.name
    with store.lock(work.key, lambda: say(f"{name}: another process computes this result; waiting for it")) as lease:
        found = look_up(store, work.key, refresh, work.run)
        if isinstance(found, Record):
            return found, False
        say(f"{name}: computing ({work.because or found.reason})")
        return compute(work, store, show, lease), True


def compute(work: Work, store: ArtifactStore, show: Show, lease: Lease) -> Record:
    """Compute and publish; whoever calls holds the key's lock. What a killed attempt left is taken up.

    Raises:
        LeaseLost: another process took the key over, because this one was suspended. UserError: the user's mistake, as
            the stage says it; and whatever else the stage raises. A checkpoint stays.
    """
    folder = store.work_folder(work.key)
    out = _take_up(folder, lease.number)
    started, clock = datetime.now(UTC), time.monotonic()

    def before_commit() -> None:
        work.check_inputs()
        lease.check()

    try:
        work.check_inputs()
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
                "environment": _environment(),
                "run": work.run,
                "started": started.isoformat(timespec="milliseconds"),
                "seconds": round(time.monotonic() - clock, 3),
            },
            before_commit=before_commit,
        )
    except BaseException as error:
        if lease.is_lost():
            shutil.rmtree(out, ignore_errors=True)
            if isinstance(error, Exception):
                lease.check()  # whatever went wrong then, this is why
        elif isinstance(error, InputChanged) or not _has_checkpoint(out):
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, _MALFORMED) and (imported := _imported(work)):
            raise UserError(
                f"{work.stage.name} can't use {imported}, which was computed elsewhere and imported "
                f"({type(error).__name__}: {error}). Its files are not what this version of Tether writes. Rerun from "
                "the stage before, so that it is computed here."
            ) from error
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return record


def _imported(work: Work) -> str:
    """Return the inputs that rest on an imported record, for people."""
    given = (f"{name} {each.digest[:12]}" for name, each in work.inputs.items() if each.imported)
    return ", ".join(given)


def _call(work: Work, out: Path, points: Path, show: Show, lease: Lease) -> dict[str, float]:
    """Call the stage's function. Its points stay beside its checkpoint: a resumed stage shows its whole curve."""
    runtime = getattr(work.job, "runtime", None)
    spreads = work.stage.spreads and runtime is not None and runtime.ranks > 1
    run: Run
    if spreads:
        run = partial(ranks.run, work.stage, check=lease.check)
    else:
        if runtime is not None and "torch" in work.stage.libraries:
            activate(runtime)
        run = work.stage.load_run()
    logs.take_over()  # what it imported may log by itself
    with closing(Spool(points)) as kept:
        for point in read_points(points):
            show(point)

        def observe(
            step: int, metrics: Mapping[str, float], total: int | None = None, *,
            tokens: float | None = None, resumed: bool = False,
            samples: Sequence[Mapping[str, object]] | None = None,
        ) -> None:  # fmt: skip
            lease.check()
            more = {"total": total, "tokens": tokens, "resumed": resumed or None, "samples": samples}
            show(kept.append(step, metrics, **more))

        with naming(out):
            return run(work.job, {name: given.path for name, given in work.inputs.items()}, out, observe)


def _plot(work: Work, metrics: Mapping[str, float], out: Path, points: Path) -> None:
    """Charts and the points themselves go beside the artifact as attachments."""
    if read_points(points):
        (out / "attachments").mkdir(exist_ok=True)
        shutil.copyfile(points, out / "attachments" / POINTS)
    with naming(out / "attachments"):
        plots.render(work.stage.name, work.job, metrics, points, out)


def _take_up(folder: Path, number: int) -> Path:
    """Return the folder for holder `number` of the key to compute in, with the checkpoint of the last attempt that left
    one.

    Each holder has a folder of its own, and takes the last one's by renaming it. So one that was taken for dead, and
    goes on, finds its paths gone: it can't write among the files of whoever took over. Half-written results are
    removed, they would be taken for part of the artifact.
    """
    out = folder / f"{number:09d}"
    earlier = [path for path in folder.glob("[0-9]*") if path.is_dir()]
    for path in sorted(earlier, reverse=True):
        if not out.exists() and _has_checkpoint(path):
            path.rename(out)
            sync(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)
    if out.exists():
        _mend(folder / POINTS)
    else:
        (folder / POINTS).unlink(missing_ok=True)
    for name in ("artifact", "attachments"):
        shutil.rmtree(out / name, ignore_errors=True)
    make_folder(out)
    return out


def _mend(points: Path) -> None:
    """Remove damaged lines, so that they are told of once."""
    lines = points.read_bytes().splitlines(keepends=True) if points.is_file() else []
    whole = [line for line in lines if is_point(line)]
    if len(whole) < len(lines):
        logger.warning("%s: %d damaged points of earlier steps are left out", points, len(lines) - len(whole))
        with replacing(points) as temporary:
            temporary.write_bytes(b"".join(whole))


def _has_checkpoint(out: Path) -> bool:
    return (out / "checkpoint").is_dir() and any((out / "checkpoint").iterdir())


def _environment() -> Environment:
    """Return what the record says of where it was computed."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "instruction_set": cpu_instruction_set(),
        "cpu": _cpu_model(),
        "code": code_version(),
    }


def _cpu_model() -> str:
    """As the processor calls itself; two of one instruction set may still round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
