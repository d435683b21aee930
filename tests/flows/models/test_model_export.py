"""Exported folders, read back by transformers and peft alone: the store's model, whole, with its card, no pickle."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from components.base.errors import UserError
from components.gates.judging import Waiver
from components.models.adapters import Backbone, load_adapter
from components.models.folders import load_causal_lm, load_reward_model
from components.models.runtime import Runtime
from components.reward.scoring import score_sequences
from components.store.store import ArtifactStore
from flows.models.model_export import export
from tasks.model_folder import place_of

RUNTIME = Runtime(device="cpu", dtype="float32", threads=1)
IDS = torch.tensor([[6, 7, 8, 9, 10, 2], [9, 6, 6, 2, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
LORA = ("reward.lora.rank=2", "ppo.lora.rank=2")
PEFT_ASKS_FOR_WHAT_TRANSFORMERS_RENAMED = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=MASK).logits


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_language_model_gives_the_stores_logits_and_speaks_its_chat_template(
    make_home: Any, stage: str, tmp_path: Path
) -> None:
    home, out = make_home(*LORA), tmp_path / "deep" / "out"
    export(home.path, f"{home.run}/{stage}", out)
    stored, _ = load_causal_lm(home.artifact(stage), RUNTIME)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), logits(stored))
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "my parcel"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|user|>my parcel<|end|><|assistant|>"
    sampling = GenerationConfig.from_pretrained(out)
    assert (sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p) == (True, 1.0, 0, 1.0)
    assert sampling.max_new_tokens == 10 and sampling.eos_token_id == tokenizer.eos_token_id


@PEFT_ASKS_FOR_WHAT_TRANSFORMERS_RENAMED
def test_a_lora_policy_goes_as_adapter_too_and_on_the_exported_sft_model_it_is_the_policy(
    make_home: Any, tmp_path: Path
) -> None:
    from peft import PeftModel

    home = make_home(*LORA)
    for stage in ("sft", "ppo"):
        export(home.path, f"{home.run}/{stage}", tmp_path / stage)
    sft, _ = load_causal_lm(home.artifact("sft"), RUNTIME)
    stored = load_adapter(Backbone(sft), "policy", home.artifact("ppo") / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    before = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "ppo" / "adapter"))
    with torch.no_grad():
        hidden = stored.base_model(input_ids=IDS, attention_mask=MASK).last_hidden_state
        torch.testing.assert_close(adapted, stored.get_output_embeddings()(hidden))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ppo"))
    assert torch.allclose(merged, adapted, atol=1e-5) and not torch.allclose(before, adapted, atol=1e-2)
    assert not (tmp_path / "ppo" / "adapter_config.json").exists(), "beside the model it would be loaded onto it"


@PEFT_ASKS_FOR_WHAT_TRANSFORMERS_RENAMED
def test_a_reward_model_scores_as_the_stores_and_its_config_states_the_scale(make_home: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    home = make_home(*LORA)
    for stage in ("sft", "reward"):
        export(home.path, f"{home.run}/{stage}", tmp_path / stage)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    stored, tokenizer = load_reward_model(home.artifact("reward"), RUNTIME)
    torch.testing.assert_close(logits(model), logits(stored))
    ours = score_sequences(stored, tokenizer.pad_token_id, [IDS[0].tolist(), IDS[1, :4].tolist()], RUNTIME)
    assert torch.allclose(logits(model).squeeze(-1), ours, atol=1e-6)
    scale = json.loads((home.artifact("reward") / "reward.json").read_text())
    assert model.config.score_scale == scale and scale["temperature"] == 1.5
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "sft", num_labels=1)
    adapted = PeftModel.from_pretrained(base, tmp_path / "reward" / "adapter")
    assert torch.allclose(logits(adapted), logits(stored), atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "shift", "scale", "temperature"), [("reward", 0.5, 2.0, 1.5), ("reward.judge", 0.25, 4.0, 1.25)]
)
def test_the_cards_code_scores_as_the_pipeline_does(
    make_home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, shift: float, scale: float,
    temperature: float,
) -> None:  # fmt: skip
    home = make_home(*LORA, judge=stage == "reward.judge")
    export(home.path, f"{home.run}/{stage}", tmp_path / "out")
    snippet = (tmp_path / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    found: dict[str, Any] = {}
    exec(snippet.replace('"..."', '"my parcel"'), found)
    stored, tokenizer = load_reward_model(home.artifact(stage), RUNTIME)
    texts = [f"<|user|>my parcel<|end|><|assistant|>{each}<|end|>" for each in ("one response", "another")]
    encoded = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in texts]
    raw = score_sequences(stored, tokenizer.pad_token_id, encoded, RUNTIME)
    assert torch.allclose(found["scaled"], (raw - shift) / scale, atol=1e-5)
    assert AutoModelForSequenceClassification.from_pretrained(".").config.score_scale["shift"] == shift
    assert torch.allclose(found["probability"], torch.sigmoid((raw[0] - raw[1]) / temperature), atol=1e-5)


def test_the_folder_holds_the_stores_bytes_the_card_the_lineage_and_no_pickle(make_home: Any, tmp_path: Path) -> None:
    home, out = make_home(*LORA), tmp_path / "out"
    export(home.path, home.run, out)
    assert files_of(out) == {
        "README.md", "lineage.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json", "adapter/backbone.json",
    }  # fmt: skip
    stored = home.artifact("ppo")
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (stored / "model" / name).read_bytes()
    for path in out.rglob("*"):
        assert not path.is_file() or path.suffix in (".safetensors", ".json", ".jinja", ".md")
        assert not path.is_file() or not path.read_bytes().startswith((b"\x80", b"PK"))
        assert not path.is_symlink() and os.access(path, os.W_OK)
    told = json.loads((out / "lineage.json").read_text())
    assert [each["stage"] for each in told["made"]] == ["validate", "sft", "reward", "ppo"]
    assert told["digest"] == home.records["ppo"].digest and told["promoted"] is None


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model/config.json", "config.json"),
        ("adapter/adapter_model.safetensors", "adapter/adapter_model.safetensors"),
        ("members/2/model/model.safetensors", "members/2/model.safetensors"),
        ("members/2/adapter/backbone.json", "members/2/adapter/backbone.json"),
        ("reward.json", "reward.json"),
        ("samples.jsonl", None),
        ("metrics.json", None),
    ],
)
def test_each_model_of_an_artifact_is_a_folder_that_transformers_can_load(name: str, place: str | None) -> None:
    assert place_of(name) == place


def test_a_folder_that_is_not_empty_is_left_alone_and_an_empty_one_is_filled(make_home: Any, tmp_path: Path) -> None:
    home, out = make_home(), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out: .* a folder that is not empty. Name a new folder"):
        export(home.path, home.run, out)
    assert files_of(out) == {"mine.txt"}
    with pytest.raises(UserError, match="this is a file"):
        export(home.path, home.run, out / "mine.txt")
    (out / "mine.txt").unlink()
    export(home.path, home.run, out)
    assert (out / "model.safetensors").is_file()


def test_what_is_interrupted_or_damaged_leaves_nothing(
    make_home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, before = make_home(), set(tmp_path.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("flows.models.model_export.card", full)
        with pytest.raises(OSError, match="No space"):
            export(home.path, home.run, tmp_path / "out")
    weights = ArtifactStore(home.path).objects / home.records["ppo"].files["model/model.safetensors"]
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(UserError, match=r"the store no longer has an intact copy .*model.safetensors"):
        export(home.path, home.run, tmp_path / "out")
    assert set(tmp_path.iterdir()) - before == set()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("gates.policy.kl=1",), "policy.kl: policy/kl_high is 3.8, must be <= 1"),
        (
            ("gates.human_eval.win_rate_low=0.65",),
            "human_eval.win_rate_low: human_eval/win_rate_low is 0.61, must be >= 0.65",
        ),
    ],
)
def test_a_model_that_failed_goes_out_only_on_demand_and_says_so_at_the_top(
    make_home: Any, tmp_path: Path, settings: tuple[str, ...], reason: str
) -> None:
    home, out = make_home(*settings), tmp_path / "out"
    for asked in (home.run, home.records["ppo"].digest[:12]):
        with pytest.raises(UserError, match="--allow-failed") as refused:
            export(home.path, asked, out)
        assert reason in str(refused.value) and not out.exists()
    export(home.path, home.run, out, allow_failed=True)
    top = (out / "README.md").read_text().partition("\n# tether-policy\n")[2].strip()
    assert top.startswith(f"> **This model failed**, as run {home.run} judged it:") and reason in top[:300]
    export(home.path, f"{home.run}/sft", tmp_path / "sft")  # whose own gates passed


def test_a_policy_that_was_stopped_is_one_that_failed_though_the_gate_is_off(make_home: Any, tmp_path: Path) -> None:
    home = make_home("gates.ppo.stopped=null", metrics={"ppo": {"ppo/stopped": 1.0}})
    with pytest.raises(UserError, match=r"the tether broke: .* an alarm of ppo\.monitors\.stop_on"):
        export(home.path, home.run, tmp_path / "out")


def test_a_waived_gate_lets_it_out_and_stands_at_the_top(make_home: Any, tmp_path: Path) -> None:
    waiver = Waiver(gate="policy.kl", user="eve", reason="a demonstration")
    home = make_home("gates.policy.kl=1", waivers=[waiver])
    export(home.path, home.run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "> Gate `policy.kl` failed and was waived by eve: a demonstration" in card
    assert json.loads((tmp_path / "out" / "lineage.json").read_text())["waivers"][0]["user"] == "eve"
