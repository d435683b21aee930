"""Read everything that a run's report shows from what the run stored.

Nothing is computed anew here: a fact that no status, record or artifact holds is None, and the page says so.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import JsonValue

from components.base.hashing import canonical_json, digest_json
from components.base.nested import flatten, group
from components.data.inputs import NAMED, REFERENCE, label_of, of_kind, values_of
from components.gates.gate_text import outcome, rule
from components.gates.judging import Verdict
from components.gates.margins import Margin, margin, tightness
from components.gates.renamed import present_options
from components.gates.self_checks import FILE
from components.gates.table import GATES
from components.human_eval.comparison.model_pairs import RESULT
from components.keys.code_version import CodeVersion
from components.ppo.alarm_table import LOG_RATIO, WINDOW, chosen_alarm
from components.store.store import ArtifactStore, Record
from data_contracts.expectations.suites import first_rows
from flows.config.removed import REMOVED
from flows.config.run_config import default_values
from flows.reports.compared_rounds import rounds_up_to
from flows.reports.report_links import Link, links
from flows.reports.terminal import simulated_note
from flows.reports.verdict import RunVerdict, run_verdict
from tasks.execution import explanation
from tasks.execution.plots import CHARTS
from tasks.lineage.of_run import graph_of
from tasks.lineage.picture import Diagram
from tasks.result import Input
from tasks.runs.awaited_labels import LabelProgress, read_progress
from tasks.runs.comparison_names import compared_names
from tasks.runs.config import run_values
from tasks.runs.journal import Sent, readable_done, recorded_inputs
from tasks.runs.points import curves, points_file, read_points
from tasks.runs.status import Part, RunStatus, StageStatus, load_status
from tasks.stages import ALWAYS
from tasks.tracking.model_links import model_name

Curve = Sequence[tuple[float, float]]
Metrics = Mapping[str, float | None]
"""Final metrics; None for a metric that is not finite."""
Document = Mapping[str, Any]
"""A JSON document of an artifact, or a row of one, as its stage wrote it."""

SAMPLES = 6
"""Number of pairs of responses that are shown in their original order, in addition to the picked ones."""
EXAMPLES = 5
"""Number of quarantined rows that are shown."""


class Chart(NamedTuple):
    """A chart of a stage."""

    title: str
    svg: Path | None
    """None if the stage has not ended, had nothing to draw, or was computed by an earlier version."""


@dataclass(frozen=True)
class StageFacts:
    """A stage of a run, with the record and files of the artifact that the run used."""

    home: Path
    run: str
    status: StageStatus
    store: ArtifactStore
    record: Record | None
    """None if the stage has no artifact, or its record is missing in the store."""

    @classmethod
    def of(cls, home: Path, run: str, stage: StageStatus) -> "StageFacts":
        """Return the facts of a stage of a run."""
        store = ArtifactStore(home)
        return cls(home, run, stage, store, taken_record(store, stage))

    @property
    def name(self) -> str:
        return self.status.name

    @property
    def metrics(self) -> Metrics:
        return self.status.metrics

    @property
    def choice(self) -> str:
        """Return which checkpoint its artifact holds and why; empty if the artifact does not say."""
        return str((self.document("metadata.json") or {}).get("reason", ""))

    @property
    def alarms(self) -> list[Document]:
        """Return the first alarm of each name that the policy's training raised, by update.

        `chosen` follows its gate, which may have changed since, and so is found in the history.
        """
        rows = [row for row in self.rows("history.jsonl") if LOG_RATIO in row]
        limit = self.bound("policy.chosen_log_ratio")
        assert not isinstance(limit, tuple)
        chosen = (chosen_alarm(rows[max(0, end - WINDOW) : end], limit) for end in range(1, len(rows) + 1))
        return [*(self.document("metadata.json") or {}).get("alarms", []), *islice(filter(None, chosen), 1)]

    @property
    def self_checks(self) -> list[Document]:
        """Return the results of its self-checks; empty if it has none, or an earlier release computed it."""
        records = filter(None, (*map(self.part, self.status.parts), self.record))
        paths = filter(None, (self.store.attachment(record, FILE) for record in records))
        return [check for path in paths for check in json.loads(path.read_text(encoding="utf-8"))]

    @property
    def kl_by_token(self) -> Document | None:
        """Return the tokens and prompts that carry KL, from the newest batch for which they are known."""
        return next(reversed(self.rows("kl_carriers.jsonl")), None)

    @property
    def by(self) -> str | None:
        """Return the run that computed the artifact, if it is a different run."""
        return self.record.run if self.record is not None and self.record.run != self.run else None

    @property
    def source(self) -> str:
        """Return the start of one digest of the code that is part of the key; empty if it is not recorded."""
        return digest_json(self.record.parts["source"])[:12] if self.record and "source" in self.record.parts else ""

    @property
    def machine(self) -> dict[str, object]:
        return {} if self.record is None else {**self.record.machine, **group(self.record.job, "runtime")}

    @property
    def why(self) -> dict[str, str]:
        """Return one line per step that says why it was computed or reused."""
        return {name: explanation.in_a_line(reason) for name, reason in self.status.explained.items()}

    def part(self, name: str) -> Record | None:
        """Return a sub-stage's record; None if it has not run or the record is missing in the store."""
        return taken_record(self.store, self.status.parts[name]) if name in self.status.parts else None

    @property
    def speed(self) -> dict[str, float | None]:
        """Return the median tokens per second over the steps (`tokens`) and the peak memory in GB (`memory`); None if
        not measured.

        The median is hardly affected by a step during which the machine was busy, or by the first step, which compiles.
        """

        def measured(name: str) -> list[float]:  # a direct method's metrics are called direct/...
            return [y for metric, curve in self.curves.items() if metric.endswith(name) for _, y in curve]

        tokens, memory = measured("/tokens_per_second") or list(self._paces()), measured("/peak_memory_gb")
        return {"tokens": median(tokens) if tokens else None, "memory": max(memory, default=None)}

    @property
    def outcomes(self) -> dict[str, int]:
        """Return the number of its gates by outcome."""
        words = [outcome(verdict) for verdict in self.status.gates]
        return {word: words.count(word) for word in ("PASS", "WAIVED", "WARN", "SKIPPED", "FAIL") if word in words}

    @property
    def charts(self) -> dict[str, Chart]:
        """Return its charts and those of its sub-stages, by name, as drawn when the stage was computed."""
        records = {self.name: self.record} | {name: self.part(name) for name in self.status.parts}
        return {
            chart: Chart(title, None if record is None else self.store.attachment(record, f"{chart}.svg"))
            for name, record in records.items()
            for chart, (title, _) in CHARTS.get(name, {}).items()
        }

    def _points(self) -> list[Any]:
        by, attached = self.run, None
        if self.record is not None:
            by, attached = self.record.run, self.store.attachment(self.record, "points.jsonl")
        return list(read_points(attached or points_file(self.home / "runs" / by, self.name)))

    def _paces(self) -> Iterator[float]:
        """Yield the tokens per second of each step, from the times (ms) at which the steps ended."""
        for before, point in pairwise(self._points()):
            tokens, passed = point.get("tokens"), point.get("time", 0) - before.get("time", 0)
            if tokens and passed > 0 and point["step"] == before["step"] + 1:
                yield 1000 * tokens / passed

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Return the (step, value) pairs of each metric, from the run that computed the artifact; empty if none are
        stored."""
        by_metric = curves(self._points())
        if not by_metric:  # PPO's artifact also holds its history, though not its speed
            by_metric = curves({"step": row.pop("update"), "metrics": row} for row in self.rows("history.jsonl"))
        return {name: [(x, y) for x, y in curve if math.isfinite(y)] for name, curve in by_metric.items()}

    def bound(self, gate: str) -> float | tuple[float, float] | None:
        """Return the threshold of one of its gates; None if the gate is off or was not judged."""
        return next((verdict.threshold for verdict in self.status.gates if verdict.name == gate), None)

    def text(self, name: str, part: str = "") -> str | None:
        """Return the text of a file of the artifact, or of a sub-stage's; None if it is missing or damaged."""
        record = self.part(part) if part else self.record
        path = self.store.file(record, name) if record is not None else None
        return path.read_text(encoding="utf-8") if path is not None else None

    def document(self, name: str, part: str = "") -> Any:
        """Return the content of a JSON file likewise; None if it is missing or damaged."""
        return json.loads(self.text(name, part) or "null")

    def rows(self, name: str, part: str = "") -> list[dict[str, Any]]:
        """Return the rows of a JSONL file likewise; empty if it is missing or damaged."""
        # splitlines would also split at characters that a string may contain
        return [json.loads(line) for line in (self.text(name, part) or "").split("\n") if line]


class GateFacts(NamedTuple):
    """A gate and its verdict."""

    verdict: Verdict
    outcome: str
    rule: str
    """With its second bound, if it has one: the gate passes if either holds."""
    description: str
    margin: Margin


class SourceFacts(NamedTuple):
    """A source of the data."""

    name: str
    path: str | None
    """Where it was read: the path, or `owner/name@commit` of a hub dataset."""
    digest: str | None
    counts: Document | None = None
    """If the kind has several sources: this one's entry of `sources.json` (`data_contracts.validate.SourceCounts`)."""


class DataFacts(NamedTuple):
    """What was read, which rows were quarantined and why, and how the rest was split."""

    sources: list[SourceFacts]
    generated: Mapping[str, float] | None
    """Options of the built-in task's generator, if it is the source."""
    metrics: Metrics
    checks: list[Document]
    """The entries of `report.json` (`data_contracts.expectations.suites.JudgedCheck`)."""
    quarantined: int | None
    examples: Sequence[Document]
    """Rows of `quarantine.jsonl`."""


class ShownSample(NamedTuple):
    """A row of PPO's evaluation that the page shows."""

    row: Document
    number: int
    """Its number, from 1; 0 for a row of `worst.jsonl`."""
    picked: list[str]
    """Reasons for picking it; empty for a row shown in the original order."""


class PolicyFacts(NamedTuple):
    """How KL was controlled, and the policy's responses next to SFT's."""

    tether: Document
    """`ppo.kl` of the config."""
    evaluated: int
    samples: list[ShownSample]
    worst: list[ShownSample]
    """The prompts whose mean score falls most, and those with the largest KL of a response; empty for older runs."""


class Option(NamedTuple):
    """An option of the run's config."""

    name: str
    """Dotted name."""
    value: object
    default: object
    """The profile's value."""
    changed: bool


class RunFacts(NamedTuple):  # long: the page's template reads each field by its name
    """All facts of a run's report."""

    home: Path
    status: RunStatus
    links: Mapping[str, Sequence[Link]]
    """Pages on MLflow and Prefect, by stage; those of the run under ""."""
    project: JsonValue
    seed: JsonValue
    simulated: str
    """As `simulated_note` returns it."""
    stages: list[StageFacts]
    verdict: RunVerdict
    gates: list[GateFacts]
    """Failed ones first, then the tightest."""
    data: DataFacts
    reward: Document
    """`calibration.json` and `robustness.json` of the reward model; its `suites.json` under `suites`."""
    policy: PolicyFacts
    comparison: Document | None
    """`result.json` of the human evaluation."""
    compared: Document | None
    """`comparison.json` of a run that compares models."""
    models: Mapping[str, str]
    """The name that the user gave to each model, by its name in `compared`."""
    sheet: Document | None
    """`sheet.json`, which describes what people judge, while labels are awaited."""
    labels: LabelProgress | None
    """The progress of the labels when it was last checked."""
    against: str
    """The name of the values that `options` are compared with."""
    options: list[Option]
    lineage: Diagram | None = None
    """The artifacts that its stages were made of; None if no stage has ended."""
    rounds: Sequence[RunStatus] = ()
    """For a later round of `tether iterate`: the rounds up to and including this one."""

    def stage(self, name: str) -> StageFacts:
        """Return the stage called `name`."""
        return next(stage for stage in self.stages if stage.name == name)


def run_facts(home: Path, run: str | None = None) -> RunFacts:
    """Return the facts of a run (None: the newest).

    Raises:
        UserError: there is no such run.
    """
    status = load_status(home, run)
    values = run_values(home, status.run)
    # A run of an earlier version may have fewer stages; the page needs an entry for each.
    states = {name: StageStatus(name=name) for name in ALWAYS} | {stage.name: stage for stage in status.stages}
    stages = {name: StageFacts.of(home, status.run, stage) for name, stage in states.items()}
    reward, human_eval = stages["reward"], stages["human_eval"]
    labels = read_progress(home / "runs" / status.run)
    documents = [reward.document(f"{name}.json") or {} for name in ("calibration", "robustness")]
    suites = reward.document("suites.json") or {}
    against, options = _options(home, status.run, values, status.profile)
    return RunFacts(
        home=home,
        status=status,
        links=links(home, status),
        project=values.get("project"),
        seed=values.get("seed"),
        simulated=simulated_note(values),
        stages=list(stages.values()),
        verdict=run_verdict(
            status,
            values,
            labels,
            model_name(str(values.get("project", "")), "policy"),
            Sent.load(home / "runs" / status.run).decision,
        ),
        gates=sorted(
            (_gate(stage, verdict) for stage in stages.values() for verdict in stage.status.gates),
            key=lambda gate: tightness(gate.verdict, gate.margin),
        ),
        data=_data(stages["validate"], group(values, "data")),
        reward={"bins": [], "slices": [], "probes": {}, **documents[0], **documents[1], "suites": suites},
        policy=_policy(stages["ppo"], group(values, "ppo"), on_the_sheet(human_eval)),
        comparison=human_eval.document("result.json"),
        compared=human_eval.document(RESULT),
        models=compared_names(status.origin),
        sheet=human_eval.document("sheet.json"),
        labels=labels,
        against=against,
        options=options,
        lineage=graph_of(done) if (done := readable_done(home / "runs" / status.run)[0]) else None,
        rounds=rounds_up_to(home, status),
    )


def taken_record(store: ArtifactStore, stage: StageStatus | Part) -> Record | None:
    """Return the record that a run used for a (sub-)stage, even if the key has a newer record with other bytes."""
    records = store.published(stage.key) if stage.key and stage.digest else []
    return next((record for record in records if record.digest == stage.digest), None)


def code_name(code: CodeVersion) -> str:
    """Return version and commit of the code as text."""
    commit = (code.get("commit") or "unknown")[:12] + (" with changes" if code.get("dirty") else "")
    return f"Tether {code['version']}, commit {commit}" if code.get("version") else f"commit {commit}"


def _gate(stage: StageFacts, verdict: Verdict) -> GateFacts:
    description = verdict.description or (GATES[verdict.name].description if verdict.name in GATES else "")
    return GateFacts(verdict, outcome(verdict), rule(verdict), description, margin(verdict, stage.metrics))


def _data(stage: StageFacts, config: Mapping[str, Any]) -> DataFacts:
    used = [record for record in (stage.part("validate.judge"), stage.record) if record is not None]
    digests = {name: digest for record in used for name, digest in record.inputs.items()}
    quarantined = stage.rows("quarantine.jsonl")
    runs = {stage.run, stage.record.run} if stage.record is not None else set()
    recorded = recorded_inputs(stage.home, runs)
    kinds = [*NAMED, *([REFERENCE] if REFERENCE in digests or stage.record is None else [])]  # `last` may name none
    return DataFacts(
        sources=[
            source for kind in kinds for source in _sources(kind, values_of(config.get(kind)), digests, stage, recorded)
        ],
        generated=config.get("generator") if config.get("preferences", "") is None else None,
        metrics=stage.metrics,
        checks=[{**check, "first_rows": first_rows(check)} for check in stage.document("report.json") or []],
        quarantined=len(quarantined) if stage.record is not None else None,
        examples=quarantined[:EXAMPLES],
    )


def _sources(
    kind: str, named: Sequence[str], digests: Mapping[str, str], stage: StageFacts, recorded: Mapping[str, Input]
) -> Iterator[SourceFacts]:
    """Yield the files of a kind of data: as they were read, or as the config names them if the stage has not ended."""
    read = of_kind(digests, kind)
    if len(read) > 1 and stage.record is not None:
        counts = {entry["source"]: entry for entry in stage.document("sources.json") or []}
        for name, digest in read.items():
            source = recorded.get(digest)
            path = None if source is None else source.hub or str(source.path)
            yield SourceFacts(name, path, digest, counts.get(label_of(name)))
    elif named:
        source = recorded.get(read.get(kind, ""))
        hub = source.hub if source else ""
        yield from (SourceFacts(kind, hub or path, read.get(kind)) for path in named)
    elif read:
        yield SourceFacts(kind, None, read.get(kind))


def on_the_sheet(human_eval: StageFacts) -> Collection[str]:
    """Return the prompts that raters are judging now. The page is stored next to their sheet, and its samples would
    reveal which model wrote which reply."""
    if human_eval.status.state != "awaiting_labels":
        return ()
    return {canonical_json(row["prompt"]) for row in human_eval.rows("responses.jsonl")}


def _policy(stage: StageFacts, config: Mapping[str, Any], hidden: Collection[str]) -> PolicyFacts:
    computed: Mapping[str, Any] = group(stage.record.job if stage.record is not None else {}, "ppo") or config
    kl = group(present_options({"ppo": dict(computed)}), "ppo", "kl")
    direct = group(stage.record.job if stage.record is not None else {}, "policy")
    strength = f"{direct['beta']} of" if "beta" in direct else "not used by"
    control = f"{strength} {direct['method']}" if direct else "unknown"
    tether = {"target": None, "unit": "response", "ceiling": None, "control": control, **kl}
    rows = stage.rows("evaluation.jsonl")
    why = {"fall": "mean score falls by {:.3g} SFT deviations", "kl": "KL of {:.3g} nats"}
    worst = [(row, why[row["reason"]].format(row["value"])) for row in stage.rows("worst.jsonl")]
    samples = [ShownSample(row, 0, [text]) for row, text in worst if canonical_json(row["prompt"]) not in hidden]
    open_rows = {i: row for i, row in enumerate(rows, 1) if canonical_json(row["prompt"]) not in hidden}
    return PolicyFacts(tether, len(rows), _samples(open_rows), samples)


def _samples(rows: Mapping[int, Document]) -> list[ShownSample]:
    """Return the row with the highest KL, the row with the highest reward, and the first few others, of rows by
    number."""
    picked: dict[int, list[str]] = {}
    for why, name in (("the worst KL", "kl"), ("the highest reward", "score")):
        finite = {number: value for number, row in rows.items() if math.isfinite(value := row["policy"][name])}
        if finite:
            picked.setdefault(max(finite, key=finite.__getitem__), []).append(why)
    first = [number for number in rows if number not in picked][:SAMPLES]
    return [ShownSample(rows[number], number, picked.get(number, [])) for number in (*picked, *first)]


def _options(home: Path, run: str, values: Mapping[str, JsonValue], profile: str) -> tuple[str, list[Option]]:
    """Return the name of the values that options are compared with, and every option."""
    against, defaults = default_values(home, run, profile)
    plain = flatten({option: default for option, (default, _) in REMOVED.items()}) | flatten(defaults)
    return against, [
        # Runtime and runners are resolved for each machine, so a difference is not the user's change.
        Option(name, value, plain.get(name), value != plain.get(name) and not name.startswith(("runtime.", "runners.")))
        for name, value in flatten(values).items()
    ]
