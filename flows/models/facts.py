"""One model with all that its card and its export say of it: its records, and the run that it is judged by."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from components.base.errors import UserError
from components.gates.judging import Verdict, Waiver
from components.gates.text import number, outcome, rule
from components.store.graph import Graph, Node
from components.store.store import ArtifactStore, Record
from flows.models.lineage import ChangedOption, changed_options, find_subject, own_records
from tasks.runs.config import run_values
from tasks.runs.journal import Done, readable_done, recorded_paths
from tasks.runs.status import RunStatus, StageStatus, has_run, list_runs, load_status, own_runs
from tasks.tracking.links import JUDGE, MODELS, model_name
from tasks.tracking.registry import Version, versions

logger = logging.getLogger(__name__)

PASSED = ("passed", "cached")
"""States of a stage whose gates passed, none of them waived."""
OF_JUDGE = "reward.judge"
"""The sub-stage that makes an independent judge."""
KINDS = MODELS | {OF_JUDGE: JUDGE}
"""(Sub-)stage to the kind of model that it makes."""
SHOWN = {OF_JUDGE: "reward"}
"""Sub-stage to the stage under which a run's status has it."""


class ModelFacts(NamedTuple):
    """The facts about a model."""

    name: str
    """As it is registered (`tether-policy`), whether it is or not."""
    record: Record
    upstream: tuple[Node, ...]
    """All that it was made of, in the order of making; itself last."""
    made: Sequence[Record]
    """The newest record of each artifact that it was made of; its own last, the one it was found by."""
    paths: Mapping[str, Path]
    """Maps the digest of an external input to where it was read."""
    config: Mapping[str, JsonValue]
    """Of the run that computed it; empty where that is not here."""
    options: Mapping[str, ChangedOption]
    """Those that differ from the profile's, of all stages that it was made by, by dotted name."""
    run: str | None
    """The run whose gates judge it; None where no run here has it."""
    stages: Mapping[str, StageStatus]
    """That run's stages by name."""
    waivers: Sequence[Waiver]
    """Those of that run."""
    versions: tuple[Version, ...]
    """Its registered versions, where the registry was asked."""
    promoted: Mapping[str, str] | None
    """Who made it champion: `{by, at, run, judges}`."""
    users: Mapping[str, str]
    """Who started each run that computed a part of it, as far as they are here."""
    costs: Mapping[str, Mapping[str, float]]
    """Digest of what it was made of to what its computing cost, by currency, as far as runs here say so."""

    @property
    def kind(self) -> str:
        """sft, reward, judge or policy."""
        return KINDS[self.record.stage]

    @property
    def stages_of(self) -> dict[str, Record]:
        """Stage to its record, itself and what it was made of directly: an earlier run's reward model is not here."""
        by_digest = {record.digest: record for record in self.made}
        inputs = [self.record.inputs.get(name) for name in ("data", "judge_data", "sft", "reward", "judge")]
        records = [*(by_digest[digest] for digest in inputs if digest in by_digest), self.record]
        return {record.stage: record for record in records}

    @property
    def gates(self) -> list[Verdict]:
        """Return every gate that judged it or what it was made of, and of a policy those of human_eval."""
        shown = [*self.stages_of, *(["human_eval"] if self.kind == "policy" else [])]
        shown = list(dict.fromkeys(SHOWN.get(name, name) for name in shown))
        return [gate for name in shown for gate in self._gates_of(name)]

    def _gates_of(self, name: str) -> Sequence[Verdict]:
        """The gates of a stage that judge this model: those of a reward model and of a judge are told apart."""
        gates = self.stages[name].gates if name in self.stages else []
        if name == "reward" and self.kind in ("reward", JUDGE):
            return [gate for gate in gates if gate.name.startswith("reward.judge_") == (self.kind == JUDGE)]
        return gates

    @property
    def failures(self) -> list[str]:
        """Why it should not be used: gates that failed and were not waived, a PPO that was stopped, no judgement."""
        if self.run is None:
            return ["no run here has judged it by gates"]
        own = [SHOWN.get(self.record.stage, self.record.stage), *(["human_eval"] if self.kind == "policy" else [])]
        gates = {gate.name: gate for name in own for gate in self._gates_of(name)}
        found = [
            f"{name}: {gate.metric} is {number(gate.value)}, must be {rule(gate)}"
            for name, gate in gates.items()
            if outcome(gate) == "FAIL"
        ]
        stopped = gates.get("ppo.stopped")
        if self.record.metrics.get("ppo/stopped") and (stopped is None or outcome(stopped) == "OFF"):
            found.append("PPO's tether broke: KL left ppo.watch.kl_high or met ppo.kl.stop_above")
        return found


def model_facts(home: Path, asked: str) -> ModelFacts:
    """Return the facts of the model that `asked` names.

    Args:
        home: the `TETHER_HOME`.
        asked: a registered model (`tether-policy`, `tether-policy@champion`, `tether-policy/3`), a run's model
            (`RUN/reward`, `RUN/reward.judge`; `RUN` alone means its policy), or the beginning of an artifact's digest
            or key.

    Raises:
        UserError: nothing of that name is known, or it is not a model.
    """
    graph, registered = Graph.of(ArtifactStore(home)), versions(home)
    digest, run = find_model(home, asked, graph, registered)
    model = next((each for each in registered if asked in each.spellings), None)
    if run is None:
        run = _judging_run(home, digest, [each for each in registered if each.digest == digest])
    if run is not None:
        graph = graph.of_keys(load_status(home, run).needs)
    return _gather(home, digest, graph, registered, run, model.name if model is not None else None)


def facts_of_run(home: Path, run: str, records: Iterable[Record]) -> Iterator[ModelFacts]:
    """Yield the facts of each model that a run's gates let through, from that run alone: cheap, for its end.

    Args:
        home: the `TETHER_HOME`.
        run: the run.
        records: what it has, by this run or from the store.
    """
    graph = Graph(records)
    for stage in load_status(home, run).stages:
        passed = stage.name in MODELS and stage.state in (*PASSED, "waived")
        if passed and stage.digest and graph.node(stage.digest).records:
            yield _gather(home, stage.digest, graph, (), run)


def find_model(home: Path, asked: str, graph: Graph, registered: Iterable[Version]) -> tuple[str, str | None]:
    """Return the digest of the model that `asked` names, and the run that it is named by, if it is.

    Raises:
        UserError: as `model_facts`.
    """
    run, _, stage = asked.partition("/")
    if has_run(home, run):
        stage = stage or "ppo"
        digests = _models_of(load_status(home, run))
        if (digest := digests.get(stage)) is None:
            there = [name for name, digest in digests.items() if digest]
            raise UserError(
                f"{asked}: run {run} has no model of {stage}. "
                + (f"Name one that it has, as {run}/{there[-1]}." if there else "None of its stages got to a model.")
            )
        return digest, run
    subject = find_subject(home, asked, graph, registered)
    stages = {record.stage for digest in subject.digests for record in graph.node(digest).records}
    if len(subject.digests) != 1 or not stages & set(KINDS):
        raise UserError(
            f"{asked}: this is {', '.join(stages) or 'an external input'}, not a model. Only "
            f"{', '.join(KINDS)} produce models: give a registered one (as tether-policy@champion), RUN/STAGE, or its "
            f"digest."
        )
    return subject.digests[0], None


def _models_of(status: RunStatus) -> dict[str, str | None]:
    """(Sub-)stage to the digest of the model that a run has of it, in the order of the stages."""
    found: dict[str, str | None] = {}
    for stage in status.stages:
        found |= {name: part.digest for name, part in stage.parts.items() if name in KINDS}
        found |= {stage.name: stage.digest} if stage.name in KINDS else {}
    return found


def _judging_run(home: Path, digest: str, registered: Iterable[Version]) -> str | None:
    """Return the run that made a model champion, else the newest whose gates let it through, else the newest that has
    it."""
    for each in registered:
        if each.promoted and has_run(home, run := each.promoted.get("run", "")):
            return run
    newest = None
    ours = own_runs(home)
    for run in [*ours, *(each for each in list_runs(home) if each not in ours)]:  # what was judged here comes first
        if newest in ours and run not in ours:
            return newest
        for stage in load_status(home, run).stages:
            if digest in (stage.digest, *(part.digest for part in stage.parts.values())):
                newest = newest or run
                if stage.state in (*PASSED, "waived"):
                    return run
    return newest


def _gather(
    home: Path, digest: str, graph: Graph, registered: Iterable[Version], run: str | None, name: str | None = None
) -> ModelFacts:
    upstream = tuple(graph.upstream([digest]))
    if not upstream[-1].records:
        lost = "".join(f" Key {key[:16]}: {miss.reason}." for key, miss in graph.unreadable.items())
        raise UserError(
            f"artifact {digest[:16]}: the store has no record of it that can be read.{lost} Run the same command "
            "again to compute it."
        )
    records = own_records(upstream[-1])
    record = next((each for each in records if each.run == run), records[0])
    config, computed_in = _other_runs(home, record.run, upstream)
    status = None if run is None else load_status(home, run)
    stages = {} if status is None else {stage.name: stage for stage in status.stages}
    own = tuple(each for each in registered if each.digest == digest)
    promoted = next((each.promoted for each in own if each.promoted), None)
    imported = status is not None and bool(status.imported)
    if promoted is None and run is not None and KINDS[record.stage] == "policy" and not imported:
        promoted = _promoted(stages, readable_done(home / "runs" / run)[0])
    made = [*(node.records[0] for node in upstream[:-1] if node.records), record]
    options: dict[str, ChangedOption] = {}
    for each in made:
        options |= changed_options(each, computed_in[each.run].profile if each.run in computed_in else None)
    computed_by = {each.run for node in upstream for each in node.records}
    sources = {node.digest for node in upstream if not node.records}
    paths = recorded_paths(home, computed_by) if sources else {}
    return ModelFacts(
        name=name or model_name(str(config.get("project", "tether")), KINDS[record.stage]),
        record=record,
        upstream=upstream,
        made=made,
        paths={source: paths[source] for source in sources if source in paths},
        config=config,
        options=dict(sorted(options.items())),
        run=run,
        stages=stages,
        waivers=[] if status is None else status.waivers,
        versions=own,
        promoted=promoted,
        users={run: each.user for run, each in computed_in.items() if each.user},
        costs={each.digest: cost for each in made if (cost := _cost(each, computed_in.get(each.run)))},
    )


def _cost(record: Record, run: RunStatus | None) -> dict[str, float]:
    """Return what computing a record cost in the run that did, by currency; empty where it has no price or is not
    here."""
    if run is None:
        return {}
    for stage in run.stages:
        if record.key in stage.needs and stage.price is not None and record.stage in stage.computed:
            return {run.currency: stage.computed[record.stage] / 3600 * stage.price}
    return {}


def _other_runs(home: Path, run: str, upstream: Iterable[Node]) -> tuple[Mapping[str, JsonValue], dict[str, RunStatus]]:
    """Return the config of `run`, and all runs that computed a part; what can't be read is named in a warning."""
    config: Mapping[str, JsonValue] = {}
    found = {}
    for each in {run, *(record.run for node in upstream for record in node.records)}:
        try:
            if has_run(home, each):
                found[each] = load_status(home, each)
                config = run_values(home, each) if each == run else config
        except UserError as error:
            logger.warning("%s", error)
    return config, found


def _promoted(stages: Mapping[str, StageStatus], done: Iterable[Done]) -> dict[str, str] | None:
    """Who promoted the policy of a run, by that run's own folder: MLflow may hear of it later."""
    judged = stages.get("human_eval")
    withheld = any(gate.withheld for stage in stages.values() for gate in stage.gates)
    if judged is None or judged.state not in PASSED or withheld:
        return None
    for each in done:
        if each.record.digest == judged.digest and not each.imported:
            at = datetime.fromtimestamp(each.time / 1000, UTC).isoformat(timespec="seconds")
            return {"by": each.user, "at": at, "run": each.run, "judges": each.judges}
    return None
