"""What sets the KL coefficient β from update to update."""

from dataclasses import dataclass

from components.ppo.config import KLConfig


@dataclass
class KLController:
    """β, fixed or adaptive. Its whole state is `beta` and `holding`."""

    config: KLConfig
    beta: float
    """The coefficient of the next update."""
    holding: bool
    """Adaptive only: KL has not yet reached half the target, and β waits."""

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

    def stops(self, kl: float) -> bool:
        """Whether `kl` is over the hard ceiling."""
        return self.config.stop_above is not None and kl > self.config.stop_above
