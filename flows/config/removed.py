"""Options that were taken out: their old defaults are dropped, and any other value is refused with what to do."""

from collections.abc import Collection, Mapping

from pydantic import JsonValue

from components.base.errors import UserError
from components.gates.renamed import present_options
from flows.config.config_errors import show

_EPSILON = "Leave it out: AdamW adds epsilon as torch does. A smaller `epsilon` or a longer `warmup` calms early steps."
_GENERATOR = "The built-in task's noise is 0.3."
_TRANSFER = "Weights go by ppo.rollout.folder; on one host /dev/shm/tether is in memory."
REMOVED: dict[str, tuple[JsonValue, str]] = {
    "data.generator.annotator_noise": (0.3, _GENERATOR),
    "human_eval.length_strata": (4, "Prompts are divided into 4 strata by length."),
    "ppo.mask_tied_groups": (False, "Raise ppo.group_size, so that fewer groups are tied (`ppo/tied_groups`)."),
    "ppo.mask_truncated": (False, "Raise generation.max_new_tokens, or keep ppo.score.missing_eos=replace."),
    "ppo.monitors.false_alarms": (0.01, "The monitors raise a false alarm in 1 % of runs at most."),
    "ppo.epsilon_style": ("torch", _EPSILON),
    "ppo.rollout.address": ("127.0.0.1", _TRANSFER),
    "ppo.rollout.transfer": ("folder", _TRANSFER),
    "ppo.score.ensemble_deviations": (1.0, "`lower` subtracts one standard deviation; `minimum` is stricter."),
    "ppo.score.length_buffer": (None, "Set ppo.score.length_penalty, or raise generation.max_new_tokens."),
    "ppo.score.length_buffer_penalty": (1.0, "Set ppo.score.length_penalty, or raise generation.max_new_tokens."),
    "reward.calibration_bins": (10, "The expected calibration error has 10 bins of equal mass."),
    "reward.centring": (0.0, "Scores are shifted to mean 0 on SFT responses after training."),
    "reward.combine": ("ensemble", "Members stay an ensemble: ppo.score.ensemble combines their scores."),
    "reward.epsilon_style": ("torch", _EPSILON),
    "reward.use_margin": (False, "Give votes instead: reward.labels=shares learns how clear a preference is."),
    "sft.epsilon_style": ("torch", _EPSILON),
}
"""Maps an option to its last default, and to a sentence that says what to do without it."""


def without_removed(
    values: Mapping[str, JsonValue], source: str, finished: Collection[str] = ()
) -> dict[str, JsonValue]:
    """Return a config's values with renamed options under their present names, and without removed options that have
    their last default, as older runs store them.

    Args:
        finished: stages whose stored results are used as they are. Their removed options are dropped at any value.

    Raises:
        UserError: a removed option has another value.
    """
    found: dict[str, JsonValue] = present_options(values)
    for option, (default, advice) in REMOVED.items():
        *groups, name = option.split(".")
        place: dict[str, JsonValue] = found
        for group in groups:
            inner = place.get(group)
            if not isinstance(inner, dict):
                break
            place[group] = place = dict(inner)
        else:
            stage = "validate" if groups[0] == "data" else groups[0]
            if name in place and (value := place.pop(name)) != default and stage not in finished:
                raise UserError(f"{source}: {option} = {show(value)}: this option is gone. {advice}")
    return found
