"""A chat template for a base without one: its markers become tokens, and SFT teaches to end as its turns do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from components.base.errors import UserError
from components.models.batching import encode_prompt, encode_response
from components.models.chat.endings import endings_of
from components.models.chat.rendering import rendered_conversation
from components.models.chat.templates import CHAT_TEMPLATES
from components.models.folders import load_base, save_model
from components.models.tokenizers import load_tokenizer
from data_contracts.findings.texts import rendered_and_judged

ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where is it?"}]
WHOLE = [*ASKED, {"role": "assistant", "content": "On its way."}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokenizer, of bytes, has an EOS and no template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("base") / "plain"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["</s>", "<stop>", *alphabet])}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", extra_special_tokens=["<stop>"])
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=0, **shape))
    save_model(model.eval(), tokenizer, folder)
    return folder


def test_chatml_gives_a_base_markers_embeddings_and_an_end_that_is_trained(base: Path) -> None:
    with pytest.raises(UserError, match=r"no chat template.*sft\.chat_template=chatml"):
        load_tokenizer(base)
    model, tokenizer = load_base(base, template="chatml")
    rendered = rendered_conversation(tokenizer, WHOLE)
    assert rendered == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhere is it?<|im_end|>\n"
        "<|im_start|>assistant\nOn its way.<|im_end|>\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.get_input_embeddings().num_embeddings == len(tokenizer) == 258 + 3  # the markers and pad
    prompt, response = encode_prompt(tokenizer, ASKED, 200), encode_response(tokenizer, "On its way.", 50)
    assert tokenizer.convert_ids_to_tokens(response[-1]) == "<|im_end|>"
    assert prompt.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3, "each marker is one token"
    whole = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert whole[: len(prompt) + len(response)] == prompt + response, "SFT learns what later turns show"
    assert rendered_and_judged(tokenizer, ASKED, ["On its way."])[1] is None, "the contract's template_agrees"
    assert endings_of(tokenizer).ids == (response[-1], 0), "its former EOS ends a response too"


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
def test_every_named_template_renders_prompt_response_and_eos(base: Path, name: str) -> None:
    tokenizer = load_tokenizer(base, template=name)
    assert rendered_and_judged(tokenizer, ASKED, ["On its way.", "b"])[1] is None


def test_the_same_template_gives_the_same_model_and_what_is_saved_is_loaded_again(
    base: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        save_model(*load_base(base, template="chatml", stop=("###",)), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in files)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert rendered_conversation(tokenizer, WHOLE).endswith("On its way.<|im_end|>\n")
    assert endings_of(tokenizer) == ((tokenizer.eos_token_id, 0), ("###",))
    told = json.loads((tmp_path / "one" / "generation_config.json").read_text())
    assert told["eos_token_id"] == [tokenizer.eos_token_id, 0], "so that vLLM and generate stop there too"
    model, again = load_base(tmp_path / "one", stop=("###",))
    assert endings_of(again) == endings_of(tokenizer) and len(again) == len(tokenizer)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)


def test_a_models_list_of_eos_ids_ends_responses_and_its_templates_end_comes_first(
    base: Path, tmp_path: Path
) -> None:
    """As Llama 3's: EOS is <|end_of_text|>, and turns end with <|eot_id|>, which generation_config lists."""
    model, tokenizer = load_base(base, template="plain")
    tokenizer.chat_template = CHAT_TEMPLATES["plain"].replace("{{ eos_token }}", "<stop>")
    model.generation_config.eos_token_id = [0, 1, 40]
    save_model(model, tokenizer, tmp_path / "listed")
    model, tokenizer = load_base(tmp_path / "listed")
    assert (tokenizer.eos_token, endings_of(tokenizer).ids) == ("<stop>", (1, 0, 40))
    assert model.generation_config.eos_token_id == [1, 0, 40] and model.config.eos_token_id == 1
    assert rendered_and_judged(tokenizer, ASKED, ["b"])[1] is None


def test_a_template_without_an_end_agrees_only_where_a_stop_string_is_its_end(base: Path) -> None:
    text = CHAT_TEMPLATES["plain"].replace("{{ eos_token }}", "{{ '\\n###' }}")
    for stop, agrees in (((), False), (("\n###",), True), (("###",), True), (("##!",), False)):
        tokenizer = load_tokenizer(base, template=text, stop=stop)
        assert (rendered_and_judged(tokenizer, ASKED, ["b"])[1] is None) == agrees, stop


@pytest.mark.parametrize(("text", "reason"), [
    ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError"),
    ("{{ raise_exception('no') }}", "no"),
])  # fmt: skip
def test_a_template_that_cannot_be_used_is_named_by_its_option(base: Path, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"^sft\.chat_template: .*{reason}"):
        load_tokenizer(base, template=text)


def test_sft_on_a_template_trains_responses_to_end_with_its_end(
    base: Path, stages: Any, tmp_path: Path, runtime: Any
) -> None:
    from components.models.config import GenerationConfig
    from components.sft import stage as sft

    generation = GenerationConfig(max_prompt_tokens=200, max_new_tokens=200)
    job = stages.job("sft", base=str(base), chat_template="chatml", max_demonstrations=16, epochs=6, batch_size=8,
                     micro_batch_size=8, generation=generation, evaluate=2)  # fmt: skip
    sft.run(job, {"data": stages.inputs["data"], "base": base}, tmp_path, lambda *_, **__: None)
    folder = tmp_path / "artifact" / "model"
    before, (model, tokenizer) = load_base(base, template="chatml")[0], load_base(folder)
    assert tokenizer.eos_token == "<|im_end|>" and "<|im_start|>" in tokenizer.chat_template
    end = tokenizer.eos_token_id
    rows = [m.get_output_embeddings().weight[end] for m in (before, model)]
    ids = torch.tensor([encode_prompt(tokenizer, ASKED, 200) + encode_response(tokenizer, "On its way.", 50)[:-1]])
    likely = [m(ids).logits[0, -1].log_softmax(-1)[end].item() for m in (before, model)]
    assert not torch.equal(*rows) and likely[1] > likely[0] + 0.5
