"""The methods that train the policy, and which options say something to which. Names only."""

from typing import Literal

Method = Literal["ppo", "dpo", "ipo", "kto"]
DIRECT = ("dpo", "ipo", "kto")
"""The methods that train on preference pairs, without sampling."""
ONLY_OF = {
    "label_smoothing": ("dpo", "ipo"), "form": ("dpo", "ipo"), "soft_labels": ("dpo", "ipo"), "margin": ("dpo",),
    "desirable_weight": ("kto",), "undesirable_weight": ("kto",),
}  # fmt: skip
"""Maps an option of `policy` that not every direct method has to the methods that have it."""
MEASURES = (
    "evaluate", "repeats", "rules", "rewards", "watch", "evaluate_temperature", "best_of", "score.ensemble", "kl.band",
    "kl.ceiling", "kl.unit", "kl.response_ceiling",
)  # fmt: skip
"""The options of `ppo` that measure any policy. All others are PPO's own."""


def is_used(method: str, option: str) -> bool:
    """Return whether a dotted option, such as `ppo.kl.target`, says something to a method; of a group, whether one of
    its options does."""
    group, _, name = option.partition(".")
    if group == "policy":
        of = ONLY_OF.get(name.partition(".")[0], DIRECT)
        return name in ("", "method") or method in of
    if group == "ppo" and method != "ppo":
        return any(f"{used}.".startswith(f"{name}.") or f"{name}.".startswith(f"{used}.") for used in ("", *MEASURES))
    return True
