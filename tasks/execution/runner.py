"""The life of every stage: build the key, look it up, compute, publish, record, judge the gates.

Nothing here imports torch or MLflow before a stage needs them, because a hit must cost only milliseconds.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from components.base.errors import GateFailed, UserError
from components.base.settings import Settings
from components.base.text import line
from components.gates import gate_text, judging
from components.gates.plugged import plugged_metrics
from components.keys.changes import KeyParts, in_a_line
from components.store.store import Record
from tasks.execution import explanation, logs
from tasks.execution.attempts import through_breakdowns
from tasks.execution.computing import Show, Work, compute_once, look_up
from tasks.execution.context import RunContext
from tasks.execution.keying import Inputs, key_of
from tasks.execution.stage_progress import StageProgress
from tasks.result import Given, StageResult, State, as_inputs, is_skipped
from tasks.runs.explained import Explanation, Hit
from tasks.runs.journal import Done, write_done
from tasks.runs.points import Point, Spool, points_file
from tasks.runs.samples import SamplesFile, choice_of, samples_file
from tasks.runs.status import Part, finite
from tasks.stages import Stage, ends_group


def run_stage(stage: Stage, job: Settings, sources: Given, ctx: RunContext) -> StageResult:
    """Run a stage's whole life in this process, or reuse its stored result. The runtime of `job` must be resolved.

    Returns:
        The result; its state is `passed`, `cached`, `waived` or `skipped` (`running` for a sub-stage that isn't the
            last).

    Raises:
        GateFailed: a gate stops the run; the artifact is kept.
        UserError: an option or input is wrong.
    """
    with logs.of_stage(stage.group):
        inputs, attempts = as_inputs(sources), ctx.execution.attempts
        began = time.time()
        spent = ctx.status.stage(stage.group).seconds
        try:
            ctx.begin_stage(stage.group)
            result = through_breakdowns(lambda: _obtain(stage, job, inputs, ctx), attempts, stage.name, ctx.say)
            ctx.results[stage.name] = result
            _record(result, ctx)
        except BaseException as error:
            # An error that is not an Exception came from outside: Ctrl-C, or Prefect's signal to stop.
            state: State = "failed" if isinstance(error, Exception) else "interrupted"
            seconds = time.time() - began
            if stage.group not in ctx.execution.pools:  # a pool's worker measures its own time (`dispatch`)
                ctx.status.add_computed(stage.group, stage.name, seconds)
            ctx.end_stage(stage.group, state, seconds=spent + seconds)
            raise
        seconds = time.time() - began
        _count(result, ctx, seconds)
        _end(result, ctx, spent + seconds)
        failure = judging.failure(stage.group, result.verdicts)
        if failure is not None:
            raise GateFailed(f"{failure}. The artifact is kept ({result.digest[:12]}); nothing downstream starts.")
        return result


def peek(stage: Stage, job: Settings, sources: Given, ctx: RunContext) -> StageResult | None:
    """Return the stored result that `run_stage` would find, judged by this run's gates; None if there is none.

    It writes no status, uses no MLflow, computes nothing and raises no GateFailed.
    """
    inputs, started = as_inputs(sources), time.monotonic()
    key, _, pinned = _key(stage, job, inputs, ctx)
    record = look_up(ctx.store, key, stage.name in ctx.reuse.refresh, ctx.run, pinned)
    return _result(stage, record, inputs, ctx, True, started) if isinstance(record, Record) else None


def _key(stage: Stage, job: Settings, inputs: Inputs, ctx: RunContext) -> tuple[str, KeyParts, Record | None]:
    """Return the stage's key, its parts and, when continuing an earlier run, the only record that may be used."""
    pinned = ctx.reuse.pinned.get(stage.name)
    if pinned is not None and pinned.inputs == {name: source.digest for name, source in inputs.items()}:
        return pinned.key, pinned.parts, pinned
    return *key_of(stage, job, inputs, ctx.execution.root), None


def _obtain(stage: Stage, job: Settings, inputs: Inputs, ctx: RunContext) -> StageResult:
    started = time.monotonic()
    key, parts, pinned = _key(stage, job, inputs, ctx)
    # Before the look-up, so that garbage collection keeps what this run needs.
    ctx.status.update(stage.group, key=key, parts=_parts(stage, ctx, key, None))
    refresh = stage.name in ctx.reuse.refresh
    stored = look_up(ctx.store, key, refresh, ctx.run, pinned)
    if isinstance(stored, Record):
        _explain_hit(stage, job, inputs, ctx, stored, pinned is not None)
        return _result(stage, stored, inputs, ctx, True, started)
    if pinned is not None:  # today's code must not publish under a key of other code
        raise UserError(
            f"{stage.name}: artifact {pinned.digest[:12]} of run {pinned.run}, which this run continues from, is "
            f"no longer complete in the store ({stored.reason}). Compute it again with `tether rerun {stage.group} "
            f"--from {pinned.run}`."
        )
    why = explanation.miss(ctx.store, stage.name, key, parts, stored, ctx.run)
    _explain(stage, ctx, why)
    limit = ctx.execution.timeouts.get(stage.group)
    work = Work(stage, job, inputs, key, parts, ctx.run, explanation.in_a_line(why), limit)
    pool = ctx.execution.pools.get(stage.group)

    with _recording(stage, ctx) as show:
        if pool is None:
            record, here = compute_once(work, ctx.store, show, ctx.say, refresh)
            if not here:
                _explain_hit(stage, job, inputs, ctx, record)
                return _result(stage, record, inputs, ctx, True, started)
        else:
            # The worker holds the key's lock, never the caller.
            from tasks.execution.dispatch import dispatch

            record = dispatch(
                work, pool, ctx.store, show, ctx.say, refresh,
                page=lambda address: ctx.status.update(stage.group, prefect=address),
                computed=lambda seconds: ctx.status.add_computed(stage.group, stage.name, seconds),
            )  # fmt: skip
    if others := {other.digest for other in ctx.store.published(record.key)} - {record.digest}:
        before = ", ".join(sorted(digest[:12] for digest in others))
        ctx.say(f"{record.stage}: the same key gave different bytes before ({before}): a step is not deterministic")
    return _result(stage, record, inputs, ctx, False, started)


def _parts(stage: Stage, ctx: RunContext, key: str, digest: str | None) -> dict[str, Part]:
    part = {} if ends_group(stage.name) else {stage.name: Part(key=key, digest=digest)}
    return {**ctx.status.stage(stage.group).parts, **part}


def _explain(stage: Stage, ctx: RunContext, why: Explanation) -> None:
    """Record why a (sub-)stage was computed or reused. A retried run that finds its own result keeps the first
    reason."""
    earlier = ctx.status.stage(stage.group).explained
    its_own = isinstance(why, Hit) and why.run == ctx.run
    if not its_own or stage.name not in earlier:
        ctx.status.update(stage.group, explained={**earlier, stage.name: why})


def _explain_hit(
    stage: Stage, job: Settings, inputs: Inputs, ctx: RunContext, record: Record, pinned: bool = False
) -> None:
    """Record that a (sub-)stage was taken from a record, and say what differs from it that is in no key."""
    differing = [] if pinned else explanation.unkeyed_changes(record, job, inputs)
    _explain(stage, ctx, Hit(run=record.run, pinned=pinned, differing=differing))
    if differing:
        ctx.say(f"{stage.name}: not in its key, and different in run {record.run}: {in_a_line(differing)}")


@contextmanager
def _recording(stage: Stage, ctx: RunContext) -> Iterator[Show]:
    path = points_file(ctx.folder, stage.group)
    samples = SamplesFile(samples_file(ctx.folder, stage.group))
    with closing(Spool(path)) as spool, closing(samples), StageProgress(ctx.reporting.console, stage.name) as progress:

        def show(point: Point) -> None:
            spool.add(point)
            progress.show(point)
            samples.add(point)

        yield show


def _result(stage: Stage, record: Record, inputs: Inputs, ctx: RunContext, cached: bool, started: float) -> StageResult:
    """Judge a record by this run's thresholds. Verdicts are never cached."""
    skipped = is_skipped(record)
    verdicts, path = list[judging.Verdict](), ctx.store.path(record)
    if ends_group(stage.name):
        parts = (part for part in ctx.results.values() if part.name == stage.group and part.stage != stage)
        metrics = judging.stage_metrics(record.metrics, (part.record.metrics for part in parts))
        metrics |= plugged_metrics(stage.group, record.metrics, path, ctx.gates)
        verdicts = judging.judge(stage.group, metrics, ctx.gates, ctx.waivers, skipped)
    state: State
    if not ends_group(stage.name):
        state = "running"
    elif any(verdict.stops for verdict in verdicts):
        state = "gate_failed"
    elif skipped:
        state = "skipped"
    elif any(verdict.waived for verdict in verdicts):
        state = "waived"
    else:
        state = "cached" if cached and _all_hits(stage.group, ctx) else "passed"
    seconds = time.monotonic() - started
    return StageResult(stage, record.digest, path, state, verdicts, cached, seconds, record, inputs)


def _all_hits(group: str, ctx: RunContext) -> bool:
    return all(result.cached for result in ctx.results.values() if result.name == group)


def _record(result: StageResult, ctx: RunContext) -> None:
    names = result.record.attachments if result.record.run == ctx.run else ()
    files = {name: path for name in names if (path := ctx.store.attachment(result.record, name)) is not None}
    write_done(ctx.folder, Done.of(result, ctx.folder, files, ctx.user))


def _count(result: StageResult, ctx: RunContext, seconds: float) -> None:
    """Record how much of the `seconds` was spent computing a (sub-)stage, or the time that its reuse saved."""
    stage, record = result.stage, result.record
    entry, pool = ctx.status.stage(stage.group), stage.group in ctx.execution.pools
    if record.run != ctx.run:
        ctx.status.update(stage.group, reused={**entry.reused, stage.name: record.seconds})
    elif not pool and not result.cached:
        ctx.status.add_computed(stage.group, stage.name, seconds)
    elif pool and stage.name not in entry.computed:  # computed for this run, which died before the worker finished
        ctx.status.add_computed(stage.group, stage.name, record.seconds)


def _end(result: StageResult, ctx: RunContext, seconds: float) -> None:
    group, record = result.name, result.record
    fields = {
        "seconds": seconds,
        "cached": _all_hits(group, ctx),
        "key": record.key,
        "digest": record.digest,
        "metrics": {**ctx.status.stage(group).metrics, **finite(record.metrics)},
        "gates": result.verdicts,
        "parts": _parts(result.stage, ctx, record.key, record.digest),
    }
    if not ends_group(result.stage.name):
        ctx.status.update(group, **fields)
    else:
        ctx.end_stage(group, result.state, **fields)
    by = f"{record.run}{' and imported' if record.imported else ''}"
    how = f"cached, computed by {by}" if result.cached else f"computed in {result.seconds:.1f} s"
    ctx.say(f"{record.stage}: {how}; artifact {record.digest[:12]}")
    if reason := choice_of(result.path):
        ctx.say(f"  {line(reason)}")
    for verdict in result.verdicts:
        word = gate_text.outcome(verdict)
        if word not in ("PASS", "OFF") or (word == "OFF" and verdict.within is not None):
            because = f", waived by {verdict.user}: {verdict.reason}" if verdict.waived else ""
            ctx.say(f"  {line(f'{word} {verdict.name}: {verdict.text}{because}')}")
