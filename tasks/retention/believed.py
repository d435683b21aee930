"""Decide what to accept of an imported run: files are checked by schema, numbers against their records.

Anybody can write an archive, so its run.json is not taken over: metrics come from its records, gates are judged again
with its config's thresholds, and only known fields with valid values remain. Pages, cards and MLflow's content are not
imported, but made here.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from components.base.errors import UserError
from components.gates.judging import GatesConfig, Threshold, Verdict, Waiver, judge, stage_metrics
from components.store.archive import RUN, Archive
from components.store.records import SHA, Record
from tasks.result import State, is_skipped
from tasks.runs.config import CONFIG, parse_values
from tasks.runs.label import LONGEST_VALUE, Label
from tasks.runs.schema import RUN_SCHEMA
from tasks.runs.status import RUN_FILE, RunFile, StageStatus, finite
from tasks.stages import KNOWN, PIPELINE, STAGES

LONGEST_REASON = 4000
"""The largest number of characters of a waiver's reason."""
LATEST = 1e11
"""Upper limit of times, in seconds since 1970, and of a stage's seconds."""


class _Point(BaseModel):
    """A line of metrics/<stage>.jsonl. It is accepted only in exactly this form; nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int = Field(ge=0, le=10**12)
    time: int = Field(0, ge=0, le=10**14)
    metrics: dict[str, float]
    total: float | None = None
    tokens: float | None = None
    resumed: bool | None = None
    samples: list[dict[str, JsonValue]] | None = None


def believed_files(archive: Archive) -> tuple[RunFile, dict[str, bytes]]:
    """Return an archive's run, and its files as this home stores them.

    Raises:
        UserError: a file is missing, or has content that Tether does not write or that the records contradict.
    """
    for name in (RUN_FILE, CONFIG):
        if name not in archive.files:
            raise UserError(f"{archive.path} is refused, and nothing of it was written: it lacks run/{name}.")
    name = RUN_FILE
    try:
        given = RunFile.model_validate_json(archive.files[RUN_FILE])
        name = CONFIG
        values = parse_values(archive.files[CONFIG].decode())
        gates = GatesConfig.model_validate(values.get("gates") or _told(given))
        for name in archive.files:
            if name not in (RUN_FILE, CONFIG):
                _check_points(name, archive.files[name])
        name = RUN_FILE
        document = _believed(given, archive.records, gates)
    except (ValueError, UserError) as error:
        raise UserError(
            f"{archive.path} is refused, and nothing of it was written: {name}: {_problem(error)}. Ask who sent it to "
            f"export the run again, with this version of Tether."
        ) from error
    files = {RUN_FILE: document.model_dump_json(indent=1).encode()}
    return document, files | {name: data for name, data in archive.files.items() if name != RUN_FILE}


def _problem(error: ValueError | UserError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
    return str(error).rstrip(".")


def _check_points(name: str, data: bytes) -> None:
    stage = name.partition("/")[2].removesuffix(".jsonl")
    if stage not in PIPELINE:
        raise ValueError(f"{stage} is not a stage")
    # Nobody reads what follows the last line feed: its writer was killed.
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            _Point.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(f"row {number}: {_problem(error)}") from error


def _believed(given: RunFile, records: list[Record], gates: GatesConfig) -> RunFile:
    """Return the run that follows from an archive's run.json and records."""
    if given.schema_version > RUN_SCHEMA:
        raise ValueError(f"a newer Tether wrote it (run schema {given.schema_version}, here {RUN_SCHEMA})")
    if not RUN.fullmatch(given.run):
        raise ValueError(f"run: {given.run!r} is not a run's id")
    if not given.finished or given.process:
        raise ValueError("the run has not ended, or has a process")
    for field, text in (("profile", given.profile), ("user", given.user)):
        if not text.isprintable() or len(text) > LONGEST_VALUE:
            raise ValueError(f"{field}: it is longer than {LONGEST_VALUE} characters, or holds one that can't be shown")
    label = Label.of(given.name or None, [f"{key}={value}" for key, value in given.tags.items()])
    origin: dict[str, str] = {name: given.origin[name] for name in ("stage", "from") if name in given.origin}
    if origin and (origin.get("stage") not in (*PIPELINE, *STAGES) or not RUN.fullmatch(origin.get("from", ""))):
        raise ValueError("origin: it names no stage, or no run")
    if given.origin.get("votes"):  # a round of `tether iterate`
        if not given.origin.get("round", "").isdecimal() or not RUN.fullmatch(given.origin["votes"]):
            raise ValueError("origin: it names no round, or no run")
        origin |= {name: given.origin[name] for name in ("round", "votes")}
    if until := given.origin.get("until"):
        if until not in PIPELINE:
            raise ValueError("origin: it ends after no stage of this version")
        origin["until"] = until
    names = [stage.name for stage in given.stages]
    if names != [name for name in PIPELINE if name in names] or not names:
        raise ValueError(f"stages: {', '.join(names)} are not stages of this version, each once and in their order")
    if strange := [record.stage for record in records if record.stage not in KNOWN]:
        raise ValueError(f"stages: there is a record of {strange[0]}, which is not a stage of this version")
    _check_needed(given, records)
    return RunFile(
        schema_version=RUN_SCHEMA,
        run=given.run,
        profile=given.profile,
        name=label.name,
        tags=dict(label.tags),
        user=given.user,
        started=given.started,
        imported=datetime.now(UTC).isoformat(timespec="seconds"),
        origin=origin,
        stages=[_stage(stage, records, gates) for stage in given.stages],
        finished=given.finished,
        updated=given.updated,
        process={},
    )


def _check_needed(given: RunFile, records: list[Record]) -> None:
    """Check that the run is based on each record; otherwise records could be added for the keys of other runs.

    Raises:
        ValueError: it is not, or two records are of the same artifact.
    """
    by_digest = {record.digest: record for record in records}
    waiting, needed = [digest for stage in given.stages for digest in stage.needs], set[str]()
    while waiting:
        digest = waiting.pop()
        if digest in by_digest and digest not in needed:
            needed.add(digest)
            waiting += by_digest[digest].inputs.values()
    for record in records:
        if record.digest not in needed or by_digest[record.digest] is not record:
            raise ValueError(f"stages: the run does not rest on the record of {record.stage} ({record.key[:12]})")


def _told(given: RunFile) -> dict[str, dict[str, Threshold]]:
    """Return the thresholds of a run's judged gates, for a config that names none."""
    told: dict[str, dict[str, Threshold]] = {}
    for verdict in (verdict for stage in given.stages for verdict in stage.gates if verdict.threshold is not None):
        stage, _, short = verdict.name.partition(".")
        told.setdefault(stage, {})[short] = verdict.threshold
    return told


def _stage(given: StageStatus, records: list[Record], gates: GatesConfig) -> StageStatus:
    """Return a stage as it follows from its records."""
    where = f"stages.{given.name}"
    numbers = (given.seconds, given.started or 0.0, given.began or 0.0)
    if not all(math.isfinite(number) and 0 <= number < LATEST for number in numbers):
        raise ValueError(f"{where}: seconds, started or began is not a time")
    if given.state == "running":
        raise ValueError(f"{where}: it is running, in a run that has ended")
    if strange := {*given.parts, *given.explained} - {*KNOWN, *PIPELINE}:
        raise ValueError(f"{where}: {min(strange)} is not a stage")
    for digest in given.needs:
        if not SHA.fullmatch(digest):
            raise ValueError(f"{where}: {digest!r} is neither a key nor a digest")
    record = _record(given.name, given.key, given.digest, records, where)
    parts = [_record(given.name, part.key, part.digest, records, where) for part in given.parts.values()]
    metrics: dict[str, float | None] = {}
    for each in (*parts, record):
        metrics |= finite(each.metrics) if each is not None else {}
    if record is not None and record.key == given.key:
        for name, value in finite(record.metrics).items():
            if name in given.metrics and given.metrics[name] != value:
                raise ValueError(f"{where}: {name} is {given.metrics[name]}, and {value} in its record")
    verdicts = _verdicts(given, record, [each for each in parts if each is not None], gates, where)
    return StageStatus(
        name=given.name,
        state=given.state,
        seconds=given.seconds,
        started=given.started,
        began=given.began,
        cached=given.cached,
        key=given.key,
        digest=given.digest,
        metrics=metrics,
        gates=verdicts,
        explained=given.explained,
        parts=given.parts,
    )


def _record(stage: str, key: str | None, digest: str | None, records: list[Record], where: str) -> Record | None:
    """Return the record of a stage's artifact, preferably that of its key; None if it has no artifact."""
    if digest is None:
        return None
    fitting = [each for each in records if each.digest == digest and KNOWN[each.stage].shown == stage]
    if key is None or not fitting:
        raise ValueError(f"{where}: the record of {digest[:12]} is not in it")
    return next((each for each in fitting if each.key == key), fitting[0])


def _verdicts(
    given: StageStatus, record: Record | None, parts: Sequence[Record], gates: GatesConfig, where: str
) -> list[Verdict]:
    """Return the stage's gates as judged here. They must agree with those in the run."""
    claims: tuple[State, ...] = ("passed", "cached", "waived", "gate_failed", "skipped")
    if record is None or not KNOWN[record.stage].final:
        if given.gates or given.state in claims:
            raise ValueError(f"{where}: it is {given.state}, and nothing is there that its gates could judge")
        return []
    waivers = [Waiver(gate=v.name, user=_short(v.user), reason=_short(v.reason)) for v in given.gates if v.waived]
    skipped = is_skipped(record)
    plugged = gates.plugged(given.name)  # measured in the other home; only the run's claim is available here
    told = {v.metric: v.value for v in given.gates if v.metric in plugged and v.value is not None}
    metrics = stage_metrics(record.metrics, (each.metrics for each in parts)) | told
    judged = judge(given.name, metrics, gates, waivers, skipped)
    by_name: Mapping[str, Verdict] = {verdict.name: verdict for verdict in judged}
    for verdict in given.gates:
        here = by_name.get(verdict.name)
        if here is None:
            raise ValueError(f"{where}: {verdict.name} is not a gate of this version")
        for field in ("metric", "value", "threshold", "passed", "waived"):
            said, found = getattr(verdict, field), getattr(here, field)
            if said != found:
                raise ValueError(f"{where}: {verdict.name} has {field} {said}; its record and config give {found}")
    stops, waived = any(verdict.stops for verdict in judged), any(verdict.waived for verdict in judged)
    fine = ("skipped",) if skipped else ("waived",) if waived else ("passed", "cached")
    expected = ("gate_failed",) if stops else fine
    if given.state in claims and given.state not in expected:
        raise ValueError(f"{where}: it is {given.state}; its gates, judged by its record, give {expected[0]}")
    return judged if given.gates or any(verdict.threshold is not None for verdict in judged) else []


def _short(text: str | None) -> str:
    return (text or "unknown")[:LONGEST_REASON]
