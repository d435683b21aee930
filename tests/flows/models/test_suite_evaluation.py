"""`tether eval`: which reward model is meant, and what is printed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.models.folders import save_model
from components.models.tokenizers import train_tokenizer
from flows.models.suite_evaluation import find_reward_model
from tests.stored_run import stored_run

WORDS = "where is my parcel it was late again please help".split()


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer([" ".join(WORDS)], 300)
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape)
    save_model(LlamaForSequenceClassification(config).eval(), tokenizer, tmp_path / "classifier")
    return tmp_path / "classifier"


def test_a_folders_classifier_is_evaluated_as_json_and_as_a_table(
    tether_here: Any, classifier: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"where {WORDS[i % 7]}", "chosen": WORDS[i % 5], "rejected": WORDS[i % 3 + 5], "subset": "ab"[i % 2]}
        for i in range(20)
    ]
    write_rows(tmp_path / "suite.jsonl", rows)
    arguments = "eval", str(classifier), "--suite", str(tmp_path / "suite.jsonl")
    done = tether_here(*arguments, "--json", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shape"] == "pairs" and found["overall"]["pairs"] == 20 and list(found["subsets"]) == ["a", "b"]
    assert (found["temperature"], found["temperature_fitted"], found["digest"]) == (1.0, False, None)
    said = tether_here(*arguments, home=tmp_path / "home").stdout
    assert (
        "20 pairs, 7 prompts" in said
        and "not fitted" in said
        and f"| all | 20 | {found['overall']['accuracy']:.3f}" in said
    )
    wrong = tether_here("eval", str(classifier), "--suite", str(tmp_path / "none.jsonl"), home=tmp_path / "home")
    assert wrong.returncode == 2 and "none.jsonl: there is no such file." in wrong.stderr


def test_a_name_of_no_reward_model_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval nothing: there is no such reward model\. Name a run's \(RUN:reward\)"):
        find_reward_model(tmp_path, "nothing")
    run = stored_run(tmp_path)
    with pytest.raises(UserError, match=rf"eval {run}:ppo: not a reward model.* Name one as RUN:reward"):
        find_reward_model(tmp_path, f"{run}:ppo")
