"""What sets the KL coefficient β from update to update."""

from dataclasses import dataclass

from components.ppo.config import KLConfig

WINDOW = 5
"""Batches of the window that the ceiling is judged over."""
FAR = 3.0
"""A batch whose interval lies above this many ceilings needs no window."""


@dataclass
class KLController:
    """β, fixed or adaptive, and the ceiling."""

    config: KLConfig
    beta: float
    """The coefficient of the next update."""
    holding: bool
    """Adaptive only: KL has not yet reached half the target, and β waits."""
    above: int = 0
    """How many batches in a row, the last one included, were above the ceiling."""

    @classmethod
    def start(cls, config: KLConfig) -> "KLController":
        """The controller before the first update."""
        return cls(config, config.coefficient, config.control == "adaptive")

    def update(self, kl: float) -> None:
        """Move β after an update whose mean KL was `kl` (in the config's unit).

        β ← β (1 + e / horizon) with e = clip(KL / target - 1, ±0.2) (Ziegler et al. 2019, section 2.2, with the horizon
        in batches). β holds until KL first reaches half the target, since a policy that starts at the reference has KL
        0, and would only be pushed off its tether.
        """
        if self.config.control == "fixed":
            return
        self.holding = self.holding and kl < self.config.target / 2
        if not self.holding:
            error = min(max(kl / self.config.target - 1, -0.2), 0.2)
            self.beta *= 1 + error / self.config.horizon

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
        return {"beta": self.beta, "holding": self.holding, "above": self.above}
