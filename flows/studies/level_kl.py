"""Choose how far a method moves the policy from SFT, so that its KL lands in a band: a search of at most four runs.

Methods at different KL can't be compared: more KL buys more reward (Gao et al. 2023, arXiv 2210.10760). The search
reads KL on prompts of the calibration split, by which nothing is judged, from runs of the full length: a shorter run
has less KL, and the run with the chosen strength is one of the cells.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from components.gates.methods import ON_PAIRS
from components.ppo.config import KLConfig
from flows.config.run_config import RunConfig
from flows.reports.run_facts import StageFacts

MOST_RUNS = 4
LARGEST_STEP = math.log(8)
"""The largest step beyond what was tried, in the log of the strength."""

Band = tuple[float, float]
"""Lowest and highest KL, in `ppo.kl.unit`."""


class Strength(NamedTuple):
    """The option that decides how far a method moves the policy from SFT, and whether KL rises with it."""

    option: str
    rises: bool
    most: int | None = None
    """Its largest value, for a whole number from 2; None for any positive number."""


class Trial(NamedTuple):
    """A run of the search: its strength, its KL on prompts of the calibration split, and what training took."""

    strength: float
    kl: float
    run: str = ""
    seconds: float = 0.0


def strength_of(config: RunConfig) -> Strength:
    """Return the option of the strength of a config's method. With a fixed β, that of PPO's updates is β itself."""
    if config.policy.method in ON_PAIRS:
        return Strength("policy.beta", rises=False)
    if config.policy.method == "best_of_n":  # KL is log n - (n - 1) / n, 1.2 nats for 8, and the cost is n
        return Strength("policy.n", rises=True, most=8)
    fixed = config.ppo.kl.control == "fixed"
    return Strength("ppo.kl.coefficient", rises=False) if fixed else Strength("ppo.kl.target", rises=True)


def next_strength(trials: Sequence[Trial], band: Band, strength: Strength) -> float | None:
    """Return the strength to try next; None if the search is over: in the band, after `MOST_RUNS`, or at a limit.

    In logs of strength and KL it aims at the band's middle, along the secant through the nearest trials on both sides,
    in the inner 80 % between them. While all trials are on one side, it extrapolates: from one trial as KL ∝ strength,
    then along the secant through the outermost two.
    """
    if band[0] <= trials[-1].kl <= band[1] or len(trials) >= MOST_RUNS:
        return None
    sign, aim = (1 if strength.rises else -1), _middle(band)
    points = sorted((sign * math.log(trial.strength), _log(trial.kl)) for trial in trials)
    below, above = [p for p in points if p[1] < aim], [p for p in points if p[1] >= aim]
    if below and above:
        (x_low, y_low), (x_high, y_high) = max(below), min(above)
        x = x_low + min(0.9, max(0.1, (aim - y_low) / (y_high - y_low))) * (x_high - x_low)
    else:
        (x_outer, y_outer), (x_other, y_other) = (points[-1], points[0]) if below else (points[0], points[-1])
        slope = (y_outer - y_other) / (x_outer - x_other) if len(points) > 1 else 1.0
        step = (aim - y_outer) / slope if slope > 0 else math.copysign(LARGEST_STEP, aim - y_outer)
        x = x_outer + max(-LARGEST_STEP, min(LARGEST_STEP, step))
    value = math.exp(sign * x)
    value = float(f"{value:.3g}") if strength.most is None else min(strength.most, max(2, round(value)))
    return None if any(value == trial.strength for trial in trials) else value


def best(trials: Sequence[Trial], band: Band) -> Trial:
    """Return the trial whose KL is nearest to the band's middle, in logs."""
    # A KL near 0 may be estimated below 0, where the logs are cut off.
    return min(trials, key=lambda trial: (abs(_log(trial.kl) - _middle(band)), -trial.kl))


def sentence(trials: Sequence[Trial], band: Band, option: str) -> str:
    """Return how a search ended, what it tried and what that cost."""
    kl = best(trials, band).kl
    where = "inside" if band[0] <= kl <= band[1] else "outside"
    tried = ", ".join(f"{trial.strength:g} (KL {trial.kl:.3g})" for trial in trials)
    cost = sum(trial.seconds for trial in trials)
    return (
        f"KL {kl:.3g} on calibration prompts, {where} the band {band[0]:.3g} to {band[1]:.3g}; the search tried "
        f"{option} {tried} and took {cost:,.0f} s of training"
    )


def calibration_kl(policy: StageFacts, kl: KLConfig) -> float | None:
    """Return the published policy's KL, in `kl.unit`, on prompts of the calibration split; None if training evaluated
    none. If the last policy left `kl.band`, return that one's, because the KL of the early policy that is then
    published does not depend on the strength."""
    about = policy.document("metadata.json") or {}
    rows = {row["update"]: row for row in about.get("evaluations", ())}
    last = rows[max(rows)] if rows else {}
    outside = kl.band is not None and last.get(f"{kl.measure}_high", 0.0) > kl.band
    return (last if outside else rows.get(about.get("published_update"), last)).get(kl.measure)


def _middle(band: Band) -> float:
    return math.log(band[0] * band[1]) / 2


def _log(kl: float) -> float:
    return math.log(max(kl, 1e-9))
