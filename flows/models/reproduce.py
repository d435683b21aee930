"""`tether reproduce`: compute a model or run again from its records, in a separate store, and compare.

It changes no existing record, alias or MLflow entry. A run with `--refresh` would: different bytes would become the
newest record of their keys, and identical bytes would make an old policy the candidate again.
"""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from rich.console import Console

from components.base.errors import UserError
from components.base.files import sync
from components.base.hashing import digest_json
from components.base.nested import group
from components.base.settings import Settings
from components.keys.changes import KeyParts, changes
from components.keys.code_version import code_version
from components.keys.fingerprint import ROOT, code_parts
from components.models.runtime import Runtime
from components.store.graph import Graph
from components.store.store import ArtifactStore, Record
from flows.config.removed import without_removed
from flows.models.lineage import find_subject
from flows.models.model_facts import find_model
from tasks.execution.computing import Work, compute_once
from tasks.execution.context import new_run_id
from tasks.execution.keying import key_of
from tasks.execution.stage_progress import StageProgress, say
from tasks.result import Input
from tasks.runs.journal import recorded_inputs
from tasks.runs.status import has_run, load_status
from tasks.stages import KNOWN, stage_of


class Comparison(NamedTuple):
    """An artifact as recorded, and as computed now."""

    recorded: Record
    made: Record

    @property
    def same(self) -> bool:
        """Return whether the artifacts are identical to the byte."""
        return self.recorded.digest == self.made.digest

    @property
    def same_inputs(self) -> bool:
        """Return whether both were made of the same inputs; if not, different bytes prove nothing."""
        return self.recorded.inputs == self.made.inputs


class Reproduction(NamedTuple):
    """The comparisons, in the order in which the artifacts were made."""

    subject: str
    pairs: Sequence[Comparison]
    folder: Path | None
    """The home with the new results if some differ; None if all are the same."""

    @property
    def same(self) -> bool:
        """Return whether every artifact has the same bytes."""
        return all(pair.same for pair in self.pairs)

    @property
    def explained(self) -> bool:
        """Return whether each difference between results of the same inputs has a recorded cause, such as another
        machine."""
        return all(differences(pair) for pair in self.pairs if not pair.same and pair.same_inputs)


def reproduce(
    home: Path,
    subject: str,
    data: Collection[tuple[str, Path]] = (),
    allow_other_code: bool = False,
    console: Console | None = None,
    root: Path = ROOT,
) -> Reproduction:
    """Compute `subject` and everything it was made of again from the external inputs, and compare.

    The same call continues an interrupted one. If this machine lacks something that a record was computed with
    (instruction set, threads, device), what this machine has is used instead.

    Args:
        home: the Tether home.
        subject: a run's id (all its stages), a model (as in `find_model`), or an artifact's digest.
        data: names of inputs (`preferences`, `base`, `sheet`, ...) and their paths; others are read where they were
            recorded. If several inputs have one name, it is given with the path of each.
        allow_other_code: continue even if the code has changed since.
        console: prints the progress.
        root: the folder that holds Tether's packages.

    Raises:
        UserError: nothing with that name is known, an input is missing or has changed, or the code has changed. Errors
            of a stage are passed on unchanged.
    """
    console = console or Console()
    graph = Graph.of(ArtifactStore(home))
    words, digests, keys = _subject(home, subject, graph)
    plan = _plan(graph, digests, keys, root)
    if other := _other_code(plan.values(), root):
        if not allow_other_code:
            raise UserError(f"{other} To use the code here instead, give --allow-other-code.")
        say(console, other)
    sources = _sources(home, plan, data, graph)
    scratch = home / "reproduce" / digest_json(sorted(digests))[:16]
    store = ArtifactStore(scratch, alone=True)
    made: dict[str, Record] = {}
    for digest, record in plan.items():
        inputs = {name: _input(record, name, plan, made, sources, store) for name in record.inputs}
        stage, job = stage_of(record.stage, record.job), _job(record)
        key = key_of(stage, job, inputs, root)
        work = Work(stage, job, inputs, *key, "reproduce", f"as run {record.run} did")
        with StageProgress(console, stage.name) as progress:
            made[digest] = compute_once(work, store, progress.show, lambda text: say(console, text))[0]
    pairs = [Comparison(record, made[digest]) for digest, record in plan.items()]
    if all(pair.same for pair in pairs):
        shutil.rmtree(scratch)
        return Reproduction(words, pairs, None)
    folder = scratch.with_name(f"{scratch.name}-{new_run_id()}")  # the next attempt must not continue from it
    os.rename(scratch, folder)
    sync(folder.parent)
    return Reproduction(words, pairs, folder)


def _subject(home: Path, name: str, graph: Graph) -> tuple[str, Sequence[str], Collection[str]]:
    """Return a description of what `name` names, its artifacts' digests, and the keys under which a run has them."""
    run, _, stage = name.partition("/")
    if stage and has_run(home, run):
        digests: Sequence[str] = [find_model(home, name, graph)[0]]
        words = f"model {name}"
    else:
        subject = find_subject(home, name, graph)
        run, digests, words = subject.run or "", subject.digests, f"{subject.kind} {subject.name}"
    if not any(graph.node(digest).records for digest in digests):
        raise UserError(
            f"{name}: the store has no record of how it was made. Name a run, a model or an artifact that a stage "
            f"made (`tether store ls` lists them)."
        )
    return words, digests, load_status(home, run).results if run else ()


def _plan(graph: Graph, digests: Sequence[str], keys: Collection[str], root: Path) -> dict[str, Record]:
    """Return the records to compute again by digest, inputs before outputs.

    If several records have the same artifact, choose that of the run asked for, else one made by this code, else the
    newest.
    """
    order: dict[str, Record] = {}

    def visit(digest: str) -> None:
        records = graph.node(digest).records
        if digest in order or not records:
            return
        record = min(records, key=lambda candidate: (candidate.key not in keys, bool(_changed_source(candidate, root))))
        for source in record.inputs.values():
            visit(source)
        order[digest] = record

    for digest in digests:
        visit(digest)
    return order


# -- code, inputs, options ---------------------------------------------------------------------------------------------


def _other_code(plan: Collection[Record], root: Path) -> str:
    """Return a sentence that names the stages whose code differs here, and what to check out; empty if none differs."""
    changed = {record.stage: changed_files for record in plan if (changed_files := _changed_source(record, root))}
    if not changed:
        return ""
    stage, files = next(iter(changed.items()))
    recorded = [recomputed.environment.get("code") or {} for recomputed in plan if recomputed.stage in changed]
    codes = {str(code.get("commit") or ""): code for code in recorded}
    commits = [
        f"git checkout {commit}" + (" (it had uncommitted changes, which no commit holds)" if code.get("dirty") else "")
        for commit, code in codes.items()
        if commit
    ]
    return (
        f"the code here (commit {code_version(root)['commit'] or 'unknown'}) differs from the code that computed "
        f"{', '.join(changed)} ({stage}: {', '.join(files[:3])}{' and more' if len(files) > 3 else ''}). "
        f"{'Check it out: ' + ', or '.join(commits) if commits else 'Its commit is not recorded'}."
    )


def _changed_source(record: Record, root: Path) -> list[str]:
    stage = stage_of(record.stage, record.job) if record.stage in KNOWN else None
    task = next(iter(record.parts.get("task", {})), None)
    here = code_parts(stage.module, root, task) if stage else KeyParts()
    then = KeyParts(source=record.parts.get("source", {}), task=record.parts.get("task", {}))
    return [change.name for change in changes(then, here)]


def _sources(
    home: Path, plan: Mapping[str, Record], data: Collection[tuple[str, Path]], graph: Graph
) -> dict[str, Path]:
    """Return the path of each external input by digest, after checking that it holds the same content as then.

    Two inputs can share a name if an artifact was compared with an earlier run's (`data.reference`): the content of a
    path in `data` says which one is meant.
    """
    wanted = {
        (name, digest)
        for record in plan.values()
        for name, digest in record.inputs.items()
        if digest not in plan and _file_of(record, digest, plan) is None
    }
    paths: dict[str, Path] = {}
    for name, path in data:
        digests = [digest for other, digest in wanted if other == name]
        if not digests:
            there = ", ".join(sorted({other for other, _ in wanted})) or "none: all its data are generated"
            raise UserError(f"--data {name}: there is no such input; there is {there}.")
        paths[_checked(name, path, digests)] = path
    recorded = recorded_inputs(home, {record.run for record in plan.values()})
    for name, digest in sorted(wanted):
        if digest in paths:
            continue
        if digest not in recorded:
            damaged = ", ".join(f"{key[:16]}: {miss.reason}" for key, miss in sorted(graph.unreadable.items()))
            lost = f", and a damaged record may have known it ({damaged})" if damaged else ""
            raise UserError(
                f"input {name}: this home does not record where it was read{lost}. Give the original with "
                f"--data {name}=PATH (sha256 {digest[:16]})."
            )
        path = recorded[digest].path
        paths[_checked(name, path, [digest])] = path
    return paths


def _checked(name: str, path: Path, digests: Sequence[str]) -> str:
    """Return the digest of an input's path. Raises UserError if it is none of `digests`, those that were read."""
    here = Input.named(path).digest if path.exists() else ""
    if here in digests:
        return here
    state = f"has the sha256 {here[:16]} now" if here else "does not exist"
    then = " or ".join(digest[:16] for digest in sorted(digests))
    raise UserError(f"input {name}: {path} {state}. Give the original with --data {name}=PATH (sha256 {then}).")


def _file_of(record: Record, digest: str, plan: Mapping[str, Record]) -> tuple[str, str] | None:
    """Return artifact and name of an input that is a file of another input, such as the simulated judges' sheet."""
    sources = [plan[input_digest] for input_digest in record.inputs.values() if input_digest in plan]
    return next(((one.digest, name) for one in sources for name, sha in one.files.items() if sha == digest), None)


def _input(
    record: Record, name: str, plan: Mapping[str, Record], made: Mapping[str, Record], sources: Mapping[str, Path],
    store: ArtifactStore,
) -> Input:  # fmt: skip
    """Return an input of a record for the new computation: recomputed, a file of a recomputed one, or external."""
    digest = record.inputs[name]
    if digest in made:
        return Input(digest=made[digest].digest, path=store.path(made[digest]), stored=True)
    if place := _file_of(record, digest, plan):
        artifact, file = place
        return Input.of(store.path(made[artifact]) / file)
    return Input(digest=digest, path=sources[digest])


def _job(record: Record) -> Settings:
    """Return a record's options. Options that are not part of a key, such as paths of data, have their defaults."""
    values = dict(record.job)
    if refresh := group(values, "reward", "refresh"):  # has no default, and is not read where inputs are given
        values["reward"] = {**group(values, "reward"), "refresh": {**refresh, "from_run": record.run}}
    try:
        values = without_removed(values, record.stage)
        job = stage_of(record.stage, values).load_job().model_validate(values)
    except (KeyError, ValidationError, UserError) as error:
        commit = (record.environment.get("code") or {}).get("commit") or "that computed it"
        raise UserError(
            f"{record.stage}: this version does not know its options. Check out the commit {commit}."
        ) from error
    runtime = getattr(job, "runtime", None)
    return job.model_copy(update={"runtime": _fitting(runtime)}) if runtime is not None else job


def _fitting(runtime: Runtime) -> Runtime:
    """Return the runtime with everything that this machine lacks replaced by what it has. What an older record lacks is
    resolved."""
    here, lacking = Runtime().resolve(), {problem.partition(":")[0] for problem in runtime.misfits()}
    if "device" in lacking:
        lacking |= {"gpu", "cuda", "tf32", "cuda_graphs", "ranks"}
    return runtime.model_copy(update={name: getattr(here, name) for name in lacking}).resolve()


def differences(pair: Comparison) -> list[str]:
    """Return how two computations of an artifact differ apart from inputs: options, machine, source, libraries."""
    texts = [str(change) for change in changes(pair.recorded.parts, pair.made.parts) if change.part != "input"]
    was, now = pair.recorded.environment, pair.made.environment
    for name in ("cpu", "python"):
        if was.get(name) != now.get(name):
            texts.append(f"{name} {was.get(name) or 'not recorded'} -> {now.get(name)}")
    rollout = group(group(pair.recorded.job, "ppo"), "rollout")
    if rollout.get("engine", "local") != "local" and rollout.get("batch_invariant") is not True:
        texts.append(
            f"rollouts by {rollout['engine']} without batch invariance: no two computations give the same bytes"
        )
    return texts
