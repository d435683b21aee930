"""Options to change after a gate failed, with new values computed from the run's own.

`ADVICE` has the general advice in words, which is the same for every run.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from components.gates.judging import Verdict

Values = Mapping[str, JsonValue]
"""Maps the dotted name of an option to a run's value."""


class Setting(NamedTuple):
    """A new value of an option."""

    option: str
    """Dotted."""
    before: JsonValue
    value: JsonValue

    @property
    def written(self) -> str:
        """`KEY=VALUE`, as `--set` takes it."""
        value = self.value
        text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if _is_number(value) else str(value)
        return f"{self.option}={text}"


class OptionChange(NamedTuple):
    """A new value of one option."""

    option: str
    value: Callable[[float, Verdict], float] | JsonValue
    """The value, or a function that computes it from the current one."""
    when: tuple[str, JsonValue] | None = None
    """A condition: another option and the value that it must have."""
    otherwise: float | None = None
    """The value if the current one is 0, of which any multiple is 0."""

    def applied(self, verdict: Verdict, values: Values) -> JsonValue:
        """Return the new value; None if the change does not apply or has no effect."""
        present = values.get(self.option)
        if self.when is not None and values.get(self.when[0]) != self.when[1]:
            return None
        if not callable(self.value):
            return self.value if present is not None and self.value != present else None
        if isinstance(present, bool) or not isinstance(present, (int, float)):
            return None
        found = self.otherwise if not present and self.otherwise is not None else self.value(float(present), verdict)
        if not math.isfinite(found):
            return None
        made: float = round(found) if isinstance(present, int) else float(f"{found:.2g}")
        return made if made != present else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _times(factor: float) -> Callable[[float, Verdict], float]:
    return lambda present, verdict: present * factor


def _at_least(lowest: float) -> Callable[[float, Verdict], float]:
    return lambda present, verdict: max(present, lowest)


def _threshold(present: float, verdict: Verdict) -> float:
    """Return the larger of the gate's threshold and the current value."""
    return max(present, float(verdict.threshold) if _is_number(verdict.threshold) else 0.0)  # type: ignore[arg-type]


def _excess(verdict: Verdict) -> float:
    """Return the value divided by its threshold, at least 1."""
    value, threshold = verdict.value, verdict.threshold
    if value is None or isinstance(threshold, tuple) or not threshold or threshold < 0:
        return 1.0
    return max(1.0, value / threshold)


_ADAPTIVE = ("ppo.kl.control", "adaptive")
_FIXED = ("ppo.kl.control", "fixed")
_TIGHTER = (
    OptionChange("ppo.kl.target", _times(0.7), _ADAPTIVE),
    OptionChange("ppo.kl.coefficient", _times(2), _FIXED, otherwise=0.1),
)
_TO_THE_BOUND = (
    # The target falls by the factor by which KL exceeds its bound, and by a further tenth.
    OptionChange("ppo.kl.target", lambda present, verdict: 0.9 * present / _excess(verdict), _ADAPTIVE),
    OptionChange(
        "ppo.kl.coefficient", lambda present, verdict: present * max(2.0, _excess(verdict)), _FIXED, otherwise=0.1
    ),
)
_LOOSER = (
    OptionChange("ppo.kl.target", _times(1.5), _ADAPTIVE),
    OptionChange("ppo.kl.coefficient", _times(0.5), _FIXED),
)
_LEARN_MORE = (OptionChange("reward.epochs", _times(2)),)
_FIT_LESS = (
    OptionChange("reward.epochs", lambda present, verdict: max(1, present // 2)),
    OptionChange("reward.members", _at_least(3)),
)
_SLOWER = (
    OptionChange("ppo.learning_rate", _times(0.5)),
    OptionChange("ppo.epochs", lambda present, verdict: max(1, present - 1)),
    OptionChange("ppo.clip_range", _times(0.5)),
)
_LONGER = OptionChange("generation.max_new_tokens", _times(1.5))
_SEVERAL = (OptionChange("reward.members", _at_least(3)),)

_EXPLOITED = ("repetition", "echo", "special_tokens", "violations_excess", "distinct", "dissimilarity", "entropy_ratio",
              "length_ratio", "worse_prompts", "kl_beyond_ceiling")  # fmt: skip
_PROBES = ("filler", "flattery", "hedge", "repetition", "whitespace", "exclamations", "dots")
_SHORTCUTS = ("length_gain_low", "majority_gain_low", "balanced_length_accuracy_low", "slice_accuracy_low",
              "temperature_at_end", "accuracy_low", "suite_accuracy_low")  # fmt: skip
_CONFIDENCE = ("ece", "ece_width", "calibration_slope", "brier_high", "log_loss_high", "slice_ece_excess")

CHANGES: dict[str, tuple[OptionChange, ...]] = {
    "validate.pairs": (OptionChange("data.generator.pairs", _times(2), ("data.preferences", None)),),
    "sft.loss": (OptionChange("sft.epochs", _times(2)),),
    "sft.perplexity_ratio": (OptionChange("sft.epochs", _times(2)),),
    "sft.ended": (OptionChange("sft.overlong", "drop"), _LONGER),
    **{f"reward.{name}": _LEARN_MORE for name in _SHORTCUTS},
    **{f"reward.{name}": _FIT_LESS for name in _CONFIDENCE},
    **{f"reward.probe_{name}_high": _SEVERAL for name in _PROBES},
    "reward.invariance": (OptionChange("runtime.dtype", "float32"), OptionChange("reward.shared_prompts", False)),
    "reward.position_invariance": (OptionChange("runtime.dtype", "float32"),),
    "reward.probe_texts": (OptionChange("reward.probe_texts", _threshold),),
    "reward.disagreement_auroc_low": (*_SEVERAL, OptionChange("reward.member_share", _times(0.7))),
    "reward.refresh_gain_low": (OptionChange("reward.refresh.replay", _times(2)),),
    "ppo.kl": _TO_THE_BOUND,
    "ppo.kl_per_token": _TO_THE_BOUND,
    "ppo.kl_floor": _LOOSER,
    "ppo.stopped": _TIGHTER,
    "ppo.beta_drift_below_target": (OptionChange("ppo.updates", _times(1.5)),),
    "ppo.proxy_rise_at_level_kl": _TIGHTER,
    "ppo.ratio_max": _SLOWER,
    "ppo.clip_fraction_max": _SLOWER,
    "ppo.replaced_max": (_LONGER,),
    "ppo.score_spread_min": _LEARN_MORE,
    "ppo.evaluated": (OptionChange("ppo.evaluate", _threshold),),
    "ppo.reward_gain_low": (OptionChange("ppo.updates", _times(2)),),
    "ppo.demonstration_perplexity_ratio": (OptionChange("ppo.ptx.coefficient", _times(2), otherwise=0.5),),
    **{f"ppo.{name}": _TIGHTER for name in _EXPLOITED},
    "ppo.ended": (OptionChange("ppo.score.missing_eos", "replace"), _LONGER),
    "human_eval.items": (OptionChange("human_eval.items", _threshold),),
    "human_eval.win_rate_low": (OptionChange("human_eval.items", _times(2)),),
}
"""Maps a gate to changes of options. The first one that applies to a run is suggested. If none does, and for all other
gates, the command of `ADVICE` is suggested."""


def setting(verdict: Verdict, values: Values) -> Setting | None:
    """Return the option to change after this gate failed in a run with these options; None if there is none."""
    for change in CHANGES.get(verdict.name, ()):
        if (value := change.applied(verdict, values)) is not None:
            return Setting(change.option, values.get(change.option), value)
    return None


def rerun_from(options: Iterable[str], stages: Iterable[str]) -> str:
    """Return the first stage that a change of these options recomputes. Options outside stages are in every key."""
    names = list(stages)
    groups = {option.partition(".")[0] for option in options}
    return min((each if each in names else names[0] for each in groups), key=names.index)
