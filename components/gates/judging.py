"""Thresholds, and judging a stage's final metrics by them. Judging is never cached."""

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from components.base.errors import GateFailed, UserError
from components.base.settings import Settings
from components.base.text import counted
from components.gates.gate import Gate, Op
from components.gates.renamed import present_gate, present_metric
from components.gates.table import GATES

# Strict: `true` is not a number.
_Number = Annotated[float, Field(strict=True)]

WIDEST = 0.15, (0.5, 2.0)
"""The widest nulls that let a gate pass: an ECE, and the ends of a slope. With these it rejects four in five models
whose confidence is 0.2 too high, or which are three times as sure as they may be. Wider ones let nearly all pass."""

Threshold = _Number | tuple[_Number, _Number] | None
"""A number, `(low, high)` for `between`, or None: not judged."""


class Waiver(Settings):
    """A user's decision to let one gate fail in this run."""

    gate: Annotated[str, AfterValidator(present_gate)]
    user: str
    reason: str = Field(min_length=1)


class Verdict(Settings):
    """One gate's judgement."""

    name: Annotated[str, AfterValidator(present_gate)]
    metric: Annotated[str, AfterValidator(present_metric)]
    value: float | None
    """The metric; None if it is missing, NaN or infinite, which fails."""
    op: Op
    threshold: Threshold
    """None: the gate is off."""
    passed: bool
    skipped: bool = False
    """The config left the stage out, so its gates cannot pass."""
    waived: bool = False
    user: str | None = None
    reason: str | None = None
    """Why it is waived, or off."""
    warn_only: bool = False
    description: str = ""
    text: Annotated[str, AfterValidator(present_metric)] = ""
    """The judgement in words: metric, value, threshold."""
    within: float | tuple[float, float] | None = None
    """A second bound within which the gate also passes, such as the null of an ECE; None without one. With a threshold
    of None it is so wide that the gate is not judged."""

    @property
    def stops(self) -> bool:
        """Return whether it prevents later stages from starting."""
        return not (self.passed or self.waived or self.warn_only or self.skipped)

    @property
    def withheld(self) -> bool:
        """Return whether it blocks promotion: the stage was skipped, and this gate was not waived."""
        return self.skipped and not (self.passed or self.waived or self.warn_only)


class ExtraGate(Settings):
    """A gate that a profile adds, on any metric that the stage records."""

    metric: Annotated[str, AfterValidator(present_metric)] = ""
    """The metric that is judged, as `policy/entropy`."""
    plugin: str = ""
    """Instead of `metric`: an entry point of the group `tether.gates`. It is a function of the stage's metrics and its
    artifact's folder that returns the number to judge."""
    code: str = "auto"
    """Name and version of the plug-in's distribution and sha256 of its files; each run computes it again."""
    timeout: float = Field(600.0, gt=0)
    """Time limit in seconds of the plug-in's call, including its import."""
    op: Op
    """`<=`, `>=`, `>`, `==`, or `between` (with a threshold of two numbers)."""
    threshold: Threshold
    """A number, `[low, high]` for `between`, or null for off."""
    description: str = ""
    """What the gate asks, for people."""
    warn_only: bool = False
    """Shown and recorded, but never stops a run."""

    @model_validator(mode="after")
    def _judges_one_thing(self) -> Self:
        if bool(self.metric) == bool(self.plugin):
            raise ValueError("set either metric (that the stage records) or plugin (that measures one)")
        return self

    def rule(self, stage: str, short: str) -> Gate:
        """Return the gate. The description of a plugged gate names the plug-in's distribution."""
        description, metric = self.description, self.metric
        if self.plugin:
            by = "" if self.code == "auto" else f" of {self.code.rpartition(' ')[0]}"
            description = f"{description or 'measured'} (plug-in {self.plugin}{by})"
            metric = plugged_metric(stage, short)
        return Gate(f"{stage}.{short}", self.op, description, metric, warn_only=self.warn_only)


def plugged_metric(stage: str, short: str) -> str:
    """Return the name of the number that a plug-in measures for a gate; stages record no metric of this form."""
    return f"{stage}/plugin/{short}"


def with_kl_gates(thresholds: Mapping[str, Any], kl: Mapping[str, Any]) -> dict[str, Any]:
    """Return thresholds by group. Of the gates on KL that they do not name, the one in `ppo.kl.unit` takes the band."""
    if (band := kl.get("band")) is None:
        return dict(thresholds)
    short = "kl_per_token" if kl.get("unit") == "token" else "kl"
    defaults = {"kl": None, "kl_per_token": None, short: band}
    return {**thresholds, "policy": defaults | (thresholds.get("policy") or {})}


class GatesConfig(BaseModel):
    """Thresholds as `{group: {gate: number | [low, high] | null}}`; null is off, and so is a gate that is not named."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)
    __pydantic_extra__: dict[str, dict[str, Threshold]]

    extra: dict[str, dict[str, ExtraGate | None]] = {}
    """Further gates as `{stage: {name: {metric, op, threshold}}}`; null drops one that the extended profile added."""

    _reasons: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Return why gates are off that other options than `gates` turn off."""
        return self._reasons

    def without(self, gates: Iterable[str], reason: str) -> Self:
        """Return these thresholds with built-in `gates` off, for a reason."""
        changed = self.model_copy()
        changed._reasons = {**self._reasons, **dict.fromkeys(gates, reason)}
        return changed

    @model_validator(mode="after")
    def _names_gates_that_there_are(self) -> Self:
        groups = sorted({gate.group for gate in GATES.values()})
        for group, thresholds in self.__pydantic_extra__.items():
            if group not in groups:
                raise ValueError(f"gates.{group} is not a group of gates{_nearest(group, groups)}")
            for short, threshold in thresholds.items():
                if (gate := GATES.get(f"{group}.{short}")) is None:
                    raise ValueError(f"gates.{group}.{short} is not a gate{_nearest(f'{group}.{short}', GATES)}")
                _check_threshold(f"gates.{gate.name}", gate.op, threshold)
        for stage, gates in self.extra.items():
            for short, extra in gates.items():
                key, name = f"gates.extra.{stage}.{short}", present_gate(f"{stage}.{short}")
                if name in GATES:
                    raise ValueError(f"{key} is a built-in gate's name: choose another, or set gates.{name}")
                if not re.fullmatch(r"\w+", short):
                    raise ValueError(f"{key} is not a valid gate name: use letters, digits and _")
                if extra is not None:
                    _check_threshold(f"{key}.threshold", extra.op, extra.threshold)
        return self

    def rules(self, stage: str | None = None) -> list[tuple[Gate, Threshold]]:
        """Return each gate of a stage (None: of all) with its threshold (None: off); extra gates come last."""
        named = self.__pydantic_extra__
        built_in: list[tuple[Gate, Threshold]] = [
            (gate, None if gate.name in self._reasons else named.get(gate.group, {}).get(gate.short))
            for gate in GATES.values()
        ]
        extra = [
            (added.rule(of, short), added.threshold)
            for of, gates in self.extra.items() for short, added in gates.items() if added is not None
        ]  # fmt: skip
        return [(gate, threshold) for gate, threshold in built_in + extra if stage in (None, gate.stage)]

    def plugged(self, stage: str) -> dict[str, ExtraGate]:
        """Return the judged gates of a stage whose number a plug-in measures, by the name of that number."""
        extra = self.extra.get(stage, {})
        return {
            plugged_metric(stage, short): gate
            for short, gate in extra.items() if gate is not None and gate.plugin and gate.threshold is not None
        }  # fmt: skip

    @property
    def unnamed(self) -> list[str]:
        """Return the gates that are off because the config does not name them."""
        named = {f"{group}.{short}" for group, gates in self.__pydantic_extra__.items() for short in gates}
        return [name for name in GATES if name not in named and name not in self._reasons]


def stage_metrics(final: Mapping[str, float], parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics that gates judge: those of the sub-stages `parts`, overridden by those of the `final` one."""
    metrics = dict[str, float]()
    for part in parts:
        metrics |= part
    return metrics | dict(final)


def judge(
    stage: str, metrics: Mapping[str, float], gates: GatesConfig, waivers: Sequence[Waiver] = (), skipped: bool = False
) -> list[Verdict]:
    """Judge a stage's final metrics by every gate of the stage; `waivers` may be of any stage.

    A missing metric, NaN or an infinity fails. A waiver counts only for a gate that failed. The gates of a `skipped`
    stage fail whatever its metrics are, but do not stop the run.
    """
    by_gate = {waiver.gate: waiver for waiver in waivers}
    verdicts = [_judge(gate, metrics, bound, by_gate.get(gate.name), skipped) for gate, bound in gates.rules(stage)]
    why = gates.reasons
    return [v.model_copy(update={"reason": why[v.name]}) if v.name in why else v for v in verdicts]


def check_waivers(waivers: Sequence[Waiver], gates: GatesConfig, option: str = "--waive") -> None:
    """Raise UserError for a waiver of an unknown gate; `option` is the option by which the user gave it."""
    names = [gate.name for gate, _ in gates.rules()]
    for waiver in waivers:
        if waiver.gate not in names:
            raise UserError(f"{option} {waiver.gate}: there is no such gate{_nearest(waiver.gate, names)}")


def failure(stage: str, verdicts: Sequence[Verdict]) -> GateFailed | None:
    """Return the error that names every gate that stops the run; None if none does."""
    stopping = [verdict for verdict in verdicts if verdict.stops]
    if not stopping:
        return None
    lines = "; ".join(f"{verdict.name}: {verdict.text} ({verdict.description})" for verdict in stopping)
    return GateFailed(f"{stage}: {counted(len(stopping), 'gate')} failed. {lines}")


def _judge(
    gate: Gate, metrics: Mapping[str, float], threshold: Threshold, waiver: Waiver | None, skipped: bool
) -> Verdict:
    value = metrics.get(gate.metric)
    if gate.if_measured and not metrics.keys() & {gate.metric, gate.estimate}:
        threshold = None
    verdict = functools.partial(
        Verdict,
        name=gate.name,
        metric=gate.metric,
        op=gate.op,
        threshold=threshold,
        warn_only=gate.warn_only,
        description=gate.description,
        value=value if value is not None and math.isfinite(value) else None,
    )
    if threshold is None:
        return verdict(passed=True, text=f"{gate.metric} is not judged")
    rule = f"{gate.op} {_shown(threshold)}"
    if value is None and gate.estimate in metrics:
        estimate = f"{gate.estimate} ({metrics[gate.estimate]:.6g}) has no interval (is it of one prompt?)"
        passed, text = False, f"{gate.metric} is unknown: {estimate}, must be {rule}"
    elif value is None:
        near = difflib.get_close_matches(gate.metric, metrics, cutoff=0.5)
        recorded = f"; {gate.stage} recorded {', '.join(near)}" if near else ""
        passed, text = False, f"{gate.metric} is missing, must be {rule}{recorded}"
    elif not math.isfinite(value):
        passed, text = False, f"{gate.metric} is {value}, must be {rule}"
    elif gate.interval == "both":
        ends = [metrics.get(f"{gate.metric}{end}", math.nan) for end in ("_low", "_high")]
        passed = all(_holds(gate.op, end, threshold) for end in ends)
        text = f"{gate.metric} is {value:.6g} with an interval from {ends[0]:.6g} to {ends[1]:.6g}, must be {rule}"
    else:
        passed = _holds(gate.op, value, threshold)
        text = f"{gate.metric} is {value:.6g}, must be {rule}"
        if (second := stand_in(gate, metrics)) is not None:
            chance = _holds(gate.op, value, second[1])
            verdict = functools.partial(verdict, within=second[1])
            text += f" or within {second[0]} {_shown(second[1])}"
            if chance and not passed and _too_wide(second[1]) and not skipped:
                few = "It is not judged: so few pairs could not show that a model is far too sure. Add test pairs"
                return verdict(threshold=None, passed=True, text=f"{text}. {few}")
            passed = passed or chance
    if skipped:
        passed, text = False, f"the stage {gate.stage} was skipped, so its gates do not pass ({text})"
    if not passed and waiver is not None:
        by = {"user": waiver.user, "reason": waiver.reason}
        return verdict(passed=passed, text=text, skipped=skipped, waived=True, **by)
    return verdict(passed=passed, text=text, skipped=skipped)


def stand_in(
    gate: Gate, metrics: Mapping[str, float] | Mapping[str, float | None]
) -> tuple[str, float | tuple[float, float]] | None:
    """Return names and values of the metrics that may replace a gate's threshold; None if one is unknown."""
    names = gate.or_within if isinstance(gate.or_within, tuple) else (gate.or_within,) if gate.or_within else ()
    values = [value for name in names if (value := metrics.get(name)) is not None and math.isfinite(value)]
    if not names or len(values) < len(names):
        return None
    return " to ".join(names), values[0] if len(values) == 1 else (values[0], values[1])


def _too_wide(null: float | tuple[float, float]) -> bool:
    return null[0] < WIDEST[1][0] or null[1] > WIDEST[1][1] if isinstance(null, tuple) else null > WIDEST[0]


def _holds(op: str, value: float, threshold: float | tuple[float, float]) -> bool:
    if isinstance(threshold, tuple):
        return threshold[0] <= value <= threshold[1]
    if op == "==":
        return value == threshold
    if op == ">":
        return value > threshold
    return value <= threshold if op == "<=" else value >= threshold


def _check_threshold(key: str, op: Op, threshold: Threshold) -> None:
    if threshold is None:
        return
    numbers = threshold if isinstance(threshold, tuple) else (threshold,)
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{key} is {_shown(threshold)}: a threshold is a finite number")
    if isinstance(threshold, tuple) != (op == "between"):
        wanted = "[low, high]" if op == "between" else "one number"
        raise ValueError(f"{key} is {_shown(threshold)}: this gate takes {wanted}, or null for off")
    if isinstance(threshold, tuple) and threshold[0] > threshold[1]:
        raise ValueError(f"{key} is {_shown(threshold)}: low is above high")


def _shown(threshold: float | tuple[float, float]) -> str:
    if isinstance(threshold, tuple):
        return f"[{threshold[0]:.6g}, {threshold[1]:.6g}]"
    return f"{threshold:.6g}"


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
