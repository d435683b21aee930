"""A batch is computed again by loops: healthy batches pass, and each check fails by name on a fault of its own."""

from collections.abc import Callable, Sequence
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
from components.ppo.config import KLConfig
from components.ppo.control import KLController
from components.ppo.experience import Experience, gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Packed
from components.ppo.monitors.by_the_book import (
    SAME,
    Surprises,
    UpdateChecks,
    book_beta,
    check_batch,
    check_gradient,
    check_sampled,
    is_judged,
)

BATCH = ["ppo.prompts", "ppo.endings", "ppo.scores", "ppo.rewarded", "ppo.advantages", "ppo.gradient"]


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
        {"clip_range_high": 0.3, "dual_clip": 3.0, "critic": {"clip_range": 0.2}},
        {"critic": {"clip_range": 0.5}},
        {"critic": {"kind": "shared", "clip_range": 0.2}},
        {"aggregation": "sequence"},
    ],
    ids=str,
)
def test_a_healthy_batch_passes_whatever_the_method(judge: Callable[..., SelfChecks], options: dict[str, Any]) -> None:
    results = judge(moved=True, **options).results
    assert not [name for name, result in results.items() if result.verdict == "doubtful"]
    assert results["ppo.gradient"].verdict == ("not judged" if "aggregation" in options else "held")
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
    with pytest.raises(CheckFailed, match=r"ppo\.gradient failed.*that of the critic by"):
        judge()


def ascending(*inputs: Any) -> Any:
    """The policy loss with the other sign."""
    found = maths.policy_loss(*inputs)
    return found._replace(loss=-found.loss)


def without_the_last_token(*inputs: Any) -> Any:
    """The policy loss without the tokens that end a response."""
    found, mask = maths.policy_loss(*inputs), inputs[3]
    return found._replace(loss=found.loss.scatter(1, mask.long().sum(1, keepdim=True) - 1, 0.0))


def of_itself(logprobs: Tensor, old: Tensor, *inputs: Any) -> Any:
    """The policy loss with a ratio that is always 1."""
    return maths.policy_loss(logprobs, logprobs.detach(), *inputs)


def never_clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *clip: Any) -> Any:
    """The policy loss without clipping."""
    return maths.policy_loss(logprobs, old, advantages, mask, 1e9)


@pytest.mark.parametrize("fault", [ascending, without_the_last_token, of_itself, never_clipped])
def test_a_loss_with_another_gradient_is_named(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(objective, "policy_loss", fault)
    with pytest.raises(CheckFailed, match=r"ppo\.gradient failed, perhaps because the loss has another sign"):
        judge()


@pytest.mark.parametrize("kind", ["separate", "shared"])
@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_critic_with_another_gradient_is_named(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch, kind: str, factor: float
) -> None:
    monkeypatch.setattr(objective, "value_loss", lambda *inputs: factor * maths.value_loss(*inputs))
    with pytest.raises(CheckFailed, match=r"ppo\.gradient failed.*that of the (critic|policy) by"):
        judge(critic={"kind": kind})


@pytest.fixture
def batches(load: Callable[..., Any], stages: Any) -> Callable[..., list[Surprises]]:
    """Return the surprises of batches of 64 responses, one for each seed, to a policy with a spread distribution."""

    def batches(*seeds: int, temperature: float = 1.0, alike: bool = False) -> list[Surprises]:
        job, models, _ = load()
        with torch.no_grad():
            models.policy.get_output_embeddings().weight.mul_(6)
        rows, seen = read_split(stages.inputs["data"] / "prompts.train"), list[Surprises]()
        generation = job.generation.model_copy(update={"temperature": temperature})
        for number, seed in enumerate(seeds):
            prompts = [encode_prompt(models.tokenizer, rows[(number + i) % len(rows)]["prompt"], 64) for i in range(64)]
            numbers = [0] * 64 if alike else None
            samples = sample(models.policy, models.tokenizer, prompts, generation, seed, numbers)
            seen.append(Surprises.of(models.policy, samples, job))
        return seen

    return batches


def test_samples_of_the_policy_are_as_surprising_as_they_must_be(batches: Callable[..., list[Surprises]]) -> None:
    checks, (first, second) = SelfChecks(), batches(1, 2)
    check_sampled(checks, "update 2", [first, second], exact=True)
    assert checks.results["ppo.sampled"].verdict == "held"
    likeness = first.likeness(second)
    assert likeness is not None and abs(likeness) < SAME


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_a_sampler_with_another_temperature_is_named(
    batches: Callable[..., list[Surprises]], temperature: float
) -> None:
    with pytest.raises(CheckFailed, match=r"ppo\.sampled failed, perhaps because the sampler has another temperature"):
        check_sampled(SelfChecks(), "update 2", batches(1, 2, temperature=temperature), exact=True)


def test_rows_and_updates_with_the_same_random_numbers_are_named(batches: Callable[..., list[Surprises]]) -> None:
    with pytest.raises(CheckFailed, match=r"ppo\.sampled failed.*responses are alike by"):
        check_sampled(SelfChecks(), "update 1", batches(1, alike=True), exact=True)
    first, again = batches(1, 1)
    likeness = first.likeness(again)
    assert likeness is not None and likeness > SAME


def test_a_policy_that_is_certain_of_its_tokens_is_not_judged() -> None:
    checks = SelfChecks()
    check_sampled(checks, "update 1", [Surprises(torch.zeros(64, 20), torch.zeros(64, 20))], exact=True)
    assert checks.results["ppo.sampled"].verdict == "not judged"


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

    def two(
        learn: Callable[..., Any] = Learner.update, start: int = 8, numbers: int = 8, beta: float = 0.1,
        history: Sequence[dict[str, float]] = ({"ppo/kl": 0.0},), **options: Any,
    ) -> SelfChecks:  # fmt: skip
        job, models, samples = load(**{"minibatch_size": 4} | options)
        rows = read_split(stages.inputs["data"] / "prompts.train")
        checks, learner = SelfChecks(), Learner.start(models, job)
        judged = UpdateChecks(checks, learner, len(rows), stages.inputs["data"])
        for number, (first, seed) in enumerate([(0, 0), (start, numbers)], 1):
            asked = [row["prompt"] for row in rows[first : first + 8]]
            prompts = [encode_prompt(models.tokenizer, prompt, 64) for prompt in asked]
            samples = sample(models.policy, models.tokenizer, prompts, job.generation, seed)
            batch = gather_experience(models, samples, job, 0.1, asked)
            judged.before(number, batch, beta, asked, history[: number - 1])
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


def test_the_same_prompts_in_each_update_are_named(two_updates: Callable[..., SelfChecks]) -> None:
    with pytest.raises(CheckFailed, match=r"ppo\.fresh failed.*its prompts are the same"):
        two_updates(start=0)


@pytest.mark.parametrize("taken", [[[0, 1, 2, 3], [0, 1, 2, 3]], [[0, 1, 2, 3]]], ids=["twice", "one is lost"])
def test_rows_that_no_minibatch_takes_are_named(
    two_updates: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch, taken: list[list[int]]
) -> None:
    monkeypatch.setattr(Learner, "_minibatches", lambda learner, update, learned: enumerate(taken))
    with pytest.raises(CheckFailed, match=r"ppo\.learned failed.*of 8 rows were in 0 to \d minibatches and not in"):
        two_updates(stop_epochs_above=None, epochs=1)


@pytest.mark.parametrize("kl", [[0.0, 4.0, 9.0, 2.0], [1.0, 1.4, 1.6, 2.5, 8.0, 2.9]])
@pytest.mark.parametrize("options", [{}, {"proportional": 0.5}, {"control": "fixed"}, {"horizon": 2.0}], ids=str)
def test_beta_by_the_book_is_the_controllers(kl: list[float], options: dict[str, Any]) -> None:
    config = KLConfig.model_validate({"control": "adaptive", "target": 3.0, "band": 6.0} | options)
    controller = KLController.start(config)
    for value in kl:
        controller.update(value)
    assert book_beta(config, kl) == pytest.approx(controller.beta, rel=1e-12)


def test_a_controller_that_pushes_away_or_lost_its_state_is_named(two_updates: Callable[..., SelfChecks]) -> None:
    adaptive = {"kl": {"control": "adaptive", "target": 0.5, "horizon": 1.0, "coefficient": 0.1}, "updates": 40}
    with pytest.raises(CheckFailed, match=r"ppo\.beta failed, perhaps because the controller moves .* before it 0\.12"):
        two_updates(beta=0.1, history=({"ppo/kl": 2.0},), **adaptive)
