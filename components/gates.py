"""Gates as data: a metric, a direction and a threshold. Judging is never cached."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, RootModel, field_validator

from components.errors import GateFailed, TetherError, UserError
from components.settings import Settings

# Strict: `true` is no threshold.
_Number = Annotated[float, Field(strict=True)]

Threshold = _Number | tuple[_Number, _Number] | None
"""A number, `(low, high)` for `between`, or None: not judged."""


class Gate(Settings):
    """One rule for one final metric. Its threshold is not here: thresholds live in the profiles alone."""

    name: str
    """`stage.metric`, the name that `--waive` takes."""
    metric: str
    """The `group/name` that is judged."""
    op: Literal["<=", ">=", ">", "==", "between"]
    """`>` for a gain: where nothing changed at all its interval is 0 wide, and 0 is none."""
    description: str
    or_within: str | None = None
    """A metric that may stand in for an upper threshold where it is larger (ECE's simulated null)."""
    warn_only: bool = False
    """Said and recorded, but never stops a run."""
    if_measured: bool = False
    """Of what not every run does: off where the metric is missing (NaN fails all the same)."""

    @property
    def stage(self) -> str:
        """The stage it judges."""
        return self.name.partition(".")[0]

    @property
    def short(self) -> str:
        """Its key below `gates.<stage>` in a config."""
        return self.name.partition(".")[2]


class Waiver(Settings):
    """Somebody lets one gate fail, in this run."""

    gate: str
    user: str
    reason: str = Field(min_length=1)


class Verdict(Settings):
    """One gate's judgement."""

    name: str
    metric: str
    value: float | None
    """The metric, or None where it is missing, NaN or infinite (which fails)."""
    op: str
    threshold: Threshold
    """None: the gate is off."""
    passed: bool
    waived: bool = False
    user: str | None = None
    reason: str | None = None
    warn_only: bool = False
    description: str = ""
    text: str = ""
    """The judgement in words: metric, value, threshold."""

    @property
    def stops(self) -> bool:
        """Whether nothing downstream may start."""
        return not (self.passed or self.waived or self.warn_only)


_Row = tuple[str, str, Any, str, dict[str, Any]]

_PROBES = {
    "filler": "a filler sentence",
    "flattery": "a flattering sentence",
    "hedge": "a hedging sentence",
    "repetition": "saying the last sentence again",
    "whitespace": "white space at the end",
    "exclamations": "!!! at the end",
    "dots": "... at the end",
}


_WIDTH_NULL = {"or_within": "reward/ece_width_null_95"}


def _plain(stage: str, op: str, described: Mapping[str, str]) -> list[_Row]:
    """Gates that are called as their metrics are."""
    return [(f"{stage}.{name}", f"{stage}/{name}", op, text, {}) for name, text in described.items()]


def _gates() -> dict[str, Gate]:
    rows: list[_Row] = [
        ("validate.contract", "data/contract", ">=", "every error-severity expectation of the suite holds", {}),
        ("validate.pairs", "data/pairs", ">=", "enough pairs are left after quarantine", {}),
        ("validate.leaked_prompts", "data/leaked_prompts", "<=", "no prompt is in two splits", {}),
        ("validate.annotator_agreement", "data/annotator_agreement", ">=", "annotators agree (Fleiss' kappa)", {}),
        ("sft.loss", "sft/loss", "<=", "held-out loss, nats per response token", {}),
        ("sft.perplexity_ratio", "sft/perplexity_ratio", "<=", "held-out perplexity against the baseline's", {}),
        ("sft.ended", "sft/ended", ">=", "share of responses that end by themselves", {}),
        ("reward.accuracy_low", "reward/accuracy_low", ">=", "held-out accuracy, lower end of its interval", {}),
        ("reward.ece", "reward/ece", "<=", "calibration error after temperature", {"or_within": "reward/ece_null_95"}),
        ("reward.calibration_slope", "reward/calibration_slope", "between", "recalibration slope", {}),
        ("reward.length_gain_low", "reward/length_gain_low", ">", "accuracy above a length-only rule, lower end", {}),
        ("reward.invariance", "reward/invariance", "<=", "a text scores the same alone, in a batch and padded", {}),
        ("reward.ece_width", "reward/ece_width", "<=", "the same in bins of equal width", _WIDTH_NULL),
        ("reward.slice_accuracy_low", "reward/slice_accuracy_low", ">=", "accuracy in the worst slice, lower end", {}),
        (
            "reward.slice_ece_excess",
            "reward/slice_ece_excess",
            "<=",
            "worst slice's calibration error above chance",
            {},
        ),
        *_plain(
            "reward",
            ">",
            {"majority_gain_low": "accuracy above always naming the side that won more often, lower end"},
        ),
        *_plain(
            "reward",
            ">=",
            {
                "probe_texts": "texts that the rise in score is measured on",
                "balanced_length_accuracy_low": "mean accuracy where the longer and where the shorter won, lower end",
                "disagreement_auroc_low": "an ensemble disagrees more on soup than on SFT samples, lower end",
            },
        ),
        (
            "reward.refresh_gain_low",
            "reward/refresh_gain_low",
            ">=",
            "accuracy on the old held-out pairs against the reward model refreshed, lower end",
            {"if_measured": True},
        ),
        *_plain(
            "reward",
            "<=",
            {
                "brier_high": "Brier score after temperature, upper end",
                "log_loss_high": "log loss after temperature, nats a pair, upper end",
                "length_partial_correlation_high": "correlation of score and length given the label, upper end",
                "position_invariance": "a text scores the same wherever it stands in a batch",
                **{
                    f"probe_{name}_high": f"rise in score by {what}, SFT standard deviations, upper end"
                    for name, what in _PROBES.items()
                },
            },
        ),
        ("ppo.kl", "ppo/kl_high", "<=", "held-out KL to SFT, nats per response, upper end", {}),
        ("ppo.kl_floor", "ppo/kl", ">=", "the policy has moved away from SFT at all", {"warn_only": True}),
        ("ppo.stopped", "ppo/stopped", "<=", "training was not cut short by the KL ceiling", {}),
        ("ppo.evaluated", "ppo/evaluated", ">=", "held-out prompts that all these are measured on", {}),
        ("ppo.reward_gain_low", "ppo/reward_gain_low", ">", "reward gain over SFT on held-out prompts, lower end", {}),
        (
            "ppo.demonstration_perplexity_ratio",
            "ppo/demonstration_perplexity_ratio",
            "<=",
            "perplexity of demonstrations against SFT's (capability kept)",
            {},
        ),
        ("ppo.repetition", "ppo/repetition", "<=", "repetition in responses", {}),
        ("ppo.echo", "ppo/echo", "<=", "responses that repeat the prompt back", {}),
        ("ppo.distinct", "ppo/distinct", ">=", "share of distinct responses", {}),
        ("ppo.length_ratio", "ppo/length_ratio", "between", "response length against SFT's", {}),
        ("ppo.ended", "ppo/ended", ">=", "share of responses that end by themselves", {}),
        ("ppo.violations_excess", "ppo/violations_excess", "<=", "policy violations above SFT's (built-in task)", {}),
        ("human_eval.labels_complete", "human_eval/labels_complete", ">=", "share of items with every rating", {}),
        ("human_eval.items", "human_eval/items", ">=", "enough rated items", {}),
        ("human_eval.fleiss_kappa", "human_eval/fleiss_kappa", ">=", "judges agree (Fleiss' kappa)", {}),
        ("human_eval.win_rate_low", "human_eval/win_rate_low", ">=", "win rate against SFT, lower end", {}),
    ]
    return {
        name: Gate(name=name, metric=metric, op=op, description=description, **extra)
        for name, metric, op, description, extra in rows
    }


GATES: dict[str, Gate] = _gates()
"""Every gate there is, by name, in the order they are shown."""


class GatesConfig(RootModel[dict[str, dict[str, Threshold]]]):
    """Thresholds as `{stage: {gate: number | [low, high] | null}}`: every gate named, none defaulted, null is off."""

    model_config = {"frozen": True}

    @field_validator("root")
    @classmethod
    def _matches_the_registry(cls, given: dict[str, dict[str, Threshold]]) -> dict[str, dict[str, Threshold]]:
        named = [f"{stage}.{short}" for stage, thresholds in given.items() for short in thresholds]
        for name in named:
            if name not in GATES:
                raise ValueError(f"gates.{name} is no gate{_nearest(name)}")
        missing = [name for name in GATES if name not in named]
        if missing:
            raise ValueError(f"gates.{missing[0]} has no threshold; give one, or null to leave the gate off")
        for name in named:
            _check_threshold(GATES[name], given[name.partition(".")[0]][name.partition(".")[2]])
        return given

    def stage(self, stage: str) -> dict[str, Threshold]:
        """Thresholds of one stage's gates by short name (empty for a stage without gates)."""
        return self.root.get(stage, {})


def judge(
    stage: str, metrics: Mapping[str, float], thresholds: Mapping[str, Threshold], waivers: Sequence[Waiver] = ()
) -> list[Verdict]:
    """Judge a stage's final metrics by every gate of the registry that is the stage's.

    A missing metric, NaN or an infinity fails. A waiver only counts for a gate that failed.

    Args:
        stage: the stage's name.
        metrics: its final metrics.
        thresholds: by the gate's short name, as `GatesConfig.stage` gives them; None is off.
        waivers: of any stage.

    Raises:
        TetherError: a gate of the stage has no entry in `thresholds`.
    """
    gates = [gate for gate in GATES.values() if gate.stage == stage]
    for gate in gates:
        if gate.short not in thresholds:
            raise TetherError(f"gates.{gate.name} has no threshold (null would leave it off)")
    by_gate = {waiver.gate: waiver for waiver in waivers}
    return [_judge(gate, metrics, thresholds[gate.short], by_gate.get(gate.name)) for gate in gates]


def check_waivers(waivers: Sequence[Waiver]) -> None:
    """Raise UserError for a waiver that names no gate."""
    for waiver in waivers:
        if waiver.gate not in GATES:
            raise UserError(f"--waive {waiver.gate}: there is no such gate{_nearest(waiver.gate)}")


def failure(stage: str, verdicts: Sequence[Verdict]) -> GateFailed | None:
    """The error that names every gate which stops the run, or None."""
    stopping = [verdict for verdict in verdicts if verdict.stops]
    if not stopping:
        return None
    lines = "; ".join(f"{verdict.name}: {verdict.text} ({verdict.description})" for verdict in stopping)
    return GateFailed(f"{stage}: {len(stopping)} gate(s) failed. {lines}")


def _judge(gate: Gate, metrics: Mapping[str, float], threshold: Threshold, waiver: Waiver | None) -> Verdict:
    value = metrics.get(gate.metric)
    if value is None and gate.if_measured:
        threshold = None
    shown: dict[str, Any] = {
        "name": gate.name,
        "metric": gate.metric,
        "op": gate.op,
        "threshold": threshold,
        "warn_only": gate.warn_only,
        "description": gate.description,
        "value": value if value is not None and math.isfinite(value) else None,
    }
    if threshold is None:
        return Verdict(**shown, passed=True, text=f"{gate.metric} is not judged")
    rule = f"{gate.op} {_shown(threshold)}"
    if value is None:
        passed, text = False, f"{gate.metric} is missing, must be {rule}"
    elif not math.isfinite(value):
        passed, text = False, f"{gate.metric} is {value}, must be {rule}"
    else:
        passed = _holds(gate.op, value, threshold)
        text = f"{gate.metric} is {value:.6g}, must be {rule}"
        stand_in = metrics.get(gate.or_within, math.nan) if gate.or_within else math.nan
        if math.isfinite(stand_in):
            passed = passed or _holds(gate.op, value, stand_in)
            text += f" or within {gate.or_within} {stand_in:.6g}"
    if not passed and waiver is not None:
        shown |= {"waived": True, "user": waiver.user, "reason": waiver.reason}
    return Verdict(**shown, passed=passed, text=text)


def _holds(op: str, value: float, threshold: float | tuple[float, float]) -> bool:
    if isinstance(threshold, tuple):
        return threshold[0] <= value <= threshold[1]
    if op == "==":
        return value == threshold
    if op == ">":
        return value > threshold
    return value <= threshold if op == "<=" else value >= threshold


def _check_threshold(gate: Gate, threshold: Threshold) -> None:
    if threshold is None:
        return
    numbers = threshold if isinstance(threshold, tuple) else (threshold,)
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"gates.{gate.name} is {_shown(threshold)}: a threshold is a finite number")
    if isinstance(threshold, tuple) != (gate.op == "between"):
        wanted = "[low, high]" if gate.op == "between" else "one number"
        raise ValueError(f"gates.{gate.name} is {_shown(threshold)}: this gate takes {wanted}, or null for off")
    if isinstance(threshold, tuple) and threshold[0] > threshold[1]:
        raise ValueError(f"gates.{gate.name} is {_shown(threshold)}: low is above high")


def _shown(threshold: float | tuple[float, float]) -> str:
    if isinstance(threshold, tuple):
        return f"[{threshold[0]:.6g}, {threshold[1]:.6g}]"
    return f"{threshold:.6g}"


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, GATES, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(GATES)}"
