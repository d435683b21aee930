"""A batch, two optimiser steps, against what TRL 1.12.0's PPOTrainer had at the same places (tests/golden/trl_ppo.py).

Where TRL is not to be matched, the tests in `test_trl_differences.py` say what is right instead.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from components.models.config import GenerationConfig
from components.models.folders import frozen
from components.models.runtime import Runtime
from components.models.sampling import Samples
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.experience import Experience, gather_experience
from components.ppo.learner import Learner
from components.ppo.maths import gae, masked_mean, policy_loss, token_rewards, value_loss, whiten
from components.ppo.models import Models, SeparateCritic, frozen_pass
from components.reward.scoring import ScoreScale

GOLDEN = Path(__file__).parents[2] / "golden"
PAD, CAP, BETA, DISCOUNT, LAMBDA, CLIP = 0, 6, 0.1, 1.0, 0.95, 0.2
AS_THEY_ARE = ScoreScale(shift=0, scale=1, missing_eos_score=0, temperature=1, responses=1)

Golden = dict[str, Tensor]


@pytest.fixture(scope="module")
def full() -> Golden:
    """Every response meets the cap."""
    return load_file(GOLDEN / "trl_full.safetensors")


@pytest.fixture(scope="module")
def ended() -> Golden:
    """Six of the eight end early, where TRL puts the score one slot after EOS."""
    return load_file(GOLDEN / "trl_ended.safetensors")


def near(found: Tensor, golden: Tensor) -> bool:
    """Within 1e-5 of the largest value."""
    return found.shape == golden.shape and bool((found - golden).abs().max() <= 1e-5 * golden.abs().max())


def llama(golden: Golden, prefix: str, kind: Any, **options: Any) -> Any:
    model = kind(
        LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, pad_token_id=PAD, eos_token_id=1, bos_token_id=None, **options,
        )
    )  # fmt: skip
    model.load_state_dict({k.removeprefix(f"{prefix}|"): v for k, v in golden.items() if k.startswith(f"{prefix}|")})
    return model.eval()


@pytest.fixture
def ready(full: Golden, runtime: Runtime) -> tuple[Learner, Experience]:
    """Our learner on TRL's weights, and our experience of TRL's responses."""
    reward = {"num_labels": 1}
    models = Models(
        llama(full, "0.policy", LlamaForCausalLM),
        frozen(llama(full, "reference", LlamaForCausalLM)),
        frozen(llama(full, "reward", LlamaForSequenceClassification, **reward)),
        SeparateCritic(llama(full, "0.value", LlamaForSequenceClassification, **reward), AS_THEY_ARE),
        SimpleNamespace(pad_token_id=PAD),
        AS_THEY_ARE,
    )
    options = PpoConfig(
        batch_size=8, minibatch_size=8, micro_batch_size=8, clip_range=CLIP, discount=DISCOUNT, gae_lambda=LAMBDA,
        learning_rate=3e-4, critic={"learning_rate": 1e-3}, updates=1,
        kl={"control": "fixed", "coefficient": BETA}, score={"clip": 1e9, "missing_eos": "keep"},
    )  # fmt: skip
    generation = GenerationConfig(max_prompt_tokens=6, max_new_tokens=CAP, temperature=0.7)
    job = PpoJob(seed=0, runtime=runtime, generation=generation, ppo=options)
    ids = full["0.query_responses"]
    prompt, response = ids[:, :-CAP], ids[:, -CAP:]
    whole = torch.ones_like(response, dtype=torch.bool)
    samples = Samples(prompt, prompt != PAD, response, whole, full["0.logprobs"], torch.zeros(8, dtype=torch.bool))
    return Learner.start(models, job), gather_experience(models, samples, job, BETA)


def test_logprobs_values_scores_advantages_and_returns_are_trls(ready: Any, full: Golden) -> None:
    learner, experience = ready
    found = frozen_pass(learner.models, experience.samples, learner.job)
    assert near(found.policy, full["0.logprobs"])
    assert near(found.reference, full["0.ref_logprobs"])
    assert near(experience.passes.values, full["0.values"])
    assert near(experience.scores, full["0.scores"])
    mask = experience.samples.response_mask
    assert near(token_rewards(found.policy, found.reference, experience.scores, mask, BETA), full["0.rewards"])
    assert near(experience.advantages, full["0.advantages"])
    assert near(experience.returns, full["0.returns"])


@pytest.mark.parametrize("step", [0, 1])
def test_losses_and_gradients_of_each_step_are_trls(ready: Any, full: Golden, step: int) -> None:
    """At the second step the ratios are not 1, and some of the tokens are clipped."""
    learner, experience = ready
    trained = {"policy": learner.models.policy, "value": learner.models.critic.model}
    for name, model in trained.items():
        prefix = f"{step}.{name}|"
        model.load_state_dict({k.removeprefix(prefix): v for k, v in full.items() if k.startswith(prefix)})
    parts = [losses(experience, range(8), False) for losses in learner.passes().values()]
    loss, metrics = sum(part for part, _ in parts), {k: v.value for _, found in parts for k, v in found.items()}
    assert metrics["ppo/policy_loss"] == pytest.approx(full[f"{step}.pg_loss"].item(), rel=1e-5, abs=1e-6)
    assert metrics["ppo/value_loss"] == pytest.approx(full[f"{step}.vf_loss"].item(), rel=1e-5)
    assert loss.item() == pytest.approx(full[f"{step}.loss"].item(), rel=1e-5)
    assert (metrics["ppo/clip_fraction"] > 0.1) == (step == 1)
    loss.backward()
    for name, model in trained.items():
        gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        prefix = f"{step}.{name}.grad|"
        golden = {k.removeprefix(prefix): v for k, v in full.items() if k.startswith(prefix)}
        assert gradients.keys() == golden.keys()
        ours, theirs = (torch.cat([of[k].flatten() for k in sorted(of)]) for of in (gradients, golden))
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def test_on_trls_own_rewards_and_masks_our_formulas_give_its_numbers_where_responses_end_early(ended: Golden) -> None:
    counted, values_counted = ~ended["0.padding_mask"], ~ended["0.padding_mask_p1"]
    assert (counted.sum(1) < CAP).sum() == 6
    advantages, returns = gae(ended["0.rewards"], ended["0.values"], values_counted, DISCOUNT, LAMBDA)
    whitened = whiten(advantages, counted)
    assert near(returns, ended["0.returns"])
    assert near(whitened, ended["0.advantages"])
    for step in (0, 1):
        surrogate = policy_loss(ended[f"{step}.new_logprobs"], ended["0.logprobs"], whitened, counted, CLIP)
        error = value_loss(ended[f"{step}.vpred"], ended["0.values"], returns, values_counted, None)
        policy = masked_mean(surrogate.loss, counted)
        assert policy.item() == pytest.approx(ended[f"{step}.pg_loss"].item(), rel=1e-5, abs=1e-6)
        value = masked_mean(error, values_counted)
        assert value.item() == pytest.approx(ended[f"{step}.vf_loss"].item(), rel=1e-5)


def test_a_reward_one_slot_late_is_seen_here(ended: Golden) -> None:
    """What TRL does with a response that ends early, and we don't: its score falls on the token after EOS."""
    counted = ~ended["0.padding_mask"]
    ours = token_rewards(ended["0.logprobs"], ended["0.ref_logprobs"], ended["0.scores"], counted, BETA)
    last = counted.sum(1) - 1
    early = last < CAP - 1
    rows = torch.arange(8)
    moved = copy.deepcopy(ours)
    moved[rows[early], last[early]] -= ended["0.scores"][early]
    moved[rows[early], last[early] + 1] += ended["0.scores"][early]
    assert near(moved, ended["0.rewards"])
    assert (ours - ended["0.rewards"]).abs().max() > 0.1
