"""What is compared with TRL 1.12.0's trainers, in speed and in what is learnt: one config, for both sides.

Sizes and the learning rate are each comparison's own; nothing else differs between them.
"""

from pathlib import Path
from typing import Any, Literal

from components.models.config import GenerationConfig
from components.ppo.config import PpoConfig
from flows.config.run_config import load_config

EPOCHS = 4
"""Passes over each batch, which is one minibatch and one micro-batch: TRL's default."""
BETA = load_config("demo-long").ppo.kl.coefficient
"""The KL coefficient of demo-long, here fixed."""


def ppo_config(
    batch: int, updates: int, learning_rate: float, critic: Literal["separate", "shared"] = "separate"
) -> PpoConfig:
    """Ours: batches of `batch` responses, as many optimiser steps as TRL takes (no epoch is skipped), constant rates,
    a separate critic's that of the policy."""
    return PpoConfig(
        updates=updates, batch_size=batch, minibatch_size=batch, micro_batch_size=batch, epochs=EPOCHS,
        learning_rate=learning_rate, warmup=0, decay="none", stop_epochs_above=None,
        kl={"control": "fixed", "coefficient": BETA}, score={"missing_eos": "subtract"},
        critic={"kind": critic, "learning_rate": learning_rate}, checkpoint_every=updates,
    )  # fmt: skip


def trl_config(config: PpoConfig, generation: GenerationConfig, folder: Path | str, seed: int, dtype: str) -> Any:
    """TRL's `PPOConfig` of `config`, which must come from `ppo_config` with a separate critic.

    The value loss has weight 1, as beside ours: each side's AdamW gives policy and critic steps that don't depend on
    it. What can't be the same: TRL clips no gradient (ours: at norm 1, policy and critic apart), puts a response's
    score one slot after EOS where there is one (so λ counts it one step later, and the state after EOS has a value),
    averages the value loss over that slot too, and divides logits by 1e-7 more than the temperature.
    """
    from trl.experimental.ppo import PPOConfig

    assert config.kl.form == "reward" and config.score.missing_eos == "subtract" and config.decay == "none"
    return PPOConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=dtype == "bfloat16", seed=seed, disable_tqdm=True,
        num_sample_generations=0, save_strategy="no", gradient_checkpointing=False,
        per_device_train_batch_size=config.batch_size, gradient_accumulation_steps=1, num_mini_batches=1,
        local_rollout_forward_batch_size=config.batch_size, num_ppo_epochs=config.epochs,
        total_episodes=config.batch_size * config.updates, response_length=generation.max_new_tokens,
        temperature=generation.temperature, stop_token="eos", missing_eos_penalty=config.score.missing_eos_penalty,
        kl_coef=config.kl.coefficient, kl_estimator="k1", cliprange=config.clip_range, cliprange_value=1e9, vf_coef=1.0,
        gamma=config.discount, lam=config.gae_lambda, whiten_rewards=False,
        learning_rate=config.learning_rate, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=config.beta2,
        adam_epsilon=config.epsilon, weight_decay=config.weight_decay,
    )  # fmt: skip
