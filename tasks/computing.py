"""Computing a stage: from a key that the store lacks to its record, wherever that happens.

Whoever computes (the process of the run, or a worker that it was dispatched to) needs a `Work` and the store, and
nothing of the run that wants it. Nothing here imports torch before the stage does.
"""

import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.artifacts import ArtifactStore, Miss, Record
from components.runtime import activate, cpu_instruction_set
from components.settings import Settings
from tasks.result import Source, StageResult
from tasks.spool import Point, Spool, read_points
from tasks.stages import Stage

Observe = Callable[[Point], None]
"""Called with every point of a stage as it comes, from the stage's start though it may have been resumed midway."""

POINTS = "points.jsonl"


@dataclass(frozen=True)
class Work:
    """A stage with all that its computing needs."""

    stage: Stage
    job: Settings
    """The stage's config, its runtime resolved."""
    inputs: Mapping[str, StageResult | Source]
    key: str
    parts: Mapping[str, Any]
    """What the key was made of."""
    run: str
    """The run that wants it, for the record."""


def look_up(store: ArtifactStore, key: str, refresh: bool) -> Record | Miss:
    """What the store has of `key`; nothing where it is to be computed again."""
    return Miss("asked to compute again") if refresh else store.lookup(key)


def compute_once(
    work: Work, store: ArtifactStore, observe: Observe, say: Callable[[str], None], refresh: bool = False
) -> tuple[Record, bool]:
    """Compute under the key's lock, unless the store has it by then.

    Returns:
        The record, and whether it was computed here.

    Raises:
        As `compute`.
    """
    name = work.stage.name
    with store.lock(work.key, lambda: say(f"{name}: another process computes the same; waiting for it")):
        found = look_up(store, work.key, refresh)
        if isinstance(found, Record):
            return found, False
        say(f"{name}: computing ({found.reason})")
        return compute(work, store, observe), True


def compute(work: Work, store: ArtifactStore, observe: Observe) -> Record:
    """Compute and publish; whoever calls holds the key's lock. What a killed attempt left is taken up.

    Raises:
        UserError: the user's mistake, as the stage says it; and whatever else the stage raises. A checkpoint stays.
    """
    out = store.work_folder(work.key)
    _clear(out)
    out.mkdir(parents=True, exist_ok=True)
    started, clock = datetime.now(UTC), time.monotonic()
    try:
        metrics = _call(work, out, observe)
        _plot(work.stage, out)
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
                "started": started.isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - clock, 3),
            },
        )
    except BaseException:
        if not _has_checkpoint(out):
            shutil.rmtree(out, ignore_errors=True)
        raise
    shutil.rmtree(out)
    return record


def _call(work: Work, out: Path, observe: Observe) -> dict[str, float]:
    """Call the stage's function. Its points stay beside its checkpoint: a resumed stage shows its whole curve."""
    runtime = getattr(work.job, "runtime", None)
    if runtime is not None and "torch" in work.stage.libraries:
        activate(runtime)
    run = work.stage.load_run()
    kept = Spool(out / POINTS)
    for point in read_points(kept.path):
        observe(point)

    def report(step: int, metrics: Mapping[str, float], total: int | None = None) -> None:
        observe(kept.append(step, metrics, total=total))

    try:
        return run(work.job, {name: given.path for name, given in work.inputs.items()}, out, report)
    finally:
        kept.close()


def _plot(stage: Stage, out: Path) -> None:
    """Plots and the points themselves go beside the artifact as attachments."""
    points = out / POINTS
    if read_points(points):
        (out / "attachments").mkdir(exist_ok=True)
        shutil.copyfile(points, out / "attachments" / POINTS)
    from tasks import plots

    plots.render(stage.name, points, out / "artifact", out / "attachments")


def _clear(out: Path) -> None:
    """Leave a killed stage its checkpoint and points; half-written results would be taken for part of the artifact."""
    if not _has_checkpoint(out):
        shutil.rmtree(out, ignore_errors=True)
    for name in ("artifact", "attachments"):
        shutil.rmtree(out / name, ignore_errors=True)


def _has_checkpoint(out: Path) -> bool:
    return (out / "checkpoint").is_dir() and any((out / "checkpoint").iterdir())


def _environment() -> dict[str, Any]:
    """What the record says of where it was computed (none of it is in the key beyond what the job holds)."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "instruction_set": cpu_instruction_set(),
    }
