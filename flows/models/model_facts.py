"""Gather everything that a model's card and export need: its records, and the run whose gates judge it."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.nested import group
from components.evaluation.config import COMPARISONS
from components.gates.gate_text import number, outcome, rule
from components.gates.judging import Verdict, Waiver
from components.store.graph import Graph, Node
from components.store.store import ArtifactStore, Record
from flows.models.lineage import ChangedOption, changed_options, find_subject, record_of
from flows.reports.run_facts import StageFacts
from tasks.runs.config import run_values
from tasks.runs.journal import recorded_inputs
from tasks.runs.status import RunStatus, StageStatus, has_run, list_runs, load_status
from tasks.tracking.model_links import JUDGE, MODELS, model_name
from tasks.tracking.registry import Version, versions

logger = logging.getLogger(__name__)

PASSED = ("passed", "cached")
"""States of a stage that passed its gates without a waiver."""
OF_JUDGE = "reward.judge"
"""The sub-stage that trains an independent judge."""
KINDS = MODELS | {OF_JUDGE: JUDGE}
"""Maps a (sub-)stage to the kind of model that it trains."""
SHOWN = {OF_JUDGE: "reward"}
"""Maps a sub-stage to the stage under which a run's status lists it."""
OF_POLICY = ("evaluation", "human_eval")
"""Later stages whose gates judge the policy."""


class ModelFacts(NamedTuple):  # long: the card's template reads each field by its name
    """Everything that a card or an export says about a model."""

    name: str
    """The name in the registry (`tether-policy`), even if the model is not registered."""
    record: Record
    upstream: tuple[Node, ...]
    """The nodes it was made of, in the order in which they were made; its own node is last."""
    made: Sequence[Record]
    """The newest record of each artifact it was made of; its own record, `record`, is last."""
    paths: Mapping[str, Path]
    """Maps the digest of an external input to where it was read."""
    config: Mapping[str, JsonValue]
    """The config of the run that computed the model; empty if that run is not in this home."""
    options: Mapping[str, ChangedOption]
    """Options of all stages it was made by that differ from the profile's, by dotted name."""
    run: str | None
    """The run whose gates judge the model; None if no run in this home has it."""
    stages: Mapping[str, StageStatus]
    """The stages of `run`, by name."""
    waivers: Sequence[Waiver]
    """The waivers of `run`."""
    versions: tuple[Version, ...]
    """Its registered versions, if the registry was asked."""
    users: Mapping[str, str]
    """Maps each run in this home that computed a part of it to the user who started the run."""
    evaluation: Sequence[Mapping[str, Any]] = ()
    """A policy's rows of `evaluation.json` (`components.evaluation.comparison.PairedResult`) in `run`."""

    @property
    def kind(self) -> str:
        return KINDS[self.record.stage]

    @property
    def promoted(self) -> Mapping[str, str] | None:
        """Return who made it champion: `{by, at, run, judges}`; None if nobody did."""
        return next((version.promoted for version in self.versions if version.promoted), None)

    @property
    def stages_of(self) -> dict[str, Record]:
        """Return the model's record and those it was directly made of, by stage, without an earlier run's reward
        model."""
        by_digest = {record.digest: record for record in self.made}
        inputs = [self.record.inputs.get(name) for name in ("data", "judge_data", "sft", "reward", "judge")]
        records = [*(by_digest[digest] for digest in inputs if digest in by_digest), self.record]
        return {record.stage: record for record in records}

    @property
    def gates(self) -> list[Verdict]:
        """Return the gates that judged the model and what it was made of; for a policy also those of the later
        stages."""
        stages = [*self.stages_of, *(OF_POLICY if self.kind == "policy" else ())]
        stages = list(dict.fromkeys(SHOWN.get(name, name) for name in stages))
        return [gate for name in stages for gate in self._gates_of(name)]

    def _gates_of(self, name: str) -> Sequence[Verdict]:
        """Return the gates of a stage that apply to this model: a reward model and a judge have different ones."""
        gates = self.stages[name].gates if name in self.stages else []
        if name == "reward" and self.kind in ("reward", JUDGE):
            return [gate for gate in gates if gate.name.startswith("reward.judge_") == (self.kind == JUDGE)]
        return gates

    @property
    def method(self) -> str:
        """Return how a policy was trained, as `policy.method`; empty for another model."""
        in_updates = "online_dpo" if group(self.record.job, "ppo").get("pair_labels") else "ppo"
        return str(group(self.record.job, "policy").get("method", in_updates)) if self.kind == "policy" else ""

    @property
    def failures(self) -> list[str]:
        """Return why the model should not be used: failed gates without a waiver, a stopped PPO, or no judgement."""
        if self.run is None:
            return ["no run here has judged it by gates"]
        stages = [SHOWN.get(self.record.stage, self.record.stage), *(OF_POLICY if self.kind == "policy" else ())]
        gates = {gate.name: gate for name in stages for gate in self._gates_of(name)}
        failures = [
            f"{name}: {gate.metric} is {number(gate.value)}, must be {rule(gate)}"
            for name, gate in gates.items()
            if outcome(gate) == "FAIL"
        ]
        stopped = gates.get("ppo.stopped")
        if self.record.metrics.get("ppo/stopped") and (stopped is None or outcome(stopped) == "OFF"):
            failures.append(
                "the tether broke: KL left ppo.kl.band or reached ppo.kl.ceiling, an alarm of "
                "ppo.monitors.stop_on or policy.stop_on_alarm was raised, or an observer of ppo.observers stopped it"
            )
        return failures


def model_facts(home: Path, name: str) -> ModelFacts:
    """Return the facts of the model that `name` names.

    Args:
        home: the Tether home.
        name: a registered model (`tether-policy`, `tether-policy@champion`, `tether-policy/3`), a run's model
            (`RUN/reward`, `RUN/reward.judge`; `RUN` alone means its policy), or the start of an artifact's digest
            or key.

    Raises:
        UserError: nothing with that name is known, or it is not a model.
    """
    graph, registered = Graph.of(ArtifactStore(home)), versions(home)
    digest, run = find_model(home, name, graph)
    model = next((version for version in registered if name in version.spellings), None)
    if run is None:
        run = _judging_run(home, digest, [version for version in registered if version.digest == digest])
    if run is not None:
        graph = graph.of_keys(load_status(home, run).results)
    return _gather(home, digest, graph, registered, run, model.name if model is not None else None)


def facts_of_run(home: Path, run: str, records: Iterable[Record]) -> Iterator[ModelFacts]:
    """Yield the facts of each model that passed a run's gates. Reads only that run, so it is cheap at the run's end.

    Args:
        home: the Tether home.
        run: the run's id.
        records: the records of the run's artifacts, computed or reused.
    """
    graph = Graph(records)
    for stage in load_status(home, run).stages:
        passed = stage.name in MODELS and stage.state in (*PASSED, "waived")
        if passed and stage.digest and graph.node(stage.digest).records:
            yield _gather(home, stage.digest, graph, (), run)


def find_model(home: Path, model: str, graph: Graph) -> tuple[str, str | None]:
    """Return the digest of the model that `model` names, and the run if the name contains one.

    Raises:
        UserError: as `model_facts`.
    """
    run, _, stage = model.partition("/")
    if has_run(home, run):
        stage = stage or "ppo"
        digests = _models_of(load_status(home, run))
        if (digest := digests.get(stage)) is None:
            there = ", ".join(f"{run}/{name}" for name, digest in digests.items() if digest) or "none"
            raise UserError(f"{model}: run {run} has no {stage} model. Give one that a run has; this run has {there}.")
        return digest, run
    subject = find_subject(home, model, graph)
    stages = {record.stage for digest in subject.digests for record in graph.node(digest).records}
    if len(subject.digests) != 1 or not stages & set(KINDS):
        raise UserError(
            f"{model}: this is {', '.join(stages) or 'an external input'}, not a model. Only "
            f"{', '.join(KINDS)} produce models: give a registered one (such as tether-policy@champion), RUN/STAGE, "
            f"or its digest."
        )
    return subject.digests[0], None


def _models_of(status: RunStatus) -> dict[str, str | None]:
    """Return the digest of each model that a run has, by (sub-)stage, in the order of the stages."""
    models: dict[str, str | None] = {}
    for stage in status.stages:
        models |= {name: part.digest for name, part in stage.parts.items() if name in KINDS}
        models |= {stage.name: stage.digest} if stage.name in KINDS else {}
    return models


def _judging_run(home: Path, digest: str, registered: Iterable[Version]) -> str | None:
    """Return the run that made a model champion; otherwise the newest run in which it passed its gates; otherwise the
    newest run that has it."""
    for version in registered:
        if version.promoted and has_run(home, run := version.promoted.get("run", "")):
            return run
    newest = None
    for run in list_runs(home):
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
    record = record_of(upstream[-1], run)
    config, computed_in = _other_runs(home, record.run, upstream)
    status = None if run is None else load_status(home, run)
    stages = {} if status is None else {stage.name: stage for stage in status.stages}
    made = [*(node.records[0] for node in upstream[:-1] if node.records), record]
    options: dict[str, ChangedOption] = {}
    for part in made:
        options |= changed_options(home, part, computed_in[part.run].profile if part.run in computed_in else None)
    computed_by = {part.run for node in upstream for part in node.records}
    sources = {node.digest for node in upstream if not node.records}
    read = recorded_inputs(home, computed_by) if sources else {}
    return ModelFacts(
        name=name or model_name(str(config.get("project", "tether")), KINDS[record.stage]),
        record=record,
        upstream=upstream,
        made=made,
        paths={source: read[source].path for source in sources if source in read},
        config=config,
        options=dict(sorted(options.items())),
        run=run,
        stages=stages,
        waivers=[] if status is None else status.waivers,
        versions=tuple(version for version in registered if version.digest == digest),
        users={run: status.user for run, status in computed_in.items() if status.user},
        evaluation=_evaluation(home, status) if KINDS[record.stage] == "policy" else (),
    )


def _evaluation(home: Path, status: RunStatus | None) -> Sequence[Mapping[str, Any]]:
    """Return the comparisons that a run's evaluation stored; empty without one, or if the store has lost it."""
    stages = [stage for stage in status.stages if stage.name == "evaluation"] if status is not None else []
    return (StageFacts.of(home, status.run, stages[0]).document(COMPARISONS) or ()) if status and stages else ()


def _other_runs(home: Path, run: str, upstream: Iterable[Node]) -> tuple[Mapping[str, JsonValue], dict[str, RunStatus]]:
    """Return the config of `run`, and the status of each run that computed a part. Unreadable runs are logged."""
    config: Mapping[str, JsonValue] = {}
    statuses = {}
    for name in {run, *(record.run for node in upstream for record in node.records)}:
        try:
            if has_run(home, name):
                statuses[name] = load_status(home, name)
                config = run_values(home, name) if name == run else config
        except UserError as error:
            logger.warning("%s", error)
    return config, statuses
