"""Options that steady PPO: each formula against numpy loops, each effect in an update, all together resumed."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.models.batching import encode_prompt
from components.models.config import GenerationConfig
from components.models.folders import load_causal_lm
from components.models.tokenizers import visible_text
from components.ppo import maths, models
from components.ppo.config import PpoConfig
from components.ppo.evaluate import evaluate
from components.ppo.learner import Learner
from components.ppo.models import shared_runs, weights_digest
from components.ppo.monitors.curves import STABILISERS
from components.sft.mixed import MixedDemonstrations
from components.sft.tokenized_demonstrations import token_losses
from components.training.terms import aggregated
from components.training.trained_weights import WeightAverage
from components.training.updates import Update
from tests.components.ppo.test_learner import ready, with_passes
from tests.splits import write_split

Load = Callable[..., Any]
FIXED = {"control": "fixed", "coefficient": 0.1}
LONG = GenerationConfig(max_prompt_tokens=64, max_new_tokens=40)
"""At this cap some of the tiny policy's responses end before it."""
GENERATOR = np.random.default_rng(0)


def ragged(rows: int = 6, longest: int = 9) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lengths (rows,) and their mask."""
    lengths = GENERATOR.integers(1, longest + 1, rows)
    lengths[0] = longest
    return lengths, np.arange(longest) < lengths[:, None]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.bool if np.asarray(values).dtype == bool else torch.float32)


@pytest.mark.parametrize(("high", "dual"), [(None, None), (0.28, None), (None, 3.0), (0.5, 1.2)])
def test_the_policy_loss_with_both_clips_is_a_loop_over_tokens(high: float | None, dual: float | None) -> None:
    _, mask = ragged()
    new, old, advantages = (GENERATOR.normal(0, 1.2, mask.shape) for _ in range(3))
    found = maths.policy_loss(*map(tensor, (new, old, advantages, mask)), 0.2, high, dual)
    for (i, t), counts in np.ndenumerate(mask):
        ratio, a = math.exp(new[i, t] - old[i, t]), advantages[i, t]
        surrogate = min(ratio * a, min(max(ratio, 0.8), 1 + (0.2 if high is None else high)) * a)
        if dual is not None and a < 0:
            surrogate = max(surrogate, dual * a)
        assert found.loss[i, t].item() == pytest.approx(-surrogate if counts else 0, rel=1e-4, abs=1e-6)


def test_ratios_by_sequence_give_loss_and_gradient_of_gspo() -> None:
    """Zheng et al. 2025, equations 5 and 7, by autograd: one clipped term a response, the mean of its log ratios."""
    lengths, mask = ragged()
    new, old = (GENERATOR.normal(-2, 0.3, mask.shape) for _ in range(2))
    advantages = tensor(GENERATOR.normal(0, 1, (len(lengths), 1))).double()
    ours, theirs = (torch.tensor(new, requires_grad=True) for _ in range(2))
    of_tokens, counts = advantages * tensor(mask), tensor(mask)
    found = maths.policy_loss(ours, torch.tensor(old), of_tokens, counts, 0.05, 0.1, level="sequence")
    loss = aggregated(found.loss, counts, "sequence", 1)
    ratio = (((theirs - torch.tensor(old)) * counts).sum(1) / torch.tensor(lengths)).exp()
    gspo = -torch.minimum(ratio * advantages[:, 0], ratio.clamp(0.95, 1.1) * advantages[:, 0]).mean()
    loss.backward(), gspo.backward()
    assert loss.item() == pytest.approx(gspo.item(), rel=1e-12)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    held = ratio.clamp(0.95, 1.1) != ratio
    assert 0 < found.clipped.any(1).sum() < len(lengths) and not (found.clipped.any(1) & ~held).any()


def test_the_dual_clip_ends_the_gradient_of_a_token_that_became_unlikely_enough() -> None:
    on = torch.ones(1, 3, dtype=torch.bool)
    logprobs = tensor([[math.log(2.9), math.log(3.1), math.log(3.1)]]).requires_grad_()
    found = maths.policy_loss(logprobs, torch.zeros(1, 3), tensor([[-1.0, -1.0, 1.0]]), on, 0.2, None, 3.0)
    assert found.loss.tolist()[0] == pytest.approx([2.9, 3.0, -1.2])
    found.loss.sum().backward()
    assert logprobs.grad is not None
    assert [gradient != 0 for gradient in logprobs.grad[0].tolist()] == [True, False, False]
    assert found.clipped.tolist()[0] == [False, True, True] and found.floored.tolist()[0] == [False, True, False]


def test_an_update_tells_how_many_tokens_each_clip_held(load: Load) -> None:
    given = {"clip_range": 0.01, "clip_range_high": 0.02, "dual_clip": 1.05}
    learner, experience = ready(load, epochs=1, minibatch_size=8, generation=LONG, **given)
    mask = experience.samples.response_mask
    log_ratio = torch.tensor([0.03, -0.005, 0.1, 0.01]).repeat(mask.numel() // 4 + 1)[: mask.numel()].view(mask.shape)
    push = torch.tensor([1.0, -1, -1]).repeat(mask.numel() // 3 + 1)[: mask.numel()].view(mask.shape)
    moved = dataclasses.replace(
        with_passes(experience, policy=experience.logprobs - log_ratio), advantages=push.masked_fill(~mask, 0),
        samples=dataclasses.replace(experience.samples, stats=None),
    )  # fmt: skip
    metrics = learner.update(moved, 0)
    for name, where in (("dual_clip_fraction", (push < 0) & (log_ratio == 0.1)),
                        ("clip_fraction_above", (push > 0) & (log_ratio > 0.02))):  # fmt: skip
        assert metrics[f"ppo/{name}"] == pytest.approx(where[mask].float().mean().item(), abs=1e-6), name
    plain, again = ready(load)
    assert not {f"ppo/{each}" for each in STABILISERS} & (plain.update(again, 0).keys() | again.metrics.keys())


@pytest.mark.parametrize("how", ["token", "sequence", "cap"])
def test_an_aggregation_is_a_loop_over_responses(how: Literal["token", "sequence", "cap"]) -> None:
    lengths, mask = ragged()
    x = GENERATOR.normal(size=mask.shape)
    sums = [sum(x[i, :n]) for i, n in enumerate(lengths)]
    expected = {
        "token": sum(sums) / sum(lengths),
        "sequence": np.mean([s / n for s, n in zip(sums, lengths, strict=True)]),
        "cap": np.mean([s / 12 for s in sums]),
    }
    assert aggregated(tensor(x), tensor(mask), how, 12).item() == pytest.approx(expected[how], rel=1e-5)


@pytest.mark.parametrize("kind", ["separate", "shared"])
@pytest.mark.parametrize("how", ["sequence", "cap"])
def test_an_aggregation_is_the_same_whatever_the_micro_batch_and_not_the_token_mean(
    load: Load, how: str, kind: str
) -> None:
    found = {}
    for name, micro in ((how, 8), (how, 1), ("token", 8)):
        learner, experience = ready(
            load, epochs=1, minibatch_size=8, micro_batch_size=micro, aggregation=name, critic={"kind": kind},
            epsilon=1e-3, max_grad_norm=1e9, generation=LONG,
        )  # fmt: skip
        assert len(set(experience.samples.response_lengths)) > 1
        spread = torch.linspace(-1, 1, 8).unsqueeze(1) * experience.samples.response_mask  # of mean 0 in no aggregation
        metrics = learner.update(dataclasses.replace(experience, advantages=spread), 0)
        weights = torch.cat([p.detach().flatten() for p in learner.models.policy.parameters()])
        found[name, micro] = metrics, weights
    (one, a), (parts, b), (tokens, c) = found.values()
    assert torch.allclose(a, b, atol=1e-6) and not torch.allclose(a, c, atol=1e-6)
    for name in ("ppo/policy_loss", "ppo/value_loss", "ppo/grad_norm", "ppo/clip_fraction"):
        assert parts[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert one["ppo/value_loss"] != pytest.approx(tokens["ppo/value_loss"], rel=1e-3)


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_while_the_critic_warms_up_a_constant_reward_moves_the_critic_and_nothing_else(
    load: Load, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """approx_kl is 8e-4 and more without: the policy follows the critic's errors."""
    monkeypatch.setattr(models, "score_tokens", lambda model, ids, *_, **__: torch.full((len(ids),), 3.0))
    options = {"updates": 10, "decay": "none", "learning_rate": 1e-2, "entropy_coefficient": 0.1, "micro_batch_size": 4}
    learner, experience = ready(load, critic={"kind": kind, "warmup": 2, "learning_rate": 1e-2}, **options)
    policy, critic = (weights_digest(m) for m in learner.models.trained().values())
    values = []
    for update in range(2):
        metrics = learner.update(experience, update)
        assert metrics["ppo/approx_kl"] < 1e-6 and metrics["ppo/grad_norm"] == 0 == metrics["ppo/learning_rate"]
        values.append(metrics["ppo/value_loss"])
        assert weights_digest(learner.models.policy) == policy
    assert values[1] < values[0] and weights_digest(learner.models.critic) != critic
    after = learner.update(experience, 2)
    assert after["ppo/approx_kl"] > 8e-4 and after["ppo/learning_rate"] == 1e-2
    assert weights_digest(learner.models.policy) != policy


def test_the_policys_schedule_begins_when_the_critic_is_warm(load: Load) -> None:
    learner, _ = ready(load, updates=12, warmup=0.2, decay="linear", learning_rate=1e-3,
                       critic={"warmup": 2, "learning_rate": 1e-2})  # fmt: skip
    rates = [(learner.set_rates(u), learner.optimizers["critic"].param_groups[0]["lr"]) for u in range(12)]
    policy = [rate for rate, _ in rates]
    assert policy[:2] == [0, 0] and policy[2:5] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert policy[-1] == pytest.approx(1e-3 / 8) and rates[0][1] == pytest.approx(5e-3)


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_the_sft_loss_adds_its_own_gradient_to_the_policys(load: Load, stages: Any, kind: str) -> None:
    """Its gradient is γ times that of a plain mean over the demonstrations' response tokens, in any micro-batches."""

    def gradient(coefficient: float, micro: int) -> tuple[torch.Tensor, dict[str, float], Learner]:
        learner, experience = ready(
            load, epochs=1, minibatch_size=8, micro_batch_size=micro, ptx={"coefficient": coefficient, "batch_size": 6},
            critic={"kind": kind}, max_grad_norm=1e9, generation=stages.job("ppo").generation,
        )  # fmt: skip
        learner = Learner.start(learner.models, learner.job, stages.inputs["data"])
        kept: dict[str, torch.Tensor] = {}
        for name, p in learner.models.policy.named_parameters():
            p.register_hook(lambda g, name=name: kept.update({name: kept.get(name, 0) + g.detach()}))
        metrics = learner.update(experience, 0)
        return torch.cat([kept[name].flatten() for name in sorted(kept)]), metrics, learner

    without, _, _ = gradient(0.0, 8)
    whole, metrics, learner = gradient(2.0, 8)
    parts, again, _ = gradient(2.0, 2)
    mixed = learner.demonstrations
    assert mixed is not None and len(mixed.minibatch(0)) == 6
    fresh, tokenizer = load_causal_lm(stages.inputs["sft"], learner.job.runtime)
    batch = [mixed.examples[i] for i in mixed.minibatch(0)]
    loss = token_losses(fresh.eval(), tokenizer.pad_token_id, batch, learner.job.runtime).mean()
    named = dict(fresh.named_parameters())
    own = torch.autograd.grad(loss, [named[name] for name in sorted(named)])
    assert torch.allclose(whole - without, 2 * torch.cat([g.flatten() for g in own]), atol=1e-5)
    assert torch.allclose(whole, parts, atol=1e-5)
    assert metrics["ppo/ptx_loss"] == pytest.approx(loss.item(), rel=1e-5) == again["ppo/ptx_loss"]


def test_every_optimiser_step_of_the_run_mixes_in_its_own_demonstrations(
    load: Load, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each update, or each epoch, would learn from the same few."""
    steps: list[int] = []
    minibatch = MixedDemonstrations.minibatch

    def counted(mixed: MixedDemonstrations, step: int) -> dict[int, int]:
        steps.append(step)
        return minibatch(mixed, step)

    monkeypatch.setattr(MixedDemonstrations, "minibatch", counted)
    learner, experience = ready(
        load, epochs=2, minibatch_size=4, micro_batch_size=4, stop_epochs_above=None, ptx={"coefficient": 1.0},
        generation=stages.job("ppo").generation,
    )  # fmt: skip
    learner = Learner.start(learner.models, learner.job, stages.inputs["data"])
    seen = dataclasses.replace(experience, samples=dataclasses.replace(experience.samples, stats=None))
    for update in (0, 1):
        learner.update(seen, update)
    assert steps == list(range(8))


def test_demonstrations_are_met_in_shuffled_passes_and_none_that_fits_is_refused(stages: Any, tmp_path: Path) -> None:
    tokenizer = load_causal_lm(stages.inputs["sft"], stages.job("ppo").runtime)[1]
    generation = stages.job("ppo").generation
    mixed = MixedDemonstrations.read(stages.inputs["data"], tokenizer, generation, 4, 0)
    count = len(mixed.examples)
    met = [i for step in range(count) for i in mixed.minibatch(step)]
    assert all(met.count(i) == 4 for i in range(count)) and mixed.minibatch(0) != mixed.minibatch(1)
    larger = MixedDemonstrations.read(stages.inputs["data"], tokenizer, generation, 2 * count + 1, 0)
    assert sorted(larger.minibatch(3)) == list(range(count)), "a batch of more than there are has each once"
    assert all(len(r) <= generation.max_new_tokens and r[-1] == tokenizer.eos_token_id for _, r in mixed.examples)
    rows = read_split(stages.inputs["data"] / "demonstrations.train")[:3]
    write_split(tmp_path / "demonstrations.train", [row | {"response": "late " * 99} for row in rows])
    with pytest.raises(UserError, match=r"ppo\.ptx: none of the 3 .* ppo\.ptx\.coefficient=0"):
        MixedDemonstrations.read(tmp_path, tokenizer, generation, 4, 0)


def test_the_average_is_the_recursion_of_its_weights_and_is_what_replaces_them() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average, expected = WeightAverage(model, 0.7), model.weight.detach().numpy().copy()
    for step in range(4):
        with torch.no_grad():
            model.weight += step + 0.5
        average.on_update(Update(number=step + 1, total=4, model=model, metrics={}, tokens=0))
        expected = 0.7 * expected + 0.3 * model.weight.detach().numpy()
    bias, own = model.bias.clone(), model.weight.clone()
    with average.instead(model):
        assert np.allclose(model.weight.detach().numpy(), expected, atol=1e-5)
    assert torch.equal(model.weight, own)
    average.replace(model)
    assert np.allclose(model.weight.detach().numpy(), expected, atol=1e-5) and torch.equal(model.bias, bias)


ALL: dict[str, Any] = {
    "ema": 0.5, "ptx": {"coefficient": 0.5, "batch_size": 3}, "aggregation": "sequence",
    "clip_range_high": 0.28, "dual_clip": 3.0, "micro_batch_tokens": 90,
    "updates": 4, "learning_rate": 1e-2, "checkpoint_every": 1, "evaluate": 8,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gae": {"critic": {"warmup": 1}, "evaluate_every": 2, "watch": {"prompts": 4}},
    "grpo": {"advantage": "grpo", "group_size": 4, "aggregation": "cap", "kl": FIXED},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_all_of_them_together_train_and_resume_to_the_same_bytes(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], name: str
) -> None:
    options = ALL | VARIANTS[name] | {"generation": LONG}
    metrics = stages.run("ppo", tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path / "cut", interrupting(3), **options)
    assert stages.run("ppo", tmp_path / "cut", **options) == metrics
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")
    history = read_rows(tmp_path / "whole" / "artifact" / "history.jsonl")
    assert any(row.get("ppo/ptx_loss", 0) > 0 for row in history)
    for told in (f"ppo/{each}" for each in STABILISERS):
        values = [row[told] for row in history if told in row]
        assert metrics[told] == pytest.approx(np.mean(values)), told
    about = json.loads((tmp_path / "whole" / "artifact" / "metadata.json").read_text())
    assert "the moving average with decay 0.5" in about["reason"]
    if name == "gae":
        assert history[0]["ppo/learning_rate"] == 0 and "ppo/ptx_loss" not in history[0]
    kept = load_file(tmp_path / "whole" / "checkpoint" / "ppo" / "step-000000004.safetensors")
    published = load_file(tmp_path / "whole" / "artifact" / "model" / "model.safetensors")
    first = next(key for key in kept if key.startswith("policy|"))
    assert torch.equal(published[first.removeprefix("policy|")], kept["average|0"])
    assert not torch.equal(kept[first], kept["average|0"]), "what is published is the average, not the last"


def test_by_default_none_of_them_does_anything() -> None:
    config = PpoConfig()
    assert (config.clip_range_high, config.dual_clip, config.aggregation, config.ema) == (None, None, "token", None)
    assert config.critic.warmup == config.ptx.coefficient == 0 and config.micro_batch_tokens is None


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_the_evaluation_may_have_a_temperature_of_its_own_and_kl_stays_that_of_training(
    load: Load, stages: Any, tmp_path: Path, temperature: float
) -> None:
    metrics, rows = {}, {}
    for at in (None, temperature):
        job, loaded, _ = load(evaluate=8, evaluate_temperature=at)
        loaded.policy.model.norm.weight.data.add_(0.3)
        (tmp_path / str(at) / "artifact").mkdir(parents=True)
        metrics[at] = evaluate(loaded, job, stages.inputs["data"], tmp_path / str(at))
        rows[at] = read_rows(tmp_path / str(at) / "artifact" / "evaluation.jsonl")
    for name in ("kl", "kl_low", "kl_per_token", "entropy", "sft_entropy", "entropy_ratio", "kl_at_temperature_1"):
        assert metrics[temperature][f"policy/{name}"] == metrics[None][f"policy/{name}"], name
    judged = [row["policy"] for row in rows[temperature]]
    assert metrics[temperature]["policy/proxy_reward"] == pytest.approx(np.mean([row["score"] for row in judged]))
    assert judged != [row["policy"] for row in rows[None]]
    if temperature == 0:  # the likeliest token at every step, by a plain loop
        ids = encode_prompt(loaded.tokenizer, rows[0.0][0]["prompt"], 64)
        said: list[int] = []
        while len(said) < job.generation.max_new_tokens and loaded.tokenizer.eos_token_id not in said:
            with torch.no_grad():
                logits = loaded.policy(torch.tensor([ids + said])).logits[0, -1]
            logits[loaded.tokenizer.pad_token_id] = -torch.inf
            said.append(int(logits.argmax()))
        assert judged[0]["response"] == visible_text(loaded.tokenizer, said)


def of_lengths(*lengths: int) -> dict[int, int]:
    return dict(enumerate(lengths))


@pytest.mark.parametrize("budget", [40, 100, 1000])
def test_micro_batches_by_tokens_hold_every_row_once_and_no_more_padded_tokens_than_allowed(budget: int) -> None:
    lengths = of_lengths(*GENERATOR.integers(1, 60, 200).tolist())
    runs = [run for run, counts in shared_runs(lengths, 2, budget) if counts]
    assert sorted(i for run in runs for i in run) == sorted(lengths)
    padded = [len(run) * max(lengths[i] for i in run) for run in runs]
    assert all(tokens <= budget or len(run) == 1 for run, tokens in zip(runs, padded, strict=True))
    assert max(map(len, runs)) > 2, "rows are not what is counted"
    assert len(runs) < 3 * sum(lengths.values()) / budget + 10


def test_by_tokens_ranks_get_about_as_many_tokens_and_as_many_passes_as_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = of_lengths(*GENERATOR.integers(1, 400, 64).tolist())
    found = []
    for rank in range(4):
        monkeypatch.setattr(models.ranks, "size", lambda: 4)
        monkeypatch.setattr(models.ranks, "rank", lambda rank=rank: rank)
        found.append(list(shared_runs(lengths, 1, 800)))
    assert len({len(each) for each in found}) == 1
    tokens = [sum(lengths[i] for run, counts in each for i in run if counts) for each in found]
    assert sum(tokens) == sum(lengths.values())
    assert max(tokens) - min(tokens) <= max(lengths.values())


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_an_update_by_tokens_is_the_one_by_rows_within_summation(load: Load, kind: str) -> None:
    found = []
    for options in ({"micro_batch_size": 2}, {"micro_batch_size": 8, "micro_batch_tokens": 70}):
        learner, experience = ready(load, epochs=2, minibatch_size=8, critic={"kind": kind}, epsilon=1e-3, **options)
        learner.update(experience, 0)
        found.append(
            torch.cat([p.detach().flatten() for m in learner.models.trained().values() for p in m.parameters()])
        )
    assert torch.allclose(*found, atol=1e-6)


def samples_of(texts: Path) -> list[Any]:
    return [row["response"] for row in read_rows(texts / "artifact" / "samples.jsonl")]


def test_a_run_by_tokens_samples_the_same_texts_as_one_by_rows(stages: Any, tmp_path: Path) -> None:
    stages.run("ppo", tmp_path / "rows", updates=2, evaluate=4)
    stages.run("ppo", tmp_path / "tokens", updates=2, evaluate=4, micro_batch_tokens=100)
    assert samples_of(tmp_path / "rows") == samples_of(tmp_path / "tokens")
