"""The SFT stage: it learns responses alone, EOS among them, and an interruption leaves no trace."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.models.batching import encode_prompt, encode_response
from components.models.config import GenerationConfig, ScratchModel
from components.models.folders import load_causal_lm
from components.models.runtime import Runtime
from components.models.sampling import generate_responses
from components.sft.config import SftConfig
from components.sft.stage import fine_tune, shared_out, unigram_losses
from components.sft.tokenized_demonstrations import Examples, choose_demonstrations, response_losses, token_losses
from components.training.loop import torch_seed
from tests.splits import write_split


def encoded(tokenizer: Any, rows: list[Any], generation: GenerationConfig) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and responses, cut to the lengths of `generation`."""
    most = generation.max_prompt_tokens, generation.max_new_tokens
    return [
        (encode_prompt(tokenizer, row["prompt"], most[0]), encode_response(tokenizer, row["response"], most[1]))
        for row in rows
    ]


def mean_loss(model: Any, tokenizer: Any, examples: list[Any], runtime: Runtime, batch_size: int = 32) -> float:
    """Nats per response token of all `examples`."""
    losses = response_losses(model, tokenizer.pad_token_id, Examples.of(examples), runtime, batch_size)
    return sum(losses) / sum(len(response) for _, response in examples)


@pytest.fixture(scope="module")
def trained(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("sft")
    return out, stages.run("sft", out)


@pytest.fixture(scope="module")
def examples(stages: Any, language: Any) -> list[tuple[list[int], list[int]]]:
    rows = read_split(stages.inputs["data"] / "demonstrations.heldout")
    return encoded(language.tokenizer, rows, GenerationConfig(max_new_tokens=40))


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
    train, heldout = Examples.of([([9], [1, 1, 2])]), Examples.of([([9], [1, 3])])
    # add-one over a vocabulary of 4: P(1) = 3/7, P(3) = 1/7
    assert unigram_losses(train, heldout, 4) == pytest.approx([-(math.log(3 / 7) + math.log(1 / 7))])


def test_metrics_are_those_of_the_held_out_demonstrations(
    stages: Any, trained: tuple[Path, dict[str, float]], runtime: Runtime
) -> None:
    out, metrics = trained
    names = ("demonstrations", "overlong", "loss", "perplexity", "unigram_perplexity", "perplexity_ratio", "ended",
             "gold", "violations")  # fmt: skip
    ends = {f"sft/{name}_{end}" for name in ("loss", "perplexity_ratio", "ended") for end in ("low", "high")}
    assert {f"sft/{name}" for name in names} | ends == metrics.keys()
    assert all(math.isfinite(v) for v in metrics.values())
    model, tokenizer = load_causal_lm(out / "artifact", runtime)
    rows = read_split(stages.inputs["data"] / "demonstrations.heldout")[:8]
    loss = mean_loss(model, tokenizer, encoded(tokenizer, rows, stages.job("sft").generation), runtime)
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


def test_an_untrained_base_is_published_as_it_is_and_measured(stages: Any, tmp_path: Path, digests: Any) -> None:
    from components.sft import stage

    def untrained(base: Path, out: Path) -> dict[str, float]:
        job = stages.job("sft", train=False, base=str(base), batch_size=10_000)  # too few to train on are no matter
        return stage.run(job, {"data": stages.inputs["data"], "base": base}, out, lambda *a, **k: None)

    metrics = untrained(stages.inputs["sft"] / "model", tmp_path / "one")
    published = tmp_path / "one" / "artifact" / "model"
    assert digests(published) == digests(stages.inputs["sft"] / "model")
    assert untrained(published, tmp_path / "two") == metrics and not (tmp_path / "one" / "checkpoint").exists()
    before = json.loads((stages.inputs["sft"] / "metrics.json").read_text())
    assert metrics["sft/perplexity_ratio"] == metrics["sft/perplexity_ratio_high"] == 1
    assert metrics["sft/demonstrations"] == 0
    assert {name: metrics[name] for name in ("sft/loss", "sft/loss_high", "sft/ended", "sft/gold")} == pytest.approx(
        {name: before[name] for name in ("sft/loss", "sft/loss_high", "sft/ended", "sft/gold")}, rel=1e-5
    )


def test_without_training_a_base_has_to_be_named() -> None:
    with pytest.raises(ValidationError, match=r"sft\.train is false, so .*: set sft\.base"):
        SftConfig(train=False)
    assert SftConfig(train=False, keep="20260101-000000-0000").train is False


def test_micro_batches_have_the_whole_batch_s_loss_and_gradient_though_their_responses_differ_in_length(
    stages: Any, examples: Any, tmp_path: Path, runtime: Runtime
) -> None:
    ragged = [(prompt, response[: 2 + 3 * i]) for i, (prompt, response) in enumerate(examples[:8])]
    found = []
    for micro in (8, 3, 1):
        model, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
        job = stages.job("sft", epochs=1, batch_size=8, micro_batch_size=micro)
        fine_tune(job, model, tokenizer.pad_token_id, Examples.of(ragged), tmp_path / str(micro),
                  lambda step, metrics, total=None, **_: found.append(metrics))  # fmt: skip
    assert len({len(response) for _, response in ragged}) > 4 and len(found) == 3
    assert all(0.01 < metrics.pop("sft/peak_memory_gb") < 100 for metrics in found), "as this process has"
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-5)


def lengths(tokenizer: Any, rows: list[dict[str, Any]]) -> list[int]:
    """Tokens of the rows' responses, EOS included."""
    return [len(tokenizer(row["response"], add_special_tokens=False)["input_ids"]) + 1 for row in rows]


def test_overlong_demonstrations_stay_out_unless_asked_for_and_all_that_is_taught_ends(
    stages: Any, language: Any
) -> None:
    rows = read_split(stages.inputs["data"] / "demonstrations.train")
    tokens, cap, eos = lengths(language.tokenizer, rows), 14, language.tokenizer.eos_token_id
    fits = [i for i, n in enumerate(tokens) if n <= cap]
    assert 30 < len(fits) < 150 and tokens.count(cap) and tokens.count(cap + 1), "the cap itself is within"
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=cap)
    found = choose_demonstrations(language.tokenizer, rows, generation, "drop", None)
    whole = encoded(language.tokenizer, rows, generation)
    assert list(found.examples) == [whole[i] for i in fits] and (found.seen, found.overlong) == (200, 200 - len(fits))
    assert all(response[-1] == eos for _, response in found.examples)
    first = choose_demonstrations(language.tokenizer, rows, generation, "drop", 20)
    assert list(first.examples) == list(found.examples[:20]) and first.seen == fits[19] + 1
    assert first.overlong == first.seen - 20, "later ones take the place of those that are left out"
    cut = choose_demonstrations(language.tokenizer, rows, generation, "cut", 20)
    assert list(cut.examples) == whole[:20] and cut.seen == 20
    assert [response[-1] == eos for _, response in cut.examples] == [n <= cap for n in tokens[:20]]


def test_the_stage_learns_and_evaluates_without_overlong_demonstrations_by_default(stages: Any, tmp_path: Path) -> None:
    assert SftConfig().overlong == "drop"
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=14)
    options = {"generation": generation, "overlong": "drop", "epochs": 1}
    metrics = stages.run("sft", tmp_path / "drop", **options)
    _, tokenizer = load_causal_lm(tmp_path / "drop" / "artifact", stages.job("sft").runtime)
    data = stages.inputs["data"]
    tokens = lengths(tokenizer, read_split(data / "demonstrations.train"))
    fit = sum(n <= 14 for n in tokens)
    assert metrics["sft/demonstrations"] == fit and metrics["sft/overlong"] == pytest.approx(1 - fit / len(tokens))
    model, _ = load_causal_lm(tmp_path / "drop" / "artifact", stages.job("sft").runtime)
    heldout = read_split(data / "demonstrations.heldout")
    ending = [row for row, n in zip(heldout, lengths(tokenizer, heldout), strict=True) if n <= 14][:8]
    loss = mean_loss(model, tokenizer, encoded(tokenizer, ending, generation), stages.job("sft").runtime)
    assert metrics["sft/loss"] == pytest.approx(loss, abs=1e-6) and 0 < len(ending) < len(heldout)


@pytest.mark.parametrize(("cap", "use"), [(11, "to train on"), (9, "to evaluate on")])
def test_too_few_demonstrations_that_fit_are_the_users_mistake_and_the_message_names_cap_and_option(
    stages: Any, tmp_path: Path, cap: int, use: str
) -> None:
    options = {"overlong": "drop", "generation": GenerationConfig(max_prompt_tokens=64, max_new_tokens=cap)}
    rows = read_split(stages.inputs["data"] / "demonstrations.train")
    if use == "to evaluate on":  # what fits is all in the training split
        options |= {"batch_size": 1, "micro_batch_size": 1}
    else:
        options |= {"batch_size": len(rows), "micro_batch_size": len(rows)}
    data = tmp_path / "data"
    shutil.copytree(stages.inputs["data"], data)
    if use == "to evaluate on":
        long = [row | {"response": " ".join([row["response"]] * 3)} for row in rows[:8]]
        write_split(data / "demonstrations.heldout", long)
    with pytest.raises(UserError) as error:
        type(stages)(stages.inputs | {"data": data}).run("sft", tmp_path / "out", **options)
    for part in (use, f"more than {cap} tokens", "generation.max_new_tokens", "sft.overlong=cut"):
        assert part in str(error.value)
    assert not (tmp_path / "out" / "artifact").exists()


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


WATCHED: dict[str, Any] = {
    "max_demonstrations": 8, "epochs": 24, "batch_size": 8, "micro_batch_size": 8, "learning_rate": 5e-2,
    "evaluate_every": 8, "evaluate": 6, "decay": "none",
}  # fmt: skip


def test_held_out_evaluations_publish_a_checkpoint_that_the_judged_demonstrations_did_not_choose(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], runtime: Runtime
) -> None:
    shown: dict[int, list[dict[str, Any]]] = {}

    def observe(step: int, metrics: Any, samples: Any = None, **_: Any) -> None:
        shown.update({step: samples} if samples else {})

    metrics = stages.run("sft", tmp_path / "whole", observe, **WATCHED)
    about = json.loads((tmp_path / "whole" / "artifact" / "metadata.json").read_text())
    published = about["published_step"]
    assert metrics["sft/published_step"] == published < about["last_step"] == 24, "8 demonstrations are overfitted"
    model, tokenizer = load_causal_lm(tmp_path / "whole" / "artifact", runtime)
    rows = read_split(stages.inputs["data"] / "demonstrations.heldout")
    job = stages.job("sft", **WATCHED)
    judged, watched = shared_out(rows, job.sft)
    assert len(judged) == len(watched) == 10 and not {str(r["prompt"]) for r in judged[:6]} & {
        str(r["prompt"]) for r in watched
    }
    for some, name in ((watched, "watched_loss"), (judged[:6], "loss")):
        own = mean_loss(model, tokenizer, encoded(tokenizer, list(some), job.generation), runtime)
        assert metrics[f"sft/{name}"] == pytest.approx(own, abs=1e-5)
    assert metrics["sft/last_loss"] != metrics["sft/loss"] and metrics["sft/last_watched_loss"] > own
    last, _ = load_causal_lm(tmp_path / "whole" / "artifact" / "last", runtime)
    examples = encoded(tokenizer, list(judged[:6]), job.generation)
    assert metrics["sft/last_loss"] == pytest.approx(mean_loss(last, tokenizer, examples, runtime), abs=1e-5)
    assert list(shown) == [8, 16, 24]
    prompts = [row["prompt"] for row in watched[:8]]
    again = generate_responses(model, tokenizer, prompts, job.generation, torch_seed(0, "sft", "shown"), runtime)
    assert [(r["prompt"], r["response"]) for r in shown[published]] == [
        (prompt, response.text) for prompt, response in zip(prompts, again, strict=True)
    ]
    with pytest.raises(KeyboardInterrupt):
        stages.run("sft", tmp_path / "cut", interrupting(17), **WATCHED)
    assert stages.run("sft", tmp_path / "cut", **WATCHED) == metrics
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_demonstrations_that_cannot_be_watched_are_said_before_the_training(stages: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(stages.inputs["data"], data)
    rows = read_split(data / "demonstrations.heldout")
    same = [dict(rows[0]) for _ in range(4)]
    write_split(data / "demonstrations.heldout", same)  # whoever is watched has the prompt of one that is judged
    with pytest.raises(UserError, match=r"sft\.evaluate_every needs two held-out demonstrations .* there are 0"):
        type(stages)(stages.inputs | {"data": data}).run("sft", tmp_path, evaluate_every=2)
    with pytest.raises(ValidationError, match=r"no training to evaluate"):
        SftConfig(train=False, base="b", evaluate_every=2)
