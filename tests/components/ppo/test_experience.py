"""What one update learns from, and the checks that stop a run whose numbers can't be trusted."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.base.errors import CheckFailed
from components.data.tables.published import read_split
from components.models.batching import encode_prompt
from components.models.config import GenerationConfig
from components.models.sampling import LocalEngine, Samples, sample
from components.ppo.config import PpoJob, ScoreConfig
from components.ppo.evaluate import respond
from components.ppo.experience import (
    Experience,
    check_drift,
    check_start,
    gather_experience,
    lower_ends,
    rewarded_scores,
    sampler_drift,
)
from components.ppo.models import FrozenPass
from components.ppo.objective import Forward, value_term
from components.reward.scoring import ScoreScale
from components.rollouts.config import RolloutConfig

Load = Callable[..., Any]
CAP = 48

SCALE = ScoreScale(shift=1.0, scale=2.0, missing_eos_score=-2.3, temperature=1.0, responses=16)


def check_sampler(sampled: torch.Tensor, recomputed: torch.Tensor, mask: torch.Tensor, job: PpoJob) -> float:
    drift = sampler_drift(sampled, recomputed, mask, job).item()
    check_drift(drift, job)
    return drift


def ended(*lengths: int, eos: tuple[bool, ...]) -> Samples:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    empty = torch.zeros(mask.shape, dtype=torch.long)
    return Samples(empty, mask, empty, mask, empty.float(), torch.tensor(eos))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [1.0, -2.3, 5.0]),
        ({"missing_eos": "subtract", "missing_eos_penalty": 0.7}, [1.0, 0.3, 5.0]),
        ({"missing_eos": "keep"}, [1.0, 1.0, 5.0]),
        ({"clip": 0.5}, [0.5, -2.3, 0.5]),
        ({"length_penalty": 0.1}, [0.8, -2.7, 4.7]),
    ],
)
def test_scores_are_scaled_clipped_then_missing_eos_then_length(config: dict[str, Any], expected: list[float]) -> None:
    samples = ended(2, 4, 3, eos=(True, False, True))
    scores = rewarded_scores(torch.tensor([3.0, 3.0, 99.0]), samples, SCALE, ScoreConfig(**config))
    assert torch.allclose(scores, torch.tensor(expected))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_at_the_start_kl_is_0_and_the_sampler_agrees(load: Load, temperature: float) -> None:
    job, models, samples = load(generation=GenerationConfig(max_new_tokens=10, temperature=temperature))
    experience = gather_experience(models, samples, job, beta=0.1)
    assert abs(experience.metrics["ppo/kl"]) < 1e-5 and abs(experience.metrics["ppo/log_ratio_at_temperature_1"]) < 1e-5
    recomputed = gather_experience(models, dataclasses.replace(samples, stats=None), job, beta=0.1)
    assert recomputed.metrics["ppo/kl"] == 0 and recomputed.metrics["ppo/sampler_drift"] <= 1e-4
    for name in ("ppo/entropy", "ppo/log_ratio_at_temperature_1", "ppo/proxy_reward"):
        assert experience.metrics[name] == pytest.approx(recomputed.metrics[name], abs=1e-5)
    assert torch.allclose(experience.advantages, recomputed.advantages, atol=1e-3)
    check_start(experience, job)
    mask = samples.response_mask
    assert experience.advantages[mask].std().item() == pytest.approx(1, abs=1e-3)
    assert not experience.advantages[~mask].any() and not experience.returns[~mask].any()


def test_the_metrics_are_of_the_batch_both_units_of_kl_among_them(load: Load) -> None:
    job, models, samples = load()
    with torch.no_grad():
        models.policy.model.norm.weight.add_(0.2)
    drifted = dataclasses.replace(samples, logprobs=relogprobs(models, samples, job), stats=None)
    metrics = gather_experience(models, drifted, job, beta=0.25).metrics
    tokens = samples.response_mask.sum().item()
    assert metrics["ppo/kl"] != 0 and metrics["ppo/beta"] == 0.25
    assert metrics["ppo/kl"] * len(samples.ended) / tokens == pytest.approx(metrics["ppo/kl_per_token"], rel=1e-4)
    assert metrics["ppo/response_tokens"] == pytest.approx(tokens / len(samples.ended))
    assert metrics["ppo/kl_k3"] > 0 and metrics["ppo/kl_k2"] > 0


@pytest.mark.parametrize("path", ["sampler", "training"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_and_its_units_are_those_of_transformers_forward_passes_padded_on_either_side(
    load: Load, stages: Any, tmp_path: Path, temperature: float, path: str
) -> None:
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=CAP, temperature=temperature)
    job, models, _ = load(generation=generation)
    with torch.no_grad():
        models.policy.model.norm.weight.add_(0.2)
    models.policy.save_pretrained(tmp_path)
    folder = stages.inputs["sft"] / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [row["prompt"] for row in read_split(stages.inputs["data"] / "prompts.train")[:16]]
    said = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in prompts]
    ids = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in said]
    samples = sample(models.policy, models.tokenizer, [encode_prompt(tokenizer, p, 64) for p in prompts], generation, 5)
    if path == "training":
        samples = dataclasses.replace(samples, stats=None)
    found = gather_experience(models, samples, job, beta=0.1)

    responses = []
    for row in samples.response_ids.tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else CAP
        responses.append(row[:end])
    lengths = [len(each) for each in responses]
    assert len(set(map(len, ids))) > 2 and len(set(lengths)) > 2, "padding on both sides"
    assert {each[-1] == tokenizer.eos_token_id for each in responses} == {True, False}, "with and without EOS"
    for left in (True, False):
        of = [padded_logprobs(each, tokenizer, ids, responses, temperature, left) for each in (tmp_path, folder)]
        of += [padded_logprobs(each, tokenizer, ids, responses, 1.0, left) for each in (tmp_path, folder)]
        for row, length in enumerate(lengths):
            for ours, theirs in ((found.logprobs, of[0]), (found.passes.sft, of[1]), (found.passes.reference, of[1])):
                assert torch.allclose(ours[row, :length].double(), theirs[row], atol=1e-5)
                assert not ours[row, length:].any()
        k1 = [p - q for p, q in zip(*of[:2], strict=True)]
        k3 = [k + torch.exp(-k) - 1 for k in k1]
        summed = [float(each.sum()) for each in k1]
        expected = {
            "ppo/kl": math.fsum(summed) / len(summed),
            "ppo/kl_per_token": math.fsum(summed) / sum(lengths),
            "ppo/kl_k2": math.fsum(float((k * k).sum()) / 2 for k in k1) / len(summed),
            "ppo/kl_k3": math.fsum(float(k.sum()) for k in k3) / len(summed),
            "ppo/log_ratio_at_temperature_1": math.fsum(float((p - q).sum()) for p, q in zip(*of[2:], strict=True))
            / len(summed),
            "ppo/response_tokens": sum(lengths) / len(lengths),
            "ppo/ended": sum(each[-1] == tokenizer.eos_token_id for each in responses) / len(responses),
        }
        assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
        assert abs(expected["ppo/kl"]) > 1e-2, "else this tests nothing"


def padded_logprobs(
    folder: Path, tokenizer: Any, prompts: list[list[int]], responses: list[list[int]], temperature: float, left: bool
) -> list[torch.Tensor]:
    """Each response's log-probabilities, by one float64 forward pass of transformers over padded rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    pads = [[tokenizer.pad_token_id] * (width - len(row)) for row in rows]
    ids = torch.tensor([pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)])
    counts = [[0] * len(pad) + [1] * len(row) if left else [1] * len(row) + [0] * len(pad)
              for pad, row in zip(pads, rows, strict=True)]  # fmt: skip
    mask = torch.tensor(counts)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits / temperature
    logits[..., tokenizer.pad_token_id] = -math.inf  # it cannot be sampled
    found = []
    for row, (pad, prompt, response) in enumerate(zip(pads, prompts, responses, strict=True)):
        start = len(prompt) + (len(pad) if left else 0)
        of_row = logits[row, start - 1 : start - 1 + len(response)].log_softmax(-1)
        found.append(of_row.gather(1, torch.tensor(response)[:, None])[:, 0])
    return found


def relogprobs(models: Any, samples: Samples, job: Any) -> torch.Tensor:
    from components.ppo.models import frozen_pass

    return frozen_pass(models, dataclasses.replace(samples, stats=None), job).policy


def test_a_sampler_that_drifts_from_the_training_path_stops_the_run(load: Load) -> None:
    job, models, samples = load()
    with torch.no_grad():
        models.policy.model.norm.weight.add_(0.2)  # trained on after sampling
    with pytest.raises(CheckFailed, match="sampler and the training path disagree"):
        gather_experience(models, dataclasses.replace(samples, stats=None), job, beta=0.1)


def of(stages: Any, dtype: str = "float32", temperature: float = 1.0) -> PpoJob:
    """A job of this number format and temperature."""
    job = stages.job("ppo", generation=GenerationConfig(temperature=temperature))
    return job.model_copy(update={"runtime": job.runtime.model_copy(update={"dtype": dtype})})


def test_drift_is_the_largest_difference_in_float32_the_mean_kl_in_bfloat16_and_never_under_the_mask(
    stages: Any,
) -> None:
    exact, rounded = of(stages), of(stages, "bfloat16")
    samples = ended(2, 4, eos=(True, True))
    off = torch.zeros(2, 4)
    off[0, 3] = 9.0
    assert check_sampler(samples.logprobs, off, samples.response_mask, exact) == 0
    off[1, 2] = 2e-4
    with pytest.raises(CheckFailed, match="largest"):
        check_sampler(samples.logprobs, off, samples.response_mask, exact)
    off[1, 2] = 0.1  # rounding in bfloat16
    assert check_sampler(samples.logprobs, off, samples.response_mask, rounded) == pytest.approx(
        (math.expm1(0.1) - 0.1) / 6, rel=1e-4
    )
    off[1, 2] = -1.0
    with pytest.raises(CheckFailed, match="mean KL"):
        check_sampler(samples.logprobs, off, samples.response_mask, rounded)


@pytest.mark.parametrize(
    ("server", "here", "first", "temperature", "allowed"),
    [
        ("float32", "float32", None, 1.0, 1e-5), ("float32", "float32", 5e-13, 0.5, 4e-5),
        ("bfloat16", "float32", None, 1.0, 0.01), ("bfloat16", "bfloat16", 0.003, 1.0, 0.011),
        ("float32", "bfloat16", 0.001, 0.5, 0.011),
    ],
)  # fmt: skip
def test_a_servers_tolerance_follows_from_both_formats(
    stages: Any, server: str, here: str, first: float | None, temperature: float, allowed: float
) -> None:
    job, rollout = of(stages, here, temperature), {"engine": "vllm", "url": "http://127.0.0.1:1", "dtype": server}
    job = job.model_copy(update={"ppo": job.ppo.model_copy(update={"rollout": RolloutConfig(**rollout)})})
    check_drift(0.99 * allowed, job, first)
    said = "allowed with a server in" if first is None else f"where the first update had {first:.2g},"
    with pytest.raises(CheckFailed, match=said):
        check_drift(1.01 * allowed, job, first)


def started(noise: torch.Tensor) -> Experience:
    """Responses (B, T) whose log-probabilities are off the reference's by `noise`, as a first batch."""
    count, width = noise.shape
    mask = torch.ones(count, width, dtype=torch.bool)
    samples = dataclasses.replace(ended(*[width] * count, eos=(True,) * count), response_mask=mask)
    kl = {"ppo/kl": noise.double().sum(1).mean().item()}
    passes = FrozenPass(noise, noise, 0 * noise, 0 * noise, 0 * noise, noise, noise)
    return Experience(samples, passes, noise, noise, noise, None, 0.0, kl)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize(("responses", "tokens"), [(8, 1000), (128, 40), (2, 1)])
def test_rounding_of_a_135_m_model_stops_no_run_at_any_length_or_temperature(
    stages: Any, temperature: float, responses: int, tokens: int
) -> None:
    job, generator = of(stages, temperature=temperature), torch.Generator().manual_seed(0)
    for _ in range(100):
        noise = torch.randn(responses, tokens, generator=generator) * 7.7e-6 / temperature
        first = started(noise)
        check_sampler(noise, 0 * noise, first.samples.response_mask, job)
        check_start(first, job)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_dropout_left_on_stops_the_run_at_any_temperature(load: Load, temperature: float) -> None:
    generation = GenerationConfig(max_new_tokens=40, temperature=temperature)
    job, models, samples = load(generation=generation)
    models.policy.train()
    for layer in models.policy.model.layers:
        layer.self_attn.attention_dropout = 0.1
    prompts = [ids[mask].tolist() for ids, mask in zip(samples.prompt_ids, samples.prompt_mask, strict=True)]
    torch.manual_seed(0)
    with pytest.raises(CheckFailed, match=r"sampler and the training path disagree .* Check that dropout is off"):
        gather_experience(models, dataclasses.replace(samples, stats=None), job, beta=0.1)
    dropped = sample(models.policy, models.tokenizer, prompts, generation, 1)
    with pytest.raises(CheckFailed, match=r"KL to the reference is .* before the first update"):
        check_start(gather_experience(models, dropped, job, beta=0.1), job)


def test_what_is_allowed_grows_as_the_logits_do_and_as_the_root_of_the_tokens(stages: Any) -> None:
    one = torch.zeros(1, 2)
    for dtype, temperature, allowed in (
        ("float32", 1.0, 1e-4), ("float32", 0.1, 1e-3), ("float32", 2.0, 1e-4), ("bfloat16", 0.5, 0.04)
    ):  # fmt: skip
        job, mask = of(stages, dtype, temperature), torch.ones(1, 2, dtype=torch.bool)
        off = allowed if dtype == "float32" else math.sqrt(2 * allowed)  # of k3, which is Δ² / 2 at first
        check_sampler(one, one + 0.9 * off, mask, job)
        with pytest.raises(CheckFailed):
            check_sampler(one, one + 1.2 * off, mask, job)
    for responses, tokens, temperature in ((8, 1000, 1.0), (8, 250, 1.0), (32, 1000, 1.0), (8, 1000, 0.1)):
        allowed, job = 1e-4 / temperature * math.sqrt(tokens / responses), of(stages, temperature=temperature)
        check_start(started(torch.full((responses, tokens), 0.99 * allowed / tokens)), job)
        with pytest.raises(CheckFailed, match="rounding is allowed"):
            check_start(started(torch.full((responses, tokens), -1.01 * allowed / tokens)), job)


def test_the_lower_end_of_a_batchs_kl_is_that_of_its_prompts(load: Load) -> None:
    job, models, samples = load()
    models.sft.model.norm.weight.add_(0.2)
    metrics = gather_experience(models, samples, job, beta=0.1).metrics
    found = gather_experience(models, samples, job, beta=0.1)
    kl = (found.logprobs - found.passes.reference).sum(1).double().numpy()
    lengths = samples.response_mask.sum(1).numpy()
    assert len({tuple(ids) for ids in samples.prompt_ids.tolist()}) == 8, "eight prompts, a response each"
    t = 2.3646242510  # Student's 97.5th percentile with 7 degrees of freedom
    assert metrics["ppo/kl_low"] == pytest.approx(kl.mean() - t * kl.std(ddof=1) / math.sqrt(8), rel=1e-4)
    rest = kl - metrics["ppo/kl_per_token"] * lengths
    half = t * rest.std(ddof=1) / math.sqrt(8) / lengths.mean()
    assert metrics["ppo/kl_per_token_low"] == pytest.approx(metrics["ppo/kl_per_token"] - half, rel=1e-4)
    same = dataclasses.replace(samples, prompt_ids=samples.prompt_ids[:1].expand(8, -1))
    assert lower_ends(torch.ones(8), same) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_that_are_not_numbers_never_pass_as_agreement(stages: Any, dtype: str) -> None:
    samples = ended(2, 4, eos=(True, True))
    with pytest.raises(CheckFailed):
        check_sampler(samples.logprobs, torch.full((2, 4), float("nan")), samples.response_mask, of(stages, dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_stops_the_run(load: Load, value: float) -> None:
    job, models, samples = load(critic={"kind": "shared"})
    models.reward_model.score.weight.fill_(value)
    with pytest.raises(CheckFailed, match="score that isn't finite"):
        gather_experience(models, samples, job, beta=0.1)


def test_a_reference_that_is_not_the_start_stops_the_run(load: Load) -> None:
    job, models, samples = load()
    models.reference.model.norm.weight.add_(0.2)
    experience = gather_experience(models, samples, job, beta=0.1)
    with pytest.raises(CheckFailed, match="before the first update, where it must be 0"):
        check_start(experience, job)
    experience.metrics["ppo/kl"] = float("nan")
    with pytest.raises(CheckFailed):
        check_start(experience, job)


def test_the_critic_starts_from_the_reward_model_in_the_unit_of_scaled_scores(load: Load) -> None:
    from components.ppo.models import frozen_pass, weights_digest

    job, models, samples = load()
    found = frozen_pass(models, samples, job)
    first = samples.prompt_ids[0][samples.prompt_mask[0]].unsqueeze(0)
    with torch.no_grad():
        raw = models.reward_model(first).logits.squeeze()
    assert found.values[0, 0].item() == pytest.approx(models.scale(raw).item(), abs=1e-4)
    assert not found.values[~samples.response_mask].any()
    shared = frozen_pass(*load(critic={"kind": "shared"})[1:], job)
    assert not shared.values.any(), "a shared head starts at 0, the mean of SFT's scaled scores"
    job, models, samples = load(critic={"start": "sft"})
    assert not frozen_pass(models, samples, job).values.any(), "and so does a critic that starts as SFT"
    trunks = [weights_digest(model.base_model) for model in (models.critic.model, models.sft, models.reward_model)]
    assert trunks[0] == trunks[1] != trunks[2]


def test_the_judged_kl_is_the_training_paths_whatever_the_sampler_says_of_itself(
    load: Load, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, models, _ = load()
    with torch.no_grad():
        models.policy.model.norm.weight.add_(0.2)
    data = stages.inputs["data"]
    prompts = [row["prompt"] for row in read_split(data / "prompts.test")[:4]]
    honest = [row.kl for row in respond(models, models.policy, prompts, job, data)]
    real = LocalEngine.sample

    def flattering(self: LocalEngine, *rest: Any) -> Samples:
        samples = real(self, *rest)
        return dataclasses.replace(samples, logprobs=samples.logprobs - 1.0)

    monkeypatch.setattr(LocalEngine, "sample", flattering)
    assert [row.kl for row in respond(models, models.policy, prompts, job, data)] == honest
    assert max(map(abs, honest)) > 1e-3


def test_values_are_clipped_in_units_of_the_whole_batchs_deviation_of_the_returns(load: Load) -> None:
    job, models, samples = load(critic={"clip_range": 0.3})
    experience = gather_experience(models, samples, job, beta=0.1)
    assert experience.returns is not None
    deviation = experience.returns[samples.response_mask].std().item()  # torch's std is Bessel-corrected
    assert experience.returns_deviation == pytest.approx(deviation, rel=1e-5)
    mask, old, returns = samples.response_mask, experience.passes.values, experience.returns
    values = old + torch.linspace(-2, 2, mask.numel()).view(mask.shape)
    term = value_term(Forward(job, experience, torch.arange(len(mask)), mask, False, values=values))
    clipped = values.clamp(old - 0.3 * deviation, old + 0.3 * deviation)
    expected = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
    assert torch.allclose(term.losses[mask], expected[mask], rtol=1e-4)


@pytest.mark.parametrize(("form", "weight"), [("reward", 0.0), ("k2", 0.3), ("k3", 0.3)])
def test_a_kl_loss_weighs_beta_where_nothing_divides_the_score_and_0_where_kl_is_in_the_reward(
    load: Load, form: str, weight: float
) -> None:
    kl = {"control": "fixed", "coefficient": 0.3, "form": form}
    job, models, samples = load(advantage="rloo", group_size=2, kl=kl)
    assert gather_experience(models, samples, job, beta=0.3).kl_weight == weight
