"""The methods that train the policy, and the options and gates that each of them uses. Names only."""

from typing import Literal

Method = Literal["ppo", "online_dpo", "dpo", "ipo", "kto", "best_of_n"]
ON_PAIRS = ("dpo", "ipo", "kto")
"""The methods that train on the preference pairs of the data, without sampling."""
DIRECT_METHODS = (*ON_PAIRS, "best_of_n")
"""The methods that make no updates of PPO. Their options stand under `policy`."""
_BY_UPDATES = ("ppo", "online_dpo")
_USES: dict[tuple[str, ...], tuple[str, ...]] = {
    (*_BY_UPDATES, *DIRECT_METHODS): (  # what measures the policy
        "policy.method", "ppo.evaluate", "ppo.repeats", "ppo.rules", "ppo.rewards", "ppo.watch",
        "ppo.evaluate_temperature", "ppo.best_of", "ppo.score.ensemble", "ppo.kl.band", "ppo.kl.ceiling", "ppo.kl.unit",
        "ppo.kl.response_ceiling", "gates.ppo.stopped",
    ),
    DIRECT_METHODS: ("policy",),
    ON_PAIRS: ("policy.beta", "policy.max_pairs", "policy.stop_on_alarm"),
    ("dpo", "ipo"): ("policy.label_smoothing", "policy.form", "policy.soft_labels"),
    ("dpo",): ("policy.margin",),
    ("kto",): ("policy.desirable_weight", "policy.undesirable_weight"),
    ("best_of_n",): ("policy.n", "policy.rounds", "policy.max_prompts"),
    _BY_UPDATES: ("ppo", "ppo.rules.drop", "ppo.rules.penalty", "gates.ppo"),
    (*_BY_UPDATES, "best_of_n"): ("ppo.score",),  # by which it chooses responses
    ("ppo",): (  # its loss, in whose place online DPO has its own
        "ppo.advantage", "ppo.ratio", "ppo.clip_range", "ppo.clip_range_high", "ppo.dual_clip", "ppo.group_size",
        "ppo.aggregation", "ppo.discount", "ppo.gae_lambda", "ppo.critic", "ppo.importance", "ppo.kl.form",
        "gates.ppo.ratio_max", "gates.ppo.clip_fraction_max",
    ),
    ("online_dpo",): ("ppo.pair_labels",),
}  # fmt: skip
USED_BY = {name: methods for methods, names in _USES.items() for name in names}
"""Maps an option, a group of options or `gates.` with a gate to the methods that use it. What stands in a group with an
entry is used by the group's methods, unless it has an entry of its own; all methods use what has none."""


def is_used(method: str, option: str) -> bool:
    """Return whether a method uses a dotted option, such as `ppo.kl.target`; of a group, whether it uses one of its
    options."""
    if any(method in methods for name, methods in USED_BY.items() if f"{name}.".startswith(f"{option}.")):
        return True
    while option and option not in USED_BY:
        option = option.rpartition(".")[0]
    return method in USED_BY.get(option, (method,))
