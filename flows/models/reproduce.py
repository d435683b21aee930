"""`tether reproduce`: what the records of a model or run say, computed again in a store of its own, and compared.

Nothing that there is gets touched: no record, no alias, no MLflow. That is why it is not a run with `--refresh`: other
bytes would become the newest record of their keys, and the same bytes would make an old policy the candidate again.
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
from flows.models.facts import find_model
from flows.models.lineage import find_subject
from tasks.execution.computing import Work, compute_once
from tasks.execution.context import new_run_id
from tasks.execution.keying import key_of
from tasks.execution.progress import StageProgress, say
from tasks.result import Input
from tasks.runs.journal import recorded_paths
from tasks.runs.status import has_run, load_status
from tasks.stages import KNOWN
from tasks.tracking.registry import versions


class Comparison(NamedTuple):
    """An artifact as recorded, and as computed now."""

    recorded: Record
    made: Record

    @property
    def same(self) -> bool:
        """To the byte."""
        return self.recorded.digest == self.made.digest

    @property
    def same_inputs(self) -> bool:
        """Return what it was made of; else its own bytes prove nothing."""
        return self.recorded.inputs == self.made.inputs


class Reproduction(NamedTuple):
    """The comparisons, in the order in which the artifacts were made."""

    subject: str
    pairs: Sequence[Comparison]
    kept: Path | None
    """The home with the results, where some differ."""

    @property
    def same(self) -> bool:
        """Return whether every artifact has the same bytes."""
        return all(pair.same for pair in self.pairs)

    @property
    def explained(self) -> bool:
        """Return whether the two machines or programs differ wherever the same inputs gave other bytes."""
        return all(differences(pair) for pair in self.pairs if not pair.same and pair.same_inputs)


def reproduce(
    home: Path,
    asked: str,
    data: Mapping[str, Path] | None = None,
    allow_other_code: bool = False,
    console: Console | None = None,
    root: Path = ROOT,
) -> Reproduction:
    """Compute `asked` and everything that it was made of again, from the external inputs.

    An interrupted one is taken up by the same call. On a machine that lacks what a record was computed with
    (instruction set, threads, device), this one's takes its place.

    Args:
        home: the `TETHER_HOME`.
        asked: a run's id (all its stages), a model (as `find_model`), or an artifact's digest.
        data: input name (`preferences`, `base`, `sheet`, ...) to where it is now; else it is read where it was. Of
            several inputs of one name, `NAME@DIGEST` is the one whose sha256 begins so.
        allow_other_code: go on though the code here is another than what computed it.
        console: where progress is said.
        root: the folder that holds our packages.

    Raises:
        UserError: nothing of that name, an input that is gone or has changed, or other code. And what a stage raises.
    """
    data, console = data or {}, console or Console()
    graph = Graph.of(ArtifactStore(home))
    subject, digests, keys = _subject(home, asked, graph)
    plan = _plan(graph, digests, keys, root)
    if other := _other_code(plan.values(), root):
        if not allow_other_code:
            raise UserError(f"{other} To continue with the code here, give --allow-other-code.")
        say(console, other)
    sources = _sources(home, plan, data, graph)
    scratch = home / "reproduce" / digest_json(sorted(digests))[:16]
    store = ArtifactStore(scratch, alone=True)
    made: dict[str, Record] = {}
    for digest, record in plan.items():
        inputs = {name: _input(record, name, plan, made, sources, store) for name in record.inputs}
        made[digest] = _compute(record, inputs, store, console, root)
    pairs = [Comparison(record, made[digest]) for digest, record in plan.items()]
    if all(pair.same for pair in pairs):
        shutil.rmtree(scratch)
        return Reproduction(subject, pairs, None)
    kept = scratch.with_name(f"{scratch.name}-{new_run_id()}")  # which the next attempt does not take up
    os.rename(scratch, kept)
    sync(kept.parent)
    return Reproduction(subject, pairs, kept)


def _subject(home: Path, asked: str, graph: Graph) -> tuple[str, Sequence[str], Collection[str]]:
    """Return what is asked for in words, its artifacts' digests, and the keys under which a run has them."""
    registered = versions(home)
    run, _, stage = asked.partition("/")
    if stage and has_run(home, run):
        digests: Sequence[str] = [find_model(home, asked, graph, registered)[0]]
        words = f"model {asked}"
    else:
        subject = find_subject(home, asked, graph, registered)
        run, digests, words = subject.run or "", subject.digests, f"{subject.kind} {subject.name}"
    if not any(graph.node(digest).records for digest in digests):
        raise UserError(
            f"{asked}: the store has no record of how it was made. Name a run, a model or an artifact that a stage "
            f"made (`tether store ls` lists them)."
        )
    return words, digests, load_status(home, run).needs if run else ()


def _plan(graph: Graph, digests: Sequence[str], keys: Collection[str], root: Path) -> dict[str, Record]:
    """Return the records to compute again by what they gave, what goes in before what comes out.

    Of several that gave the same artifact, that of the run asked for, else one of this very code, else the newest.
    """
    order: dict[str, Record] = {}

    def visit(digest: str) -> None:
        records = graph.node(digest).records
        if digest in order or not records:
            return
        record = min(records, key=lambda each: (each.key not in keys, bool(_changed_source(each, root))))
        for given in record.inputs.values():
            visit(given)
        order[digest] = record

    for digest in digests:
        visit(digest)
    return order


# -- code, inputs, options ---------------------------------------------------------------------------------------------


def _other_code(plan: Collection[Record], root: Path) -> str:
    """Says that the code here is another one, of which stages, and what to check out; empty where it is the same."""
    changed = {record.stage: found for record in plan if (found := _changed_source(record, root))}
    if not changed:
        return ""
    stage, files = next(iter(changed.items()))
    known = [each.environment.get("code") or {} for each in plan if each.stage in changed]
    codes = {str(code.get("commit") or ""): code for code in known}
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
    """Modules of a record's stage, and its built-in task, that are not here as they were."""
    stage, task = KNOWN.get(record.stage), next(iter(record.parts.get("task", {})), None)
    here = code_parts(stage.module, root, task) if stage else KeyParts()
    then = KeyParts(source=record.parts.get("source", {}), task=record.parts.get("task", {}))
    return [change.name for change in changes(then, here)]


def _sources(home: Path, plan: Mapping[str, Record], data: Mapping[str, Path], graph: Graph) -> dict[str, Path]:
    """Maps the digest of an external input to its path; each is checked to hold what was read then."""
    wanted = {
        (name, digest)
        for record in plan.values()
        for name, digest in record.inputs.items()
        if digest not in plan and _file_of(record, digest, plan) is None
    }
    given = _given(data, wanted, plan)
    recorded = recorded_paths(home, {record.run for record in plan.values()})
    found: dict[str, Path] = {}
    for name, digest in sorted(wanted):
        path = given.get(digest) or recorded.get(digest)
        shared = sum(other == name for other, _ in wanted) > 1
        again = f"Give it as it was with --data {_exact(name, digest) if shared else name}=PATH (sha256 {digest[:16]})."
        if path is None:
            damaged = ", ".join(f"{key[:16]}: {miss.reason}" for key, miss in sorted(graph.unreadable.items()))
            lost = f", and may be what a damaged record tells of ({damaged})" if damaged else ""
            raise UserError(f"input {name}: this home does not record where it was read{lost}. {again}")
        if not path.exists():
            raise UserError(f"input {name}: {path} no longer exists. {again}")
        if (here := Input.of(path).digest) != digest:
            raise UserError(f"input {name}: {path} is not what was read then (its sha256 is {here[:16]}). {again}")
        found[digest] = path
    return found


def _given(
    data: Mapping[str, Path], wanted: Collection[tuple[str, str]], plan: Mapping[str, Record]
) -> dict[str, Path]:
    """Map the digest of each input that the user names to its path; `wanted` has names and digests of all inputs.

    Two inputs share a name where an artifact was compared with an earlier run's (`data.reference`). A name alone then
    means the one that the path holds.

    Raises:
        UserError: there is no such input, or the name means several.
    """
    found: dict[str, Path] = {}
    for asked, path in data.items():
        name, _, begin = asked.partition("@")
        fitting = sorted(digest for other, digest in wanted if other == name and digest.startswith(begin))
        if len(fitting) > 1 and path.exists() and (here := Input.of(path).digest) in fitting:
            fitting = [here]
        if not fitting:
            known = sorted({other for other, _ in wanted})
            if name in known:
                known = sorted(_exact(*each) for each in wanted if each[0] == name)
            there = ", ".join(known) or "none: all its data are generated"
            raise UserError(f"--data {asked}: it has no such input; there is {there}.")
        if len(fitting) > 1:
            several = " and ".join(f"{_exact(name, each)} ({_readers(each, plan)})" for each in fitting)
            raise UserError(
                f"--data {asked}={path}: {len(fitting)} inputs have that name, {several}, and the path holds none of "
                f"them. Say which it is, as --data {_exact(name, fitting[0])}=PATH."
            )
        found[fitting[0]] = path
    return found


def _exact(name: str, digest: str) -> str:
    """Return what names one of several inputs of the same name."""
    return f"{name}@{digest[:12]}"


def _readers(digest: str, plan: Mapping[str, Record]) -> str:
    """Return which stages of which runs read an input, as `validate of run r1`."""
    reads = (record for record in plan.values() if digest in record.inputs.values())
    return ", ".join(sorted({f"{record.stage} of run {record.run}" for record in reads}))


def _file_of(record: Record, digest: str, plan: Mapping[str, Record]) -> tuple[str, str] | None:
    """Artifact and name of an input that is a file of another input, as the simulated judges' sheet is the sample's."""
    beside = [plan[each] for each in record.inputs.values() if each in plan]
    return next(((each.digest, name) for each in beside for name, sha in each.files.items() if sha == digest), None)


def _input(
    record: Record, name: str, plan: Mapping[str, Record], made: Mapping[str, Record], sources: Mapping[str, Path],
    store: ArtifactStore,
) -> Input:  # fmt: skip
    """Return an input of a record as it is now: computed again, a file of what was, or an external input."""
    digest = record.inputs[name]
    if digest in made:
        return Input(digest=made[digest].digest, path=store.path(made[digest]), stored=True)
    if found := _file_of(record, digest, plan):
        artifact, file = found
        return Input.of(store.path(made[artifact]) / file)
    return Input(digest=digest, path=sources[digest])


def _job(record: Record) -> Settings:
    """Return a record's options; what is no part of a key, as where its data were, has its default."""
    values = dict(record.job)
    if refresh := group(values, "reward", "refresh"):  # has no default, and is not read where inputs are given
        values["reward"] = {**group(values, "reward"), "refresh": {**refresh, "from_run": record.run}}
    try:
        job = KNOWN[record.stage].load_job().model_validate(values)
    except (KeyError, ValidationError) as error:
        commit = (record.environment.get("code") or {}).get("commit") or "that computed it"
        raise UserError(
            f"{record.stage}: this code does not know its options. Check out the commit {commit}."
        ) from error
    runtime = getattr(job, "runtime", None)
    return job.model_copy(update={"runtime": _fitting(runtime)}) if runtime is not None else job


def _fitting(runtime: Runtime) -> Runtime:
    """Return the runtime with what this machine lacks replaced by what it has; what an older record lacks is
    resolved."""
    here, lacking = Runtime().resolve(), {problem.partition(":")[0] for problem in runtime.misfits()}
    if "device" in lacking:
        lacking |= {"gpu", "cuda", "tf32", "ranks"}
    return runtime.model_copy(update={name: getattr(here, name) for name in lacking}).resolve()


def _compute(record: Record, inputs: Mapping[str, Input], store: ArtifactStore, console: Console, root: Path) -> Record:
    stage, job = KNOWN[record.stage], _job(record)
    work = Work(stage, job, inputs, *key_of(stage, job, inputs, root), "reproduce", f"as run {record.run} did")
    with StageProgress(console, stage.name) as progress:
        return compute_once(work, store, progress.show, lambda text: say(console, text))[0]


def differences(pair: Comparison) -> list[str]:
    """In what the two computations of an artifact differ, inputs aside: options, machine, source, libraries."""
    found = [str(each) for each in changes(pair.recorded.parts, pair.made.parts) if each.part != "input"]
    was, now = pair.recorded.environment, pair.made.environment
    for name in ("cpu", "python"):
        if was.get(name) != now.get(name):
            found.append(f"{name} {was.get(name) or 'not recorded'} -> {now.get(name)}")
    rollout = group(group(pair.recorded.job, "ppo"), "rollout")
    if rollout.get("engine", "local") != "local" and rollout.get("batch_invariant") is not True:
        found.append(f"rollouts by {rollout['engine']} without batch invariance: no two computations are alike")
    return found
