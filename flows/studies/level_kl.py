"""Choose how strongly a method pulls away from SFT, so that its KL lands in a band: a search of at most four runs.

Methods compared at different KL say little about the methods: more KL buys more reward (Gao et al. 2023, arXiv
2210.10760). KL is measured on prompts of the calibration split, on which no gate and no table judges.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from components.base.nested import group
from components.base.text import counted
from flows.config.run_config import RunConfig, to_values
from flows.reports.run_facts import StageFacts

MOST_RUNS = 4
LARGEST_STEP = math.log(8)
"""The largest step of the search in the log of the strength beyond what it has tried."""
TOLERANCE = 0.2
"""Half of the default band, relative to the target: within it the adaptive β hardly changes."""


class Strength(NamedTuple):
    """The option that decides how far a method moves the policy from SFT."""

    option: str
    rises: bool
    """Whether KL rises with it."""
    whole: bool = False
    """Whether it is a whole number, from 2."""
    most: float = math.inf


_DIRECT = Strength("policy.beta", rises=False)
STRENGTHS = {
    "ppo": Strength("ppo.kl.target", rises=True),
    "best_of_n": Strength("policy.n", rises=True, whole=True, most=8),  # KL grows with log n, the cost with n
    **dict.fromkeys(("dpo", "ipo", "kto", "online_dpo"), _DIRECT),
}
"""Maps a method (`policy.method`) to the option of its strength."""


def strength_of(config: RunConfig) -> Strength:
    """Return the option of the strength of a config's method. With a fixed β, that of PPO is β itself."""
    method = str(group(to_values(config), "policy").get("method", "ppo"))
    if method == "ppo" and config.ppo.kl.control == "fixed":
        return Strength("ppo.kl.coefficient", rises=False)
    return STRENGTHS[method]


class Trial(NamedTuple):
    """A run of the search."""

    strength: float
    kl: float
    """On prompts of the calibration split, nats."""
    run: str = ""
    seconds: float = 0.0


class Band(NamedTuple):
    """The KL at which methods are compared, in `ppo.kl.unit`."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Return its middle in logs, at which the search aims."""
        return math.sqrt(self.low * self.high)

    def distance(self, kl: float) -> float:
        """Return the distance of a KL from the middle, in logs."""
        return abs(_log(kl) - math.log(self.middle))

    def holds(self, kl: float) -> bool:
        return self.low <= kl <= self.high


def next_strength(trials: Sequence[Trial], band: Band, strength: Strength) -> float | None:
    """Return the strength to try next; None if the search is over: in the band, after `MOST_RUNS`, or at a limit.

    In logs of strength and KL, it goes along the secant through the nearest trials on both sides of the band's middle,
    but stays in the inner 80 % between them. While all trials are on one side, it extrapolates: after one trial with
    slope 1, as KL ∝ strength, then along the secant through the outermost two, by `LARGEST_STEP` at most.
    """
    if band.holds(trials[-1].kl) or len(trials) >= MOST_RUNS:
        return None
    sign, aim = (1 if strength.rises else -1), math.log(band.middle)
    points = sorted((sign * math.log(trial.strength), _log(trial.kl)) for trial in trials)
    below, above = [p for p in points if p[1] < aim], [p for p in points if p[1] >= aim]
    if below and above:
        (x_low, y_low), (x_high, y_high) = max(below), min(above)
        share = (aim - y_low) / (y_high - y_low)
        x = x_low + min(0.9, max(0.1, share)) * (x_high - x_low)
    else:
        outer, other = (points[-1], points[0]) if below else (points[0], points[-1])
        width = outer[0] - other[0]
        slope = (outer[1] - other[1]) / width if width else 1.0
        step = (aim - outer[1]) / slope if slope > 0 else math.copysign(LARGEST_STEP, aim - outer[1])
        x = outer[0] + max(-LARGEST_STEP, min(LARGEST_STEP, step))
    value = min(strength.most, math.exp(sign * x))
    value = max(2, round(value)) if strength.whole else float(f"{value:.3g}")
    return None if any(value == trial.strength for trial in trials) else value


def best(trials: Sequence[Trial], band: Band) -> Trial:
    """Return the trial whose KL is nearest to the band's middle."""
    # A KL near 0 may be estimated below 0, where the logs are cut off.
    return min(trials, key=lambda trial: (band.distance(trial.kl), abs(trial.kl - band.middle)))


def outcome(trials: Sequence[Trial], band: Band) -> str:
    """Return a sentence on how the search ended, and what it cost."""
    chosen = best(trials, band)
    cost = f"{counted(len(trials), 'run')}, {sum(trial.seconds for trial in trials):,.0f} s of training"
    where = "inside" if band.holds(chosen.kl) else "the search did not reach"
    return (
        f"KL {chosen.kl:.3g} on calibration prompts, {where} the band {band.low:g} to {band.high:g} ({cost})"
    )


def calibration_kl(policy: StageFacts, measure: str) -> float | None:
    """Return the KL of the published policy on prompts of the calibration split, by the evaluations during training;
    None if there were none.

    Args:
        measure: `kl` (nats a response) or `kl_per_token`.
    """
    about = policy.document("metadata.json") or {}
    rows = {row["update"]: row for row in about.get("evaluations", ()) if measure in row}
    row = rows.get(about.get("published_update")) or (rows[max(rows)] if rows else None)
    return None if row is None else row[measure]


def _log(kl: float) -> float:
    return math.log(max(kl, 1e-9))
