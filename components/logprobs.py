"""Log-probabilities of given tokens, on the path that training differentiates. Natural logarithms, float32."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.batching import position_ids
from components.models import autocast
from components.runtime import Runtime

NEVER = -1e9
"""Logit of a token of probability 0 (finite, so that entropy is)."""


class TokenStats(NamedTuple):
    """Of the K tokens that count, in row-major order of (N, L)."""

    logprobs: Tensor
    """(K,) log-probability of each token given those before it, nats, at the temperature asked for."""
    entropy: Tensor
    """(K,) entropy of the distribution each was drawn from, nats."""
    hidden: Tensor
    """(K, D) last hidden state at the position that predicts the token, float32."""
    logprobs_at_1: Tensor
    """(K,) as `logprobs`, at temperature 1 (the same tensor where that is the temperature)."""


def vocabulary_logits(model: Any, hidden: Tensor) -> Tensor:
    """Float32 logits (..., V) from last hidden states (..., D); the pad token has none: it can't be sampled."""
    logits = model.get_output_embeddings()(hidden).float()
    return logits.index_fill(-1, torch.tensor([model.config.pad_token_id], device=logits.device), NEVER)


def last_hidden(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Last hidden states (N, L, D) of a causal or scalar-head model; positions count real tokens only.

    Args:
        ids: (N, L) token ids, padded on either side.
        mask: (N, L), True where a token counts.
    """
    return model.base_model(
        input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask), use_cache=False
    ).last_hidden_state


def predicts(counts: Tensor) -> Tensor:
    """(N, L) True at the position before each token that counts (N, L): where the model says what comes."""
    out = torch.zeros_like(counts)
    out[:, :-1] = counts[:, 1:]
    return out


def token_stats(
    model: Any, ids: Tensor, mask: Tensor, counts: Tensor, runtime: Runtime, temperature: float = 1.0
) -> TokenStats:
    """Log-probability, entropy and hidden state for the tokens where `counts` (N, L) is True.

    A token at the first position has no prediction: `counts` must be False there. The output layer runs only at the
    positions asked for, so a batch whose prompts are long costs little memory.
    """
    with autocast(runtime):
        hidden = last_hidden(model, ids, mask)[predicts(counts)]
        logits = vocabulary_logits(model, hidden)
    tokens = ids[counts].unsqueeze(-1)
    at_1 = torch.log_softmax(logits, -1)
    at_temperature = at_1 if temperature == 1.0 else torch.log_softmax(logits / temperature, -1)
    entropy = -(at_temperature.exp() * at_temperature).sum(-1)
    return TokenStats(
        at_temperature.gather(-1, tokens).squeeze(-1), entropy, hidden.float(), at_1.gather(-1, tokens).squeeze(-1)
    )
