"""What a run must judge before its policy may be a candidate for promotion. A gate that is off judges nothing."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from components.base.nested import group
from components.gates.judging import with_kl_gates
from components.gates.table import GATES


class Requirement(NamedTuple):
    """One thing that has to be judged."""

    what: str
    gates: tuple[str, ...]
    """Gates of which one has to be on."""
    chance: float | None = None
    """The value without learning. A threshold below it judges nothing."""
    if_measured: bool = False
    """Whether it applies only to runs that measure it."""


REQUIREMENTS = (
    Requirement("reward accuracy", ("reward.accuracy_low",), chance=0.5),
    Requirement("KL to SFT", ("policy.kl", "policy.kl_per_token")),
    Requirement("gain in reward", ("policy.reward_gain_low",), chance=0.0),
    Requirement("policy violations", ("policy.violations_excess",), if_measured=True),
    Requirement("violations of ppo.rules", ("policy.rule_violations_excess",), if_measured=True),
    Requirement("win rate", ("human_eval.win_rate_low",), chance=0.5),
)


def unjudged(values: Mapping[str, Any], metrics: Collection[str]) -> list[Requirement]:
    """Return the requirements that no threshold of a run judges.

    Args:
        values: the run's config, nested.
        metrics: names of the final metrics of its stages so far.
    """
    thresholds = with_kl_gates(values.get("gates") or {}, group(values, "ppo", "kl"))

    def judges(requirement: Requirement, gate: str) -> bool:
        gate_group, _, short = gate.partition(".")
        threshold = (thresholds.get(gate_group) or {}).get(short)
        return threshold is not None and (requirement.chance is None or threshold >= requirement.chance)

    return [
        requirement for requirement in REQUIREMENTS
        if not any(judges(requirement, gate) for gate in requirement.gates)
        and not (requirement.if_measured and GATES[requirement.gates[0]].estimate not in metrics)
    ]  # fmt: skip


def why_no_alias(values: Mapping[str, Any], metrics: Collection[str] | None = None) -> str:
    """Return why a run gives a model no alias, and what to do; empty if it may.

    Args:
        values, metrics: as for `unjudged`; without `metrics` the model is not a policy, and no gate is required.
    """
    if not values.get("promote", True):
        return "its profile is for trying things (promote is false)"
    if metrics is None or not (lacking := unjudged(values, metrics)):
        return ""
    unmet = ', '.join(requirement.what for requirement in lacking)
    options = ", ".join(f"gates.{requirement.gates[0]}" for requirement in lacking)
    return f"its run does not judge {unmet}: set {options}, and rerun human_eval"
