"""Choose learning rates that are null by the model's size, before the first key is built."""

from pathlib import Path
from typing import Any

from components.gates.methods import DIRECT_METHODS
from components.models.weights import count_parameters
from components.training.optim import Trained, default_rate
from flows.config.run_config import RunConfig
from flows.data.pretrained import find_base

UNITS = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"))


def with_rates(config: RunConfig, home: Path) -> tuple[RunConfig, list[str]]:
    """Return `config` with each null learning rate replaced by a number, and a line that names the chosen rates.

    A critic that shares the policy's trunk uses the policy's rate, so its own stays null.

    Raises:
        UserError: a rate is null, and the pretrained model that determines the size is missing.
    """
    ppo, reward = config.ppo, config.reward
    group: Trained = "policy" if config.policy.method in DIRECT_METHODS else "ppo"
    policy = getattr(config, group)
    rate_and_lora: dict[Trained, tuple[float | None, bool]] = {
        "sft": (config.sft.learning_rate, False),
        "reward": (reward.learning_rate, reward.lora is not None),
        group: (policy.learning_rate, policy.lora is not None),
    }
    if group == "ppo" and ppo.has_critic and ppo.critic.kind == "separate":
        rate_and_lora["ppo.critic"] = ppo.critic.learning_rate, ppo.lora is not None
    missing = {name: lora for name, (rate, lora) in rate_and_lora.items() if rate is None}
    if not missing:
        return config, []
    base = config.sft.base
    size = config.sft.scratch.parameters if base is None else count_parameters(find_base(base, home), "sft.base")
    rates = {name: default_rate(name, size, lora) for name, lora in missing.items()}
    groups = {name: _with(getattr(config, name), rates.get(name)) for name in ("sft", "reward", "policy", "ppo")}
    groups["ppo"] = groups["ppo"].model_copy(update={"critic": _with(ppo.critic, rates.get("ppo.critic"))})
    power, word = next((unit for unit in UNITS if size >= unit[0]), UNITS[-1])
    chosen = ", ".join(f"{name}.learning_rate {rate:g}" for name, rate in rates.items())
    return config.model_copy(update=groups), [f"chosen for a model of {size / power:.3g} {word} parameters: {chosen}"]


def _with(group: Any, rate: float | None) -> Any:
    return group if rate is None else group.model_copy(update={"learning_rate": rate})
