"""What MLflow is to know of a run: facts on disk first, carried there now or later (tracking.py does).

runs/<run>/tracking.jsonl          one fact a line, in order: open, begin, record, end (of a stage), card, close
runs/<run>/metrics/<stage>.jsonl   a stage's points
runs/<run>/tracking.json           how much of both MLflow has, and what it calls the run; replaced in one step
runs/<run>/report.html             the run for people, written at its end; MLflow gets that too
"""

import fcntl
import getpass
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from components.canonical import digest_json
from components.files import temporary_beside
from components.gates import Verdict, Waiver
from tasks.result import Source, StageResult
from tasks.spool import drop_torn_tail, points_after, points_file

REPORT = "report.html"

Fact = dict[str, Any]
"""`{"time": ms, "kind": ...}` and what belongs to the kind."""


class _Kept(BaseModel):
    # NaN is a metric like any other, and JSON has none.
    model_config = ConfigDict(ser_json_inf_nan="strings", protected_namespaces=())


class Given(_Kept):
    """An input of a stage that is done."""

    name: str
    digest: str
    path: Path
    stage: str = ""
    """The (shown) stage that made it; empty for a source."""
    lineage: dict[str, str] = Field(default_factory=dict)


class Done(_Kept):
    """A stage that is done, with all that MLflow shows of it: recording it later needs neither record nor config."""

    name: str
    shown: str
    final: bool
    key: str
    digest: str
    path: Path
    run: str
    """The run that computed it."""
    by: str = ""
    """The run that takes it."""
    user: str = ""
    """Who started that."""
    cached: bool
    step: int
    """Where final metrics stand: after the last step of the curves."""
    job: dict[str, Any]
    metrics: dict[str, float]
    verdicts: list[Verdict]
    lineage: dict[str, str]
    inputs: list[Given]
    attachments: dict[str, Path]
    """Files by name; empty on a hit, which links to the run that has them."""
    code: dict[str, Any] = Field(default_factory=dict)
    """Version, commit and dirty state of what computed it (`components.code_version`)."""
    source: str = ""
    """sha256 of all the code that the stage runs, as its key has it."""
    libraries: dict[str, str] = Field(default_factory=dict)
    """Versions, as its key has them."""
    machine: dict[str, Any] = Field(default_factory=dict)
    """Where it was computed."""

    @classmethod
    def of(cls, result: StageResult, step: int, attachments: Mapping[str, Path], by: str) -> Self:
        """What there is to say of `result` in the run `by`."""
        record = result.record
        return cls(
            name=result.stage.name,
            shown=result.stage.shown,
            final=result.stage.final,
            key=result.key,
            digest=result.digest,
            path=result.path.absolute(),
            run=record.run,
            by=by,
            user=current_user(),
            cached=result.cached,
            step=step,
            job=record.job,
            metrics=dict(result.metrics),
            verdicts=list(result.verdicts),
            lineage=result.lineage,
            inputs=[_given(name, each) for name, each in result.inputs.items()],
            attachments={name: path.absolute() for name, path in attachments.items()},
            code=record.environment.get("code") or {},
            source=digest_json(record.parts.get("source", {})),
            libraries=record.parts.get("libraries", {}),
            machine={name: value for name, value in record.environment.items() if name != "code"},
        )

    def code_tags(self) -> dict[str, str]:
        """Which code computed it, as tags of MLflow; its pages know the first one."""
        tags = {"mlflow.source.git.commit": self.code.get("commit"), "tether.code_version": self.code.get("version")}
        if self.code.get("dirty") is not None:
            tags["tether.code_dirty"] = str(self.code["dirty"]).lower()
        return {name: value for name, value in {**tags, "tether.source": self.source}.items() if value}


def current_user() -> str:
    """Who runs this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's number without a name
        return str(os.getuid())


def _given(name: str, given: StageResult | Source) -> Given:
    made = {"stage": given.name, "lineage": given.lineage} if isinstance(given, StageResult) else {}
    return Given(name=name, digest=given.digest, path=given.path.absolute(), **made)


class Sent(BaseModel):
    """How far a run's facts and points have come, and under which ids MLflow has them."""

    facts: int = 0
    """Bytes of tracking.jsonl."""
    points: dict[str, int] = Field(default_factory=dict)
    """Stage to bytes of its points file."""
    closed: bool = False
    """Whether the last of those facts is the run's end."""
    project: str = ""
    experiment: str | None = None
    parent: str | None = None
    stages: dict[str, str] = Field(default_factory=dict)
    """Stage to the id of its run."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """As it stands for the run in `folder` (nothing sent where there's no file)."""
        path = folder / "tracking.json"
        return cls.model_validate_json(path.read_text()) if path.is_file() else cls()

    def save(self, folder: Path) -> None:
        """Replace the file."""
        temporary = temporary_beside(folder / "tracking.json")
        temporary.write_text(self.model_dump_json(indent=1))
        os.replace(temporary, folder / "tracking.json")


def add_fact(folder: Path, kind: str, **about: Any) -> None:
    """Write down one more fact of the run in `folder`."""
    fact = {"time": time.time_ns() // 1_000_000, "kind": kind, **about}
    with (folder / "tracking.jsonl").open("a") as file:
        file.write(json.dumps(fact) + "\n")


def facts_after(folder: Path, offset: int, limit: int | None = None) -> tuple[list[Fact], int]:
    """Whole facts from byte `offset` on (at most `limit`; none where nothing is tracked), and where the next begins."""
    return points_after(folder / "tracking.jsonl", offset, limit)


def read_facts(folder: Path) -> list[Fact]:
    """Every whole fact of a run."""
    return facts_after(folder, 0)[0]


def waivers(folder: Path) -> list[Waiver]:
    """The waivers that let gates of a run pass so far."""
    verdicts = [
        Verdict.model_validate(verdict)
        for fact in read_facts(folder)
        if fact["kind"] == "record"
        for verdict in fact["done"]["verdicts"]
    ]
    found = {v.name: Waiver(gate=v.name, user=v.user or "", reason=v.reason or "") for v in verdicts if v.waived}
    return list(found.values())


def is_whole(folder: Path) -> bool:
    """Whether the run has ended and MLflow has got all of it; reads no more than it must."""
    sent, facts = Sent.load(folder), folder / "tracking.jsonl"
    if not facts.is_file():
        return True
    points = {stage: points_file(folder, stage) for stage in sent.stages}
    return (
        sent.closed
        and sent.facts == facts.stat().st_size
        and all(sent.points.get(stage, 0) == path.stat().st_size for stage, path in points.items() if path.is_file())
    )


def waiting(folder: Path) -> tuple[int, int]:
    """How many facts and points of a run MLflow has not got."""
    sent = Sent.load(folder)
    stages = {fact["stage"] for fact in read_facts(folder) if fact["kind"] == "begin"}
    points = sum(len(points_after(points_file(folder, stage), sent.points.get(stage, 0))[0]) for stage in stages)
    return len(facts_after(folder, sent.facts)[0]), points


@contextmanager
def held(folder: Path, wait: bool) -> Iterator[bool]:
    """Whether this process may carry the run's facts, while the block runs: one does at a time.

    Args:
        folder: the run's.
        wait: for whoever does now; else the answer is False.
    """
    with (folder / "tracking.jsonl").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def mend_facts(folder: Path) -> None:
    """Cut off a last fact whose writer was killed, so that the next one starts a line of its own."""
    drop_torn_tail(folder / "tracking.jsonl")
