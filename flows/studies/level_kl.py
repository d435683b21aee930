"""Choose how far a method moves the policy from SFT, so that its KL lands in a band: a search of at most four runs.

Methods at different KL can't be compared: more KL buys more reward (Gao et al. 2023, arXiv 2210.10760). The search
reads KL on prompts of the calibration split, by which nothing is judged, from runs of the full length: a shorter run
has less KL, and the run with the chosen strength is one of the cells.
"""

import math
from dataclasses import dataclass, field

from components.base.errors import UserError
from components.gates.methods import DIRECT_METHODS, ON_PAIRS
from components.ppo.config import KLConfig
from flows.config.run_config import RunConfig
from flows.reports.run_facts import StageFacts

MOST_RUNS = 4
LARGEST_STEP = math.log(8)
"""The largest step beyond what was tried, in the log of the strength."""

Band = tuple[float, float]
"""Lowest and highest KL, in `ppo.kl.unit`."""


@dataclass
class Trial:
    """A run of the search: its strength, its KL on prompts of the calibration split, and what training took."""

    strength: float
    kl: float
    run: str = ""
    seconds: float = 0.0


@dataclass
class Search:
    """A search for the strength, the option that decides how far a method moves the policy from SFT."""

    option: str
    start: float
    band: Band
    rises: bool = False
    """Whether KL rises with it."""
    most: int | None = None
    """Its largest value, for a whole number from 2; None for any positive number."""
    trials: list[Trial] = field(default_factory=list)

    @classmethod
    def of(cls, config: RunConfig, band: Band | None) -> "Search":
        """Return the search for a config's method. With a fixed β, the strength of PPO's updates is β itself.

        `band` None is the target ± 20 %, within which the adaptive β hardly changes. Raises UserError if training makes
        no evaluations, which measure KL.
        """
        policy, kl = config.policy, config.ppo.kl
        name = "policy" if policy.method in DIRECT_METHODS else "ppo"
        if getattr(config, name).evaluate_every is None:
            raise UserError(f"--level-kl needs evaluations during training, and {name}.evaluate_every is null: set it.")
        band = band or (0.8 * kl.target, 1.2 * kl.target)
        if policy.method in ON_PAIRS:
            return cls("policy.beta", policy.beta, band)
        if policy.method == "best_of_n":  # KL is log n - (n - 1) / n, 1.2 nats for 8, and the cost is n
            return cls("policy.n", policy.n, band, rises=True, most=8)
        if kl.control == "fixed":
            return cls("ppo.kl.coefficient", kl.coefficient, band)
        return cls("ppo.kl.target", float(f"{sum(band) / 2:.3g}"), band, rises=True)

    def setting(self, strength: float) -> str:
        """Return the text that sets a strength, as `--set` takes it."""
        return f"{self.option}={strength:g}"

    def next(self) -> float | None:
        """Return the strength to try next; None if the search is over: in the band, after `MOST_RUNS`, or at a limit.

        In logs of strength and KL it aims at the band's middle, along the secant through the nearest trials on both
        sides, in the inner 80 % between them. While all trials are on one side, it extrapolates: from one trial as
        KL ∝ strength, then along the secant through the outermost two.
        """
        if not self.trials:
            return self.start
        if self.band[0] <= self.trials[-1].kl <= self.band[1] or len(self.trials) >= MOST_RUNS:
            return None
        sign, aim = (1 if self.rises else -1), self._middle
        points = sorted((sign * math.log(trial.strength), _log(trial.kl)) for trial in self.trials)
        below, above = [p for p in points if p[1] < aim], [p for p in points if p[1] >= aim]
        if below and above:
            (x, y), (x_high, y_high) = max(below), min(above)
            step = min(0.9, max(0.1, (aim - y) / (y_high - y))) * (x_high - x)
        else:
            (x, y), (x_other, y_other) = (points[-1], points[0]) if below else (points[0], points[-1])
            slope = (y - y_other) / (x - x_other) if len(points) > 1 else 1.0
            step = (aim - y) / slope if slope > 0 else math.copysign(LARGEST_STEP, aim - y)
            step = max(-LARGEST_STEP, min(LARGEST_STEP, step))
        value = math.exp(sign * (x + step))
        value = float(f"{value:.3g}") if self.most is None else min(self.most, max(2, round(value)))
        return None if any(value == trial.strength for trial in self.trials) else value

    def best(self) -> Trial:
        """Return the trial whose KL is nearest to the band's middle, in logs."""
        # A KL near 0 may be estimated below 0, where the logs are cut off.
        return min(self.trials, key=lambda trial: (abs(_log(trial.kl) - self._middle), -trial.kl))

    def sentence(self) -> str:
        """Return how the search ended, what it tried and what that cost."""
        kl, (low, high) = self.best().kl, self.band
        where = "inside" if low <= kl <= high else "outside"
        tried = ", ".join(f"{trial.strength:g} (KL {trial.kl:.3g})" for trial in self.trials)
        return (
            f"KL {kl:.3g} on calibration prompts, {where} the band {low:.3g} to {high:.3g}; the search tried "
            f"{self.option} {tried} and took {sum(trial.seconds for trial in self.trials):,.0f} s of training"
        )

    @property
    def _middle(self) -> float:
        return math.log(self.band[0] * self.band[1]) / 2


def calibration_kl(policy: StageFacts, kl: KLConfig) -> float | None:
    """Return the published policy's KL, in `kl.unit`, on prompts of the calibration split; None if training evaluated
    none. If the last policy left `kl.band`, return that one's, because the KL of the early policy that is then
    published does not depend on the strength."""
    about = policy.document("metadata.json") or {}
    rows = {row["update"]: row for row in about.get("evaluations", ())}
    last = rows[max(rows)] if rows else {}
    outside = kl.band is not None and last.get(f"{kl.measure}_high", 0.0) > kl.band
    return (last if outside else rows.get(about.get("published_update"), last)).get(kl.measure)


def _log(kl: float) -> float:
    return math.log(max(kl, 1e-9))
