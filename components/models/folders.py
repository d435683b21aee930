"""Models as Hugging Face folders: built from scratch, loaded from GGUF or safetensors, given a scalar head, saved.

Weights are float32; `autocast` runs matrix products in the runtime's format. No pickle is read and no remote code run.
"""

import json
import math
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
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
from components.distributed.sharding import is_spread, spread
from components.models.batching import pad
from components.models.cache import open_context
from components.models.chat.endings import endings_of, special_tokens
from components.models.config import GivenTemplate, ScratchModel
from components.models.logprobs import Side, last_hidden, only_applies_its_layer, vocabulary_logits
from components.models.matrices.kernels import by_onednn
from components.models.runtime import Runtime
from components.models.tokenizers import gguf_file, load_with_new_tokens
from components.models.weights import as_folder, check_weights, load_from, load_whole, refusing

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()

CHECKED_PROMPTS, CHECKED_STEPS, CHECKED_TOLERANCE = (3,) * 5 + (5,) * 4, 2, 1e-4
"""Sorted lengths of the prompts on which a loaded model is checked (the sampler reads nine in pairs, of which one is
padded), decoding steps, and the largest difference of logits as a share of their range. Rounding gives up to 1e-5."""


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
    only_applies_its_layer(model, torch.ones(1, config.hidden_size))
    return model.eval()


def load_base(
    folder: Path, named_by: str = "sft.base", template: GivenTemplate = None, stop: Sequence[str] = (),
    trained: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Load a pretrained model and its tokenizer from a Hugging Face folder, a GGUF file or a folder with one.

    Args:
        folder: the folder, or the GGUF file.
        named_by: the option that names it, for the error.
        template, stop: as for `load_tokenizer`. Tokens added to the tokenizer get random embeddings from seed 0.
        trained: a reward model will be made from it too.

    Raises:
        UserError: the folder has no loadable model, its tokenizer has no chat template or EOS, Tether computes other
            logits than the model, or there is no reward model of its kind.
    """
    with as_folder(folder) as whole:
        return _load_base(whole, named_by, template, stop, trained)


def _load_base(
    folder: Path, named_by: str, template: GivenTemplate, stop: Sequence[str], trained: bool
) -> tuple[Any, Any]:
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
    listed = eos if isinstance(eos := model.generation_config.eos_token_id, list) else []
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    ends = endings_of(tokenizer).ids
    if len({*ends, *listed}) > 1:
        model.generation_config.eos_token_id = list(dict.fromkeys([*ends, *listed]))
    if trained:
        _check_reward_class(model, folder, named_by)
    plain = set(tokenizer.get_vocab().values()) - {*special_tokens(tokenizer), tokenizer.pad_token_id}
    if not plain:
        raise UserError(
            f"{named_by}: the tokenizer in {folder} has no tokens but its special ones, so it writes no text. Use the "
            "tokenizer that the model was trained with."
        )
    _check_logits(model, sorted(plain), folder, named_by)
    return model, tokenizer


@torch.no_grad()
def _check_logits(model: Any, tokens: Sequence[int], folder: Path, named_by: str) -> None:
    """Check on random texts that Tether computes the logits of the model's own forward pass, with padding on the right
    (as SFT does), on the left (as PPO does), and with a cache (as the sampler does).

    With ALiBi, or another distance that `position_ids` do not set, they differ, or the sampler fails.
    """
    pad_id, draw, back = model.config.pad_token_id, random.Random(0), -1 - CHECKED_STEPS
    texts = [draw.choices(tokens, k=length + CHECKED_STEPS) for length in CHECKED_PROMPTS]
    with refusing(folder, named_by, "holds a model that cannot compute a few tokens"):
        reference = [row for _, same in groupby(texts, len) for row in model(input_ids=torch.tensor(list(same))).logits]
    span = float(torch.cat(reference).max() - torch.cat(reference).min())

    def check(how: str, hidden: Tensor, expected: Sequence[Tensor]) -> None:
        wrong = vocabulary_logits(model, hidden) - torch.cat(list(expected)).float()
        wrong.select(-1, pad_id).fill_(0)
        if not (most := float(wrong.abs().max())) <= CHECKED_TOLERANCE * span:
            raise UserError(
                f"{named_by}: {folder} holds a {model.config.model_type} model ({type(model).__name__}) whose logits "
                f"Tether does not compute as its class does: {how}, they differ by up to {most:.2g}, of a range of "
                f"{span:.2g}. Tether would train and sample from another model than the one that it publishes. Use an "
                "architecture that docs/guide/models.md lists."
            )

    with refusing(folder, named_by, f"holds a {model.config.model_type} model that Tether cannot train or sample"):
        sides: tuple[Side, ...] = ("right", "left")
        for side in sides:
            ids, mask = pad(texts, pad_id, side=side)
            check(f"in texts padded on the {side}", last_hidden(model, ids, mask, side)[mask], reference)
        prompts, _ = pad([text[:-CHECKED_STEPS] for text in texts], pad_id, side="left")
        context = open_context(model, prompts, CHECKED_PROMPTS, CHECKED_STEPS)
        for at in range(back, 0):
            hidden = context.read_prompts() if at == back else context.append(torch.tensor([t[at] for t in texts]))
            steps = counted(at - back, "decoding step")
            check(f"after padded prompts and {steps}", hidden, [row[[at]] for row in reference])


def _check_reward_class(model: Any, folder: Path, named_by: str) -> None:
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
    only_applies_its_layer(model, torch.ones(1, model.get_output_embeddings().weight.shape[-1]))
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
        cleaned = {key: value for key, value in config.items() if key not in whence}
        write_json(folder / name, cleaned)


def frozen(model: Any, runtime: Runtime | None = None) -> Any:
    """Put a model into eval mode and switch off all gradients; return it.

    With a runtime it moves to the device, with `zero3` in shares. In bfloat16 the linear layers below the head then
    store their weights in bfloat16. (`autocast` would round float32 weights to the same numbers at each use, and keep
    both copies.)
    """
    model = model.eval().requires_grad_(False)
    if runtime is None:
        return model

    def prepare(part: nn.Module) -> None:
        for layer in part.modules():
            if runtime.dtype == "bfloat16" and isinstance(layer, nn.Linear) and not is_spread(layer.weight):
                layer.weight = nn.Parameter(layer.weight.to(runtime.device, torch.bfloat16), requires_grad=False)

    return spread(model, runtime.sharding, runtime.device, runtime.dtype, prepare)


def on_host(runtime: Runtime) -> Runtime:
    """Return the runtime with which a model is loaded that then moves to the device block by block.

    Its weights are mapped from the files, so that the ranks of a host share one copy, and read where they are used.
    """
    return runtime.model_copy(update={"device": "cpu"})
