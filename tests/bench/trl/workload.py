"""What both sides of the throughput benchmark are given: models, response lengths; and what the work costs.

A response's length is a table's, not chance: a token is sampled as always, then exchanged where it would end the
response too soon or too late. Log-probabilities stay the model's own, so ratios and gradients are ordinary.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from components.models import sampling
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, load_base

SIZES = {
    "1m": ScratchModel(hidden_size=128, layers=4, heads=4, vocabulary=2048),
    "7m": ScratchModel(hidden_size=256, layers=6, heads=4, vocabulary=8192),
    "30m": ScratchModel(hidden_size=512, layers=7, heads=8, vocabulary=16384),
    "135m": None,
    "1b": ScratchModel(hidden_size=2048, layers=16, heads=32, vocabulary=128256),
}
"""Llamas with random weights and tied embeddings: 1.05 M parameters (25 % embeddings), 6.8 M (31 %), 30.4 M (28 %);
135m is SmolLM2-135M; 1b has Llama-3.2-1B's width, depth and vocabulary, without its grouped heads (1.07 B, 25 %)."""
SHORTEST_PROMPT, SHORTEST_RESPONSE, CAP = 16, 8, 64
"""Tokens: prompts and responses are at most CAP."""


class Lengths(NamedTuple):
    """Tokens of each row of each update."""

    prompts: Tensor
    """(B,) prompt tokens, the same every update."""
    ends: Tensor
    """(U, B) response tokens up to and with EOS; CAP + 1 where the response meets the cap instead."""

    @property
    def responses(self) -> Tensor:
        """(U, B) response tokens."""
        return self.ends.clamp(max=CAP)


@dataclass(frozen=True)
class Workload:
    """The fixed work of one measurement, equal for both sides."""

    size: str
    variant: Literal["ragged", "full"]
    dtype: Literal["float32", "bfloat16"]
    updates: int
    """Measured, after one that isn't; 0: that one."""
    seed: int = 0

    @property
    def measured(self) -> slice:
        """Of all updates those that are measured."""
        return slice(1 if self.updates else 0, None)

    @property
    def batch(self) -> int:
        """Responses an update; one minibatch, one micro-batch."""
        return 8 if self.size in ("135m", "1b") else 32

    def lengths(self, batch: int | None = None) -> Lengths:
        """Prompts of 16 to 64 tokens and responses of 8 to 64 with EOS (ragged), or all of 64 without (full)."""
        rows, updates = batch or self.batch, self.updates + 1
        if self.variant == "full":
            return Lengths(torch.full((rows,), CAP), torch.full((updates, rows), CAP + 1))
        draw = torch.Generator().manual_seed(self.seed)
        return Lengths(
            torch.randint(SHORTEST_PROMPT, CAP + 1, (rows,), generator=draw),
            torch.randint(SHORTEST_RESPONSE, CAP + 1, (updates, rows), generator=draw),
        )

    def prompts(self, tokenizer: Any, lengths: Tensor) -> list[list[int]]:
        """Token lists of `lengths` (B,), of ordinary tokens, all different."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        low = 1 + max(tokenizer.pad_token_id, tokenizer.eos_token_id)
        return [torch.randint(low, len(tokenizer), (int(n),), generator=draw).tolist() for n in lengths]


def numbers_tokenizer(vocabulary: int) -> Any:
    """Tokens that are their own ids; pad is 0 and EOS is 1."""
    words = WordLevel({str(i): i for i in range(vocabulary)}, "2")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1")


def causal_lm(size: str, smollm2: Path) -> tuple[Any, Any]:
    """The policy of a size, float32, and its tokenizer (padding on the left, as TRL's collator needs it)."""
    if (shape := SIZES[size]) is None:
        model, tokenizer = load_base(smollm2)
    else:
        tokenizer = numbers_tokenizer(shape.vocabulary)
        model = build_causal_lm(shape, tokenizer, max_positions=2 * CAP, seed=0)
    tokenizer.padding_side = "left"
    return model, tokenizer


def scalar_model(policy: Any, seed: int) -> Any:
    """A scalar-head model on a copy of the policy's trunk: what reward model and critic start as."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = LlamaForSequenceClassification(copy.deepcopy(policy.config))
    width = policy.config.hidden_size
    model.model, model.score = copy.deepcopy(policy.model), torch.nn.Linear(width, 1, bias=False)
    model.num_labels = model.config.num_labels = 1
    return model.to(policy.device).eval()


class ForcedLengths:
    """Exchanges sampled tokens such that rows end where a table says."""

    def __init__(self, ends: Tensor, tokenizer: Any) -> None:
        """`ends` (B,) as in `Lengths`, for the rows of one batch."""
        self.ends, self.eos, self.pad = ends, tokenizer.eos_token_id, tokenizer.pad_token_id

    def exchange(self, tokens: Tensor, rows: Tensor, t: int) -> Tensor:
        """The `t`-th response tokens (N,) of `rows` (N,): EOS where it is due, an ordinary token where it isn't."""
        special = (tokens == self.eos) | (tokens == self.pad)
        tokens = torch.where(special, max(self.eos, self.pad) + 1, tokens)
        return torch.where(self.ends.to(tokens.device)[rows] == t + 1, self.eos, tokens)

    @contextmanager
    def in_our_sampler(self, seed: int) -> Iterator[None]:
        """While `sample` runs with `seed`; a row is told by its uniform, as ended rows are dropped."""
        drawn = torch.rand(len(self.ends), CAP, generator=torch.Generator().manual_seed(seed))
        choose, step = sampling._choose, iter(range(CAP))

        def forced(probabilities: Tensor, uniform: Tensor) -> Tensor:
            t = next(step)
            same = uniform.unsqueeze(1) == drawn[:, t].to(uniform.device)
            assert same.sum(1).eq(1).all(), "the sampler doesn't draw as this hook thinks"
            return self.exchange(choose(probabilities, uniform), same.long().argmax(1), t)

        with patch.object(sampling, "_choose", forced):
            yield

    @contextmanager
    def in_generate(self) -> Iterator[None]:
        """While transformers' `generate` samples, which keeps every row to the end."""
        choose, step = torch.multinomial, iter(range(CAP))

        def forced(probabilities: Tensor, num_samples: int) -> Tensor:
            tokens = choose(probabilities, num_samples=num_samples).squeeze(1)
            return self.exchange(tokens, torch.arange(len(tokens), device=tokens.device), next(step)).unsqueeze(1)

        with patch.object(torch, "multinomial", forced):
            yield


def _linear_operations(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Of x weightᵀ, from the shapes (..., I) and (O, I)."""
    return 2 * math.prod(x) * weight[0]


def _attention_operations(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of attention, from its shapes; a causal mask is not taken off, as torch does not for its other kernels."""
    return sdpa_flop_count(query, key, value)


def _attention_gradient_operations(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


PRODUCTS = {
    torch.ops.mkldnn._linear_pointwise: _linear_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_gradient_operations,
}
"""What torch's `FlopCounterMode` does not count by itself: oneDNN's products and the CPU's attention."""


def trunk_parameters(model: Any) -> int:
    """Parameters that every token passes through: all but the embeddings, tied or not."""
    outer = {id(m.weight): m.weight.numel() for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    return sum(p.numel() for p in model.parameters()) - sum(outer.values())


def decoding_bytes(config: Any, trunk: int, prompts: Sequence[int], responses: Sequence[int], width: int) -> int:
    """Bytes that sampling must read at least: weights once a step, and the keys and values of the rows still going.

    The first step reads the prompt and counts as one reading of the weights; its cache is written, not read.

    Args:
        trunk: parameters as in `trunk_parameters`; the output layer is added.
        width: bytes a number.
    """
    heads, head = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head
    weights = (trunk + config.vocab_size * config.hidden_size) * max(responses)
    # Step t (from 2) of a response reads the cache of its prompt and of t - 2 tokens, and is fed the one after them.
    cached = sum((n - 1) * p + (n - 1) * (n - 2) // 2 for p, n in zip(prompts, responses, strict=True))
    return width * (weights + per_token * cached)


def training_flops(
    config: Any, trunk: int, prompts: Sequence[int], responses: Sequence[int], epochs: int, trunks: int
) -> int:
    """Floating-point operations of the model in training: 6 a parameter and token, and causal attention.

    The output layer counts at response tokens only; attention is 12 layers × width × context a token (Chowdhery et
    al. 2022, appendix B), a causal context being half the sequence on average. Nothing recomputed or padded counts.

    Args:
        trunk: parameters as in `trunk_parameters`.
        trunks: 2 with a separate critic, 1 with a shared one.
    """
    rows = [p + n for p, n in zip(prompts, responses, strict=True)]
    per_pass = 6 * trunk * sum(rows) + 6 * config.num_hidden_layers * config.hidden_size * sum(n * n for n in rows)
    output = 6 * config.vocab_size * config.hidden_size * sum(responses)
    return epochs * (trunks * per_pass + output)
