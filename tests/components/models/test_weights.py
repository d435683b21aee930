"""No weight is drawn at random for one that the files lack; a folder's kernels and endless templates are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.base.errors import UserError
from components.models import tokenizers
from components.models.adapters import Backbone, load_adapter, save_adapter
from components.models.config import AdapterConfig, ScratchModel
from components.models.folders import build_causal_lm, load_base, load_causal_lm, load_reward_model, save_model
from components.models.runtime import Runtime
from components.models.tokenizers import load_tokenizer, train_tokenizer

CPU = Runtime(device="cpu", dtype="float32", threads=1, instruction_set="default")
LOADERS: dict[str, Callable[[Path], Any]] = {
    "base": load_base,
    "policy": lambda folder: load_causal_lm(folder, CPU),
    "reward from sft": lambda folder: load_reward_model(folder, CPU, seed=0),
    "reward": lambda folder: load_reward_model(folder, CPU),
}
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model `policy` and a reward model `reward`."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer = train_tokenizer(["my order is late what can you do"], 300)
    model = build_causal_lm(ScratchModel(hidden_size=16, layers=2, heads=2), tokenizer, 64, 0)
    save_model(model, tokenizer, folder / "policy")
    save_model(*load_reward_model(folder / "policy", CPU, seed=0), folder / "reward")
    return folder


@pytest.fixture(params=LOADERS)
def loaded(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> tuple[Callable[[Path], Any], Path]:
    """A loader, and a folder that it takes, to spoil."""
    name = "reward" if request.param == "reward" else "policy"
    return LOADERS[request.param], Path(shutil.copytree(saved / name, tmp_path / "model"))


def change(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    """Write other weights."""
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    """Write another config."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


NORM = "model.layers.1.input_layernorm.weight"


def filled(value: float) -> Callable[[Tensors], Tensors]:
    """One number of one weight is `value`."""

    def edit(tensors: Tensors) -> Tensors:
        tensors[NORM][3] = value
        return tensors

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: {f"module.{name}": t for name, t in tensors.items()}, r"lacks .*no layer takes module\."),
        (lambda tensors: dict(sorted(tensors.items())[: len(tensors) // 2]), r"lacks model\.layers.* more"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != NORM}, rf"lacks {NORM}\. "),
        (lambda tensors: {**tensors, "model.layers.2.mlp.up_proj.weight": torch.ones(2)}, r"takes model\.layers\.2"),
        (lambda tensors: {**tensors, NORM: torch.ones(3)}, rf"another shape {NORM}\."),
        (filled(float("nan")), f"NaN or infinite: {NORM}"),
        (filled(float("-inf")), f"NaN or infinite: {NORM}"),
    ],
    ids=["renamed", "half", "one gone", "one more", "another shape", "NaN", "infinite"],
)
def test_weights_that_are_not_the_configs_are_named_by_every_loader(
    loaded: tuple[Callable[[Path], Any], Path], edit: Callable[[Tensors], Tensors], said: str
) -> None:
    load, folder = loaded
    load(folder)
    change(folder, edit)
    with pytest.raises(UserError, match=said):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "do not fit"),
        ({"num_hidden_layers": 3}, "lacks"),
        ({"num_hidden_layers": 1}, "no layer takes"),
        ({"hidden_size": 32}, "another shape"),
        ({"hidden_act": "no such function"}, "KeyError"),
        ({"rope_parameters": {"rope_type": "none of these"}}, "KeyError"),
        ({"model_type": "t5"}, "can load|do not fit"),
        ({"model_type": "no such model"}, "no such model"),
        ({"num_attention_heads": "many"}, "many"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"attn_implementation": "kernels-community/flash-attn"}, "attention kernel 'kernels-community"),
        ({"_attn_implementation": "someone/kernel@v1"}, "attention kernel"),
        ({"text_config": {"attn_implementation": {"": "someone/kernel"}}}, "attention kernel"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit_the_weights_or_asks_for_code_is_refused(
    loaded: tuple[Callable[[Path], Any], Path], changes: dict[str, Any], said: str
) -> None:
    load, folder = loaded
    configure(folder, **changes)
    with pytest.raises(UserError, match=said) as error:
        load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": ' * 3000, b"9" * 5000])
def test_a_file_that_cannot_be_read_is_the_users_mistake_in_one_paragraph(
    loaded: tuple[Callable[[Path], Any], Path], name: str, content: bytes
) -> None:
    load, folder = loaded
    (folder / name).write_bytes(content)
    try:
        load(folder)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert name == "tokenizer_config.json", "the tokenizer is whole without it"


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_alone_says_where_its_base_is_named(saved: Path, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(saved / "policy", tmp_path / "model"))
    (folder / "model.safetensors").rename(folder / file)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(UserError, match=r"that it changes \(base_model_name_or_path .*\) is .* Merge .* that model"):
        load_base(folder)


@pytest.mark.parametrize("left", [1, 0])
def test_a_missing_shard_is_named_and_downloaded_again(saved: Path, tmp_path: Path, left: int) -> None:
    model, tokenizer = load_base(saved / "policy")
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(tmp_path.glob("model-*"))
    assert len(shards) > 1
    for shard in shards[left:]:
        shard.unlink()
    with pytest.raises(UserError, match=rf"names '{shards[left].name}', .* download this file again; else"):
        load_base(tmp_path)
    shards[left].symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=rf"names '{shards[left].name}'"):
        load_base(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(UserError, match="not a safetensors file in this folder"):
        load_base(tmp_path)


def test_an_output_layer_is_left_out_for_a_fresh_head_alone(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "policy", tmp_path / "model"))
    configure(folder, tie_word_embeddings=False)
    change(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    load_base(folder)
    load_reward_model(folder, CPU, seed=0)
    with pytest.raises(UserError, match=r"lacks score\.weight; no layer takes lm_head\.weight"):
        load_reward_model(folder, CPU)
    with pytest.raises(UserError, match=r"no layer takes score\.weight"):
        load_causal_lm(saved / "reward", CPU)


def adapter(folder: Path, saved: Path) -> Backbone:
    """Write an adapter that is not zero to `folder`; a fresh backbone to load it onto."""
    view = Backbone(load_causal_lm(saved / "policy", CPU)[0]).add("a", AdapterConfig(rank=2, targets=("q_proj",)), 1)
    save_adapter(view, folder)
    return Backbone(load_causal_lm(saved / "policy", CPU)[0])


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: {n: t for n, t in tensors.items() if n != KEY}, f"lacks {KEY}"),
        (lambda tensors: {**tensors, "module.x": torch.ones(2)}, r"no layer takes module\.x"),
        (lambda tensors: {**tensors, KEY: tensors[KEY][:1].contiguous()}, f"another shape {KEY}"),
        (lambda tensors: {**tensors, KEY: tensors[KEY] / 0}, f"NaN or infinite: {KEY}"),
    ],
    ids=["one gone", "one more", "a row that would be repeated", "infinite"],
)
def test_an_adapters_weights_are_all_from_its_file(
    saved: Path, tmp_path: Path, edit: Callable[[Tensors], Tensors], said: str
) -> None:
    backbone, file = adapter(tmp_path, saved), tmp_path / "adapter_model.safetensors"
    save_file(edit(load_file(file)), file)
    with pytest.raises(UserError, match=said):
        load_adapter(backbone, "b", tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = namespace(a='a' * 999) %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}",
        "{{ 'a' * 99999999999 }}",
        "{% if messages | length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[7].content }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%99999999999d' % 1 }}",
    ],
    ids=["loops", "doubles", "one long text", "loops over several turns", "recurses", "fails", "power", "format"],
)
def test_a_chat_template_that_fails_or_does_not_end_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizers, "TEMPLATE_SECONDS", 1)
    folder = Path(shutil.copytree(saved / "policy", tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="can't be used"):
        load_tokenizer(folder)


@pytest.mark.parametrize("sharded", [False, True])
def test_another_head_in_a_tied_model_is_refused(tmp_path: Path, sharded: bool) -> None:
    """transformers 5 would use it; vLLM and transformers 4 use the embeddings."""
    tokenizer = train_tokenizer(["my order is late what can you do"], 300)
    model = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 64, 0)
    save_model(model, tokenizer, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    copy = weights["model.embed_tokens.weight"].clone()
    for head, tied in ((copy, True), (copy + 0.1, False)):
        if sharded:
            (tmp_path / "model.safetensors").unlink(missing_ok=True)
            save_file({"lm_head.weight": head}, tmp_path / "b.safetensors", metadata={"format": "pt"})
            save_file(weights, tmp_path / "a.safetensors", metadata={"format": "pt"})
            at = dict.fromkeys(weights, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": at}))
        else:
            save_file(weights | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if tied:
            load_base(tmp_path)  # a copy of the embeddings, as some programs write it
            continue
        with pytest.raises(UserError, match=r"two models.*tie_word_embeddings.*lm_head\.weight.*to false in conf"):
            load_base(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_base(tmp_path)[0].get_output_embeddings().weight, copy + 0.1)
