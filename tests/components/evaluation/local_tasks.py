"""A two-choice task of lm-evaluation-harness in a file, and a tiny Llama that reads its words."""

import random
from pathlib import Path
from typing import Any

from components.base.jsonl import write_rows

YAML = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata: {{version: 2.0}}
"""
NUMBERS = [str(number) for number in range(20)]
WORDS = ["<pad>", "<eos>", "<unk>", *"What is plus ? Question : Answer".split(), *NUMBERS]


def write_task(folder: Path, name: str = "sums", count: int = 40, seed: int = 0) -> Path:
    """Write `name.yaml` and its documents, sums with a right and a wrong answer; return the YAML's path."""
    drawn = random.Random(seed)
    rows = list[dict[str, Any]]()
    for number in range(count):
        a, b, gold = drawn.randrange(9), drawn.randrange(9), drawn.randrange(2)
        choices = [str(a + b + (place != gold)) for place in (0, 1)]
        rows.append({"question": f"What is {a} plus {b} ?", "choices": choices, "gold": gold, "text": number // 4})
    write_rows(folder / f"{name}.jsonl", rows)
    path = folder / f"{name}.yaml"
    path.write_text(YAML.format(name=name, data=f"{name}.jsonl"))
    return path


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama of two layers with a tokenizer of whole words; return its folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, initializer_range=0.2,
    )).save_pretrained(folder)  # fmt: skip
    return folder
