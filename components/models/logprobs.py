"""Log-probabilities of given tokens on the training path (with gradients). Natural logarithms, float32."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from components.distributed.sharding import through
from components.models.adapters import AdapterView
from components.models.batching import onto, position_ids
from components.models.config import LOGITS_AT_ONCE
from components.models.runtime import Runtime, autocast

NEVER = -1e9
"""The logit that stands for probability 0. It is finite, so that the entropy is finite too."""


_ONLY_A_LAYER = "_tether_only_applies_its_layer"


class TokenStats(NamedTuple):
    """Statistics of the K tokens that count, in row-major order of (N, L)."""

    logprobs: Tensor
    """(K,) log-probability of each token given those before it, nats, at the given temperature."""
    logprobs_at_1: Tensor
    """(K,) the same at temperature 1, without gradient."""
    hidden: Tensor
    """(K, D) last hidden state at the position that predicts the token, float32."""
    entropy: Tensor | None
    """(K,) entropy of each token's distribution, nats; None if it was not asked for."""


class _Output(BaseModelOutput):
    """A backbone's output with only hidden states; any other field is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Precomputed:
    """Stands for a backbone, or a decoder in one (OPT), and returns hidden states (1, K, D) computed before."""

    def __init__(self, backbone: nn.Module, hidden: Tensor) -> None:
        self._backbone, self._hidden = backbone, hidden

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backbone, name)
        return _Precomputed(attribute, self._hidden) if isinstance(attribute, PreTrainedModel) else attribute

    def __call__(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self._hidden)


def vocabulary_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return float32 logits (..., V) from last hidden states (..., D). The pad token gets probability 0.

    They come from the forward pass of the model's class, with `hidden` instead of its backbone's output: it may
    also cap logits (Gemma 2) or scale them (Granite, MiniCPM 3). A class that does not is not called, to save time.
    """
    whole = model.backbone.model if isinstance(model, AdapterView) else model
    only = only_applies_its_layer(whole, hidden)
    rows, pad_id = hidden.reshape(-1, hidden.shape[-1]), model.config.pad_token_id
    if only:
        logits = whole.get_output_embeddings()(rows).float()
        logits.select(-1, pad_id).fill_(NEVER)
    else:
        computed = _by_own_forward(whole, rows.unsqueeze(0)).float()
        logits = computed.select_scatter(computed.new_full(computed.shape[:-1], NEVER), -1, pad_id)  # it may be a view
    return logits.reshape(*hidden.shape[:-1], -1)


@torch.no_grad()
def only_applies_its_layer(model: Any, hidden: Tensor) -> bool:
    """Return whether the model's class computes the same as its output layer, also from states (..., D) far outside
    any cap. The answer stays with the model; the host waits for it on a GPU, so it is found when a model is loaded."""
    if (stored := getattr(model, _ONLY_A_LAYER, None)) is not None:
        return bool(stored)
    layer, state = model.get_output_embeddings(), 1e4 * hidden.detach().reshape(1, -1, hidden.shape[-1])[:, :1]
    a_view = not isinstance(model, PreTrainedModel) or not isinstance(layer, nn.Module)  # has no class
    only = a_view or state.is_meta or torch.equal(layer(state).float(), _by_own_forward(model, state).float())
    setattr(model, _ONLY_A_LAYER, only)
    return only


def _by_own_forward(model: Any, hidden: Tensor) -> Tensor:
    """Return logits (1, K, V) of hidden states (1, K, D) by the forward pass of the model's class."""
    head, name = object.__new__(type(model)), model.base_model_prefix
    backbone = _Precomputed(model._modules[name], hidden)
    head.__dict__.update(model.__dict__, _modules={**model._modules, name: backbone})  # the model itself is unchanged
    return head.forward(inputs_embeds=hidden, use_cache=False, return_dict=True).logits


Side = Literal["left", "right"]


def last_hidden(
    model: Any, ids: Tensor, mask: Tensor, side: Side | None = None, packed: Sequence[int] | None = None
) -> Tensor:
    """Return the last hidden states (N, L, D) of a causal or scalar-head model; positions count real tokens only.

    Args:
        ids: (N, L) token ids, padded on either side.
        mask: (N, L), True where a token counts.
        side: the side of the padding. None reads it from `mask`, for which the host waits for the GPU.
        packed: lengths of the sequences that stand end to end in one row (1, L), without padding; they do not attend to
            each other. None if each row is one sequence.
    """
    if packed is not None:
        kept_apart = end_to_end(model, packed, ids.device)
        return model.base_model(input_ids=ids, use_cache=False, **kept_apart).last_hidden_state
    masked = {"attention_mask": mask.long(), "position_ids": position_ids(mask)}
    if side == "right" or (side is None and bool((mask[:, :-1] >= mask[:, 1:]).all())):
        masked = {}  # causal attention ignores what is to the right, so padding there needs no mask
    return model.base_model(input_ids=ids, use_cache=False, **masked).last_hidden_state


def end_to_end(model: Any, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the model inputs that separate sequences of `lengths` in one row (as `DataCollatorWithFlattening` does).

    Positions (1, L) restart with each sequence; transformers then builds masks that separate them, also for layers with
    sliding windows. Flash attention, which reads no mask, gets the sequences' boundaries.
    """
    begun = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    inputs: dict[str, Any] = {"position_ids": onto(device, begun)}
    if "flash" in (model.config._attn_implementation or ""):
        at, longest = onto(device, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)), max(lengths)
        inputs |= {"cu_seq_lens_q": at, "cu_seq_lens_k": at, "max_length_q": longest, "max_length_k": longest}
    return inputs


def positions(mask: Tensor) -> Tensor:
    """Return the flat indices (K,) of the True entries of a mask (N, L), in row-major order. The host waits for a
    GPU."""
    return mask.flatten().nonzero().squeeze(1)


def predicting(hidden: Tensor, at: Tensor) -> Tensor:
    """Return the hidden states (K, D) of (N, L, D) at the positions before `at` (K,), which predict those tokens."""
    return hidden.flatten(0, 1)[at - 1]


def token_stats(
    model: Any, ids: Tensor, mask: Tensor, counts: Tensor, runtime: Runtime, temperature: float = 1.0,
    with_entropy: bool = False, side: Side | None = None, at: Tensor | None = None,
    packed: Sequence[int] | None = None,
) -> TokenStats:  # fmt: skip
    """Compute log-probability, hidden state and optionally entropy of the tokens where `counts` (N, L) is True.

    A sequence's first token has no prediction, so `counts` must be False there. The output layer runs only at these
    positions, in chunks of at most `LOGITS_AT_ONCE` logits; with several chunks, the backward pass computes the logits
    of each chunk again.

    Args:
        side, packed: the side of the padding and the contents of a row, as for `last_hidden`.
        at: `positions(counts)`. None computes them, for which the host waits for the GPU.
    """
    at = positions(counts) if at is None else at
    return through(model, _token_stats, ids, mask, at, runtime, temperature, with_entropy, side, packed)


def _token_stats(
    model: Any, ids: Tensor, mask: Tensor, at: Tensor, runtime: Runtime, temperature: float, with_entropy: bool,
    side: Side | None, packed: Sequence[int] | None,
) -> TokenStats:  # fmt: skip
    with autocast(runtime):
        hidden = predicting(last_hidden(model, ids, mask, side, packed), at)
    tokens = ids.flatten()[at]
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)

    def turn(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        with autocast(runtime):
            logits = vocabulary_logits(model, hidden)
        scaled = logits if temperature == 1.0 else logits / temperature
        logprobs = -cross_entropy(scaled, tokens, reduction="none")
        with torch.no_grad():
            at_1 = logprobs.detach() if temperature == 1.0 else -cross_entropy(logits, tokens, reduction="none")
        return logprobs, at_1, *([Categorical(logits=scaled, validate_args=False).entropy()] if with_entropy else [])

    turns = zip(hidden.split(rows), tokens.split(rows), strict=True)
    again = torch.is_grad_enabled() and len(tokens) > rows
    parts = [checkpoint(turn, h, t, use_reentrant=False) if again else turn(h, t) for h, t in turns]
    logprobs, at_1, *entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenStats(logprobs, at_1, hidden.float(), entropy[0] if entropy else None)
