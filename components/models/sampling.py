"""Sample responses with a key-value cache.

Legend: B responses, P prompt tokens (padded on the left), T response tokens (padded on the right).
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from components.base.errors import CheckFailed
from components.base.jsonl import read_rows, write_rows
from components.distributed import ranks, sharding
from components.models.adapters import AdapterView
from components.models.batching import Messages, encode_prompt, onto, pad
from components.models.cache import Graphs, can_be_captured, open_context
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


class SampledStats(NamedTuple):
    """Further values that the sampler computed, (B, T), 0 where the response mask is False."""

    logprobs_at_1: Tensor
    """Log-probabilities at temperature 1, nats."""
    entropy: Tensor
    """Entropy of the distribution from which a token was drawn, nats."""
    values: Tensor | None
    """Value of the state in which a token was chosen; None if the sampler had no value head."""


class OtherEnding(NamedTuple):
    """A response that did not end with EOS but with another token or at a stop string."""

    text_tokens: int
    """Number of tokens that contain its text."""
    characters: int
    """Number of characters of its text; a stop string may begin within its last token."""
    reward_ids: list[int]
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
    stats: SampledStats | None = None
    """Set if the sampler's numbers are as exact as the training path's; None if they must be recomputed."""
    other_endings: Mapping[int, OtherEnding] = field(default_factory=dict)
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
    def text_ids(self) -> list[list[int]]:
        """Return each response's token ids without the final EOS.

        For a response that ended at a stop string, these are the ids that contain its text.
        """
        rows = zip(self.response_ids.tolist(), self.response_lengths, self.ended.tolist(), strict=True)
        text_ids = [ids[: length - ended] for ids, length, ended in rows]
        for row, other in self.other_endings.items():
            text_ids[row] = self.response_ids[row, : other.text_tokens].tolist()
        return text_ids

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
        visible = [visible_text(tokenizer, ids) for ids in self.text_ids]
        for row, other in self.other_endings.items():
            visible[row] = visible[row][: other.characters]
        return visible

    def reward_ids(self, row: int) -> list[int]:
        """Return the token ids of response `row` as a reward model reads it: a response that ended has a final EOS."""
        if row in self.other_endings:
            return self.other_endings[row].reward_ids
        return self.response_ids[row, : self.response_lengths[row]].tolist()

    def special_tokens(self, tokenizer: Any) -> list[int]:
        """Return how many special tokens each response has, without its ending and padding."""
        special = special_tokens(tokenizer)
        return [sum(token in special for token in ids) for ids in self.text_ids]


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    text: str
    token_ids: list[int]
    """Its tokens as a reward model reads them (`reward_ids`), with EOS if it ended."""
    ended: bool
    """Whether EOS, or another ending of the tokenizer's, was sampled before the cap."""
    sampled_ids: list[int]
    """Its tokens as they were sampled, with the ending."""
    number: int
    """The number of its random stream."""


@contextmanager
def sampling_copy(model: Any, runtime: Runtime, graphs: Graphs | None = None) -> Iterator[Any]:
    """Yield the model to sample from: in float32 the model itself, else a bfloat16 copy (cast once, not per token).

    A 4-bit backbone is not copied, since the copy would take four times its memory. The copy of `graphs` is kept.
    """
    if runtime.dtype == "float32" or (isinstance(model, AdapterView) and is_four_bit(model.backbone.model)):
        whole = sharding.gathered(model)
        read = whole.backbone.model if isinstance(whole, AdapterView) else whole
    else:
        whole = read = _in_bfloat16(model, None if graphs is None else graphs.model)
        if graphs is not None:
            graphs.model = whole
    with packed_weights(read, FEW_ROWS):
        yield whole
    sharding.release(model)


def _in_bfloat16(model: Any, earlier: Any = None) -> Any:
    """Return a copy with every parameter in bfloat16, cast (and gathered) one by one, so there is no copy in float32.

    Buffers are not cast: with rotary frequencies rounded to bfloat16 the 500th position is off by up to 0.2 radians.

    Args:
        earlier: a copy with earlier weights, to which the weights are copied in place; None makes a new one.
    """
    source = model.merged(torch.bfloat16) if isinstance(model, AdapterView) else model
    sharding.only_own_part(source)
    weights = (sharding.whole(p.detach().to(torch.bfloat16)) for p in source.parameters())
    if earlier is None:
        skeleton = sharding.skeleton(source)
        pairs = zip(skeleton.parameters(), weights, strict=True)
        return copy.deepcopy(skeleton, {id(p): nn.Parameter(weight, requires_grad=False) for p, weight in pairs})
    for parameter, weight in zip(earlier.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return earlier


@torch.no_grad()
def sample(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], generation: GenerationConfig, seed: int,
    numbers: Sequence[int] | None = None, device: str = "cpu", value_head: Callable[[Tensor], Tensor] | None = None,
    graphs: Graphs | None = None,
) -> Samples:  # fmt: skip
    """Sample one response per prompt from the full softmax at `generation.temperature`, until an ending or the cap.

    Endings are those of the tokenizer (`endings_of`), EOS among them. At temperature 0 the likeliest token is taken,
    and its statistics are those at temperature 1. (Only an evaluation's copy of a `GenerationConfig` can have 0.) The
    pad token is never sampled. Rows that have ended are dropped from the forward pass where that saves time.

    Args:
        model: a causal LM, or a view of one: `base_model(...)`, `get_output_embeddings()` and `config` are used.
        numbers: each prompt's number, from 0, among all prompts of `seed`; None numbers them in order. A response's
            randomness depends only on the seed and its number (`response_uniforms`).
        value_head: computes values (n,) from last hidden states (n, D).
        graphs: decode by these CUDA graphs; None decodes without.

    Raises:
        CheckFailed: a logit is NaN or infinite, so that there is no distribution to sample from.
    """
    pad_id, endings = tokenizer.pad_token_id, endings_of(tokenizer)
    prompt_ids, prompt_mask = (onto(device, x) for x in pad(prompts, pad_id, side="left"))
    batch, cap = len(prompts), generation.max_new_tokens
    order = sorted(range(batch), key=lambda row: len(prompts[row]))  # of rows: first those of the context
    by_row = response_uniforms(seed, order if numbers is None else [numbers[row] for row in order], cap)
    uniforms = onto(device, by_row.T.double().contiguous())
    index, end_ids = onto(device, torch.tensor(order)), onto(device, torch.tensor(endings.ids))
    going, stops = torch.ones_like(index, dtype=torch.bool), _StopStrings(tokenizer, batch) if endings.strings else None
    results: dict[str, Tensor] = defaultdict(lambda: torch.zeros(batch, cap, device=device))
    results["tokens"] = torch.full((batch, cap), pad_id, dtype=torch.long, device=device)
    columns = list[dict[str, Tensor]]()  # of `results`, since rows were last checked
    room = cap if graphs is None else cap + max(0, generation.max_prompt_tokens - prompt_ids.shape[1])
    context = open_context(model, prompt_ids[index], [len(prompts[row]) for row in order], room, graphs)
    draw, hidden = _Draw(generation.temperature), context.read_prompts()
    drawn = draw(model, hidden, uniforms[0])
    for t in range(cap):
        if value_head is not None:
            drawn["values"] = value_head(hidden.float())
        columns.append(drawn)
        tokens = drawn["tokens"]
        if t % LEAVE_EVERY[torch.device(device).type] == 0 or t + 1 == cap:
            still, recent = _still_going(columns, results, t + 1, going, end_ids)
            if not still:
                raise _no_distribution(model, t + 1)
            if stops is not None:
                still = stops.without_complete(order[: len(still)], still, recent.tolist())
            remaining = _closed_up(still)
            if t + 1 == cap or not remaining:
                break
            if len(remaining) < len(still) and context.keep(remaining):
                moved = [*remaining, *sorted({*range(batch)} - {*remaining})]
                order, index = [order[i] for i in moved], onto(device, torch.tensor(moved))
                # A gather: `index_put_` sorts on CUDA under deterministic algorithms.
                results, rows = {name: values[index] for name, values in results.items()}, index[: len(remaining)]
                tokens, going, uniforms = tokens[rows], going[rows], uniforms[:, rows]
        hidden, drawn = context.step(tokens, uniforms[t + 1], draw)
    ended, mask, values = _responses(results, order, pad_id, end_ids, {} if stops is None else stops.lengths)
    stats = SampledStats(values["logprobs_at_1"], values["entropy"], values.get("values"))
    return Samples(prompt_ids, prompt_mask, values["tokens"], mask, values["logprobs"], ended, stats)


def _still_going(
    columns: list[dict[str, Tensor]], results: Mapping[str, Tensor], end: int, going: Tensor, end_ids: Tensor
) -> tuple[list[bool], Tensor]:
    """Move `columns` (n,), up to token `end`, to the first rows of `results`, and update which rows are `going` (n,).

    Return the latter, empty if a distribution was not finite, and the moved tokens. The host waits for the GPU once.
    """
    recent = {name: torch.stack([drawn[name] for drawn in columns], 1) for name in columns[0]}
    columns.clear()
    for name, values in recent.items():
        results[name][: len(values), end - values.shape[1] : end] = values
    going &= ~torch.isin(recent["tokens"], end_ids).any(1)
    sound = (recent["logprobs"] + recent["entropy"]).isfinite().all().unsqueeze(0)
    *still, finite = torch.cat([going, sound]).tolist()
    return still if finite else [], recent["tokens"]


class _StopStrings:
    """Finds complete stop strings in `batch` responses that are being sampled."""

    def __init__(self, tokenizer: Any, batch: int) -> None:
        self._finder, self._over = StopFinder(tokenizer), set[int]()
        self._ids: list[list[int]] = [[] for _ in range(batch)]
        self.lengths: dict[int, int] = {}
        """Maps a row with a complete stop string to its number of tokens up to that."""

    def without_complete(self, rows: list[int], going: list[bool], recent: list[list[int]]) -> list[bool]:
        """Return `going`, which of `rows` go on after their `recent` tokens, without those with a complete stop
        string."""
        # Also in rows that reached EOS since the last check: a stop string may precede it.
        for row, tokens in zip(rows, recent, strict=True):
            ids, done = self._ids[row], len(self._ids[row])
            ids += tokens
            start = max(0, done - self._finder.window)
            if row not in self._over and (end := self._finder.first(ids[start:], done - start)) is not None:
                self.lengths[row] = start + end
        still = [on and row not in self.lengths for on, row in zip(going, rows, strict=True)]
        self._over.update(row for on, row in zip(still, rows, strict=True) if not on)
        return still


def _responses(
    results: Mapping[str, Tensor], order: Sequence[int], pad_id: int, end_ids: Tensor, stopped: Mapping[int, int]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return whether each response ended (B,), the mask of the responses (B, T), and `results` (B, cap) of the rows
    `order` as (B, T) in the prompts' order.

    Args:
        stopped: maps a row with a stop string to its number of tokens up to that.
    """
    index = onto(end_ids.device, torch.tensor(sorted(range(len(order)), key=order.__getitem__)))
    response = results["tokens"][index]
    ends, cap = torch.isin(response, end_ids), response.shape[1]
    ended = ends.any(1)
    length = torch.where(ended, ends.long().argmax(1) + 1, cap)
    if stopped:
        at = torch.full((len(response),), cap + 1)
        at[list(stopped)] = torch.tensor(list(stopped.values()))
        at = onto(response.device, at)
        ended, length = ended | (at <= cap), torch.minimum(length, at)
    mask = torch.arange(int(length.max()), device=response.device) < length.unsqueeze(-1)
    values = {name: x[index, : mask.shape[1]].masked_fill(~mask, 0) for name, x in results.items()}
    return ended, mask, values | {"tokens": response[:, : mask.shape[1]].masked_fill(~mask, pad_id)}


def with_endings(samples: Samples, tokenizer: Any) -> Samples:
    """Return `samples` with the text's extent of each response that ended without EOS."""
    endings = endings_of(tokenizer)
    if len(endings.ids) == 1 and not endings.strings:
        return samples
    eos, others = endings.ids[0], dict[int, OtherEnding]()
    rows = zip(samples.response_ids.tolist(), samples.response_lengths, samples.ended.tolist(), strict=True)
    for row, (ids, length, ended) in enumerate(rows):
        last = ids[length - 1]
        if not ended or last == eos:
            continue
        if last in endings.ids:
            text_ids = ids[: length - 1]
            others[row] = OtherEnding(len(text_ids), len(visible_text(tokenizer, text_ids)), [*text_ids, eos])
            continue
        whole = visible_text(tokenizer, ids[:length])
        text = before_stop(tokenizer, whole)
        count = token_of_character(tokenizer, ids[:length], len(text) - 1) + 1 if text else 0
        text_ids = ids[:count]
        exact = visible_text(tokenizer, text_ids) == text
        others[row] = OtherEnding(
            count, len(text), [*(text_ids if exact else tokenizer(text, add_special_tokens=False)["input_ids"]), eos]
        )
    return replace(samples, other_endings=others)


def response_uniforms(seed: int, numbers: Sequence[int], cap: int) -> Tensor:
    """Return the uniform random numbers (B, cap), on the CPU, for the tokens of the responses numbered `numbers`.

    Response r gets the draws r · cap to (r + 1) · cap - 1 of torch's CPU generator after `seed`. So they do not depend
    on the batch, the number of processes or the device.
    """
    drawn = torch.rand(max(numbers, default=-1) + 1, cap, generator=torch.Generator().manual_seed(seed))
    return drawn[list(numbers)]


@dataclass(frozen=True)
class _Draw:
    """Draws tokens (n,) after the last hidden states (n, D) of a model, and returns by name also their log-probability,
    the entropy and the log-probability at temperature 1 (n,)."""

    temperature: float

    def __call__(self, model: Any, hidden: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
        logits = vocabulary_logits(model, hidden)
        scaled = logits if self.temperature in (0.0, 1.0) else logits / self.temperature
        probabilities = torch.softmax(scaled, -1)
        tokens = logits.argmax(-1) if self.temperature == 0 else _choose(probabilities, uniforms)
        logprobs = probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1).log()
        log_partition = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1) - logprobs
        at_1 = logprobs if scaled is logits else -functional.cross_entropy(logits, tokens, reduction="none")
        entropy = log_partition - torch.linalg.vecdot(probabilities, scaled)
        return {"tokens": tokens, "logprobs": logprobs, "entropy": entropy, "logprobs_at_1": at_1}


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


def _choose(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index of each row (n, V) at which the cumulative weight exceeds `uniform` (n,) of the total.

    Weights in [0, 1] are counted in units of 2^-`WEIGHT_BITS`. Integer sums are exact in any order, so every device
    finds the same index, and never one of weight 0. (CUDA's cumulative sums of floats are not deterministic.) Long rows
    are searched first by sums of blocks and then within a block, which is cheaper and gives the same result. A row with
    NaN gets any index.
    """
    units, vocabulary = (weights * 2**WEIGHT_BITS).round_(), weights.shape[1]
    if vocabulary <= LONGEST_BLOCK:
        cumulative = units.cumsum(1, dtype=torch.long)
        threshold = (uniform * cumulative[:, -1]).long().unsqueeze(1)
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp(max=vocabulary - 1)
    lacking = -vocabulary % BLOCK
    blocks = (functional.pad(units, (0, lacking)) if lacking else units).unflatten(1, (-1, BLOCK))
    units = blocks.sum(2, dtype=torch.float64)  # exact too: a float64 represents every integer below 2^53
    cumulative = units.cumsum(1, dtype=torch.long)
    threshold = uniform * cumulative[:, -1]
    index = _first_above(cumulative, threshold).unsqueeze(1)
    before = (cumulative - units).gather(1, index).squeeze(1)
    block = blocks.gather(1, index.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).cumsum(1, dtype=torch.long)
    token = torch.add(_first_above(block, threshold - before), index.squeeze(1), alpha=BLOCK)
    return token.clamp(max=vocabulary - 1) if lacking else token


def _first_above(cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the first index (n,) at which increasing rows (n, K) exceed `threshold` (n,); the last if none does."""
    return (cumulative[:, :-1] <= threshold.unsqueeze(1)).sum(1)


@dataclass(frozen=True)
class LocalEngine:
    """Samples responses of a model in this process, whose weights do not change meanwhile."""

    model: Any
    tokenizer: Any
    runtime: Runtime
    value_head: Callable[[Tensor], Tensor] | None
    graphs: Graphs | None = None

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
        sampled = rows or [0]  # a rank without a share samples a row that is not used
        uncopied = isinstance(self.model, AdapterView) and not exact  # only its matrix products are in bfloat16
        with autocast(self.runtime) if uncopied else nullcontext():
            samples = sample(
                self.model, self.tokenizer, [prompts[row] for row in sampled], generation, seed,
                [numbered[row] for row in sampled], device, self.value_head, self.graphs,
            )  # fmt: skip
        if ranks.size() > 1:
            samples = _together(samples, rows, prompts, self.tokenizer.pad_token_id, generation.max_new_tokens)
        samples = with_endings(samples, self.tokenizer)
        return samples if exact else replace(samples, stats=None)


def _together(samples: Samples, rows: list[int], prompts: Sequence[Sequence[int]], pad_id: int, cap: int) -> Samples:
    """Return the samples of all ranks, on every rank. `samples` are those of the prompts `rows`; unused if `rows` is
    empty."""
    device = samples.response_ids.device

    def joined(part: Tensor) -> Tensor:
        """Return (B, T) or (B,) from this rank's (b, t) or (b,). Each sum has one nonzero term, so it is exact."""
        out = torch.zeros(len(prompts), *([cap] if part.dim() > 1 else []), dtype=torch.float64, device=device)
        if rows:
            at = torch.tensor(rows, device=device)
            out[(at,) if part.dim() == 1 else (at, slice(part.shape[1]))] = part.double()
        return ranks.joined(out).to(part.dtype)

    mask = joined(samples.response_mask)
    width = int(mask.sum(1).max())
    mask = mask[:, :width]

    def cut(part: Tensor) -> Tensor:
        return joined(part)[:, :width]

    stats = samples.stats
    if stats is not None:
        values = None if stats.values is None else cut(stats.values)
        stats = SampledStats(cut(stats.logprobs_at_1), cut(stats.entropy), values)
    ids, prompt_mask = (tensor.to(device) for tensor in pad(prompts, pad_id, side="left"))
    response = cut(samples.response_ids).masked_fill(~mask, pad_id)
    return Samples(ids, prompt_mask, response, mask, cut(samples.logprobs), joined(samples.ended), stats)


@contextmanager
def rollout_engine(
    model: Any, tokenizer: Any, runtime: Runtime, value_head: Callable[[Tensor], Tensor] | None = None
) -> Iterator[LocalEngine]:
    """Open an engine that samples from the current weights of `model`, which must not be trained meanwhile."""
    graphs = _kept_graphs(model, runtime)
    with sampling_copy(model, runtime, graphs) as sampler:
        yield LocalEngine(sampler, tokenizer, runtime, value_head, graphs)


_GRAPHS = WeakKeyDictionary[Any, Graphs]()
"""The CUDA graphs of the model that was sampled from last, for as long as it exists."""


def _kept_graphs(model: Any, runtime: Runtime) -> Graphs | None:
    """Return the graphs of `model`, and free those of another one; None if it is not sampled from by graphs."""
    if runtime.device != "cuda" or not runtime.cuda_graphs or not can_be_captured(model):
        return None
    if model not in _GRAPHS:
        _GRAPHS.clear()
        _GRAPHS[model] = Graphs()
    return _GRAPHS[model]


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
                out[i] = Response(text, samples.reward_ids(row), ended[row], sampled_ids, numbers[row])
    return [out[i] for i in range(len(encoded))]


@dataclass(frozen=True)
class SftAnswers:
    """SFT's responses (N,) to the first prompts of the calibration split. The reward stage samples them, once.

    The scale of the scores, the scales of the sources of `ppo.rewards` and the limits of the alarms are computed from
    them. Held-out evaluations compare the policy's responses with them. Another model that samples with the same `seed`
    and `numbers` gets the same random numbers.
    """

    seed: int = 0
    numbers: Sequence[int] = ()
    """(N,) the number of each response's random stream."""
    ids: Sequence[Sequence[int]] = ()
    """(N,) the tokens of each response as they were sampled, with its ending."""
    ended: Sequence[bool] = ()
    """(N,) whether the ending was sampled before the cap."""

    @classmethod
    def of(cls, responses: Sequence[Response], seed: int) -> "SftAnswers":
        """Return responses that `generate_responses` sampled with `seed`."""
        numbers, ids = [r.number for r in responses], [r.sampled_ids for r in responses]
        return cls(seed, numbers, ids, [r.ended for r in responses])

    @classmethod
    def read(cls, artifact: Path) -> "SftAnswers | None":
        """Read the responses of a reward artifact; None if release 0.1.0 made it, which did not store them."""
        if not (artifact / ANSWERS).exists():
            return None
        rows = read_rows(artifact / ANSWERS)
        columns = ([row[name] for row in rows] for name in ("number", "ids", "ended"))
        return cls(rows[0]["seed"], *columns)

    def write(self, artifact: Path) -> None:
        """Write a row for each response."""
        columns = zip(self.numbers, self.ids, self.ended, strict=True)
        rows = ({"seed": self.seed, "number": n, "ids": list(ids), "ended": ended} for n, ids, ended in columns)
        write_rows(artifact / ANSWERS, rows)

    def samples(self, rows: slice, prompts: Sequence[Sequence[int]], tokenizer: Any, device: str) -> Samples:
        """Return the responses `rows` to `prompts` (as token ids), as they were sampled, with log-probabilities 0."""
        prompt_ids, prompt_mask = pad(prompts, tokenizer.pad_token_id, "left")
        ids, mask = pad(self.ids[rows], tokenizer.pad_token_id)
        samples = Samples(
            onto(device, prompt_ids), onto(device, prompt_mask), onto(device, ids), onto(device, mask),
            torch.zeros(ids.shape, device=device), onto(device, torch.tensor(self.ended[rows])),
        )  # fmt: skip
        return with_endings(samples, tokenizer)


ANSWERS = "sft_answers.jsonl"
"""Name of the file of SFT's responses in a reward artifact."""
ANSWERS_STREAM = "reward", "scale"
"""Name of the random stream of these responses, for `torch_seed`."""
