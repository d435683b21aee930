"""Final metrics from the curves of the whole training, for gates that warn."""

import math
from collections.abc import Mapping, Sequence

from components.ppo.config import KLConfig
from components.ppo.control import WINDOW
from components.stats.series import series_mean, series_rise

FEWEST = 5
"""The fewest updates in a window; with fewer its metrics are left out."""
LEVEL_KL = 1.0
"""KL counts as level if the interval of its rise begins at or below 0 and ends at or below this times the mean KL."""
STABILISERS = ("clip_fraction_above", "dual_clip_fraction", "ptx_loss")
"""Metrics of an update that say what a stabiliser did in it. Each is there only if its option is set."""

Row = Mapping[str, float]


def curve_metrics(history: Sequence[Row], config: KLConfig) -> dict[str, float]:
    """Return metrics from the rows of `history.jsonl`, one row per update, in order.

    `ppo/ratio_max` and `ppo/clip_fraction_max` are the largest of all updates, if ratios are clipped. For the others
    see `uniform_scores`, `unsettled_tether`, `unpaid_reward` and `stabiliser_means`.
    """
    names = (("ppo/ratio_max", "ppo/ratio_max"), ("ppo/clip_fraction_max", "ppo/clip_fraction"))
    values = {new: [row[old] for row in history if old in row] for new, old in names}
    largest = {name: max(of_updates) for name, of_updates in values.items() if of_updates}
    metrics = largest | uniform_scores(history) | unsettled_tether(history, config) | unpaid_reward(history)
    return metrics | stabiliser_means(history)


def stabiliser_means(history: Sequence[Row]) -> dict[str, float]:
    """Return the mean of each metric of `STABILISERS`, and of the share that `ppo.rules.drop` left out.

    Each is over the updates that have it.
    """
    metrics = {}
    for name in (f"ppo/{short}" for short in (*STABILISERS, "left_out")):
        if values := [row[name] for row in history if name in row]:
            metrics[name] = math.fsum(values) / len(values)
    return metrics


def uniform_scores(history: Sequence[Row]) -> dict[str, float]:
    """Measure how well the scores distinguished rollouts, where they did so worst.

    `ppo/replaced_max`: the largest share that all of `WINDOW` = 5 updates in a row reached (all updates, if there are
    fewer) of responses whose score was replaced for a missing EOS and so says nothing about them; absent if
    `ppo.score.missing_eos` is not `replace`. The largest share of single batches would be chance: with a true share of
    0.8, one of 100 batches of 32 nearly always exceeds 0.9. `ppo/score_spread_min`: the smallest standard deviation
    of an update's rewarded scores, in SFT deviations; at 0 nothing can be learned from them.
    """
    replaced = [row["ppo/replaced"] for row in history if "ppo/replaced" in row]
    spreads = [row["ppo/score_spread"] for row in history if "ppo/score_spread" in row]
    in_a_row = [min(replaced[i : i + WINDOW]) for i in range(max(len(replaced) - WINDOW, 0) + 1)] if replaced else []
    metrics = {"ppo/replaced_max": max(in_a_row)} if in_a_row else {}
    return metrics | ({"ppo/score_spread_min": min(spreads)} if spreads else {})


def unsettled_tether(history: Sequence[Row], config: KLConfig) -> dict[str, float]:
    """Measure whether KL was below its target and β still moved in the last third of the updates.

    `ppo/late_kl` (with `_high`): mean KL there, in `config.unit`. `ppo/late_log_beta_rise`: change of log β.
    `ppo/beta_drift_below_target`: the smaller end, in size, of the interval of that change if the interval of KL is
    below the target, else 0. The interval of the change is that of the mean step of log β: log β sums the controller's
    errors, so a line fitted to it would take chance for a trend. A fixed β does not move.
    """
    late = history[-(len(history) // 3) :]
    if len(history) // 3 < FEWEST:
        return {}
    kl = series_mean([row[f"ppo/{config.measure}"] for row in late])
    steps = [math.log(b["ppo/beta"] / a["ppo/beta"]) if a["ppo/beta"] > 0 else 0.0
             for a, b in zip(history[-len(late) - 1 : -1], late, strict=True)]  # fmt: skip
    step = series_mean(steps)
    certain = max(step.low, -step.high, 0.0) * len(steps)
    return {
        "ppo/late_kl": kl.value,
        "ppo/late_kl_high": kl.high,
        "ppo/late_log_beta_rise": math.fsum(steps),
        "ppo/beta_drift_below_target": certain if config.control == "adaptive" and kl.high < config.target else 0.0,
    }


def unpaid_reward(history: Sequence[Row]) -> dict[str, float]:
    """Measure whether proxy reward rose while KL did not, over the last two thirds of the updates.

    The first third is left out, since KL rises from 0 there. Rises are those of a least-squares line.
    `ppo/late_proxy_rise_low`: lower end of the rise of proxy reward, in SFT deviations. `ppo/late_kl_rise_high`: upper
    end of the rise of KL, in nats per response. `ppo/proxy_rise_at_level_kl`: `late_proxy_rise_low` if it is above 0
    and KL is level (its lower end at most 0, its upper end at most `LEVEL_KL` times the mean KL); else 0.
    """
    late = history[-(2 * len(history) // 3) :]
    if 2 * len(history) // 3 < FEWEST:
        return {}
    reward, kl = (series_rise([row[f"ppo/{name}"] for row in late]) for name in ("proxy_reward", "kl"))
    level = kl.low <= 0 and kl.high <= LEVEL_KL * abs(math.fsum(row["ppo/kl"] for row in late)) / len(late)
    return {
        "ppo/late_proxy_rise_low": reward.low,
        "ppo/late_kl_rise_high": kl.high,
        "ppo/proxy_rise_at_level_kl": max(reward.low, 0.0) if level else 0.0,
    }
