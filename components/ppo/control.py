"""The tether: the controller of the KL coefficient β, the limits on KL, and the reference that is refreshed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from components.ppo.config import KLConfig, PpoConfig
from components.training.updates import Observer, Stateful, Update

WINDOW = 5
"""Number of batches in the window over which the ceiling is judged."""
FAR = 3.0
"""A batch whose interval lies above this many times the ceiling stops the run at once."""
OUTSIDE = 2
"""The run stops after this many batches in a row whose KL is certainly above the band."""


@dataclass
class KLController(Stateful):
    """A fixed or adaptive β."""

    config: KLConfig
    coefficient: float
    """c in the formula of `update`; equal to β if `proportional` is 0."""
    holding: bool
    """Adaptive only: KL has not yet reached half the target, so the coefficient stays."""
    error: float = -1.0
    """m in the formula of `update`, a moving average of KL / target - 1; -1 at the start, where KL is 0."""
    memory = ("coefficient", "holding", "error")

    @classmethod
    def start(cls, config: KLConfig) -> "KLController":
        """Return the controller before the first update."""
        return cls(config, config.coefficient, config.control == "adaptive")

    @property
    def beta(self) -> float:
        """Return β of the next update."""
        gain = self.config.proportional if self.config.control == "adaptive" else 0.0
        return self.coefficient * math.exp(gain * min(max(self.error, -1.0), 1.0))

    def update(self, kl: float) -> None:
        """Move β after an update whose mean KL was `kl` (in the config's unit).

        With e = KL / target - 1 and the horizon in batches (Ziegler et al. 2019, section 2.2),

            c ← c (1 + clip(e, ±0.2) / horizon),    β = c exp(proportional clip(m, ±1)),    m ← (m + e) / 2.

        c stays until KL first reaches half the target: a policy that starts at the reference has KL 0, and c would fall
        all that time. By default `proportional` is 0 and β is c. If KL follows β with a delay, c alone makes KL
        oscillate around the target, more so with a smaller horizon. The second factor damps this (Stooke et al. 2020,
        arXiv 2007.03964, section 5: the proportional part of a PID controller of the multiplier). Here it acts on log β
        and on a moving average in which each batch weighs half as much as the next, since single batches are noisy.
        """
        if self.config.control == "fixed":
            return
        error = kl / self.config.target - 1
        self.error = (self.error + error) / 2
        self.holding = self.holding and kl < self.config.target / 2
        if not self.holding:
            self.coefficient *= 1 + min(max(error, -0.2), 0.2) / self.config.horizon


@dataclass
class KLLimits(Observer[Update]):
    """Stops a training whose KL is above its ceiling, or certainly above its band."""

    config: PpoConfig
    prefix: str = "ppo/"
    """What the names of KL among an update's metrics begin with. An update without them is not judged."""
    above: int = 0
    """How many of the latest batches in a row were above the ceiling."""
    outside: int = 0
    """How many of the latest batches in a row had a KL certainly above the band."""
    memory = ("above", "outside")

    def on_update(self, update: Update) -> Update:
        """Stop the training if KL is too high."""
        name = f"{self.prefix}{self.config.kl.measure}"
        if name not in update.metrics:
            return update
        kl, low = update.metrics[name], update.metrics.get(f"{name}_low", -math.inf)
        if self.is_above_ceiling(kl, low):
            update = update.with_stop(f"KL ({kl:.3g}) is above ppo.kl.ceiling ({self.config.kl.ceiling:g})")
        if self.is_above_band(low):
            update = update.with_stop(f"KL (at least {low:.3g}) is above ppo.kl.band ({self.config.kl.band:g})")
        return update

    def is_above_ceiling(self, kl: float, low: float) -> bool:
        """Count a batch with mean KL `kl` and lower interval end `low`, in the config's unit; return whether to stop.

        Single batches are noisy (2.57, 5.63, 1.63 in a healthy demo), so the run stops only if all of the last
        `WINDOW` = 5 batches are above the ceiling. This is a sign test of each window: if the median KL is at most the
        ceiling, independent batches are all above it with probability at most 2^-5 = 3.1 %, whatever the distribution.
        Over a whole run that adds up: KL with its median at the ceiling is stopped within 60 updates in 62 % of runs.
        So the ceiling belongs well above the target (see `KLConfig.ceiling`). A t interval would count the growth of
        a diverging KL as noise. A policy that stays above the ceiling is stopped at its fifth update there. A policy
        far above it is stopped at once, if one batch's `low` is above `FAR` = 3 times the ceiling.
        """
        ceiling = self.config.kl.ceiling
        if ceiling is None:
            return False
        self.above = self.above + 1 if kl > ceiling else 0
        return self.above >= WINDOW or low > FAR * ceiling

    def is_above_band(self, low: float) -> bool:
        """Count a batch whose KL interval begins at `low` (in `kl.unit`); return whether KL has certainly left the
        band.

        By chance the lower end of a 95 % interval is above the true mean in 1 batch of 40, and in two batches in a row
        in 1 of 1,600.
        """
        band = self.config.kl.band
        self.outside = self.outside + 1 if band is not None and low > band else 0
        return self.outside >= OUTSIDE


class ReferenceRefresh(Observer[Update]):
    """Replaces the reference of the KL penalty by the policy, every `every` updates."""

    def __init__(self, every: int, reference: nn.Module, refresh: Callable[[], None]) -> None:
        self._every, self._refresh = every, refresh
        self.modules = {"reference": reference}

    def on_update(self, update: Update) -> Update:
        """Refresh the reference if it is time."""
        if update.number % self._every == 0:
            self._refresh()
        return update
