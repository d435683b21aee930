"""Sampling of responses with a key-value cache, and what is known of them before the first update.

Legend: B responses, P prompt tokens (padded on the left), T response tokens (padded on the right).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.adapters import AdapterView
from components.batching import Messages, encode_prompt, pad
from components.generation import GenerationConfig
from components.logprobs import vocabulary_logits
from components.runtime import Runtime


@dataclass(frozen=True)
class Samples:
    """Prompts and the responses sampled to them."""

    prompt_ids: Tensor
    """(B, P) int64, padded on the left."""
    prompt_mask: Tensor
    """(B, P) bool."""
    response_ids: Tensor
    """(B, T) int64; what stands after the end is pad."""
    response_mask: Tensor
    """(B, T) bool, True up to and including EOS, or up to the cap."""
    logprobs: Tensor
    """(B, T) log-probabilities as the sampler computed them, nats, 0 where the mask is False."""
    ended: Tensor
    """(B,) bool: EOS was sampled before the cap."""

    @property
    def ids(self) -> Tensor:
        """(B, P+T) prompt and response."""
        return torch.cat([self.prompt_ids, self.response_ids], 1)

    @property
    def mask(self) -> Tensor:
        """(B, P+T), True where a token counts."""
        return torch.cat([self.prompt_mask, self.response_mask], 1)

    @property
    def counts(self) -> Tensor:
        """(B, P+T), True at response tokens."""
        return torch.cat([torch.zeros_like(self.prompt_mask), self.response_mask], 1)

    def texts(self, tokenizer: Any) -> list[str]:
        """The responses as text, EOS and padding left out."""
        return [
            tokenizer.decode(ids[mask], skip_special_tokens=True)
            for ids, mask in zip(self.response_ids, self.response_mask, strict=True)
        ]


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    text: str
    token_ids: list[int]
    """Its tokens, EOS among them where it ended."""
    ended: bool
    """Whether EOS was sampled before the cap."""


@contextmanager
def sampling_copy(model: Any, runtime: Runtime) -> Iterator[Any]:
    """The model to sample from: itself in float32, else a copy with weights in bfloat16 (cast once, not per token)."""
    if runtime.dtype == "float32":
        yield model
    else:
        import copy

        whole = model.merged() if isinstance(model, AdapterView) else copy.deepcopy(model)
        yield whole.requires_grad_(False).to(torch.bfloat16)


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    generation: GenerationConfig,
    generator: torch.Generator,
    device: str = "cpu",
) -> Samples:
    """Sample one response a prompt from the whole softmax at `generation.temperature`, until EOS or the cap.

    The pad token is never sampled. Rows that have ended are dropped from the forward pass.

    Args:
        prompts: B lists of token ids.
        generator: source of all randomness, on the CPU (so that a device doesn't change the stream).
    """
    from transformers import DynamicCache

    prompt_ids, prompt_mask = (x.to(device) for x in pad(prompts, tokenizer.pad_token_id, side="left"))
    batch, cap = len(prompts), generation.max_new_tokens
    response = torch.full((batch, cap), tokenizer.pad_token_id, dtype=torch.long, device=device)
    logprobs = torch.zeros(batch, cap, device=device)
    length = torch.full((batch,), cap, dtype=torch.long, device=device)
    uniforms = torch.rand(batch, cap, generator=generator).to(device)
    cache = DynamicCache(config=model.config)
    rows = torch.arange(batch, device=device)
    ids, mask = prompt_ids, prompt_mask.long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for t in range(cap):
        hidden = model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        logp = torch.log_softmax(vocabulary_logits(model, hidden) / generation.temperature, -1)
        tokens = _inverse_cdf(logp, uniforms[rows, t])
        response[rows, t] = tokens
        logprobs[rows, t] = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        going = tokens != tokenizer.eos_token_id
        length[rows[~going]] = t + 1
        if not going.any():
            break
        if not going.all():
            kept = going.nonzero().squeeze(-1)
            cache.batch_select_indices(kept)
            rows, mask, positions, tokens = rows[kept], mask[kept], positions[kept], tokens[kept]
        ids = tokens.unsqueeze(-1)
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        positions = positions[:, -1:] + 1
    width = int(length.max())
    response_mask = torch.arange(width, device=device) < length.unsqueeze(-1)
    last = response.gather(1, (length - 1).unsqueeze(-1)).squeeze(-1)
    return Samples(
        prompt_ids, prompt_mask, response[:, :width], response_mask, logprobs[:, :width], last == tokenizer.eos_token_id
    )


def _inverse_cdf(logp: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token per row (B, V) by inverting the cumulative distribution at `uniform` (B,)."""
    cumulative = logp.double().exp().cumsum(-1)
    threshold = (uniform.double() * cumulative[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=logp.shape[-1] - 1)


def generate_responses(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Messages],
    generation: GenerationConfig,
    seed: int,
    runtime: Runtime,
    batch_size: int = 64,
) -> list[Response]:
    """Sample one response to each prompt (as messages), in their order. The same seed gives the same responses."""
    encoded = [encode_prompt(tokenizer, p, generation.max_prompt_tokens) for p in prompts]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    generator = torch.Generator().manual_seed(seed)
    out: dict[int, Response] = {}
    with sampling_copy(model, runtime) as sampler:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            samples = sample(sampler, tokenizer, [encoded[i] for i in batch], generation, generator, runtime.device)
            for i, text, ids, mask, ended in zip(
                batch, samples.texts(tokenizer), samples.response_ids, samples.response_mask, samples.ended, strict=True
            ):
                out[i] = Response(text, ids[mask].tolist(), bool(ended))
    return [out[i] for i in range(len(encoded))]
