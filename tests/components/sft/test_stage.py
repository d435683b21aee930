"""The SFT stage: it learns responses alone, EOS among them, and an interruption leaves no trace."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from components.base.jsonl import read_rows
from components.models.config import GenerationConfig, ScratchModel
from components.models.folders import load_causal_lm
from components.models.runtime import Runtime
from components.sft.demonstrations import encode_demonstrations, mean_loss, token_losses
from components.sft.stage import fine_tune, unigram_losses


@pytest.fixture(scope="module")
def trained(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("sft")
    return out, stages.run("sft", out)


@pytest.fixture(scope="module")
def examples(stages: Any, language: Any) -> list[tuple[list[int], list[int]]]:
    rows = read_rows(stages.inputs["data"] / "demonstrations.heldout.jsonl")
    return encode_demonstrations(language.tokenizer, rows, GenerationConfig(max_new_tokens=40))


def test_the_loss_is_transformers_own_over_response_tokens_with_the_prompt_masked(
    language: Any, examples: Any, runtime: Runtime
) -> None:
    own, tokens = 0.0, 0
    for prompt, response in examples[:6]:
        logits = language.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logits[:, language.tokenizer.pad_token_id] = -torch.inf  # the pad token can't be sampled
        own += torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="sum").item()
        tokens += len(response)
    assert mean_loss(language.model, language.tokenizer, examples[:6], runtime, 2) == pytest.approx(
        own / tokens, abs=1e-5
    )


def test_every_response_token_counts_once_eos_too_and_no_prompt_token(
    language: Any, examples: Any, runtime: Runtime
) -> None:
    losses = token_losses(language.model, language.tokenizer.pad_token_id, examples[:6], runtime)
    assert len(losses) == sum(len(response) for _, response in examples[:6])
    assert all(response[-1] == language.tokenizer.eos_token_id for _, response in examples)
    other = [([*prompt[:-3], 9, 9, 9], response) for prompt, response in examples[:6]]
    changed = token_losses(language.model, language.tokenizer.pad_token_id, other, runtime)
    assert losses.shape == changed.shape and not torch.allclose(losses, changed)


def test_the_unigram_baseline_by_hand() -> None:
    train, heldout = [([9], [1, 1, 2])], [([9], [1, 3])]
    # add-one over a vocabulary of 4: P(1) = 3/7, P(3) = 1/7
    assert unigram_losses(train, heldout, 4) == pytest.approx([-(math.log(3 / 7) + math.log(1 / 7))])


def test_metrics_are_those_of_the_held_out_demonstrations(
    stages: Any, trained: tuple[Path, dict[str, float]], runtime: Runtime
) -> None:
    out, metrics = trained
    names = ("loss", "perplexity", "unigram_perplexity", "perplexity_ratio", "ended", "gold", "violations")
    ends = {f"sft/{name}_{end}" for name in ("loss", "perplexity_ratio", "ended") for end in ("low", "high")}
    assert {f"sft/{name}" for name in names} | ends == metrics.keys()
    assert all(math.isfinite(v) for v in metrics.values())
    model, tokenizer = load_causal_lm(out / "artifact", runtime)
    rows = read_rows(stages.inputs["data"] / "demonstrations.heldout.jsonl")[:8]
    loss = mean_loss(model, tokenizer, encode_demonstrations(tokenizer, rows, stages.job("sft").generation), runtime)
    assert metrics["sft/loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["sft/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["sft/perplexity_ratio"] == pytest.approx(
        metrics["sft/perplexity"] / metrics["sft/unigram_perplexity"]
    )
    assert {p.name for p in (out / "artifact").iterdir()} == {"model", "samples.jsonl", "metrics.json"}
    samples = read_rows(out / "artifact" / "samples.jsonl")
    assert len(samples) == 8 and metrics["sft/ended"] == sum(s["ended"] for s in samples) / 8
    assert json.loads((out / "artifact" / "metrics.json").read_text()) == metrics


def test_it_learns_to_answer_and_to_end(stages: Any, tmp_path: Path) -> None:
    metrics = stages.run("sft", tmp_path, epochs=12, learning_rate=2e-2, checkpoint_every=1000,
                         generation=GenerationConfig(max_prompt_tokens=64, max_new_tokens=48))  # fmt: skip
    assert metrics["sft/perplexity_ratio"] < 0.2
    assert metrics["sft/ended"] >= 0.75, "EOS is among the learned tokens"


def test_a_pretrained_base_keeps_its_tokenizer_and_is_its_own_baseline(
    stages: Any, tmp_path: Path, digests: Any
) -> None:
    base = stages.inputs["sft"] / "model"
    other = type(stages)(stages.inputs | {"base": base})
    from components.sft import stage

    inputs = {"data": other.inputs["data"], "base": base}
    metrics = stage.run(stages.job("sft", epochs=1), inputs, tmp_path, lambda *a, **k: None)
    assert metrics["sft/perplexity_ratio"] == pytest.approx(metrics["sft/perplexity"] / metrics["sft/base_perplexity"])
    before = json.loads((stages.inputs["sft"] / "metrics.json").read_text())
    assert metrics["sft/base_perplexity"] == pytest.approx(before["sft/perplexity"], rel=1e-5)
    assert metrics["sft/perplexity_ratio"] < 1
    assert digests(tmp_path / "artifact" / "model")["tokenizer.json"] == digests(base)["tokenizer.json"]


def test_micro_batches_have_the_whole_batch_s_loss_and_gradient_though_their_responses_differ_in_length(
    stages: Any, examples: Any, tmp_path: Path, runtime: Runtime
) -> None:
    ragged = [(prompt, response[: 2 + 3 * i]) for i, (prompt, response) in enumerate(examples[:8])]
    found = []
    for micro in (8, 3, 1):
        model, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
        job = stages.job("sft", epochs=1, batch_size=8, micro_batch_size=micro)
        fine_tune(job, model, tokenizer.pad_token_id, ragged, tmp_path / str(micro),
                  lambda step, metrics, total=None, **_: found.append(metrics))  # fmt: skip
    assert len({len(response) for _, response in ragged}) > 4 and len(found) == 3
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("at", [1, 4, 7])
def test_interrupted_and_started_again_it_ends_with_the_same_bytes(
    stages: Any, trained: tuple[Path, Any], tmp_path: Path, at: int, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        stages.run("sft", tmp_path, interrupting(at))  # 7 steps, a checkpoint every 2 and after the last
    assert stages.run("sft", tmp_path) == trained[1]
    assert digests(tmp_path / "artifact") == digests(trained[0] / "artifact")


def test_another_seed_gives_another_model(stages: Any, trained: tuple[Path, Any], tmp_path: Path) -> None:
    assert stages.run("sft", tmp_path, seed=1)["sft/loss"] != trained[1]["sft/loss"]


@pytest.mark.parametrize(("hidden_size", "heads"), [(30, 2), (33, 2), (100, 8)])
def test_a_scratch_model_whose_heads_rotary_positions_cannot_turn_is_refused(hidden_size: int, heads: int) -> None:
    with pytest.raises(ValidationError, match=rf"hidden_size \({hidden_size}\) must be a multiple of twice heads"):
        ScratchModel(hidden_size=hidden_size, heads=heads)
