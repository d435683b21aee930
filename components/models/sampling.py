"""Sample responses with a key-value cache.

Legend: B responses, P prompt tokens (padded on the left), T response tokens (padded on the right).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from components.base.errors import CheckFailed
from components.distributed import ranks, sharding
from components.models.adapters import AdapterView
from components.models.batching import Messages, encode_prompt, onto, pad
from components.models.cache import open_context
from components.models.chat.endings import before_stop, endings_of, special_tokens
from components.models.config import GenerationConfig
from components.models.logprobs import vocabulary_logits
from components.models.matrices.kernels import packed_weights
from components.models.matrices.quantized import is_four_bit
from components.models.runtime import Runtime, autocast
from components.models.tokenizers import StopFinder, token_of_character, visible_text

LEAVE_EVERY = {"cpu": 1, "cuda": 8}
"""Number of tokens between checks of which rows have ended, by device type. A check makes the host wait for a GPU."""
FEW_ROWS = 8
"""Number of rows for which packed weights are laid out."""
LONGEST_BLOCK, BLOCK = 1024, 128
"""Distributions over more tokens than the first number are inverted in blocks of the second."""
WEIGHT_BITS = 40
"""Number of bits to which probabilities are rounded when a token is chosen; a uniform number has 24 bits."""


class Seen(NamedTuple):
    """Further values that the sampler computed, (B, T), 0 where the response mask is False."""

    logprobs_at_1: Tensor
    """Log-probabilities at temperature 1, nats."""
    entropy: Tensor
    """Entropy of the distribution from which a token was drawn, nats."""
    values: Tensor | None
    """Value of the state in which a token was chosen; None if the sampler had no value head."""


class OtherEnding(NamedTuple):
    """A response that did not end with EOS but with another token or at a stop string."""

    said: int
    """Number of tokens that contain its text."""
    characters: int
    """Number of characters of its text; a stop string may begin within its last token."""
    judged: list[int]
    """The token ids of its text, followed by EOS, which is the ending that a reward model was trained with."""


@dataclass(frozen=True)
class Samples:
    """Prompts and the responses sampled to them."""

    prompt_ids: Tensor
    """(B, P) int64, padded on the left."""
    prompt_mask: Tensor
    """(B, P) bool."""
    response_ids: Tensor
    """(B, T) int64; pad tokens after the end."""
    response_mask: Tensor
    """(B, T) bool, True up to and including the token that ends the response, or up to the cap."""
    logprobs: Tensor
    """(B, T) log-probabilities as the sampler computed them, nats, 0 where the mask is False."""
    ended: Tensor
    """(B,) bool: EOS, or another ending of the tokenizer's, was sampled before the cap."""
    seen: Seen | None = None
    """Set if the sampler's numbers are as exact as the training path's; None if they must be recomputed."""
    otherwise: Mapping[int, OtherEnding] = field(default_factory=dict)
    """Maps a row that ended without EOS to its ending."""

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Return the number of tokens of each prompt."""
        return self.prompt_mask.sum(1).tolist()

    @cached_property
    def response_lengths(self) -> list[int]:
        """Return the number of tokens of each response, including its ending."""
        return self.response_mask.sum(1).tolist()

    @cached_property
    def said(self) -> list[list[int]]:
        """Return each response's token ids without the final EOS.

        For a response that ended at a stop string, these are the ids that contain its text.
        """
        rows = zip(self.response_ids.tolist(), self.response_lengths, self.ended.tolist(), strict=True)
        found = [ids[: length - ended] for ids, length, ended in rows]
        for row, other in self.otherwise.items():
            found[row] = self.response_ids[row, : other.said].tolist()
        return found

    @property
    def ids(self) -> Tensor:
        """Return the ids of prompt and response, (B, P+T)."""
        return torch.cat([self.prompt_ids, self.response_ids], 1)

    @property
    def mask(self) -> Tensor:
        """Return the mask (B, P+T), True where a token counts."""
        return torch.cat([self.prompt_mask, self.response_mask], 1)

    @property
    def counts(self) -> Tensor:
        """Return the mask (B, P+T) that is True at response tokens."""
        return torch.cat([torch.zeros_like(self.prompt_mask), self.response_mask], 1)

    def texts(self, tokenizer: Any) -> list[str]:
        """Return the responses as text, without ending and padding; other special tokens are shown (`visible_text`)."""
        found = [visible_text(tokenizer, ids) for ids in self.said]
        for row, other in self.otherwise.items():
            found[row] = found[row][: other.characters]
        return found

    def as_judged(self, row: int) -> list[int]:
        """Return the token ids of response `row` as a reward model reads it: a response that ended has a final EOS."""
        if row in self.otherwise:
            return self.otherwise[row].judged
        return self.response_ids[row, : self.response_lengths[row]].tolist()

    def special_tokens(self, tokenizer: Any) -> list[int]:
        """Return how many special tokens each response has, without its ending and padding."""
        special = special_tokens(tokenizer)
        return [sum(token in special for token in ids) for ids in self.said]


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    text: str
    token_ids: list[int]
    """Its tokens as a reward model reads them (`as_judged`), with EOS if it ended."""
    ended: bool
    """Whether EOS, or another ending of the tokenizer's, was sampled before the cap."""
    sampled_ids: list[int]
    """Its tokens as they were sampled, with the ending."""
    number: int
    """The number of its random stream."""


@contextmanager
def sampling_copy(model: Any, runtime: Runtime) -> Iterator[Any]:
    """Yield the model to sample from: in float32 the model itself, else a bfloat16 copy (cast once, not per token).

    A 4-bit backbone is not copied, since the copy would take four times its memory.
    """
    held = sharding.gathered(model)
    if runtime.dtype == "float32" or (isinstance(held, AdapterView) and is_four_bit(held.backbone.model)):
        whole, read = held, held.backbone.model if isinstance(held, AdapterView) else held
    else:
        whole = read = _in_bfloat16(held)
        sharding.release(model)
    with packed_weights(read, FEW_ROWS):
        yield whole
    sharding.release(model)


def _in_bfloat16(model: Any) -> Any:
    """Return a copy with every parameter in bfloat16, cast one by one, so that there is no copy in float32.

    Buffers are not cast: with rotary frequencies rounded to bfloat16 the 500th position is off by up to 0.2 radians.
    """
    whole = model.merged(torch.bfloat16) if isinstance(model, AdapterView) else model
    cast = {id(p): nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=False) for p in whole.parameters()}
    return copy.deepcopy(whole, cast)


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    generation: GenerationConfig,
    seed: int,
    numbers: Sequence[int] | None = None,
    device: str = "cpu",
    value_head: Callable[[Tensor], Tensor] | None = None,
    graphs: bool = False,
) -> Samples:
    """Sample one response per prompt from the full softmax at `generation.temperature`, until an ending or the cap.

    Endings are those of the tokenizer (`endings_of`), EOS among them. At temperature 0 the likeliest token is taken,
    and its statistics are those at temperature 1. (A user's `GenerationConfig` cannot have 0; an evaluation's copy of
    it can.) The pad token is never sampled. Rows that have ended are dropped from the forward pass where that saves
    time.

    Args:
        model: a causal LM, or a view of one: `base_model(...)`, `get_output_embeddings()` and `config` are used.
        seed: seed of all randomness.
        numbers: each prompt's number, from 0, among all prompts of `seed`; None numbers them in order. A response's
            randomness depends only on the seed and its number (`response_uniforms`).
        value_head: computes values (n,) from last hidden states (n, D).
        graphs: decode by CUDA graphs if the model allows it (`Runtime.cuda_graphs`).

    Raises:
        CheckFailed: a logit is NaN or infinite, so that there is no distribution to sample from.
    """
    pad_id, endings = tokenizer.pad_token_id, endings_of(tokenizer)
    finder = StopFinder(tokenizer) if endings.strings else None
    prompt_ids, prompt_mask = (onto(device, x) for x in pad(prompts, pad_id, side="left"))
    batch, cap = len(prompts), generation.max_new_tokens
    response = torch.full((batch, cap), pad_id, dtype=torch.long, device=device)
    found: dict[str, Tensor] = {}
    uniforms = onto(device, response_uniforms(seed, range(batch) if numbers is None else numbers, cap))
    by_length = sorted(range(batch), key=lambda row: len(prompts[row]))
    rows = onto(device, torch.tensor(by_length))
    going = torch.ones_like(rows, dtype=torch.bool)
    sound = torch.ones(1, dtype=torch.bool, device=device)
    end_ids = torch.tensor(endings.ids, device=device)
    stopped: dict[int, int] = {}
    over: set[int] = set()
    looked = 0
    context = open_context(model, prompt_ids[rows], [len(prompts[row]) for row in by_length], cap, graphs)
    hidden = context.read_prompts()
    for t in range(cap):
        logits = vocabulary_logits(model, hidden)
        scaled = logits if generation.temperature in (0.0, 1.0) else logits / generation.temperature
        probabilities = torch.softmax(scaled, -1)
        tokens = logits.argmax(-1) if generation.temperature == 0 else _choose(probabilities, uniforms[rows, t])
        response[rows, t] = tokens
        facts = _facts(logits, scaled, probabilities, tokens)
        if value_head is not None:
            facts["values"] = value_head(hidden.float())
        for name, value in facts.items():
            found.setdefault(name, torch.zeros(batch, cap, device=device))[rows, t] = value
        going &= ~torch.isin(tokens, end_ids)
        sound &= (facts["logprobs"] + facts["entropy"]).isfinite().all()
        if t % LEAVE_EVERY[torch.device(device).type] == 0 or t + 1 == cap:
            *still, fine = torch.cat([going, sound]).tolist()  # the only wait for a GPU
            if not fine:
                raise _no_distribution(model, t + 1)
            if finder is not None:
                present = rows.tolist()
                # Also in rows that reached EOS since the last check: a stop string may precede it.
                stopped |= _stops(finder, response, [row for row in present if row not in over], looked, t + 1)
                looked, still = t + 1, [on and row not in stopped for on, row in zip(still, present, strict=True)]
                over.update(row for on, row in zip(still, present, strict=True) if not on)
            kept = _closed_up(still)
            if t + 1 == cap or not kept:
                break
            if len(kept) < len(still) and context.shrinks(len(kept)):
                context.keep(kept)
                index = onto(device, torch.tensor(kept))
                rows, tokens, going = rows[index], tokens[index], going[index]
        hidden = context.append(tokens)
    ends = torch.isin(response, end_ids)
    ended = ends.any(1)
    length = torch.where(ended, ends.long().argmax(1) + 1, cap)
    if stopped:
        at = torch.full((batch,), cap + 1)
        at[list(stopped)] = torch.tensor(list(stopped.values()))
        at = onto(device, at)
        ended, length = ended | (at <= cap), torch.minimum(length, at)
    mask = torch.arange(int(length.max()), device=device) < length.unsqueeze(-1)
    response = response[:, : mask.shape[1]].masked_fill(~mask, pad_id)
    found = {name: value[:, : mask.shape[1]].masked_fill(~mask, 0) for name, value in found.items()}
    seen = Seen(found["logprobs_at_1"], found["entropy"], found.get("values"))
    return Samples(prompt_ids, prompt_mask, response, mask, found["logprobs"], ended, seen)


def _stops(finder: StopFinder, response: Tensor, rows: Sequence[int], looked: int, done: int) -> dict[int, int]:
    """Return those of `rows` with a stop string that is complete at a token from `looked` to `done`, with their
    lengths up to that token."""
    start = max(0, looked - finder.window)
    recent = response[:, start:done].tolist()  # waits for the GPU: strings are decoded on the host
    ends = ((row, finder.first(recent[row], looked - start)) for row in rows)
    return {row: start + end for row, end in ends if end is not None}


def with_endings(samples: Samples, tokenizer: Any) -> Samples:
    """Return `samples` with the text's extent of each response that ended without EOS."""
    endings = endings_of(tokenizer)
    if len(endings.ids) == 1 and not endings.strings:
        return samples
    eos, found = endings.ids[0], dict[int, OtherEnding]()
    rows = zip(samples.response_ids.tolist(), samples.response_lengths, samples.ended.tolist(), strict=True)
    for row, (ids, length, ended) in enumerate(rows):
        last = ids[length - 1]
        if not ended or last == eos:
            continue
        if last in endings.ids:
            said = ids[: length - 1]
            found[row] = OtherEnding(len(said), len(visible_text(tokenizer, said)), [*said, eos])
            continue
        whole = visible_text(tokenizer, ids[:length])
        text = before_stop(tokenizer, whole)
        count = token_of_character(tokenizer, ids[:length], len(text) - 1) + 1 if text else 0
        said = ids[:count]
        exact = visible_text(tokenizer, said) == text
        found[row] = OtherEnding(
            count, len(text), [*(said if exact else tokenizer(text, add_special_tokens=False)["input_ids"]), eos]
        )
    return replace(samples, otherwise=found)


def response_uniforms(seed: int, numbers: Sequence[int], cap: int) -> Tensor:
    """Return the uniform random numbers (B, cap), on the CPU, for the tokens of the responses numbered `numbers`.

    Response r gets the draws r · cap to (r + 1) · cap - 1 of torch's CPU generator after `seed`. So they do not depend
    on the batch, the number of processes or the device.
    """
    drawn = torch.rand(max(numbers, default=-1) + 1, cap, generator=torch.Generator().manual_seed(seed))
    return drawn[list(numbers)]


def _facts(logits: Tensor, scaled: Tensor, probabilities: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Return log-probability, entropy and log-probability at temperature 1 (n,) of the drawn tokens, from (n, V)."""
    logprobs = probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()
    log_partition = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1) - logprobs
    at_1 = logprobs if scaled is logits else -functional.cross_entropy(logits, tokens, reduction="none")
    entropy = log_partition - torch.linalg.vecdot(probabilities, scaled)
    return {"logprobs": logprobs, "entropy": entropy, "logprobs_at_1": at_1}


def _no_distribution(model: Any, token: int) -> CheckFailed:
    """Return the error for logits that are not finite at response token `token` (from 1); names such a weight."""
    named = model.weights() if isinstance(model, AdapterView) else model.named_parameters()
    broken = next((name for name, weight in named if not torch.isfinite(weight).all()), None)
    cause = f"{broken} holds NaN or infinity" if broken else "all weights are finite, so activations overflow"
    return CheckFailed(
        f"sampling: the model's logits are NaN or infinite at response token {token}: {cause}. If the model was just "
        "trained, lower its learning rate; else replace the model that was loaded."
    )


def _closed_up(going: Sequence[bool]) -> list[int]:
    """Return the rows (B,) to keep, ordered so that only the last rows move, into the gaps."""
    count = sum(going)
    movers = compress(range(count, len(going)), going[count:])
    return [row if going[row] else next(movers) for row in range(count)]


def _choose(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Choose a token per row (n, V) by inverting the cumulative distribution at `uniform` (n,)."""
    found = _inverse_cdf(probabilities, uniform)
    return found.clamp(max=probabilities.shape[1] - 1)  # rows with NaN find no index; `sample` raises for them


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index of each row (n, V) at which the cumulative weight exceeds `uniform` (n,) of the total.

    Weights in [0, 1] are counted in units of 2^-`WEIGHT_BITS`. Integer sums are exact in any order, so every device
    finds the same index, and never one of weight 0. (CUDA's cumulative sums of floats are not deterministic.) Long rows
    are searched first by sums of blocks and then within a block, which is cheaper and gives the same result.
    """
    units = (weights * 2**WEIGHT_BITS).round_()
    blocked = units.shape[1] > LONGEST_BLOCK
    if blocked:
        if lacking := -units.shape[1] % BLOCK:
            units = functional.pad(units, (0, lacking))
        blocks = units.unflatten(1, (-1, BLOCK))
        units = blocks.sum(2, dtype=torch.float64)  # exact too: a float64 represents every integer below 2^53
    units = units.long()
    cumulative = units.cumsum(1)
    threshold = (uniform.double() * cumulative[:, -1]).long()
    index = _first_above(cumulative, threshold)
    if not blocked:
        return index
    before = (cumulative - units).gather(1, index.unsqueeze(1)).squeeze(1)
    block = blocks.take_along_dim(index[:, None, None], 1).squeeze(1)
    return index * BLOCK + _first_above(block.long().cumsum(1), threshold - before)


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the first index (n,) at which increasing rows (n, K) exceed `threshold` (n,); the last if none does."""
    index = torch.searchsorted(cumulative, threshold.unsqueeze(1), right=True).squeeze(1)
    return index.clamp(max=cumulative.shape[1] - 1)  # sums with NaN exceed nothing


@dataclass(frozen=True)
class LocalEngine:
    """Samples responses of a model in this process, whose weights do not change meanwhile."""

    model: Any
    tokenizer: Any
    runtime: Runtime
    value_head: Callable[[Tensor], Tensor] | None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        generation: GenerationConfig,
        seed: int,
        numbers: Sequence[int] | None = None,
    ) -> Samples:
        """Sample one response to each prompt (token ids), in order, as the function `sample`.

        Any split of a batch gives the same responses. Each rank samples a share, and all ranks get all responses. In
        bfloat16 the sampler's log-probabilities differ from the training path's by rounding, so they are not kept.
        """
        device, exact = self.runtime.device, self.runtime.dtype == "float32"
        numbered = list(range(len(prompts)) if numbers is None else numbers)
        rows = ranks.share(range(len(prompts)))
        asked = rows or [0]  # a rank without a share samples a row that is not used
        graphs = device == "cuda" and self.runtime.cuda_graphs
        uncopied = isinstance(self.model, AdapterView) and not exact  # only its matrix products are in bfloat16
        with autocast(self.runtime) if uncopied else nullcontext():
            found = sample(
                self.model, self.tokenizer, [prompts[row] for row in asked], generation, seed,
                [numbered[row] for row in asked], device, self.value_head, graphs,
            )  # fmt: skip
        if ranks.size() > 1:
            found = _together(found, rows, prompts, self.tokenizer.pad_token_id, generation.max_new_tokens)
        found = with_endings(found, self.tokenizer)
        return found if exact else replace(found, seen=None)


def _together(own: Samples, rows: list[int], prompts: Sequence[Sequence[int]], pad_id: int, cap: int) -> Samples:
    """Return the samples of all ranks, on every rank. `own` are those of the prompts `rows`; unused if `rows` is
    empty."""
    device = own.response_ids.device

    def joined(part: Tensor) -> Tensor:
        """Return (B, T) or (B,) from this rank's (b, t) or (b,). Each sum has one nonzero term, so it is exact."""
        out = torch.zeros(len(prompts), *([cap] if part.dim() > 1 else []), dtype=torch.float64, device=device)
        if rows:
            at = torch.tensor(rows, device=device)
            out[(at,) if part.dim() == 1 else (at, slice(part.shape[1]))] = part.double()
        return ranks.joined(out).to(part.dtype)

    mask = joined(own.response_mask)
    width = int(mask.sum(1).max())
    mask = mask[:, :width]

    def cut(part: Tensor) -> Tensor:
        return joined(part)[:, :width]

    seen = own.seen
    if seen is not None:
        values = None if seen.values is None else cut(seen.values)
        seen = Seen(cut(seen.logprobs_at_1), cut(seen.entropy), values)
    ids, prompt_mask = (each.to(device) for each in pad(prompts, pad_id, side="left"))
    response = cut(own.response_ids).masked_fill(~mask, pad_id)
    return Samples(ids, prompt_mask, response, mask, cut(own.logprobs), joined(own.ended), seen)


@contextmanager
def rollout_engine(
    model: Any, tokenizer: Any, runtime: Runtime, value_head: Callable[[Tensor], Tensor] | None = None
) -> Iterator[LocalEngine]:
    """Open an engine that samples from the current weights of `model`, which must not be trained meanwhile."""
    with sampling_copy(model, runtime) as sampler:
        yield LocalEngine(sampler, tokenizer, runtime, value_head)


def generate_responses(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Messages],
    generation: GenerationConfig,
    seed: int,
    runtime: Runtime,
    batch_size: int = 64,
) -> list[Response]:
    """Sample one response to each prompt (as messages), in order.

    The same seed gives the same responses for any batch size, since prompts are numbered from the shortest to the
    longest.
    """
    encoded = [encode_prompt(tokenizer, p, generation.max_prompt_tokens) for p in prompts]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    out: dict[int, Response] = {}
    with rollout_engine(model, tokenizer, runtime) as engine:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            numbers = range(start, start + len(batch))
            samples = engine.sample([encoded[i] for i in batch], generation, seed, numbers)
            ended = samples.ended.tolist()
            for row, (i, text) in enumerate(zip(batch, samples.texts(tokenizer), strict=True)):
                sampled_ids = samples.response_ids[row, : samples.response_lengths[row]].tolist()
                out[i] = Response(text, samples.as_judged(row), ended[row], sampled_ids, numbers[row])
    return [out[i] for i in range(len(encoded))]
