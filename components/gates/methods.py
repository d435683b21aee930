"""The methods that train the policy, and the options that each of them uses. Names only."""

from typing import Literal

Method = Literal["ppo", "online_dpo", "dpo", "ipo", "kto", "best_of_n"]
ON_PAIRS = ("dpo", "ipo", "kto")
"""The methods that train on the preference pairs of the data, without sampling."""
DIRECT_METHODS = (*ON_PAIRS, "best_of_n")
"""The methods that make no updates of PPO. Their options stand under `policy`."""
ONLY_OF = {
    "beta": ON_PAIRS, "max_pairs": ON_PAIRS, "stop_on_alarm": ON_PAIRS, "n": ("best_of_n",), "rounds": ("best_of_n",),
    "max_prompts": ("best_of_n",),
    "label_smoothing": ("dpo", "ipo"), "form": ("dpo", "ipo"), "soft_labels": ("dpo", "ipo"), "margin": ("dpo",),
    "desirable_weight": ("kto",), "undesirable_weight": ("kto",),
}  # fmt: skip
"""Maps an option of `policy` that not every direct method has to the methods that have it."""
MEASURES = (
    "evaluate", "repeats", "rules", "rewards", "watch", "evaluate_temperature", "best_of", "score.ensemble", "kl.band",
    "kl.ceiling", "kl.unit", "kl.response_ceiling",
)  # fmt: skip
"""The options of `ppo` that measure the policy of any method. Best of n also uses `ppo.score`, to choose responses. All
others are for PPO's updates."""
LOSS = (
    "advantage", "ratio", "clip_range", "clip_range_high", "dual_clip", "group_size", "aggregation", "discount",
    "gae_lambda", "critic", "importance", "kl.form",
)  # fmt: skip
"""The options of `ppo` that online DPO does not use, because it has a loss of its own in PPO's updates."""


def measuring(method: str) -> tuple[str, ...]:
    """Return the options of `ppo` that a direct method uses."""
    return (*MEASURES, "score") if method == "best_of_n" else MEASURES


def is_used(method: str, option: str) -> bool:
    """Return whether a method uses a dotted option, such as `ppo.kl.target`; of a group, whether it uses one of its
    options."""
    group, _, name = option.partition(".")
    if group == "policy":
        of = ONLY_OF.get(name.partition(".")[0], DIRECT_METHODS)
        return name in ("", "method") or method in of
    if option == "ppo.pair_labels":
        return method == "online_dpo"
    if group == "ppo" and method == "online_dpo":
        return not any(f"{name}.".startswith(f"{unused}.") for unused in LOSS)
    if group == "ppo" and method in DIRECT_METHODS:
        measures = ("", *measuring(method))
        if name.startswith(("rules.drop", "rules.penalty")):
            return False  # they act on PPO's updates
        return any(f"{used}.".startswith(f"{name}.") or f"{name}.".startswith(f"{used}.") for used in measures)
    return True
