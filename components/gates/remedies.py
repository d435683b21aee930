"""Changes of options after a gate failed, whose new values are computed from the run's own."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pydantic import JsonValue


class Setting(NamedTuple):
    """A new value of an option."""

    option: str
    """Dotted."""
    before: JsonValue
    value: JsonValue

    @property
    def assignment(self) -> str:
        """`KEY=VALUE`, as `--set` takes it."""
        value = self.value
        return f"{self.option}={f'{value:g}' if isinstance(value, float) else str(value).lower()}"


class Formula(NamedTuple):
    """A number computed from an option's present value."""

    compute: Callable[[float, float, float], float]
    """A function of the present value, of the metric divided by the gate's threshold (at least 1), and of the
    threshold (0 if it is a range)."""
    words: str
    """The same in words."""


class OptionChange(NamedTuple):
    """A new value of one option."""

    option: str
    value: Formula | JsonValue
    when: tuple[str, JsonValue] | None = None
    """A condition: another option and the value that it must have."""
    if_zero: float | None = None
    """The value if the present one is 0, of which any multiple is 0."""

    def setting(
        self, value: float | None, threshold: float | tuple[float, float] | None, values: Mapping[str, JsonValue]
    ) -> Setting | None:
        """Return the new value; None if the change does not apply or has no effect. Arguments as in `Gate.setting`."""
        present = values.get(self.option)
        if self.when is not None and values.get(self.when[0]) != self.when[1]:
            return None
        new = self._number(present, value, threshold) if isinstance(self.value, Formula) else self.value
        return None if present is None or new is None or new == present else Setting(self.option, present, new)

    def _number(self, present: JsonValue, value: float | None, threshold: object) -> float | None:
        assert isinstance(self.value, Formula)
        if isinstance(present, bool) or not isinstance(present, (int, float)):
            return None
        bound = float(threshold) if isinstance(threshold, (int, float)) else 0.0
        excess = max(1.0, value / bound) if value is not None and bound > 0 else 1.0
        if not present and self.if_zero is not None:
            number = self.if_zero
        else:
            number = self.value.compute(float(present), excess, bound)
        if not math.isfinite(number):
            return None
        return round(number) if isinstance(present, int) else float(f"{number:.2g}")


def times(factor: float) -> Formula:
    """Return a multiple of the present value."""
    return Formula(lambda present, excess, bound: present * factor, f"{factor:g} times its value")


def at_least(lowest: float) -> Formula:
    """Return the present value, raised to `lowest` if it is below."""
    return Formula(lambda present, excess, bound: max(present, lowest), f"at least {lowest:g}")


AT_LEAST_THE_BOUND = Formula(lambda present, excess, bound: max(present, bound), "at least the gate's threshold")
HALF = Formula(lambda present, excess, bound: max(1, present // 2), "half of its value, at least 1")
ONE_LESS = Formula(lambda present, excess, bound: max(1, present - 1), "one less, at least 1")

TETHER = ("ppo.kl.target", "ppo.kl.coefficient", "policy.beta")
"""The options that hold the policy to SFT."""
_ADAPTIVE = ("ppo.kl.control", "adaptive")
_FIXED = ("ppo.kl.control", "fixed")
_HIGHER_BETA = OptionChange("policy.beta", times(2))
TIGHTER_TETHER = (
    OptionChange("ppo.kl.target", times(0.7), _ADAPTIVE),
    OptionChange("ppo.kl.coefficient", times(2), _FIXED, if_zero=0.1),
    _HIGHER_BETA,
)
_TARGET = Formula(
    lambda present, excess, bound: 0.9 * present / excess, "0.9 times its value, divided by KL over its bound"
)
_COEFFICIENT = Formula(
    lambda present, excess, bound: present * max(2.0, excess), "its value times KL over its bound, at least twice it"
)
KL_TO_ITS_BOUND = (
    OptionChange("ppo.kl.target", _TARGET, _ADAPTIVE),
    OptionChange("ppo.kl.coefficient", _COEFFICIENT, _FIXED, if_zero=0.1),
    _HIGHER_BETA,
)
LOOSER_TETHER = (
    OptionChange("ppo.kl.target", times(1.5), _ADAPTIVE),
    OptionChange("ppo.kl.coefficient", times(0.5), _FIXED),
    OptionChange("policy.beta", times(0.5)),
)
MORE_EPOCHS = (OptionChange("reward.epochs", times(2)),)
SEVERAL_MODELS = (OptionChange("reward.members", at_least(3)),)
LESS_CONFIDENCE = (OptionChange("reward.epochs", HALF), *SEVERAL_MODELS)
SMALLER_STEPS = (
    OptionChange("ppo.learning_rate", times(0.5)),
    OptionChange("ppo.epochs", ONE_LESS),
    OptionChange("ppo.clip_range", times(0.5)),
)
LONGER_RESPONSES = OptionChange("generation.max_new_tokens", times(1.5))


def rerun_from(options: Iterable[str], stages: Iterable[str]) -> str:
    """Return the first stage that a change of these options recomputes. Options outside stages are in every key."""
    names = list(stages)
    stage_of = {"judge": "reward", "policy": "ppo"}
    groups = {stage_of.get(name, name) for name in (option.partition(".")[0] for option in options)}
    return min((group if group in names else names[0] for group in groups), key=names.index)
