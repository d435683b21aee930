"""What there is to say of a run, read from what it stored: the facts of its report.

Nothing here computes a number anew: a fact that no status, record or artifact holds is None, and the page says so.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, JsonValue

from components.base.hashing import digest_json
from components.base.nested import flatten, group
from components.gates.judging import Verdict
from components.gates.table import GATES
from components.gates.text import outcome, rule
from components.keys.code_version import CodeVersion
from components.store.store import ArtifactStore, Record
from flows.config.run_config import default_values
from flows.reports.documents import (
    CheckResult,
    ComparisonResult,
    Evaluated,
    KeptOut,
    RewardResult,
    SheetAbout,
    Tether,
)
from tasks.execution import explanation
from tasks.execution.plots import CHARTS
from tasks.runs.config import run_values
from tasks.runs.points import curves, points_file, read_points
from tasks.runs.status import RunStatus, StageStatus, load_status
from tasks.stages import PIPELINE

Curve = Sequence[tuple[float, float]]
Metrics = Mapping[str, float | None]
"""Final metrics; None for one that is not finite."""
M = TypeVar("M", bound=BaseModel)

SAMPLES = 6
"""Pairs of responses that are shown as they come, beside those that are picked out."""
EXAMPLES = 5
"""Quarantined rows that are shown."""


class Chart(NamedTuple):
    """A chart of a stage."""

    title: str
    svg: Path | None
    """None where the stage has not ended or had nothing to draw, or where an earlier version computed it."""
    ended: bool
    """Whether the stage has."""


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
        """The stage's."""
        return self.status.name

    @property
    def metrics(self) -> Metrics:
        """Final metrics."""
        return self.status.metrics

    @property
    def by(self) -> str | None:
        """The run that computed it, if that is another one."""
        return self.record.run if self.record is not None and self.record.run != self.run else None

    @property
    def why(self) -> dict[str, str]:
        """A line for each of its steps: why that was computed or not."""
        return {name: explanation.in_a_line(told) for name, told in self.status.explained.items()}

    @property
    def judged(self) -> dict[str, int]:
        """How many of its gates ended how."""
        words = [outcome(verdict) for verdict in self.status.gates]
        return {word: words.count(word) for word in ("PASS", "WAIVED", "WARN", "FAIL") if word in words}

    @property
    def charts(self) -> dict[str, Chart]:
        """Its charts by name, as they were drawn when it was computed."""
        ended = self.status.digest is not None
        drawn = CHARTS.get(self.name, {})
        return {name: Chart(title, self._attached(f"{name}.svg"), ended) for name, (title, _) in drawn.items()}

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Metric name to (step, value) pairs, those of the run that computed it; empty where nothing has them."""
        by = self.record.run if self.record is not None else self.run
        found = curves(read_points(self._attached("points.jsonl") or points_file(self.home / "runs" / by, self.name)))
        if not found:  # PPO's artifact holds its course too, if not its speed
            found = curves({"step": row.pop("update"), "metrics": row} for row in self.rows("history.jsonl"))
        return {name: [(x, y) for x, y in curve if math.isfinite(y)] for name, curve in found.items()}

    def bound(self, gate: str) -> float | tuple[float, float] | None:
        """The threshold of one of its gates; None where that is off or was not judged."""
        return next((verdict.threshold for verdict in self.status.gates if verdict.name == gate), None)

    def text(self, name: str) -> str | None:
        """A file of the artifact; None where there is none, or where it is damaged."""
        path = self.store.file(self.record, name) if self.record is not None else None
        return path.read_text(encoding="utf-8") if path is not None else None

    def document(self, name: str, kind: type[M]) -> M | None:
        """A JSON file of the artifact; None as `text`."""
        text = self.text(name)
        return None if text is None else kind.model_validate(json.loads(text))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file of the artifact; none as `text`."""
        return [json.loads(line) for line in (self.text(name) or "").splitlines()]

    def _attached(self, name: str) -> Path | None:
        return self.store.attachment(self.record, name) if self.record is not None else None


@dataclass(frozen=True)
class GateFacts:
    """A gate as it was judged."""

    verdict: Verdict
    outcome: str
    rule: str
    within: str | None
    """The metric of a second bound, either of which will do."""
    within_value: float | None
    description: str


@dataclass(frozen=True)
class SourceFacts:
    """A source of the data."""

    name: str
    path: str | None
    digest: str | None


@dataclass(frozen=True)
class DataFacts:
    """What was read, what was kept out and why, and how it was split."""

    sources: list[SourceFacts]
    generated: Mapping[str, float] | None
    """Options of the generator of the built-in task, where that is the source."""
    metrics: Metrics
    checks: list[CheckResult]
    quarantined: int | None
    examples: list[KeptOut]


@dataclass(frozen=True)
class ShownSample:
    """A row of PPO's evaluation that is shown."""

    row: Evaluated
    number: int
    """From 1."""
    picked: list[str]
    """Why it is shown; empty for one that is shown as it comes."""


@dataclass(frozen=True)
class PolicyFacts:
    """What held the policy, and responses beside those of SFT."""

    tether: Tether
    bound: float | tuple[float, float] | None
    evaluated: int
    samples: list[ShownSample]


@dataclass(frozen=True)
class ComparisonFacts:
    """The result of the human evaluation; where labels are awaited, of how many items."""

    result: ComparisonResult | None
    sheet: SheetAbout | None
    bound: float | tuple[float, float] | None


@dataclass(frozen=True)
class Option:
    """An option of the run's config."""

    name: str
    """Dotted."""
    value: object
    default: object
    """The profile's."""
    changed: bool


@dataclass(frozen=True)
class Computation:
    """Where, when and by which code a stage was computed."""

    stage: str
    record: Record
    code: CodeVersion
    source: str | None
    """One digest of the code that is in the key."""
    machine: Mapping[str, object]
    libraries: Mapping[str, str]


@dataclass(frozen=True)
class RunFacts:
    """All that the report of a run says, in the order in which it says it."""

    status: RunStatus
    project: JsonValue
    seed: JsonValue
    simulated: bool
    """Whether the data are those of the built-in task."""
    stages: list[StageFacts]
    gates: list[GateFacts]
    data: DataFacts
    reward: RewardResult
    policy: PolicyFacts
    comparison: ComparisonFacts
    against: str
    """What the options are compared with."""
    options: list[Option]
    environment: list[Computation]

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
    against, options = _options(values, status.profile)
    return RunFacts(
        status=status,
        project=values.get("project"),
        seed=values.get("seed"),
        simulated=group(values, "data").get("preferences", "") is None,
        stages=list(stages.values()),
        gates=list(_gates(stages.values())),
        data=_data(stages["validate"], group(values, "data")),
        reward=_reward(stages["reward"]),
        policy=_policy(stages["ppo"], group(values, "ppo")),
        comparison=_comparison(stages["human_eval"]),
        against=against,
        options=options,
        environment=[_computation(each.name, each.record) for each in stages.values() if each.record is not None],
    )


def taken_record(store: ArtifactStore, stage: StageStatus) -> Record | None:
    """The record that a run took for a stage, though the same key may have been computed to other bytes since."""
    found = store.published(stage.key) if stage.key and stage.digest else []
    return next((record for record in found if record.digest == stage.digest), None)


def rests_on_import(home: Path, run: str) -> bool:
    """Whether a run, or the record of one of its stages, was imported."""
    status, store = load_status(home, run), ArtifactStore(home)
    records = (taken_record(store, stage) for stage in status.stages)
    return bool(status.imported) or any(record is not None and record.imported for record in records)


def _gates(stages: Iterable[StageFacts]) -> Iterable[GateFacts]:
    for stage in stages:
        for verdict in stage.status.gates:
            known = GATES.get(verdict.name)
            within = known.or_within if known is not None and verdict.threshold is not None else None
            yield GateFacts(
                verdict=verdict,
                outcome=outcome(verdict),
                rule=rule(verdict),
                within=within,
                within_value=stage.metrics.get(within) if within else None,
                description=verdict.description or (known.description if known is not None else ""),
            )


def _data(stage: StageFacts, config: Mapping[str, Any]) -> DataFacts:
    digests = stage.record.inputs if stage.record is not None else {}
    named = {name: config.get(name) for name in ("preferences", "demonstrations", "prompts")}
    lines = (stage.text("quarantine.jsonl") or "").splitlines()
    return DataFacts(
        sources=[
            SourceFacts(name, path, digests.get(name))
            for name, path in named.items()
            if path is not None or name in digests
        ],
        generated=config.get("generator") if config.get("preferences", "") is None else None,
        metrics=stage.metrics,
        checks=[CheckResult.model_validate(each) for each in json.loads(stage.text("report.json") or "[]")],
        quarantined=len(lines) if stage.record is not None else None,
        examples=[KeptOut.model_validate(json.loads(line)) for line in lines[:EXAMPLES]],
    )


def _reward(stage: StageFacts) -> RewardResult:
    calibration, robustness = (json.loads(stage.text(f"{name}.json") or "{}") for name in ("calibration", "robustness"))
    return RewardResult.model_validate(calibration | robustness)


def _policy(stage: StageFacts, config: Mapping[str, JsonValue]) -> PolicyFacts:
    computed = group(stage.record.job if stage.record is not None else {}, "ppo") or config
    rows = [Evaluated.model_validate(row) for row in stage.rows("evaluation.jsonl")]
    tether = Tether.model_validate(computed.get("kl", {"control": "unknown"}))
    return PolicyFacts(tether, stage.bound("ppo.kl"), len(rows), _samples(rows))


def _samples(rows: Sequence[Evaluated]) -> list[ShownSample]:
    """Pick the row farthest from SFT, the one that the reward model scores highest, and the first few others."""
    picked: dict[int, list[str]] = {}
    for why, values in (
        ("the worst KL", [row.policy.kl for row in rows]),
        ("the highest reward", [row.policy.score for row in rows]),
    ):
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        if finite:
            picked.setdefault(max(finite, key=values.__getitem__), []).append(why)
    first = [index for index in range(len(rows)) if index not in picked][:SAMPLES]
    return [ShownSample(rows[i], i + 1, picked.get(i, [])) for i in (*picked, *first)]


def _comparison(stage: StageFacts) -> ComparisonFacts:
    result, sheet = stage.document("result.json", ComparisonResult), stage.document("sheet.json", SheetAbout)
    return ComparisonFacts(result, sheet, stage.bound("human_eval.win_rate_low"))


def _options(values: Mapping[str, JsonValue], profile: str) -> tuple[str, list[Option]]:
    """What options are compared with, and every option by its dotted name."""
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
