"""An update moves the policy where the advantages point, the same whatever the micro-batch, and never into NaN."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.base.errors import CheckFailed
from components.models.config import GenerationConfig
from components.ppo.experience import Experience, gather_experience
from components.ppo.learner import Learner
from components.ppo.models import weights_digest
from components.ppo.objective import Forward
from components.training.terms import Term

Load = Callable[..., Any]


def ready(load: Load, **options: Any) -> tuple[Learner, Experience]:
    job, models, samples = load(**{"warmup": 0.0, "decay": "none"} | options)
    experience = gather_experience(models, samples, job, beta=0.1)
    return Learner.start(models, job), experience


def with_passes(experience: Experience, **changes: torch.Tensor | None) -> Experience:
    """The same, with other tensors of the frozen pass."""
    return dataclasses.replace(experience, passes=experience.passes._replace(**changes))


def repeatable(experience: Experience) -> Experience:
    """The same, without what the sampler saw: the policy may have left it."""
    return dataclasses.replace(experience, samples=dataclasses.replace(experience.samples, stats=None))


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_the_first_step_has_ratio_1_and_clips_nothing(load: Load, kind: str) -> None:
    learner, experience = ready(load, epochs=1, minibatch_size=8, micro_batch_size=4, critic={"kind": kind})
    metrics = learner.update(experience, 0)
    assert metrics["ppo/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ppo/clip_fraction"] == 0 and abs(metrics["ppo/approx_kl"]) < 1e-6
    assert metrics["ppo/optimizer_steps"] == 1
    assert metrics["ppo/grad_norm"] > 0 and metrics["ppo/critic_grad_norm"] > 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_tokens_of_positive_advantage_become_likelier_and_of_negative_less(load: Load, sign: float) -> None:
    learner, experience = ready(load, epochs=2, learning_rate=1e-3)
    mask = experience.samples.response_mask
    push = sign * torch.ones_like(experience.advantages).masked_fill(~mask, 0)
    learner.update(dataclasses.replace(experience, advantages=push), 0)
    found = gather(learner, experience)
    assert ((found - experience.logprobs)[mask].mean() * sign).item() > 1e-3


def gather(learner: Learner, experience: Experience) -> torch.Tensor:
    from components.ppo.models import frozen_pass

    return frozen_pass(learner.models, repeatable(experience).samples, learner.job).policy


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_micro_batches_change_nothing_but_memory(load: Load, kind: str) -> None:
    weights = []
    for micro in (8, 1):
        learner, experience = ready(load, epochs=1, minibatch_size=8, micro_batch_size=micro, critic={"kind": kind},
                                    epsilon=1e-3)  # fmt: skip
        learner.update(experience, 0)
        weights.append(torch.cat([p.detach().flatten() for p in learner.models.policy.parameters()]))
    assert torch.allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_values_are_clipped_the_same_whatever_the_micro_batch(load: Load, kind: str) -> None:
    losses: dict[Any, list[float]] = {}
    for clip, micro in itertools.product((None, 0.2), (8, 2, 1)):
        critic = {"kind": kind, "learning_rate": 1e-2, "clip_range": clip}
        learner, experience = ready(load, epochs=4, minibatch_size=8, micro_batch_size=micro, critic=critic,
                                    epsilon=1e-3, learning_rate=1e-2, stop_epochs_above=None)  # fmt: skip
        losses.setdefault(clip, []).append(learner.update(experience, 0)["ppo/value_loss"])
    assert losses[0.2] == pytest.approx([losses[0.2][0]] * 3, rel=2e-5)
    assert losses[0.2][0] > 1.02 * losses[None][0], "clipping must hold values back for this to test anything"


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_gradient_checkpointing_keeps_less_and_ends_with_the_same_bytes(load: Load, kind: str) -> None:
    weights, kept = [], []
    for on in (False, True):
        learner, experience = ready(load, epochs=2, critic={"kind": kind}, gradient_checkpointing=on)
        saved: list[int] = []

        def count(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            learner.update(experience, 0)
        kept.append(sum(saved))
        weights.append([weights_digest(m) for m in learner.models.trained().values()])
        assert not any(getattr(m, "gradient_checkpointing", False) for m in learner.models.policy.modules())
    assert weights[0] == weights[1]
    assert kept[1] < 0.7 * kept[0]


def test_an_update_leaves_reference_and_reward_model_alone(load: Load) -> None:
    learner, experience = ready(load)
    models = learner.models
    before = [weights_digest(m) for m in (models.reference, models.reward_model, models.policy, models.critic)]
    learner.update(experience, 0)
    after = [weights_digest(m) for m in (models.reference, models.reward_model, models.policy, models.critic)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, False]


def test_epochs_stop_once_the_policy_has_left_the_old_one(load: Load) -> None:
    learner, experience = ready(load, epochs=4, minibatch_size=4, learning_rate=0.05, stop_epochs_above=0.01)
    stopped = learner.update(experience, 0)["ppo/optimizer_steps"]
    free, again = ready(load, epochs=4, minibatch_size=4, learning_rate=0.05, stop_epochs_above=None)
    assert stopped < free.update(again, 0)["ppo/optimizer_steps"] == 8


@pytest.mark.parametrize("what", ["advantages", "returns"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(load: Load, what: str, value: float) -> None:
    learner, experience = ready(load)
    broken = dataclasses.replace(experience, **{what: torch.full_like(experience.advantages, value)})
    with pytest.raises(CheckFailed, match="the loss is"):
        learner.update(broken, 0)


def test_what_the_sampler_kept_must_be_the_training_paths_at_the_first_step(load: Load) -> None:
    learner, experience = ready(load)
    assert learner.update(experience, 0)["ppo/sampler_drift"] <= 1e-4
    learner, experience = ready(load)
    before = weights_digest(learner.models.policy)
    mask = experience.samples.response_mask
    off = experience.logprobs + 2e-4 * (mask.cumsum(0) == 1) * (mask.cumsum(1) == 1)  # the first token of the batch
    with pytest.raises(CheckFailed, match="sampler and the training path disagree"):
        learner.update(with_passes(experience, policy=off + 2e-4 * mask), 0)
    assert weights_digest(learner.models.policy) == before
    metrics = learner.update(with_passes(repeatable(experience), policy=off), 0)
    assert "ppo/sampler_drift" not in metrics, "that was judged when the batch was scored"


def test_a_gradient_that_is_not_finite_stops_the_run_before_its_step(load: Load) -> None:
    learner, experience = ready(load)
    before = weights_digest(learner.models.policy)
    parameter = next(learner.models.policy.parameters())
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(CheckFailed, match=r"policy.*gradient's norm"):
        learner.update(experience, 0)
    assert weights_digest(learner.models.policy) == before


def test_the_critic_fits_the_returns_at_its_own_rate(load: Load) -> None:
    learner, experience = ready(load, critic={"learning_rate": 1e-2}, learning_rate=1e-4, stop_epochs_above=None)
    again = repeatable(experience)
    losses = [learner.update(again, 0)["ppo/value_loss"] for _ in range(15)]
    assert losses[-1] < losses[0] / 2
    rates = [learner.optimizers[name].param_groups[0]["lr"] for name in ("policy", "critic")]
    assert rates == pytest.approx([1e-4, 1e-2])


def test_the_entropy_bonus_widens_the_policy(load: Load) -> None:
    entropies = []
    for coefficient in (0.0, 1.0):
        learner, experience = ready(load, entropy_coefficient=coefficient, learning_rate=3e-3, stop_epochs_above=None)
        still = dataclasses.replace(repeatable(experience), advantages=torch.zeros_like(experience.advantages))
        for _ in range(4):
            learner.update(still, 0)
        from components.ppo.models import frozen_pass

        found = frozen_pass(learner.models, still.samples, learner.job).entropy
        entropies.append(found[experience.samples.response_mask].mean().item())
    assert entropies[1] > entropies[0] + 0.01


def test_the_rate_warms_up_and_decays(load: Load) -> None:
    learner, _ = ready(load, updates=10, warmup=0.2, decay="linear", learning_rate=1e-3)
    rates = [learner.set_rates(u) for u in range(10)]
    assert rates[:3] == pytest.approx([5e-4, 1e-3, 1e-3]) and rates[-1] == pytest.approx(1e-3 / 8)
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))


def test_explained_variance_is_of_the_values_before_the_update(load: Load) -> None:
    learner, experience = ready(load)
    perfect = with_passes(experience, values=copy.deepcopy(experience.returns))
    assert learner.update(perfect, 0)["ppo/explained_variance"] == pytest.approx(1)


def test_a_further_loss_term_adds_its_gradient_and_its_metric(load: Load) -> None:
    """A term that makes every sampled token likelier, beside the policy loss of advantages that are 0."""

    def likelihood_term(forward: Forward) -> Term:
        assert forward.logprobs is not None
        return forward.term("ppo/likelihood_loss", -forward.logprobs, coefficient=0.5)

    found = {}
    for name, terms in (("without", []), ("with", [likelihood_term])):
        learner, experience = ready(load, epochs=1, minibatch_size=8, micro_batch_size=4, max_grad_norm=1e9)
        learner.terms = [*learner.terms, *terms]
        still = dataclasses.replace(experience, advantages=torch.zeros_like(experience.advantages))
        found[name] = learner.update(still, 0), gather(learner, experience)
    mask = experience.samples.response_mask
    metrics = found["with"][0]
    assert metrics["ppo/likelihood_loss"] == pytest.approx(-experience.logprobs[mask].mean().item(), rel=1e-5)
    assert metrics.keys() - found["without"][0].keys() == {"ppo/likelihood_loss"}
    assert found["without"][0]["ppo/grad_norm"] == 0 < metrics["ppo/grad_norm"]
    assert (found["with"][1] - found["without"][1])[mask].mean() > 1e-4


PAIRS: dict[str, Any] = {"advantage": "rloo", "group_size": 2, "epochs": 1, "minibatch_size": 8, "learning_rate": 1e-3}


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_online_dpo_is_the_loss_of_the_responses_sums_in_any_micro_batch(load: Load, labels: str) -> None:
    """Against -[p log σ(β d) + (1 - p) log σ(-β d)] of each pair, at weights that have left the reference."""
    for micro in (8, 4, 2):
        job, models, samples = load(**PAIRS, pair_labels=labels, micro_batch_size=micro)
        models.reference.model.norm.weight.add_(0.2)
        experience = gather_experience(models, samples, job, beta=0.1)
        learner = Learner.start(models, job)
        ratios = (experience.logprobs - experience.passes.reference).masked_fill(~samples.response_mask, 0).sum(1)
        expected = []
        for (first, second), (s, other) in zip(
            ratios.double().view(4, 2).tolist(), experience.scores.double().view(4, 2).tolist(), strict=True
        ):
            p = 1 / (1 + math.exp(other - s)) if labels == "soft" else (1 + (s > other) - (s < other)) / 2
            d = 0.1 * (first - second)
            expected.append(p * math.log1p(math.exp(-d)) + (1 - p) * math.log1p(math.exp(d)))
        metrics = learner.update(experience, 0)
        assert metrics["ppo/policy_loss"] == pytest.approx(sum(expected) / 4, rel=1e-5)
        assert metrics["ppo/pair_margin"] == pytest.approx((ratios[::2] - ratios[1::2]).abs().mean().item(), rel=1e-4)
        assert metrics["ppo/approx_kl"] < 1e-6 and metrics["ppo/grad_norm"] > 0


def test_online_dpos_entropy_bonus_is_the_same_in_any_micro_batch(load: Load) -> None:
    norms = []
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=40)  # some responses end before it
    options = PAIRS | {"pair_labels": "soft", "entropy_coefficient": 20.0, "generation": generation}
    for micro in (8, 4, 2):
        job, models, samples = load(**options, micro_batch_size=micro)
        assert len(set(samples.response_lengths)) > 1
        learner = Learner.start(models, job)
        norms.append(learner.update(gather_experience(models, samples, job, beta=0.1), 0)["ppo/grad_norm"])
    assert norms == pytest.approx(3 * norms[:1], rel=1e-4)


def test_online_dpo_raises_the_better_response_of_a_pair(load: Load) -> None:
    job, models, samples = load(**PAIRS | {"epochs": 3, "pair_labels": "hard"})
    experience = gather_experience(models, samples, job, beta=0.1)
    scores = torch.tensor([1.0, -1.0] * 4)
    learner = Learner.start(models, job)
    learner.update(dataclasses.replace(experience, scores=scores), 0)
    moved = (gather(learner, experience) - experience.logprobs).sum(1).view(4, 2)
    assert (moved[:, 0] > moved[:, 1]).all()
