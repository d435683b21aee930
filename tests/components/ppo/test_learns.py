"""PPO on a task small enough to know the answer: the optimum of reward - beta KL is pi_ref exp(r / beta)."""

import copy
from typing import Any

import pytest
import torch

from components.generation import GenerationConfig
from components.models import build_causal_lm, frozen, train_tokenizer
from components.ppo import models as ppo_models
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.experience import gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Models, SharedCritic
from components.ppo.rollout import sample
from components.reward.scoring import ScoreScale, last_counted
from components.runtime import Runtime
from components.sft.config import ScratchModel

UPDATES = 60


def test_the_policy_approaches_the_exact_optimum(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    beta = 0.5
    tokenizer = train_tokenizer(["one two three four five six."], 100)
    policy = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 16, seed=5)
    table = torch.linspace(-1, 1, len(tokenizer))[
        torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(1))
    ]

    def score(model: Any, ids: torch.Tensor, mask: torch.Tensor, runtime: Runtime) -> torch.Tensor:
        return table[ids[torch.arange(len(ids)), last_counted(mask)]]

    monkeypatch.setattr(ppo_models, "score_tokens", score)
    options = {"updates": UPDATES, "batch_size": 256, "minibatch_size": 256, "micro_batch_size": 256, "epochs": 2}
    config = PpoConfig(**options, learning_rate=5e-3, kl={"control": "fixed", "coefficient": beta},
                       critic={"kind": "shared"}, score={"missing_eos": "keep"})  # fmt: skip
    job = PpoJob(seed=0, runtime=runtime, generation=GenerationConfig(max_new_tokens=1), ppo=config)
    unit = ScoreScale(shift=0.0, scale=1.0, missing_eos_score=-1.0, temperature=1.0, responses=16)
    models = Models(policy, frozen(copy.deepcopy(policy)), None, SharedCritic(16), tokenizer, unit)
    learner, prompt = Learner.start(models, job), tokenizer("one two")["input_ids"]

    def log_policy(model: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].double()
        return logits.index_fill(0, torch.tensor([tokenizer.pad_token_id]), -1e9).log_softmax(-1)

    def distance() -> float:
        found = log_policy(policy)
        return float((found.exp() * (found - optimum)).sum())

    optimum = (log_policy(models.reference) + table.double() / beta).log_softmax(-1)
    at_start, generator = distance(), torch.Generator().manual_seed(2)
    for update in range(UPDATES):
        samples = sample(policy, tokenizer, [prompt] * 256, job.generation, generator)
        learner.update(gather_experience(models, samples, job, beta), update)
    assert at_start > 0.15
    assert distance() < 0.03
