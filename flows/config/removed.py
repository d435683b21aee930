"""Options that were taken out, or renamed.

The last default of an option that was taken out is dropped, and any other value is refused with what to do. A renamed
option keeps its value."""

import logging
from collections.abc import Collection, Mapping

from pydantic import JsonValue

from components.base.errors import UserError
from components.gates.renamed import OPTIONS_RENAMED, present_options
from flows.config.config_errors import show

_EPSILON = "Leave it out: AdamW adds epsilon as torch does. A smaller `epsilon` or a longer `warmup` calms early steps."
_GENERATOR = "The built-in task's noise is 0.3."
_TRANSFER = "Weights go by ppo.rollout.folder; on one host /dev/shm/tether is in memory."
_SHEET = "`tether people status RUN --sheet FILE` checks a rating sheet."
_OF_SHEETS = {"item_named": "error", "item_once": "error", "rating_known": "error", "responses_kept": "error",
              "rated": "warn"}  # fmt: skip
REMOVED: dict[str, tuple[JsonValue, str]] = {
    **{f"data.checks.{name}": ({"severity": how, "threshold": 0.0}, _SHEET) for name, how in _OF_SHEETS.items()},
    "data.checks.side_position": ({"severity": "warn", "threshold": [0.4, 0.6]}, _SHEET),
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


logger = logging.getLogger(__name__)


def renamed(values: dict[str, JsonValue], source: str) -> dict[str, JsonValue]:
    """Return a config's values with the present names of renamed options; a line about them goes to the log.

    Raises:
        UserError: both names of an option are set.
    """
    former = {old: new for old, new in OPTIONS_RENAMED.items() if _without(values, old) is not None}
    for old, new in former.items():
        if _without(values, new) is not None:
            raise UserError(f"{source}: {old} is called {new} now, and both are set. Leave {old} out.")
    if former:
        names = ", ".join(f"{old} is called {new} now" for old, new in former.items())
        still = "name still works" if len(former) == 1 else "names still work"
        logger.warning("%s: %s. The old %s.", source, names, still)
    return present_options(values)


def without_removed(
    values: Mapping[str, JsonValue], source: str, finished: Collection[str] = ()
) -> dict[str, JsonValue]:
    """Return a config's values as this version names them: without removed options that have their last default, and
    with renamed ones under their present names, as older runs store them.

    Args:
        finished: stages whose stored results are used as they are. Their removed options are dropped at any value.

    Raises:
        UserError: a removed option has another value.
    """
    remaining = present_options(values)
    for option, (default, advice) in REMOVED.items():
        if (entry := _without(remaining, option)) is None:
            continue
        remaining, value = entry
        stage = option.partition(".")[0].replace("data", "validate")
        if value != default and stage not in finished:
            raise UserError(f"{source}: {option} = {show(value)}: this option is gone. {advice}")
    return remaining


def _without(values: Mapping[str, JsonValue], option: str) -> tuple[dict[str, JsonValue], JsonValue] | None:
    """Return a copy of `values` without `option`, and its value; None if it is not set."""
    name, _, inner_option = option.partition(".")
    if name not in values:
        return None
    copy, value = dict(values), values[name]
    if not inner_option:
        del copy[name]
        return copy, value
    if not isinstance(value, dict) or (entry := _without(value, inner_option)) is None:
        return None
    return copy | {name: entry[0]}, entry[1]
