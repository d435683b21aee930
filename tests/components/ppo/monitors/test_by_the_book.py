"""A batch is computed again by loops: healthy batches pass, and each check fails by name on a fault of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from components.base.errors import CheckFailed
from components.base.jsonl import Message
from components.data.tables.published import read_split
from components.gates.self_checks import SelfChecks
from components.models.batching import encode_prompt
from components.models.sampling import sample
from components.ppo import experience as experience_module
from components.ppo import learner as learner_module
from components.ppo import maths, objective
from components.ppo.experience import Experience, gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Packed
from components.ppo.monitors import by_the_book
from components.ppo.monitors.by_the_book import UpdateChecks, check_batch, check_gradient, is_judged

BATCH = ["ppo.prompts", "ppo.endings", "ppo.scores", "ppo.state", "ppo.rewarded", "ppo.advantages", "ppo.gradient"]


@pytest.fixture
def judge(load: Callable[..., Any], stages: Any) -> Callable[..., SelfChecks]:
    """Judge a batch of eight responses (after `change` of it), and the gradient of its first update."""

    def judge(
        change: Callable[[Experience], Experience] = lambda batch: batch,
        prompts: Callable[[list[Message]], list[Message]] = lambda prompt: prompt,
        moved: bool = False, number: int = 1, **options: Any,
    ) -> SelfChecks:  # fmt: skip
        job, models, samples = load(**options)
        if moved:  # another policy than SFT, so that KL is not 0
            with torch.no_grad():
                models.policy.model.norm.weight.mul_(1.2)
            packed = Packed.of(samples, range(8))
            stats = packed.stats(models.policy, job, False)
            values = torch.zeros_like(samples.logprobs)
            values[samples.response_mask] = stats.logprobs.detach()
            samples = replace(samples, logprobs=values)
        asked = [prompts(row["prompt"]) for row in read_split(stages.inputs["data"] / "prompts.train")[:8]]
        batch = change(gather_experience(models, samples, job, 0.1, asked))
        checks = SelfChecks()
        check_batch(checks, models, batch, job, 0.1, asked, stages.inputs["data"], number)
        check_gradient(checks, Learner.start(models, job), batch)
        return checks

    return judge


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"critic": {"kind": "shared"}},
        {"advantage": "reinforce++"},
        {"advantage": "sequence"},
        {"advantage": "rloo", "group_size": 2},
        {"advantage": "grpo", "group_size": 4},
        {"score": {"missing_eos": "subtract", "missing_eos_penalty": 2.0, "length_penalty": 0.01, "clip": 0.5}},
        {"discount": 0.9, "gae_lambda": 0.5},
        {"aggregation": "sequence"},
    ],
    ids=str,
)
def test_a_healthy_batch_passes_whatever_the_method(judge: Callable[..., SelfChecks], options: dict[str, Any]) -> None:
    results = judge(moved=True, **options).results
    assert not [name for name, result in results.items() if result.verdict == "doubtful"]
    if not options:
        assert [name for name in BATCH if results[name].verdict == "held"] == BATCH
        assert results["ppo.first_scores"].verdict == "not judged", "eight prompts are too few"


def test_the_batches_that_are_judged_thin_out() -> None:
    assert [n for n in range(1, 40) if is_judged(n)] == [1, 2, 4, 8, 16, 32]


def test_a_prompt_that_lost_its_first_message_is_named(judge: Callable[..., SelfChecks]) -> None:
    with pytest.raises(CheckFailed, match=r"ppo\.prompts failed, perhaps because prompts change"):
        judge(prompts=lambda prompt: [{"role": "user", "content": prompt[-1]["content"] + " x"}])


def test_a_mask_that_is_short_by_the_ending_is_named(judge: Callable[..., SelfChecks]) -> None:
    def shortened(batch: Experience) -> Experience:
        samples = batch.samples
        last = samples.response_mask.long().sum(1, keepdim=True) - 1
        return replace(batch, samples=replace(samples, response_mask=samples.response_mask.scatter(1, last, False)))

    with pytest.raises(CheckFailed, match=r"ppo\.(endings|scores) failed"):
        judge(shortened)
    with pytest.raises(CheckFailed, match=r"ppo\.endings failed.* of 8 responses have their ending elsewhere"):
        judge(shortened, number=2)


def test_scores_of_the_next_response_are_named(judge: Callable[..., SelfChecks]) -> None:
    def rolled(batch: Experience) -> Experience:
        return replace(batch, passes=batch.passes._replace(raw_scores=batch.passes.raw_scores.roll(1)))

    with pytest.raises(CheckFailed, match=r"ppo\.scores failed, perhaps because scores belong to other responses"):
        judge(rolled)


def test_rewards_in_another_unit_are_named(judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience_module, "rewarded_scores", lambda raw, samples, scale, config: raw.clamp(-5, 5))
    with pytest.raises(CheckFailed, match=r"ppo\.rewarded failed"):
        judge()


def early(old: Tensor, reference: Tensor, scores: Tensor, mask: Tensor, beta: float) -> Tensor:
    """The score at the token before the last one."""
    at = (mask.long().sum(1) - 2).clamp(min=0)
    return (-beta * (old - reference)).masked_fill(~mask, 0).scatter_add(1, at.unsqueeze(1), scores.unsqueeze(1))


def reversed_kl(old: Tensor, reference: Tensor, scores: Tensor, mask: Tensor, beta: float) -> Tensor:
    """KL as a reward."""
    return maths.token_rewards(reference, old, scores, mask, beta)


@pytest.mark.parametrize("fault", [early, reversed_kl])
def test_token_rewards_in_another_place_or_with_another_sign_are_named(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(experience_module, "token_rewards", fault)
    with pytest.raises(CheckFailed, match=r"ppo\.advantages failed"):
        judge(moved=True)


def test_advantages_that_are_not_whitened_are_named(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maths, "whiten", lambda x, mask: x.masked_fill(~mask, 0))
    with pytest.raises(CheckFailed, match=r"ppo\.advantages failed"):
        judge()


def test_a_critic_that_sees_the_action_is_named(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.ppo import models

    monkeypatch.setattr(models, "predicting", lambda hidden, at: hidden.flatten(0, 1)[at])
    with pytest.raises(CheckFailed, match=r"ppo\.state failed, perhaps because the critic reads the token"):
        judge()


def ascending(*inputs: Any) -> Any:
    """The policy loss with the other sign."""
    found = maths.policy_loss(*inputs)
    return found._replace(loss=-found.loss)


def without_the_last_token(*inputs: Any) -> Any:
    """The policy loss without the tokens that end a response."""
    found, mask = maths.policy_loss(*inputs), inputs[3]
    return found._replace(loss=found.loss.scatter(1, mask.long().sum(1, keepdim=True) - 1, 0.0))


@pytest.mark.parametrize("fault", [ascending, without_the_last_token])
def test_a_loss_with_another_gradient_is_named(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(objective, "policy_loss", fault)
    with pytest.raises(CheckFailed, match=r"ppo\.gradient failed, perhaps because the loss has another sign"):
        judge()


def test_micro_batches_that_are_summed_instead_of_averaged_are_named(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner_module.MicroBatch
    monkeypatch.setattr(learner_module, "MicroBatch", lambda compute, share, tokens: made(compute, 1.0, tokens))
    with pytest.raises(CheckFailed, match=r"ppo\.gradient failed"):
        judge()


def test_the_check_leaves_no_gradient_and_no_other_random_numbers(load: Callable[..., Any]) -> None:
    job, models, samples = load()
    batch, learner = gather_experience(models, samples, job, 0.1), Learner.start(models, job)
    before = torch.get_rng_state()
    check_gradient(SelfChecks(), learner, batch)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for model in models.trained().values() for parameter in model.parameters())


@pytest.fixture
def two_updates(load: Callable[..., Any], stages: Any) -> Callable[..., SelfChecks]:
    """Judge two updates of the trainer; `learn` replaces `Learner.update`, `again` gives the second batch's prompts."""

    def two(learn: Callable[..., Any] = Learner.update, start: int = 8, numbers: int = 8, **options: Any) -> SelfChecks:
        job, models, samples = load(**{"minibatch_size": 4} | options)
        rows = read_split(stages.inputs["data"] / "prompts.train")
        checks, learner = SelfChecks(), Learner.start(models, job)
        judged = UpdateChecks(checks, learner, len(rows), stages.inputs["data"])
        for number, (first, seed) in enumerate([(0, 0), (start, numbers)], 1):
            asked = [row["prompt"] for row in rows[first : first + 8]]
            prompts = [encode_prompt(models.tokenizer, prompt, 64) for prompt in asked]
            samples = sample(models.policy, models.tokenizer, prompts, job.generation, seed)
            batch = gather_experience(models, samples, job, 0.1, asked)
            judged.before(number, batch, 0.1, asked)
            judged.after(number, learn(learner, batch, number - 1))
        return checks

    return two


@pytest.mark.parametrize(
    "options", [{}, {"critic": {"kind": "shared"}}, {"critic": {"warmup": 1}}, {"advantage": "reinforce++"}], ids=str
)
def test_updates_that_learn_from_new_responses_pass(two_updates: Callable[..., SelfChecks], options: Any) -> None:
    results = two_updates(**options).results
    assert results["ppo.learned"].verdict == results["ppo.fresh"].verdict == "held"


def test_a_critic_or_a_policy_that_is_not_trained_is_named(two_updates: Callable[..., SelfChecks]) -> None:
    def frozen(name: str) -> Callable[..., dict[str, float]]:
        def update(learner: Learner, batch: Experience, number: int) -> dict[str, float]:
            optimizers = learner.optimizers
            learner.optimizers = optimizers | {name: torch.optim.AdamW([torch.zeros(1, requires_grad=True)])}
            metrics = Learner.update(learner, batch, number)
            learner.optimizers = optimizers
            return metrics

        return update

    for name in ("policy", "critic"):
        with pytest.raises(CheckFailed, match=rf"ppo\.learned failed.*every weight of the {name} is the same"):
            two_updates(frozen(name))


@pytest.mark.parametrize("kl", [0.0, 1e-3])
def test_a_ratio_that_stays_exactly_1_is_named(
    two_updates: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch, kl: float
) -> None:
    def of_itself(learner: Learner, batch: Experience, number: int) -> dict[str, float]:
        return Learner.update(learner, batch, number) | {"ppo/ratio_max": 1.0, "ppo/approx_kl": kl}

    monkeypatch.setattr(by_the_book, "MANY", 1)
    with pytest.raises(CheckFailed, match=r"ppo\.learned failed.*the ratio is exactly 1 in all 4 steps"):
        two_updates(of_itself)


def test_the_same_prompts_in_each_update_are_named(two_updates: Callable[..., SelfChecks]) -> None:
    with pytest.raises(CheckFailed, match=r"ppo\.fresh failed.*its prompts are the same"):
        two_updates(start=0)
