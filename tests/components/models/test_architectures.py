"""Architectures of base models, tiny and random: each goes through SFT, reward and PPO, whole and as LoRA adapters.

`TABLE` is what docs/guide/models.md lists.
"""

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertGenerationConfig,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    SmolLM3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from components.base.errors import UserError
from components.data.tables.published import read_split
from components.models.batching import encode_prompt, encode_response, pad
from components.models.folders import load_base, save_model
from components.models.logprobs import last_hidden, vocabulary_logits
from components.models.runtime import Runtime
from components.models.sampling import Samples
from components.models.tokenizers import texts_of, train_tokenizer
from components.ppo import evaluate
from components.reward.scoring import load_scorer, score_sequences
from components.sft.tokenized_demonstrations import check_packing
from tests.chat_templates import FORMS

LIKE_LLAMA: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip
WITH_HEADS = LIKE_LLAMA | {"head_dim": 8}
TABLE: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "Llama": (LlamaConfig, LIKE_LLAMA),
    "Qwen2": (Qwen2Config, LIKE_LLAMA),
    "Qwen3": (Qwen3Config, WITH_HEADS),
    "GPT-2": (GPT2Config, {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}),
    "Gemma": (GemmaConfig, WITH_HEADS),
    "Gemma 2": (Gemma2Config, WITH_HEADS | {"sliding_window": 16}),
    "Gemma 3": (Gemma3TextConfig, WITH_HEADS | {"sliding_window": 16}),
    "Mistral": (MistralConfig, LIKE_LLAMA | {"sliding_window": 16}),
    "MiniCPM 3": (MiniCPM3Config, LIKE_LLAMA | {
        "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "head_dim": 8, "dim_model_base": 8,
    }),
    "Phi": (PhiConfig, LIKE_LLAMA | {"num_key_value_heads": 2}),
    "Phi 3": (Phi3Config, LIKE_LLAMA),
    "SmolLM3": (SmolLM3Config, LIKE_LLAMA),
}
WINDOWED = ("Gemma 2", "Gemma 3", "Mistral")
"""Layers that see a window of the tokens before: a pair's shared prompt can't be computed once for both responses."""
WIDER = 20
"""Factor of the output layer's random weights, so that a soft cap or a scale changes logits by more than rounding."""
CHEAP = ("GPT-2", "lora")
"""The one in every run of the tests: its layers are the only ones that store their weights transposed."""
EVERY = [(name, kind) for name in TABLE for kind in ("full", "lora")]
SAMPLE = os.environ.get("TETHER_ARCHITECTURES_SAMPLE", "")
"""A commit's id, which draws those that .ci/run tests; empty for all."""
OTHERS = [case for case in EVERY if case != CHEAP]
CASES = [CHEAP, *(random.Random(SAMPLE).sample(OTHERS, 3) if SAMPLE else OTHERS)]


@pytest.fixture(scope="module")
def tokenizer(desk_data: Path) -> Any:
    return train_tokenizer(texts_of(read_split(desk_data / "demonstrations.train")), 600)


def base_of(config: type[PretrainedConfig], options: dict[str, Any], tokenizer: Any, folder: Path) -> Path:
    """A random model of an architecture, saved as anyone's transformers saves it."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(vocab_size=len(tokenizer), **ids, **options))
    with torch.no_grad():  # logits beyond a soft cap, as those of trained models
        model.get_output_embeddings().weight.mul_(WIDER)
    save_model(model.eval(), tokenizer, folder)
    return folder


def whole_run(stages: Any, base: Path, lora: bool, out: Path) -> dict[str, dict[str, float]]:
    """SFT, reward and PPO on `base`, with adapters in the place of whole models or not. The evaluation is greedy."""
    from components.sft import stage as sft

    def silent(*_: Any, **__: Any) -> None:
        pass

    template = FORMS[base.name][0]
    form = {"chat_template": template, "system_in_question": "raise_exception" in template}
    job = stages.job("sft", base=str(base), max_demonstrations=64, epochs=1, **form)
    found = {"sft": sft.run(job, {"data": stages.inputs["data"], "base": base}, out / "sft", silent)}
    ours = type(stages)({"data": stages.inputs["data"], "sft": out / "sft" / "artifact"})
    adapters: dict[str, Any] = {"lora": {"rank": 2}} if lora else {}
    shared = {"shared_prompts": False} if base.name in WINDOWED else {}
    found["reward"] = ours.run("reward", out / "reward", max_pairs=32, probe_texts=8, **adapters, **shared)
    ours.inputs["reward"] = out / "reward" / "artifact"
    found["ppo"] = ours.run("ppo", out / "ppo", updates=1, evaluate_temperature=0, repeats={"samples": 1}, **adapters)
    return found


def recorded(function: Any, into: list[Samples]) -> Any:
    """`sampled_batches`, with the samples that it yields recorded."""

    def record(*args: Any, **options: Any) -> Iterator[Any]:
        for batch in function(*args, **options):
            into.append(batch[1])
            yield batch

    return record


def prompts_and_responses(samples: Samples) -> list[tuple[list[int], list[int]]]:
    return [
        (prompt[-length:], response[:drawn])
        for prompt, length, response, drawn in zip(
            samples.prompt_ids.tolist(), samples.prompt_lengths,
            samples.response_ids.tolist(), samples.response_lengths, strict=True,
        )
    ]  # fmt: skip


def nats(model: Any, prompt: list[int], response: list[int]) -> float:
    """Nats of a response by transformers alone; the pad token can't be sampled."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, model.config.pad_token_id] = -math.inf
    return -float(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum())


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=[] if case == CHEAP else pytest.mark.architectures) for case in CASES]
)
def test_an_architecture_goes_through_sft_reward_and_ppo(
    stages: Any, tokenizer: Any, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    sampled: list[Samples] = []
    monkeypatch.setattr(evaluate, "sampled_batches", recorded(evaluate.sampled_batches, sampled))
    base = base_of(*TABLE[name], tokenizer, tmp_path / name)
    found = whole_run(stages, base, kind == "lora", tmp_path)
    measured = {**found["sft"], **found["reward"], **found["ppo"]}
    for metric in ("sft/loss", "reward/log_loss", "policy/kl", "policy/proxy_reward"):
        assert math.isfinite(measured[metric]), metric
    assert measured["reward/invariance"] <= 1e-4
    assert measured["sft/perplexity"] < measured["sft/base_perplexity"], "SFT trains it"

    folders = [tmp_path / stage / "artifact" / "model" for stage in ("sft", "ppo")]
    sft, policy = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    assert type(policy).__name__ == type(sft).__name__ == type(load_base(base)[0]).__name__
    own, its = policy.state_dict(), sft.state_dict()
    assert any(not torch.equal(own[key], its[key]) for key in its), "PPO trains it"

    its = AutoTokenizer.from_pretrained(folders[0])
    rows = read_split(stages.inputs["data"] / "demonstrations.heldout")[:8]
    texts = [(encode_prompt(its, row["prompt"], 64), encode_response(its, row["response"], 10)) for row in rows]
    loss = sum(nats(sft, *text) for text in texts) / sum(len(response) for _, response in texts)
    assert measured["sft/loss"] == pytest.approx(loss, abs=1e-4)
    drawn, greedy = sampled[-4:-2]  # of the policy; those of SFT follow
    kl = [nats(sft, *text) - nats(policy, *text) for text in prompts_and_responses(drawn)]
    assert measured["policy/kl"] == pytest.approx(sum(kl) / len(kl), abs=1e-4)
    for prompt, response in prompts_and_responses(greedy):
        out = policy.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=10, suppress_tokens=[tokenizer.pad_token_id]
        )
        assert out[0, len(prompt) :].tolist() == response, "anybody's transformers answers the same"

    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward" / "artifact" / "model").eval()
    scorer, _ = load_scorer(tmp_path / "reward" / "artifact", runtime)
    rows = read_split(stages.inputs["data"] / "pairs.test")[:4]
    texts = [
        encode_prompt(tokenizer, row["prompt"], 40) + encode_response(tokenizer, row["chosen"], 10 + i)
        for i, row in enumerate(rows)
    ]
    ids, mask = pad(texts, tokenizer.pad_token_id)
    with torch.no_grad():
        direct = judge(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)
    ours = score_sequences(scorer, tokenizer.pad_token_id, texts, runtime)
    assert (ours - direct).abs().max() <= 1e-4, "anybody's transformers gives the same scores"


@pytest.mark.parametrize("name", TABLE)
def test_an_architecture_keeps_packed_demonstrations_apart(name: str, runtime: Runtime) -> None:
    """Windows of 16 tokens hide the beginnings of the longer two from their ends, packed or not."""
    config, options = TABLE[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(vocab_size=60, pad_token_id=0, eos_token_id=1, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rng = random.Random(0)
    batch = [
        ([rng.randrange(2, 60) for _ in range(prompt)], [rng.randrange(2, 60) for _ in range(response)])
        for prompt, response in ((3, 5), (20, 9), (1, 1), (7, 30))
    ]
    check_packing(model, 0, batch, runtime)


def test_the_guide_lists_the_architectures() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    for name, (config, _) in TABLE.items():
        needed = "`reward.shared_prompts=false`" if name in WINDOWED else ""
        assert f"| {name} | `{config.model_type}` | yes | yes | {needed}".rstrip() in guide, name


def test_an_encoder_decoder_is_refused_and_the_error_names_what_is_missing(tokenizer: Any, tmp_path: Path) -> None:
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(tokenizer), pad_token_id=0, decoder_start_token_id=0, **shape)
    save_model(T5ForConditionalGeneration(config), tokenizer, tmp_path / "t5")
    with pytest.raises(UserError, match=r"holds no model that transformers can load .*T5Config.* AutoModelForCausalLM"):
        load_base(tmp_path / "t5")


LIKE_BERT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
REFUSED: dict[str, tuple[type[PretrainedConfig], dict[str, Any], str]] = {
    "Bloom": (BloomConfig, {"hidden_size": 16, "n_layer": 2, "n_head": 2}, "a bloom model that Tether cannot train or"),
    "Falcon with ALiBi": (
        FalconConfig, {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": True},
        "a falcon model that Tether cannot train or sample",
    ),
    "RoBERTa": (
        RobertaConfig, LIKE_BERT | {"is_decoder": True},
        r"a roberta model \(RobertaForCausalLM\) whose logits .* on the left, they differ by up to .* of a range of",
    ),
    "BERT, which sees what follows": (BertGenerationConfig, LIKE_BERT, "in texts padded on the right, they differ by"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_with_other_logits_than_its_own_is_refused(name: str, tokenizer: Any, tmp_path: Path) -> None:
    config, options, message = REFUSED[name]
    base = base_of(config, options, tokenizer, tmp_path / name)
    with pytest.raises(UserError, match=f"--model: .* holds .*{message}"):
        load_base(base, "--model", trained=False)


CHANGED: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "Cohere": (CohereConfig, LIKE_LLAMA),
    "Gemma 2": TABLE["Gemma 2"],
    "Gemma 3 with a soft cap": (Gemma3TextConfig, WITH_HEADS | {"final_logit_softcapping": 5.0}),
    "Gemma 4": (Gemma4TextConfig, WITH_HEADS | {
        "final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 0, "layer_types": ["full_attention"] * 2,
    }),
    "Granite": (GraniteConfig, LIKE_LLAMA | {"logits_scaling": 8.0}),
    "MiniCPM 3": TABLE["MiniCPM 3"],
}  # fmt: skip
"""Classes that do more than apply their output layer."""


@pytest.mark.parametrize("name", [*CHANGED, "Llama", "OPT"])
def test_logits_and_gradients_are_those_of_the_models_class(name: str, tokenizer: Any, tmp_path: Path) -> None:
    opt = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tables = TABLE | CHANGED | {"OPT": (OPTConfig, opt | {"word_embed_proj_dim": 16, "max_position_embeddings": 64})}
    model, _ = load_base(base_of(*tables[name], tokenizer, tmp_path), "--model", trained=False)
    ids = torch.randint(6, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    hidden = last_hidden(model, ids, torch.ones_like(ids, dtype=torch.bool), "right")
    layer, found = model.get_output_embeddings(), []
    for logits in (vocabulary_logits(model, hidden.flatten(0, 1)).view(2, 9, -1), model(input_ids=ids).logits):
        others = torch.cat([logits[..., : tokenizer.pad_token_id], logits[..., tokenizer.pad_token_id + 1 :]], -1)
        gradient = torch.autograd.grad(others.square().sum(), layer.weight, retain_graph=True)[0]
        found.append((others, gradient))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert torch.allclose(layer(hidden)[..., 1:], found[1][0], rtol=1e-3) == (name not in CHANGED)


@pytest.mark.parametrize("name", ["Cohere", "Granite"])
def test_a_model_without_a_reward_class_judges_but_is_no_base(name: str, tokenizer: Any, tmp_path: Path) -> None:
    base = base_of(*CHANGED[name], tokenizer, tmp_path / name)
    assert load_base(base, "--judge", trained=False)[0].config.model_type == name.lower()
    with pytest.raises(UserError, match=f"no reward-model class for .*{name}Config"):
        load_base(base)
