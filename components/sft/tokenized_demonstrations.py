"""Demonstrations as tokens, and their losses under a model."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.base.errors import UserError
from components.distributed import ranks
from components.models.batching import encode_prompts, encode_responses, length_buckets, onto, pad
from components.models.config import GenerationConfig
from components.models.logprobs import positions, token_stats
from components.models.runtime import Runtime
from components.models.tokenizers import Demonstration
from components.stats.intervals import Interval, clustered_ratio
from components.training.loop import micro_batches
from components.training.tokens import CHUNK, TokenLists, TokenWriter, chunks

SAME = 1e-4
"""Largest allowed difference, absolute (nats) and relative, between a token's loss in a packed row and alone."""

Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


class Examples(Sequence[Example]):
    """n demonstrations as tokens, each read on access."""

    def __init__(self, prompts: TokenLists, responses: TokenLists) -> None:
        self.prompts, self.responses = prompts, responses

    @classmethod
    def of(cls, examples: Iterable[Example]) -> "Examples":
        """Return `examples` as Examples in memory."""
        prompts, responses = TokenWriter(None), TokenWriter(None)
        for prompt, response in examples:
            prompts.append(prompt)
            responses.append(response)
        return cls(prompts.written(), responses.written())

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, which: int) -> Example: ...
    @overload
    def __getitem__(self, which: slice) -> "Examples": ...
    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            return Examples(self.prompts[which], self.responses[which])
        return self.prompts[which], self.responses[which]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Return the number of tokens (n,) of prompt and response together."""
        return self.prompts.lengths + self.responses.lengths


class TokenizedDemonstrations(NamedTuple):
    """Demonstrations as tokens, with the numbers of those looked at and of overlong ones. Overlong ones are either all
    included or all left out."""

    examples: Examples
    seen: int
    overlong: int


def choose_demonstrations(
    tokenizer: Any,
    rows: Iterable[Demonstration],
    generation: GenerationConfig,
    overlong: Literal["drop", "cut"],
    most: int | None,
    folder: Path | None = None,
) -> TokenizedDemonstrations:
    """Encode the first `most` demonstrations (None: all), cut to the lengths of `generation`.

    A response is overlong if it exceeds `generation.max_new_tokens` with its EOS. If it is cut, it has no EOS.

    Args:
        folder: where to write a file of the tokens; None keeps them in memory.
    """
    prompts, responses = TokenWriter(folder), TokenWriter(folder)
    seen = count = 0
    cap = generation.max_new_tokens
    for chunk in chunks(rows, CHUNK if most is None else most):
        encoded_responses = encode_responses(tokenizer, [row["response"] for row in chunk], cap + 1)
        encoded_prompts = encode_prompts(tokenizer, [row["prompt"] for row in chunk], generation.max_prompt_tokens)
        for prompt, response in zip(encoded_prompts, encoded_responses, strict=True):
            if len(prompts) == most:
                break
            seen += 1
            count += len(response) > cap
            if overlong == "cut" or len(response) <= cap:
                prompts.append(prompt)
                responses.append(response[:cap])
        if len(prompts) == most:
            break
    return TokenizedDemonstrations(Examples(prompts.written(), responses.written()), seen, count)


def token_losses(model: Any, pad_id: int, batch: Sequence[Example], runtime: Runtime, packed: bool = False) -> Tensor:
    """Return the negative log-probability (K,), nats, of every response token of the batch, in order.

    Args:
        packed: put all demonstrations end to end into one row; otherwise each is a padded row.
    """
    sequences, counted = [p + r for p, r in batch], [[False] * len(p) + [True] * len(r) for p, r in batch]
    lengths = None
    if packed:
        lengths = [len(sequence) for sequence in sequences]
        sequences, counted = [list(chain.from_iterable(sequences))], [list(chain.from_iterable(counted))]
    ids, mask = pad(sequences, pad_id)
    counts = torch.zeros_like(mask)
    for row, which in enumerate(counted):
        counts[row, : len(which)] = torch.tensor(which)
    ids, mask, counts, at = (onto(runtime.device, tensor) for tensor in (ids, mask, counts, positions(counts)))
    return -token_stats(model, ids, mask, counts, runtime, side="right", at=at, packed=lengths).logprobs


@torch.no_grad()
def check_packing(model: Any, pad_id: int, batch: Sequence[Example], runtime: Runtime) -> None:
    """Check that demonstrations packed into one row have the same losses as alone, in eval mode and float32.

    Raises:
        UserError: some loss differs by more than `SAME`, absolute and relative.
    """
    exact = runtime.model_copy(update={"dtype": "float32"})
    packed = token_losses(model, pad_id, batch, exact, packed=True)
    alone = torch.cat([token_losses(model, pad_id, [example], exact) for example in batch])
    if not torch.allclose(packed, alone, rtol=SAME, atol=SAME):
        raise UserError(
            f"sft.packing: the losses of demonstrations that share a row differ by {(packed - alone).abs().max():.3g} "
            f"nats a token from those of each alone, so {type(model).__name__} does not keep them apart. Set "
            "sft.packing=null."
        )


@torch.no_grad()
def response_losses(model: Any, pad_id: int, examples: Examples, runtime: Runtime, batch_size: int = 32) -> list[float]:
    """Return the negative log-probability of the response of each of `examples` (n,), nats. The ranks share them."""
    totals = torch.zeros(len(examples), dtype=torch.float64)
    batches = list(length_buckets(examples.lengths, batch_size))
    for (number,), counts in micro_batches(range(len(batches)), 1):
        batch = batches[number]
        losses = token_losses(model, pad_id, [examples[i] for i in batch], runtime).double().cpu()
        for i, of_example in zip(batch, losses.split(examples.responses.lengths[batch].tolist()), strict=True):
            if counts:
                totals[i] = of_example.sum()
    return ranks.joined(totals).tolist()


def perplexity_ratio(losses: Sequence[float], baseline: Sequence[float], examples: Examples) -> Interval:
    """Return the perplexity of demonstrations divided by a baseline's, from their losses (n,) in nats.

    This is exp of the difference of the mean losses per token; the ends are the exponentials of `loss_a_token`'s ends.
    """
    excess = [mine - its for mine, its in zip(losses, baseline, strict=True)]
    return Interval(*map(math.exp, loss_a_token(excess, examples)))


def loss_a_token(losses: Sequence[float], examples: Examples) -> Interval:
    """Return the loss per token, sum of `losses` (n,) / sum of tokens, with an interval clustered by prompt."""
    return clustered_ratio(losses, examples.responses.lengths, map(tuple, examples.prompts))
