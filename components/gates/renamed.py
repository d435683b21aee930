"""Former names of options, gates and final metrics. Configs, waivers, verdicts and records of earlier versions are read
under the present names."""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import TypeVar

from pydantic import JsonValue

from components.base.nested import group, merge, nested
from components.gates.built_in.policy_gates import POLICY_GATES

Number = TypeVar("Number")

GATES_RENAMED = {f"ppo.{gate.short}": gate.name for gate in POLICY_GATES}
"""Maps a gate's former name to its present one."""
OPTIONS_RENAMED = {
    "ppo.kl.stop_above": "ppo.kl.ceiling",
    "ppo.watch.kl_high": "ppo.kl.band",
    **{f"gates.{former}": f"gates.{name}" for former, name in GATES_RENAMED.items()},
}
"""Maps an option's former name to its present one."""
METRICS_OF_TRAINING = (
    "alarms", "approx_kl", "beta", "beta_drift_below_target", "clip_fraction", "clip_fraction_above",
    "clip_fraction_max", "dual_clip_fraction", "explained_variance", "kl_to_reference", "late_kl", "late_kl_high",
    "late_kl_rise_high", "late_log_beta_rise", "late_proxy_rise_low", "left_out", "length_buffer_penalty",
    "proxy_rise_at_level_kl", "ptx_loss", "published_update", "ratio_max", "replaced_max", "rollouts_bit_exact",
    "score_spread_min", "stopped", "updates",
)  # fmt: skip
"""The final metrics of the stage `ppo` that keep the group `ppo`. All others are now called `policy/NAME`."""
_OF_A_POLICY = re.compile(rf"\bppo/(?!(?:{'|'.join(METRICS_OF_TRAINING)}|plugin/\w+)\b)")


def present_options(values: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a config's values with renamed options under their present names.

    An option that is there under both names stays under the former one too, which is then refused as unknown.
    """
    present = deepcopy(dict(values))
    for former, name in OPTIONS_RENAMED.items():
        (*groups, last), path = former.split("."), name.split(".")
        options = group(present, *groups)
        if isinstance(options, dict) and last in options and path[-1] not in group(present, *path[:-1]):
            present = merge(nested(path, options.pop(last)), present)
    return present


def present_gate(name: str) -> str:
    """Return the present name of a gate."""
    return GATES_RENAMED.get(name, name)


def present_metric(text: str) -> str:
    """Return the present name of a final metric, or a text with the present names of those in it."""
    return _OF_A_POLICY.sub("policy/", text)


def present_metrics(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Return a record's final metrics under their present names."""
    if any(name.startswith("policy/") for name in metrics):
        return dict(metrics)
    return {present_metric(name): value for name, value in metrics.items()}
