"""The four models of PPO: policy, reference, reward model and critic, and how each is asked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.adapters import AdapterView, Backbone, load_adapter, tensors_digest
from components.adapters_config import AdapterConfig
from components.logprobs import TokenStats, last_hidden, token_stats
from components.models import autocast, frozen, load_causal_lm, load_reward_model
from components.ppo.config import PpoJob
from components.ppo.rollout import Samples
from components.reward.scoring import ScoreScale, score_tokens
from components.runtime import Runtime
from components.training import torch_seed


class SeparateCritic(nn.Module):
    """A value function of its own, started from the reward model, in the unit of the scaled scores."""

    def __init__(self, model: Any, scale: ScoreScale) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, ids: Tensor, mask: Tensor, counts: Tensor, runtime: Runtime) -> Tensor:
        """Values (K,) of the states in which the tokens where `counts` (N, L) is True were chosen."""
        predicts = torch.zeros_like(counts)
        predicts[:, :-1] = counts[:, 1:]
        with autocast(runtime):
            hidden = last_hidden(self.model, ids, mask)[predicts]
        return self.scale(self.model.score(hidden.float()).squeeze(-1))


class SharedCritic(nn.Linear):
    """A linear value head on the policy's last hidden states; starts at 0, the mean scaled score of SFT responses."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


@dataclass
class Models:
    """What PPO trains (`policy`, `critic`) and what it holds still (`reference`, `reward_model`)."""

    policy: Any
    reference: Any
    reward_model: Any
    critic: SeparateCritic | SharedCritic
    tokenizer: Any
    scale: ScoreScale

    @classmethod
    def load(cls, job: PpoJob, inputs: Mapping[str, Path]) -> "Models":
        """Policy and reference from the SFT artifact, reward model (and a separate critic) from the reward artifact.

        Raises:
            UserError: `ppo.lora` is set, and the reward artifact holds no adapter of this SFT model.
        """
        if job.ppo.lora is not None:
            return cls._on_one_backbone(job, job.ppo.lora, inputs)
        policy, tokenizer = load_causal_lm(inputs["sft"], job.runtime)
        reference, _ = load_causal_lm(inputs["sft"], job.runtime)
        reward_model, _ = load_reward_model(inputs["reward"], job.runtime)
        scale = ScoreScale.read(inputs["reward"])
        critic: SeparateCritic | SharedCritic
        if job.ppo.critic.kind == "separate":
            critic = SeparateCritic(load_reward_model(inputs["reward"], job.runtime)[0], scale)
        else:
            critic = SharedCritic(policy.config.hidden_size).to(job.runtime.device)
        return cls(policy, frozen(reference), frozen(reward_model), critic, tokenizer, scale)

    @classmethod
    def _on_one_backbone(cls, job: PpoJob, config: AdapterConfig, inputs: Mapping[str, Path]) -> "Models":
        """The same as views of the SFT model, which is held once: the reference is it without an adapter."""
        model, tokenizer = load_causal_lm(inputs["sft"], job.runtime)
        backbone, adapter, scale = Backbone(model), inputs["reward"] / "adapter", ScoreScale.read(inputs["reward"])
        reward_model = load_adapter(backbone, "reward", adapter)
        policy = backbone.add("policy", config, torch_seed(job.seed, "ppo", "adapter"))
        critic: SeparateCritic | SharedCritic
        if job.ppo.critic.kind == "separate":
            critic = SeparateCritic(load_adapter(backbone, "critic", adapter), scale)
        else:
            critic = SharedCritic(model.config.hidden_size).to(job.runtime.device)
        return cls(policy, AdapterView(backbone), frozen(reward_model), critic, tokenizer, scale)

    def policy_and_values(self, batch: "Packed", runtime: Runtime, temperature: float) -> tuple[TokenStats, Tensor]:
        """The policy's token statistics and the critic's values (K,) on the training path."""
        stats = token_stats(self.policy, batch.ids, batch.mask, batch.counts, runtime, temperature)
        if isinstance(self.critic, SharedCritic):
            return stats, self.critic(stats.hidden).squeeze(-1)
        return stats, self.critic(batch.ids, batch.mask, batch.counts, runtime)


@dataclass(frozen=True)
class Packed:
    """Sequences moved to the left and cut to the longest: what the training path computes on.

    Response tokens keep their row-major order, so flat values (K,) fit `response_mask` of the same rows.
    """

    ids: Tensor
    mask: Tensor
    counts: Tensor

    @classmethod
    def of(cls, samples: Samples, rows: Tensor) -> "Packed":
        """Rows `rows` of `samples`."""
        ids, mask, counts = samples.ids[rows], samples.mask[rows], samples.counts[rows]
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        width = int(mask.sum(1).max())
        return cls(*(x.gather(1, order)[:, :width] for x in (ids, mask, counts)))


def micro_batches(samples: Samples, size: int) -> Iterator[Tensor]:
    """Indices of all rows of `samples` in runs of `size`, sorted by length so that little is padding."""
    yield from samples.mask.sum(1).argsort(stable=True).split(size)


@torch.no_grad()
def frozen_pass(models: Models, samples: Samples, job: PpoJob) -> dict[str, Tensor]:
    """All that is fixed before the first update of a batch, on the training path.

    Returns:
        (B, T): `policy`, `policy_at_1`, `reference`, `reference_at_1` log-probabilities, `entropy`, `values`;
        (B,): `raw_scores`.
    """
    mask = samples.response_mask
    names = ("policy", "policy_at_1", "reference", "reference_at_1", "entropy", "values")
    out = {name: torch.zeros(mask.shape, device=mask.device) for name in names}
    raw = torch.zeros(len(mask), device=mask.device)
    temperature = job.generation.temperature
    for rows in micro_batches(samples, job.ppo.micro_batch_size):
        batch = Packed.of(samples, rows)
        policy, values = models.policy_and_values(batch, job.runtime, temperature)
        reference = policy  # where SFT is judged beside the policy, they are one model
        if models.policy is not models.reference:
            reference = token_stats(models.reference, batch.ids, batch.mask, batch.counts, job.runtime, temperature)
        raw[rows] = score_tokens(models.reward_model, batch.ids, batch.mask, job.runtime)
        found = (
            policy.logprobs,
            policy.logprobs_at_1,
            reference.logprobs,
            reference.logprobs_at_1,
            policy.entropy,
            values,
        )
        for name, flat in zip(names, found, strict=True):
            out[name][rows] = scatter(flat, mask[rows])
    return out | {"raw_scores": raw}


def scatter(flat: Tensor, mask: Tensor) -> Tensor:
    """Flat values (K,) back to (B, T), 0 where the mask is False."""
    return torch.zeros(mask.shape, device=flat.device, dtype=flat.dtype).masked_scatter(mask, flat)


def weights_digest(model: Any) -> str:
    """sha256 of the bytes of all its weights, a shared backbone's among them: what a frozen model must keep."""
    return tensors_digest(model.weights() if isinstance(model, AdapterView) else model.named_parameters())
