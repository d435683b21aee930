"""Default learning rates, from a model's size and whether an adapter is trained. Importable without torch."""

import math
from typing import Literal, NamedTuple

SMALL, LARGE = 1e6, 1e9
"""Numbers of parameters between which rates follow a power law; outside they are constant."""
LORA = 10.0
"""Factor for an adapter's rate: the best rate of a LoRA adapter is about ten times that of the whole model, over sizes
and tasks (Schulman et al. 2025, "LoRA Without Regret")."""


class Ends(NamedTuple):
    """Peak learning rates of AdamW for whole models of `SMALL` and of `LARGE` parameters."""

    small: float
    large: float


Trained = Literal["sft", "reward", "ppo", "ppo.critic"]
ENDS: dict[Trained, Ends] = {
    "sft": Ends(1e-3, 2e-5),
    "reward": Ends(5e-4, 1e-5),
    "ppo": Ends(3e-4, 1e-6),
    "ppo.critic": Ends(1e-3, 1e-5),
}
"""At `SMALL`, the rates with which the built-in task was developed. At `LARGE`, those usual for 1 to 70 billion
parameters (Touvron et al. 2023, "Llama 2", sections 3.1 to 3.2.3: 2e-5, 1e-5, 1e-6; a critic's 9e-6 in OpenRLHF)."""


def default_rate(trained: Trained, parameters: int, lora: bool = False) -> float:
    """Return a default peak learning rate for a model of `parameters`, to two digits. It is only a starting point.

    small · (n / 1e6)^(log10(large / small) / 3), with n = `parameters` clipped to [1e6, 1e9]; ten times as much for an
    adapter.
    """
    small, large = ENDS[trained]
    share = math.log(min(max(parameters, SMALL), LARGE) / SMALL) / math.log(LARGE / SMALL)
    return float(f"{small * (large / small) ** share * (LORA if lora else 1.0):.2g}")
