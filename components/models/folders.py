"""Models as Hugging Face folders: built from scratch, loaded from GGUF or safetensors, given a scalar head, saved.

Weights are float32; `autocast` runs matrix products in the runtime's format. No pickle is read and no remote code run.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging as transformers_logging

from components.base.errors import UserError, naming
from components.base.jsonl import write_json
from components.base.text import counted
from components.models.adapters import AdapterView
from components.models.chat.endings import endings_of
from components.models.config import GivenTemplate, ScratchModel
from components.models.matrices.kernels import by_onednn
from components.models.runtime import Runtime
from components.models.tokenizers import gguf_file, load_with_new_tokens
from components.models.weights import as_folder, check_weights, load_from, load_whole, refusing

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()


def autocast(runtime: Runtime) -> contextlib.AbstractContextManager[Any]:
    """Compute matrix products in bfloat16 within the block, if that is the runtime's dtype."""
    if runtime.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(runtime.device, dtype=torch.bfloat16)


def build_causal_lm(config: ScratchModel, tokenizer: Any, max_positions: int, seed: int) -> LlamaForCausalLM:
    """Build a small Llama with random weights from `seed`."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=8 * config.hidden_size // 3,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=max_positions,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            initializer_range=0.06,
        )
    )
    return model.eval()


def load_base(
    folder: Path, named_by: str = "sft.base", template: GivenTemplate = None, stop: Sequence[str] = ()
) -> tuple[Any, Any]:
    """Load a pretrained model and its tokenizer from a Hugging Face folder, a GGUF file or a folder with one.

    Args:
        folder: the folder, or the GGUF file.
        named_by: the option that names it, for the error.
        template, stop: as for `load_tokenizer`. Tokens added to the tokenizer get random embeddings from seed 0.

    Raises:
        UserError: the folder has no loadable model, or its tokenizer has no chat template or EOS.
    """
    with as_folder(folder) as found:
        return _load_base(found, named_by, template, stop)


def _load_base(folder: Path, named_by: str, template: GivenTemplate, stop: Sequence[str]) -> tuple[Any, Any]:
    check_weights(folder, named_by)
    tokenizer, added = load_with_new_tokens(folder, named_by, template, stop)
    gguf = gguf_file(folder)
    options = {} if gguf is None else {"gguf_file": gguf, "quantization_config": GgufConfig(dequantize=True)}
    model = load_whole(AutoModelForCausalLM, folder, named_by, **options)
    rows = model.get_input_embeddings().num_embeddings
    allowed = {*added, tokenizer.pad_token}
    lacking = [token for token, i in tokenizer.get_vocab().items() if i >= rows and token not in allowed]
    if lacking:
        raise UserError(
            f"{named_by}: the tokenizer in {folder} has {counted(len(lacking), 'token')}, such as {lacking[0]!r}, "
            "beyond the "
            f"model's {rows} embeddings. Use the tokenizer that the model was trained with."
        )
    if len(tokenizer) > rows:  # the pad token or a template's markers were added
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the new rows are random
            model.resize_token_embeddings(len(tokenizer))
    listed = found if isinstance(found := model.generation_config.eos_token_id, list) else []
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    ends = endings_of(tokenizer).ids
    if len({*ends, *listed}) > 1:
        model.generation_config.eos_token_id = list(dict.fromkeys([*ends, *listed]))
    _check_use(model, folder, named_by)
    return model, tokenizer


def _check_use(model: Any, folder: Path, named_by: str) -> None:
    """Check on one token that the model runs and that a reward model can be made from it."""
    with refusing(folder, named_by, "holds a model that cannot compute a single token"), torch.no_grad():
        model(input_ids=torch.tensor([[model.config.eos_token_id]]), use_cache=True)
    with (
        refusing(folder, named_by, "holds a model that transformers has no reward-model class for"),
        torch.device("meta"),
    ):
        if not hasattr(AutoModelForSequenceClassification.from_config(model.config), "score"):
            raise TypeError(f"{type(model).__name__} has no counterpart with a scalar head on the last token")


def load_causal_lm(folder: Path, runtime: Runtime) -> tuple[Any, Any]:
    """Load the language model of an artifact folder (float32, eval mode, on the runtime's device) and its tokenizer.

    Raises:
        UserError: the folder's weights are not exactly those of the model.
    """
    folder = folder / "model" if (folder / "model").is_dir() else folder
    model = load_whole(AutoModelForCausalLM, folder, "the artifact")
    return by_onednn(model.to(runtime.device)), load_from(AutoTokenizer, folder)


def load_reward_model(
    folder: Path, runtime: Runtime, seed: int | None = None, heads: Sequence[str] = ()
) -> tuple[Any, Any]:
    """Load a model with scalar heads and its tokenizer.

    Args:
        seed: for a folder with a language model, the seed of its new random heads (`draw_head`); None for a folder with
            heads.
        heads: names of the new heads, which become the config's labels. Empty: one head without a name.

    Raises:
        UserError: the folder's weights are not exactly those of the model.
    """
    folder = folder / "model" if (folder / "model").is_dir() else folder
    options: dict[str, Any] = {} if seed is None else {"num_labels": max(1, len(heads))}
    if heads:
        options |= {"id2label": dict(enumerate(heads)), "label2id": {name: i for i, name in enumerate(heads)}}
    auto = AutoModelForSequenceClassification
    model = load_whole(auto, folder, "the artifact", fresh_head=seed is not None, **options)
    if seed is not None:
        draw_head(model.score, seed)
    return by_onednn(model.to(runtime.device)), load_from(AutoTokenizer, folder)


def draw_head(head: nn.Linear, seed: int) -> nn.Linear:
    """Reset the weights of `head` on the CPU to normal draws with variance 1/(d+1) for d inputs (Stiennon et al.
    2020)."""
    drawn = torch.empty(head.weight.shape)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(drawn, std=1 / math.sqrt(drawn.shape[1] + 1), generator=generator)
    with torch.no_grad():
        head.weight.copy_(drawn)
    return head


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as a Hugging Face folder (safetensors). Equal weights give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder):
        model.save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)
    for name, whence in (
        ("config.json", ("_name_or_path",)),
        ("tokenizer_config.json", ("name_or_path", "is_local", "local_files_only")),
    ):
        config = json.loads((folder / name).read_text())
        kept = {key: value for key, value in config.items() if key not in whence}
        write_json(folder / name, kept)


def frozen(model: Any, runtime: Runtime | None = None) -> Any:
    """Put a model into eval mode and switch off all gradients; return it.

    With a runtime in bfloat16, the linear layers below the head store their weights in bfloat16. (`autocast` would
    round float32 weights to the same numbers at each use, and keep both copies.)
    """
    model = model.eval().requires_grad_(False)
    if runtime is not None and runtime.dtype == "bfloat16" and not isinstance(model, AdapterView):
        for layer in model.base_model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data = layer.weight.data.to(torch.bfloat16)
    return model
