"""Demonstrations as tokens, and how surprised a model is by them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from components.models.batching import encode_prompt, encode_response, length_buckets, onto, pad
from components.models.config import GenerationConfig
from components.models.logprobs import positions, token_stats
from components.models.runtime import Runtime
from components.models.tokenizers import Demonstration
from components.stats.intervals import Interval, clustered_ratio
from components.training.loop import seeded

Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


class TokenizedDemonstrations(NamedTuple):
    """Demonstrations as tokens, and how many were looked at and are overlong, of which all or none are among them."""

    examples: list[Example]
    seen: int
    overlong: int


def choose_demonstrations(
    tokenizer: Any,
    rows: Iterable[Demonstration],
    generation: GenerationConfig,
    overlong: Literal["drop", "cut"],
    most: int | None,
) -> TokenizedDemonstrations:
    """Token ids of the first `most` demonstrations (None: all), cut to the lengths of `generation`.

    A response is overlong if it exceeds `generation.max_new_tokens` with its EOS: cut, it would not end.
    """
    examples: list[Example] = []
    seen = count = 0
    cap = generation.max_new_tokens
    for row in rows:
        if len(examples) == most:
            break
        response = encode_response(tokenizer, row["response"], cap + 1)
        seen += 1
        count += len(response) > cap
        if overlong == "cut" or len(response) <= cap:
            examples.append((encode_prompt(tokenizer, row["prompt"], generation.max_prompt_tokens), response[:cap]))
    return TokenizedDemonstrations(examples, seen, count)


def token_losses(model: Any, pad_id: int, batch: Sequence[Example], runtime: Runtime) -> Tensor:
    """Negative log-probability (K,) of every response token of the batch, nats."""
    ids, mask = pad([p + r for p, r in batch], pad_id)
    counts = torch.zeros_like(mask)
    for row, (prompt, response) in enumerate(batch):
        counts[row, len(prompt) : len(prompt) + len(response)] = True
    ids, mask, counts, at = (onto(runtime.device, each) for each in (ids, mask, counts, positions(counts)))
    return -token_stats(model, ids, mask, counts, runtime, side="right", at=at).logprobs


@torch.no_grad()
def response_losses(
    model: Any, tokenizer: Any, examples: Sequence[Example], runtime: Runtime, batch_size: int = 32
) -> list[float]:
    """Negative log-probability of the response of each of `examples` (n,), nats."""
    found = [0.0] * len(examples)
    for batch in length_buckets([len(p) + len(r) for p, r in examples], batch_size, seeded(0), shuffle=False):
        losses = token_losses(model, tokenizer.pad_token_id, [examples[i] for i in batch], runtime).double().cpu()
        for i, own in zip(batch, losses.split([len(examples[i][1]) for i in batch]), strict=True):
            found[i] = float(own.sum())
    return found


def perplexity_ratio(losses: Sequence[float], baseline: Sequence[float], examples: Sequence[Example]) -> Interval:
    """Perplexity of demonstrations over a baseline's, from `losses` and `baseline` (n,) of their responses in nats.

    exp of the difference of mean losses a token; the ends are the exponentials of `loss_a_token`'s.
    """
    excess = [mine - its for mine, its in zip(losses, baseline, strict=True)]
    return Interval(*map(math.exp, loss_a_token(excess, examples)))


def loss_a_token(losses: Sequence[float], examples: Sequence[Example]) -> Interval:
    """Sum of `losses` (n,) of responses over the sum of their tokens; demonstrations of one prompt may depend."""
    return clustered_ratio(losses, [len(r) for _, r in examples], [tuple(p) for p, _ in examples])
