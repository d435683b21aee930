"""What sets the KL coefficient β from update to update."""

import math
from dataclasses import asdict, dataclass

from components.ppo.config import KLConfig

WINDOW = 5
"""Batches of the window that the ceiling is judged over."""
FAR = 3.0
"""A batch whose interval lies above this many ceilings needs no window."""


@dataclass
class KLController:
    """β, fixed or adaptive, and the ceiling."""

    config: KLConfig
    coefficient: float
    """β as far as the horizon's moves made it; all of it where nothing is proportional."""
    holding: bool
    """Adaptive only: KL has not yet reached half the target, and the coefficient waits."""
    error: float = -1.0
    """KL / target - 1, the mean of the last batch's and of what stood here before; a policy starts at KL 0."""
    above: int = 0
    """How many batches in a row, the last one included, were above the ceiling."""

    @classmethod
    def start(cls, config: KLConfig) -> "KLController":
        """The controller before the first update."""
        return cls(config, config.coefficient, config.control == "adaptive")

    @property
    def beta(self) -> float:
        """The coefficient of the next update."""
        gain = self.config.proportional if self.config.control == "adaptive" else 0.0
        return self.coefficient * math.exp(gain * min(max(self.error, -1.0), 1.0))

    def update(self, kl: float) -> None:
        """Move β after an update whose mean KL was `kl` (in the config's unit).

        With e = KL / target - 1 and the horizon in batches (Ziegler et al. 2019, section 2.2),

            c ← c (1 + clip(e, ±0.2) / horizon),    β = c exp(proportional clip(m, ±1)),    m ← (m + e) / 2.

        c holds until KL first reaches half the target, since a policy that starts at the reference has KL 0, and would
        only be pushed off its tether. By default `proportional` is 0 and β is c. Where KL follows β late, c alone
        swings around the target, the more the smaller the horizon; the second factor damps that (Stooke et al. 2020,
        arXiv 2007.03964, section 5: the proportional part of a PID controller of the multiplier; here of its logarithm,
        and of a mean in which each batch weighs half of the one after it, since single batches swing).
        """
        if self.config.control == "fixed":
            return
        error = kl / self.config.target - 1
        self.error = (self.error + error) / 2
        self.holding = self.holding and kl < self.config.target / 2
        if not self.holding:
            self.coefficient *= 1 + min(max(error, -0.2), 0.2) / self.config.horizon

    def stops(self, kl: float, low: float) -> bool:
        """Count a batch with mean KL `kl`, whose interval begins at `low`; whether the run stops (unit of the config).

        Single batches swing (2.57, 5.63, 1.63 in a healthy demo), so the ceiling is judged over the last `WINDOW` = 5
        batches. The lower end of their median's interval is the smallest of them: if the median is at the ceiling or
        below, all five are above it with probability 2^-5 = 3.1 % at most, whatever the tails and the trend (the sign
        test; a t interval would take a runaway's own growth for noise). The run stops where that lower end is above the
        ceiling. So a policy that stays above it is stopped at its fifth update there. One far beyond is stopped at
        once: where a single batch's interval over its prompts lies above `FAR` = 3 ceilings.
        """
        ceiling = self.config.stop_above
        if ceiling is None:
            return False
        self.above = self.above + 1 if kl > ceiling else 0
        return self.above >= WINDOW or low > FAR * ceiling

    def state(self) -> dict[str, float]:
        """All that it remembers, for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "config"}
