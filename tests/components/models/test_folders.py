"""Published folders load and score with transformers' own classes as they do here, and hold no pickle."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from components.base.errors import UserError
from components.data.tables.published import read_split
from components.models.batching import pad
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, frozen, load_base, load_causal_lm, load_reward_model, save_model
from components.models.logprobs import token_stats
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.reward.scoring import score_sequences

TEXTS = ["Hello. My lamp, is late!", "We will  send a replacement.", "What can you do? Nothing.", "(order A 12)"]


def test_a_saved_language_model_loads_elsewhere_with_the_same_logits(
    language: Any, runtime: Runtime, tmp_path: Path
) -> None:
    save_model(language.model, language.tokenizer, tmp_path / "model")
    ids = torch.tensor([language.prompts[0]])
    expected = language.model(ids).logits
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(ids).logits, expected)
    ours, tokenizer = load_causal_lm(tmp_path, runtime)  # an artifact's folder, with `model` in it
    torch.testing.assert_close(ours(ids).logits, expected)
    assert not ours.training
    assert tokenizer.chat_template == language.tokenizer.chat_template
    assert tokenizer.get_vocab() == language.tokenizer.get_vocab()


def test_a_saved_reward_model_scores_elsewhere_as_here_and_reads_the_score_at_eos(
    stages: Any, runtime: Runtime
) -> None:
    folder = stages.inputs["reward"] / "model"
    ours, tokenizer = load_reward_model(stages.inputs["reward"], runtime)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert theirs.config.num_labels == 1
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == theirs.config.pad_token_id == tokenizer.pad_token_id
    rows = read_split(stages.inputs["data"] / "pairs.test")[:9]
    texts = [
        tokenizer.apply_chat_template([*r["prompt"], {"role": "assistant", "content": r["chosen"]}], tokenize=False)
        for r in rows
    ]
    sequences = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
    assert all(s[-1] == tokenizer.eos_token_id for s in sequences), "the template ends a turn with EOS"
    here = score_sequences(ours, tokenizer.pad_token_id, sequences, runtime, batch_size=4)
    ids, mask = pad(sequences, tokenizer.pad_token_id)
    with torch.no_grad():
        there = theirs(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)
        cut = score_sequences(ours, tokenizer.pad_token_id, [s[:-1] for s in sequences], runtime)
    assert torch.allclose(here, there, atol=1e-5)
    assert ((here - cut).abs() > 1e-4).all(), "without EOS the score is read elsewhere"


def test_the_models_a_run_publishes_have_a_pad_that_is_not_eos_and_no_pickle(stages: Any) -> None:
    for name in ("sft", "reward"):
        folder = stages.inputs[name] / "model"
        files = {p.name for p in folder.iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
        assert not [f for f in files if Path(f).suffix not in (".json", ".safetensors", ".jinja")]
        config = json.loads((folder / "config.json").read_text())
        assert None is not config["pad_token_id"] != config["eos_token_id"] is not None
        assert "_name_or_path" not in config
        assert b"\x80\x04" not in (folder / "model.safetensors").read_bytes()[:8]


def test_the_same_weights_give_the_same_bytes_wherever_they_were_loaded_from(
    stages: Any, runtime: Runtime, digests: Any, tmp_path: Path
) -> None:
    folder = stages.inputs["sft"] / "model"
    save_model(*load_causal_lm(folder, runtime), tmp_path / "again")
    assert digests(tmp_path / "again") == digests(folder)


@pytest.mark.parametrize("vocabulary", [300, 600])
def test_texts_survive_the_tokenizer_in_words_and_in_bytes(vocabulary: int, tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(0 if vocabulary == 600 else 400)]
    texts = [*TEXTS, " ".join(words)]
    tokenizer = train_tokenizer(texts, vocabulary)
    assert (tokenizer.backend_tokenizer.model.__class__.__name__ == "WordLevel") == (vocabulary == 600)
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        for text in (*texts, *([] if vocabulary == 600 else ["Ünseen – 漢字 🙂\nnew line"])):
            ids = one(text, add_special_tokens=False)["input_ids"]
            assert one.decode(ids, skip_special_tokens=True) == text
            assert one.unk_token_id not in ids and one.pad_token_id not in ids


def test_weights_and_head_are_drawn_from_the_seed_alone(language: Any, runtime: Runtime, tmp_path: Path) -> None:
    shape = ScratchModel(hidden_size=16, layers=1, heads=2)
    one, two, other = (build_causal_lm(shape, language.tokenizer, 64, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)
    save_model(one, language.tokenizer, tmp_path / "model")
    torch.manual_seed(7)
    a, _ = load_reward_model(tmp_path, runtime, seed=3)
    torch.manual_seed(8)
    b, _ = load_reward_model(tmp_path, runtime, seed=3)
    c, _ = load_reward_model(tmp_path, runtime, seed=4)
    assert torch.equal(a.score.weight, b.score.weight) and not torch.equal(a.score.weight, c.score.weight)


def test_a_base_whose_pad_is_eos_or_missing_gets_a_pad_of_its_own(language: Any, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.pad_token = tokenizer.eos_token
    model = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 64, 0)
    model.config.pad_token_id = None
    save_model(model, tokenizer, tmp_path)
    loaded, ours = load_base(tmp_path)
    assert ours.pad_token_id is not None and ours.pad_token_id != ours.eos_token_id
    assert loaded.config.pad_token_id == loaded.generation_config.pad_token_id == ours.pad_token_id
    assert loaded.get_input_embeddings().weight.shape[0] > ours.pad_token_id
    assert loaded.config.eos_token_id == ours.eos_token_id


def test_the_row_of_an_added_pad_is_the_same_whatever_was_drawn_before_and_no_other_row_is_drawn(
    tmp_path: Path,
) -> None:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", "<end>", *"abcdef"])}, "?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="<end>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    model = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 64, 0)
    save_model(model, tokenizer, tmp_path)
    rows = []
    for stream in (1, 2):
        torch.manual_seed(stream)
        before = torch.get_rng_state()
        loaded, ours = load_base(tmp_path)
        rows.append(loaded.get_input_embeddings().weight[-1])
        assert len(loaded.get_input_embeddings().weight) == 9 == ours.pad_token_id + 1
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*rows) and rows[0].std() > 0
    model.resize_token_embeddings(7)
    save_model(model, tokenizer, tmp_path)
    with pytest.raises(UserError, match=r"1 token, such as 'f', beyond the model's 7 embeddings"):
        load_base(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] = {"?": 0, "<end>": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match="has no tokens but its special ones"):
        load_base(tmp_path)


def test_a_folder_that_holds_no_model_or_no_chat_template_is_the_users_mistake(language: Any, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="holds no model"):
        load_base(tmp_path / "nothing")
    (tmp_path / "nothing" / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(UserError, match="no model whose tokenizer transformers can load"):
        load_base(tmp_path / "nothing")
    save_model(language.model, language.tokenizer, tmp_path / "bare")
    for file in (tmp_path / "bare").glob("*.jinja"):
        file.unlink()
    config = json.loads((tmp_path / "bare" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "bare" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="chat template"):
        load_base(tmp_path / "bare")


def test_a_frozen_model_in_bfloat16_gives_the_numbers_that_autocast_gave(language: Any, runtime: Runtime) -> None:
    half = runtime.model_copy(update={"dtype": "bfloat16"})
    ids, mask = pad(language.prompts, 0)
    counts = mask.clone()
    counts[:, 0] = False
    held = frozen(copy.deepcopy(language.model), half)
    for ours, before in zip(
        token_stats(held, ids, mask, counts, half)[:3],
        token_stats(language.model, ids, mask, counts, half)[:3],
        strict=True,
    ):
        assert torch.equal(ours, before)
    formats = {name: p.dtype for name, p in held.named_parameters()}
    assert formats["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert formats["model.embed_tokens.weight"] == formats["model.norm.weight"] == torch.float32
    assert all(p.dtype == torch.float32 for p in frozen(copy.deepcopy(language.model), runtime).parameters())
