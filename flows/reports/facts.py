"""What there is to say of a run, read from what it stored: the facts of its report.

Nothing here computes a number anew: a fact that no status, record or artifact holds is None, and the page says so.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from pydantic import JsonValue

from components.base.hashing import canonical_json, digest_json
from components.base.nested import flatten, group
from components.data.inputs import NAMED, REFERENCE, label_of, of_kind, values_of
from components.gates.judging import Verdict, stand_in
from components.gates.margins import Margin, margin, tightness
from components.gates.table import GATES
from components.gates.text import number, outcome, rule
from components.human_eval.comparison.pairs import RESULT
from components.keys.code_version import CodeVersion
from components.store.store import ArtifactStore, Record
from data_contracts.expectations.suites import JudgedCheck, first_rows
from flows.config.run_config import default_values
from flows.reports.links import Link, links
from flows.reports.rounds import Round, rounds_up_to
from flows.reports.verdict import RunVerdict, run_verdict
from tasks.execution import explanation
from tasks.execution.plots import CHARTS
from tasks.lineage.of_run import graph_of
from tasks.lineage.picture import Diagram
from tasks.runs.compared import compared_names
from tasks.runs.config import run_values
from tasks.runs.journal import readable_done, recorded_paths
from tasks.runs.labels import LabelProgress, read_progress
from tasks.runs.points import curves, points_file, read_points
from tasks.runs.status import RunStatus, StageStatus, load_status
from tasks.stages import PIPELINE
from tasks.tracking.links import model_name

Curve = Sequence[tuple[float, float]]
Metrics = Mapping[str, float | None]
"""Final metrics; None for one that is not finite."""
Document = Mapping[str, Any]
"""A JSON document of an artifact, or a row of one, as its stage wrote it."""

SAMPLES = 6
"""Pairs of responses that are shown as they come, beside those that are picked out."""
EXAMPLES = 5
"""Quarantined rows that are shown."""


class Chart(NamedTuple):
    """A chart of a stage."""

    title: str
    svg: Path | None
    """None where the stage has not ended or had nothing to draw, or where an earlier version computed it."""


@dataclass(frozen=True)
class StageFacts:
    """A stage of a run, with the record and the files of what it took."""

    home: Path
    run: str
    status: StageStatus
    store: ArtifactStore
    record: Record | None
    """None where it has no artifact, or where the store has lost its record."""

    @property
    def name(self) -> str:
        """Return the stage's name."""
        return self.status.name

    @property
    def metrics(self) -> Metrics:
        """Final metrics."""
        return self.status.metrics

    @property
    def choice(self) -> str:
        """Return which checkpoint its artifact holds and why; empty where the artifact doesn't say."""
        return str((self.document("metadata.json") or {}).get("reason", ""))

    @property
    def by(self) -> str | None:
        """Return the run that computed it, if that is another one."""
        return self.record.run if self.record is not None and self.record.run != self.run else None

    @property
    def why(self) -> dict[str, str]:
        """Return a line for each of its steps: why that was computed or not."""
        return {name: explanation.in_a_line(told) for name, told in self.status.explained.items()}

    def part_inputs(self, name: str) -> dict[str, str]:
        """Return the inputs of a sub-stage; none where it has not run, or the store has lost its record."""
        found = self._part(name)
        return {} if found is None else dict(found.inputs)

    def _part(self, name: str) -> Record | None:
        """The record of a sub-stage; None where it has not run, or the store has lost it."""
        part = self.status.parts.get(name)
        records = self.store.published(part.key) if part is not None else ()
        return next((each for each in records if part is not None and each.digest == part.digest), None)

    @property
    def speed(self) -> dict[str, float | None]:
        """Median tokens a second over its steps, and the most memory that it held, GB; None where neither was measured.

        A step during which the machine did other work, or the first, which compiles, moves a median little.
        """
        tokens = [y for _, y in self.curves.get(f"{self.name}/tokens_per_second", ())] or list(self._paces())
        memory = [y for _, y in self.curves.get(f"{self.name}/peak_memory_gb", ())]
        return {"tokens": median(tokens) if tokens else None, "memory": max(memory, default=None)}

    @property
    def judged(self) -> dict[str, int]:
        """Return how many of its gates ended how."""
        words = [outcome(verdict) for verdict in self.status.gates]
        return {word: words.count(word) for word in ("PASS", "WAIVED", "WARN", "SKIPPED", "FAIL") if word in words}

    @property
    def charts(self) -> dict[str, Chart]:
        """Its charts by name, as they were drawn when it was computed, those of its sub-stages among them."""
        records = {self.name: self.record} | {name: self._part(name) for name in self.status.parts}
        return {
            chart: Chart(title, None if record is None else self.store.attachment(record, f"{chart}.svg"))
            for name, record in records.items()
            for chart, (title, _) in CHARTS.get(name, {}).items()
        }

    def _points(self) -> list[Any]:
        by = self.record.run if self.record is not None else self.run
        return list(read_points(self._attached("points.jsonl") or points_file(self.home / "runs" / by, self.name)))

    def _paces(self) -> Iterator[float]:
        """Tokens a second of each step, from the times (ms) at which the steps ended."""
        for before, point in pairwise(self._points()):
            tokens, passed = point.get("tokens"), point.get("time", 0) - before.get("time", 0)
            if tokens and passed > 0 and point["step"] == before["step"] + 1:
                yield 1000 * tokens / passed

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Metric name to (step, value) pairs, those of the run that computed it; empty where nothing has them."""
        found = curves(self._points())
        if not found:  # PPO's artifact holds its course too, if not its speed
            found = curves({"step": row.pop("update"), "metrics": row} for row in self.rows("history.jsonl"))
        return {name: [(x, y) for x, y in curve if math.isfinite(y)] for name, curve in found.items()}

    def bound(self, gate: str) -> float | tuple[float, float] | None:
        """Return the threshold of one of its gates; None where that is off or was not judged."""
        return next((verdict.threshold for verdict in self.status.gates if verdict.name == gate), None)

    def text(self, name: str) -> str | None:
        """Return a file of the artifact; None where there is none, or where it is damaged."""
        path = self.store.file(self.record, name) if self.record is not None else None
        return path.read_text(encoding="utf-8") if path is not None else None

    def document(self, name: str) -> Any:
        """Return a JSON file of the artifact; None as `text`."""
        return json.loads(self.text(name) or "null")

    def lines(self, name: str) -> list[str]:
        """Return the lines of a JSONL file of the artifact; none as `text`."""
        return [line for line in (self.text(name) or "").split("\n") if line]  # a string may hold what splitlines takes

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the same as rows."""
        return [json.loads(line) for line in self.lines(name)]

    def _attached(self, name: str) -> Path | None:
        return self.store.attachment(self.record, name) if self.record is not None else None


class GateFacts(NamedTuple):
    """A gate as it was judged."""

    verdict: Verdict
    outcome: str
    rule: str
    within: str | None
    """The metrics of a second bound, either of which will do."""
    within_value: str | None
    description: str
    margin: Margin


class SourceFacts(NamedTuple):
    """A source of the data."""

    name: str
    path: str | None
    digest: str | None
    counts: Document | None = None
    """Of one of several: its entry of `sources.json` (`data_contracts.validate.SourceCounts`)."""


class DataFacts(NamedTuple):
    """What was read, what was kept out and why, and how it was split."""

    sources: list[SourceFacts]
    generated: Mapping[str, float] | None
    """Options of the generator of the built-in task, where that is the source."""
    metrics: Metrics
    checks: list[Document]
    """The entries of `report.json` (`data_contracts.expectations.suites.JudgedCheck`)."""
    quarantined: int | None
    examples: list[Document]
    """Rows of `quarantine.jsonl`."""


class ShownSample(NamedTuple):
    """A row of PPO's evaluation that is shown."""

    row: Document
    number: int
    """From 1."""
    picked: list[str]
    """Why it is shown; empty for one that is shown as it comes."""


class PolicyFacts(NamedTuple):
    """What held the policy, and responses beside those of SFT."""

    tether: Document
    """`ppo.kl` of the config."""
    evaluated: int
    samples: list[ShownSample]
    choice: str
    """Which checkpoint is published and why; empty where the artifact doesn't say."""
    alarms: list[Document]
    """The first of each name, by update."""
    carriers: Document | None
    """What carried KL in the newest batch of which that is known."""


class Option(NamedTuple):
    """An option of the run's config."""

    name: str
    """Dotted."""
    value: object
    default: object
    """The profile's."""
    changed: bool


class Computation(NamedTuple):
    """Where, when and by which code a stage was computed."""

    stage: str
    record: Record
    code: CodeVersion
    source: str | None
    """One digest of the code that is in the key."""
    machine: Mapping[str, object]
    libraries: Mapping[str, str]


class RunFacts(NamedTuple):
    """All facts of a run's report."""

    home: Path
    status: RunStatus
    links: Mapping[str, Sequence[Link]]
    """Pages of MLflow and Prefect, by stage; under "" those of the run."""
    project: JsonValue
    seed: JsonValue
    simulated: bool
    """Whether the data are those of the built-in task."""
    people_judge: bool
    stages: list[StageFacts]
    verdict: RunVerdict
    gates: list[GateFacts]
    """Failed ones first, then the tightest."""
    data: DataFacts
    reward: Document
    """`calibration.json` and `robustness.json` of the reward model, and below `suites` its `suites.json`."""
    policy: PolicyFacts
    comparison: Document | None
    """`result.json` of the human evaluation."""
    compared: Document | None
    """`comparison.json` of a run that compares models."""
    models: Mapping[str, str]
    """What the user called each of these, by its name there."""
    sheet: Document | None
    """`sheet.json`, what people were asked to judge, where labels are awaited."""
    labels: LabelProgress | None
    """How far people were when that was last looked at."""
    against: str
    """What the options are compared with."""
    options: list[Option]
    environment: list[Computation]
    lineage: Diagram | None = None
    """What its stages were made of; None where no stage has ended."""
    rounds: Sequence[Round] = ()
    """Of a later round of `tether iterate`: the rounds that led to it, and itself."""

    def stage(self, name: str) -> StageFacts:
        """One of the stages."""
        return next(stage for stage in self.stages if stage.name == name)


def run_facts(home: Path, run: str | None = None) -> RunFacts:
    """Read the facts of a run (None: the newest).

    Raises:
        UserError: there is no such run.
    """
    status = load_status(home, run)
    store, values = ArtifactStore(home), run_values(home, status.run)
    # A run of fewer stages (an earlier version's) lacks what the others would show.
    lacking = [StageStatus(name=name) for name in PIPELINE if name not in {each.name for each in status.stages}]
    stages = {
        each.name: StageFacts(home, status.run, each, store, taken_record(store, each))
        for each in (*status.stages, *lacking)
    }
    reward, human_eval = stages["reward"], stages["human_eval"]
    labels = read_progress(home / "runs" / status.run)
    documents = [reward.document(f"{name}.json") or {} for name in ("calibration", "robustness")]
    suites = reward.document("suites.json") or {}
    against, options = _options(values, status.profile)
    return RunFacts(
        home=home,
        status=status,
        links=links(home, status),
        project=values.get("project"),
        seed=values.get("seed"),
        simulated=group(values, "data").get("preferences", "") is None,
        people_judge=group(values, "human_eval").get("judges") == "people",
        stages=list(stages.values()),
        verdict=run_verdict(status, values, labels, model_name(str(values.get("project", "")), "policy")),
        gates=sorted(
            (_gate(stage, verdict) for stage in stages.values() for verdict in stage.status.gates),
            key=lambda each: tightness(each.verdict, each.margin),
        ),
        data=_data(stages["validate"], group(values, "data")),
        reward={"bins": [], "slices": [], "probes": {}, **documents[0], **documents[1], "suites": suites},
        policy=_policy(stages["ppo"], group(values, "ppo"), _on_the_sheet(human_eval)),
        comparison=human_eval.document("result.json"),
        compared=human_eval.document(RESULT),
        models=compared_names(status.origin),
        sheet=human_eval.document("sheet.json"),
        labels=labels,
        against=against,
        options=options,
        environment=[_computation(each.name, each.record) for each in stages.values() if each.record is not None],
        lineage=graph_of(done) if (done := readable_done(home / "runs" / status.run)[0]) else None,
        rounds=rounds_up_to(home, status),
    )


def taken_record(store: ArtifactStore, stage: StageStatus) -> Record | None:
    """Return the record that a run used for a stage, even if the key has a newer record with other bytes."""
    found = store.published(stage.key) if stage.key and stage.digest else []
    return next((record for record in found if record.digest == stage.digest), None)


def rests_on_import(home: Path, run: str) -> bool:
    """Return whether a run, or the record of one of its stages, was imported."""
    status, store = load_status(home, run), ArtifactStore(home)
    records = (taken_record(store, stage) for stage in status.stages)
    return bool(status.imported) or any(record is not None and record.imported for record in records)


def code_name(code: CodeVersion) -> str:
    """Version and commit of the code, for people."""
    commit = (code.get("commit") or "unknown")[:12] + (" with changes" if code.get("dirty") else "")
    return f"Tether {code['version']}, commit {commit}" if code.get("version") else f"commit {commit}"


def _gate(stage: StageFacts, verdict: Verdict) -> GateFacts:
    known = GATES.get(verdict.name)
    second = stand_in(known, stage.metrics) if known is not None and verdict.threshold is not None else None
    within, value = second if second is not None else (None, None)
    said = None if value is None else " to ".join(map(number, value if isinstance(value, tuple) else (value,)))
    description = verdict.description or (known.description if known is not None else "")
    alone = verdict.model_copy(update={"within": None})  # the page says the second bound with its metric's name
    found = margin(verdict, stage.metrics)
    return GateFacts(verdict, outcome(verdict), rule(alone), within, said, description, found)


def _data(stage: StageFacts, config: Mapping[str, Any]) -> DataFacts:
    digests = stage.part_inputs("validate.judge") | (stage.record.inputs if stage.record is not None else {})
    lines = stage.lines("quarantine.jsonl")
    kinds = [*NAMED, *([REFERENCE] if REFERENCE in digests or stage.record is None else [])]  # `last` may name none
    return DataFacts(
        sources=[each for kind in kinds for each in _sources(kind, values_of(config.get(kind)), digests, stage)],
        generated=config.get("generator") if config.get("preferences", "") is None else None,
        metrics=stage.metrics,
        checks=[_check(each) for each in stage.document("report.json") or []],
        quarantined=len(lines) if stage.record is not None else None,
        examples=[json.loads(line) for line in lines[:EXAMPLES]],
    )


def _sources(kind: str, named: Sequence[str], digests: Mapping[str, str], stage: StageFacts) -> Iterator[SourceFacts]:
    """Yield the files of a kind of data: as they were read or, where the stage has not ended, as the config names
    them."""
    read = of_kind(digests, kind)
    if len(read) > 1 and stage.record is not None:
        counts = {each["source"]: each for each in stage.document("sources.json") or []}
        paths = recorded_paths(stage.home, {stage.run, stage.record.run})
        for name, digest in read.items():
            path = str(paths[digest]) if digest in paths else None
            yield SourceFacts(name, path, digest, counts.get(label_of(name)))
    elif named:
        yield from (SourceFacts(kind, path, read.get(kind)) for path in named)
    elif read:
        yield SourceFacts(kind, None, read.get(kind))


def _check(row: Document) -> Document:
    """Return an entry of `report.json`; an earlier version gave some of it other names, and left some out."""
    earlier = {"name": row.get("check"), "row_numbers": row.get("first_rows", [])}
    left_out = dict.fromkeys(("description", "value", "threshold", "rows"))
    check = {**left_out, **earlier, "source": row.get("suite"), **row}
    return {**check, "first_rows": first_rows(cast(JudgedCheck, check))}


def _on_the_sheet(human_eval: StageFacts) -> Collection[str]:
    """Return the prompts that raters are judging now: the page lies beside their sheet, and would tell them who wrote
    what."""
    if human_eval.status.state != "awaiting_labels":
        return ()
    return {canonical_json(row["prompt"]) for row in human_eval.rows("responses.jsonl")}


def _policy(stage: StageFacts, config: Mapping[str, Any], hidden: Collection[str] = ()) -> PolicyFacts:
    computed: Mapping[str, Any] = group(stage.record.job if stage.record is not None else {}, "ppo") or config
    tether = {"target": None, "unit": "response", "stop_above": None, **computed.get("kl", {"control": "unknown"})}
    rows = stage.rows("evaluation.jsonl")
    carriers = stage.rows("kl_carriers.jsonl")
    raised = (stage.document("metadata.json") or {}).get("alarms", [])
    return PolicyFacts(
        tether, len(rows), _samples(rows, hidden), stage.choice, raised, carriers[-1] if carriers else None
    )


def _samples(rows: Sequence[Document], hidden: Collection[str] = ()) -> list[ShownSample]:
    """Pick the row farthest from SFT, the one that the reward model scores highest, and the first few others.

    None of them has a prompt in `hidden`.
    """
    shown = [i for i, row in enumerate(rows) if not hidden or canonical_json(row["prompt"]) not in hidden]
    picked: dict[int, list[str]] = {}
    for why, name in (("the worst KL", "kl"), ("the highest reward", "score")):
        finite = {index: value for index in shown if math.isfinite(value := rows[index]["policy"][name])}
        if finite:
            picked.setdefault(max(finite, key=finite.__getitem__), []).append(why)
    first = [index for index in shown if index not in picked][:SAMPLES]
    return [ShownSample(rows[i], i + 1, picked.get(i, [])) for i in (*picked, *first)]


def _options(values: Mapping[str, JsonValue], profile: str) -> tuple[str, list[Option]]:
    """Return what options are compared with, and every option by its dotted name."""
    against, defaults = default_values(profile)
    plain = flatten(defaults)
    return against, [
        # The machine is resolved for every run; that is no change of somebody's.
        Option(name, value, plain.get(name), value != plain.get(name) and not name.startswith(("runtime.", "runners.")))
        for name, value in flatten(values).items()
    ]


def _computation(stage: str, record: Record) -> Computation:
    return Computation(
        stage=stage,
        record=record,
        code=record.environment.get("code", CodeVersion()),
        source=digest_json(record.parts["source"]) if "source" in record.parts else None,
        machine={**record.machine, **group(record.job, "runtime")},
        libraries=record.parts.get("libraries", {}),
    )
