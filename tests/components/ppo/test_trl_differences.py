"""What TRL 1.12.0's PPOTrainer does and is not to be matched: each test says what is right instead, and holds it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.models.config import GenerationConfig
from components.models.sampling import Samples, sample
from components.ppo.experience import Experience, gather_experience
from components.ppo.learner import Learner
from components.ppo.maths import gae, kl_estimates, masked_mean, token_rewards
from components.ppo.models import frozen_pass
from tests.components.ppo.test_learner import with_passes

Load = Callable[..., Any]
ENDS_EARLY = torch.tensor([[True, True, True, False, False], [True, True, True, True, True]])


def ready(load: Load, **options: Any) -> tuple[Learner, Experience]:
    """A learner, and experience of responses that end after 2 to 9 tokens."""
    job, models, samples = load(**{"warmup": 0.0, "decay": "none"} | options)
    lengths = torch.arange(2, 10).unsqueeze(1)
    slots = torch.arange(samples.response_ids.shape[1])
    ids = samples.response_ids.masked_fill(slots == lengths - 1, models.tokenizer.eos_token_id)
    mask = slots < lengths
    ids = ids.masked_fill(~mask, models.tokenizer.pad_token_id)
    cut = Samples(samples.prompt_ids, samples.prompt_mask, ids, mask, samples.logprobs, torch.ones(8, dtype=torch.bool))
    return Learner.start(models, job), gather_experience(models, now(cut, models, job), job, beta=0.1)


def now(samples: Samples, models: Any, job: Any) -> Samples:
    """The same responses with the log-probabilities that the policy gives them."""
    return dataclasses.replace(samples, logprobs=frozen_pass(models, samples, job).policy)


def test_the_score_is_the_eos_tokens_and_no_state_follows_it() -> None:
    """TRL: the score one slot after EOS, and a critic trained on that slot."""
    scores, none = torch.tensor([2.0, 3.0]), torch.zeros(2, 5)
    rewards = token_rewards(none, none, scores, ENDS_EARLY, 0.1)
    assert rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 3]]
    values = torch.full((2, 5), 7.0)
    advantages, returns = gae(rewards, values, ENDS_EARLY, 1.0, 0.95)
    assert advantages[0, 2].item() == 2 - 7, "after EOS nothing is bootstrapped"
    assert returns[0, 3:].tolist() == advantages[0, 3:].tolist() == [0, 0]


def test_eos_is_trained_like_any_other_token(load: Load) -> None:
    """TRL with pad = eos: EOS is masked, and so is every EOS in a prompt."""
    learner, experience = ready(load, epochs=1, minibatch_size=8, micro_batch_size=8)
    samples, models, job = experience.samples, learner.models, learner.job
    rows, at = torch.arange(8), samples.response_mask.sum(1) - 1
    assert (samples.response_ids[rows, at] == models.tokenizer.eos_token_id).all()
    push = torch.zeros_like(experience.advantages)
    push[rows, at] = 1.0
    learner.update(dataclasses.replace(experience, advantages=push), 0)
    assert (now(samples, models, job).logprobs[rows, at] > experience.logprobs[rows, at]).all()


def test_an_end_of_turn_inside_a_prompt_is_read_not_masked(language: Any) -> None:
    """TRL takes whatever equals pad for padding, and its prompts hold EOS at each turn where pad = eos."""
    eos = language.tokenizer.eos_token_id
    prompt = language.prompts[0]
    assert eos in prompt and language.tokenizer.pad_token_id not in prompt
    samples = sample(
        language.model, language.tokenizer, [prompt, language.prompts[1]],
        GenerationConfig(max_prompt_tokens=64, max_new_tokens=3), 0,
    )  # fmt: skip
    assert samples.prompt_mask[0].sum() == len(prompt)


def test_gradients_are_clipped_at_max_grad_norm(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL takes the option and never clips."""
    learner, experience = ready(load, epochs=1, minibatch_size=8, max_grad_norm=1e-3)
    norms = []
    for name, model in learner.models.trained().items():
        optimizer = learner.optimizers[name]
        step = optimizer.step

        def watched(model: Any = model, step: Any = step) -> None:
            norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())
            step()

        monkeypatch.setattr(optimizer, "step", watched)
    metrics = learner.update(experience, 0)
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3)
    assert metrics["ppo/grad_norm"] > 1e-2, "what is reported is the norm before clipping"


@pytest.mark.parametrize(("epochs", "minibatch_size", "steps"), [(1, 8, 1), (1, 2, 4), (3, 4, 6)])
def test_every_minibatch_is_an_optimiser_step(load: Load, epochs: int, minibatch_size: int, steps: int) -> None:
    """TRL's accelerator swallows steps where minibatches and accumulation don't fit each other."""
    learner, experience = ready(
        load, epochs=epochs, minibatch_size=minibatch_size, micro_batch_size=1, stop_epochs_above=None
    )
    counted = learner.update(experience, 0)["ppo/optimizer_steps"]
    states = [s["step"].item() for s in learner.optimizers["policy"].state.values()]
    assert counted == steps and set(states) == {steps}


def test_statistics_are_of_the_tokens_that_count_not_diluted_by_padding(load: Load) -> None:
    """TRL: the approximate KL is a mean over all slots, and its ratio counts 1 for each padded one."""
    learner, experience = ready(load, epochs=1, minibatch_size=8, micro_batch_size=8)
    mask = experience.samples.response_mask
    moved = with_passes(experience, policy=(experience.logprobs - 0.3).masked_fill(~mask, 5.0))
    _, metrics = learner.passes()["policy"](moved, range(8), False)
    new = torch.zeros(1, 1)
    expected = kl_estimates(new - 0.3, new, torch.ones(1, 1, dtype=torch.bool)).k3.item()
    assert metrics["ppo/approx_kl"].value == pytest.approx(expected, rel=1e-3)
    assert metrics["ppo/ratio_max"].value == pytest.approx(torch.tensor(0.3).exp().item(), rel=1e-3)


def test_a_loss_is_a_mean_over_tokens_not_over_micro_batches_means(load: Load) -> None:
    """TRL averages the means of its micro-batches: a token in a short one weighs more."""
    found = []
    for size in (8, 1):
        learner, experience = ready(load, epochs=1, minibatch_size=8, micro_batch_size=size)
        found.append(learner.update(experience, 0))
    for name in ("ppo/policy_loss", "ppo/value_loss", "ppo/grad_norm", "ppo/critic_grad_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4, abs=1e-6)


def test_the_reward_holds_k1_and_nothing_else_of_kl() -> None:
    """TRL offers k3 there: as a reward its expectation has another gradient than KL's."""
    logprobs, reference = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.5, -1.0, -0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards = token_rewards(logprobs, reference, torch.zeros(1), mask, 0.5)
    assert rewards.tolist() == [[-0.25, 0.5, 0.0]]
    assert masked_mean(rewards, mask).item() == pytest.approx(-0.5 * kl_estimates(logprobs, reference, mask).k1.mean())


def test_nothing_is_trained_past_eos(load: Load) -> None:
    """TRL without a stop token trains on what was sampled after EOS."""
    learner, experience = ready(load, epochs=1, minibatch_size=8, micro_batch_size=8)
    samples, eos = experience.samples, learner.models.tokenizer.eos_token_id

    def losses(batch: Experience) -> list[float]:
        return [loss(batch, range(8), False)[0].item() for loss in learner.passes().values()]

    other = samples.response_ids.masked_fill(~samples.response_mask, eos)
    changed = dataclasses.replace(experience, samples=dataclasses.replace(samples, response_ids=other))
    assert len(losses(experience)) == 2 and losses(changed) == losses(experience)
