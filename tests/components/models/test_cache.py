"""The preallocated cache holds what transformers' own does without growing; other models keep transformers'."""

import copy
from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from components.models import cache, sampling
from components.models.batching import pad
from components.models.cache import DynamicContext, PreallocatedContext, open_context
from components.models.chat.endings import set_endings
from components.models.config import GenerationConfig
from components.models.folders import frozen
from components.models.logprobs import token_stats
from components.models.runtime import Runtime
from components.models.sampling import Samples, _choose, _closed_up, sample, with_endings
from components.ppo.models import Packed, scatter

NEW = 6


def contexts(language: Any) -> list[Any]:
    """A preallocated and a dynamic context of the same prompts."""
    from transformers import DynamicCache

    ids, mask = pad(sorted(language.prompts, key=len), language.tokenizer.pad_token_id, side="left")
    lengths = mask.sum(1).tolist()
    preallocated = open_context(language.model, ids, lengths, NEW)
    return [preallocated, DynamicContext(language.model, ids, lengths, DynamicCache(config=language.model.config))]


@torch.no_grad()
def test_hidden_states_are_those_of_the_growing_cache_also_after_rows_left(language: Any) -> None:
    ours, theirs = contexts(language)
    assert isinstance(ours, PreallocatedContext)
    torch.testing.assert_close(ours.read_prompts(), theirs.read_prompts(), atol=1e-5, rtol=0)
    leaving = [(), (0, 3), (), tuple(range(4)), (5,), ()]
    rows = torch.arange(len(language.prompts))
    for t, gone in enumerate(leaving):
        tokens = 2 + (rows * 7 + t) % 50
        torch.testing.assert_close(ours.append(tokens), theirs.append(tokens), atol=1e-5, rtol=0)
        if gone:
            order = _closed_up([row not in gone for row in range(len(rows))])
            assert set(order) == set(range(len(rows))) - set(gone)
            rows = rows[order]
            ours.keep(order)
            theirs.keep(order)
    assert len(rows) == len(language.prompts) - 7


@torch.no_grad()
def test_nothing_is_allocated_after_the_prompts_and_padding_of_rows_that_left_is_not_read(language: Any) -> None:
    context, _ = contexts(language)
    context.read_prompts()
    places = [x.data_ptr() for layer in context.cache.layers for x in (layer.keys, layer.values)]
    width = max(map(len, language.prompts))
    assert context.cache.layers[0].keys.shape[2] == width + NEW
    seen: list[Tensor] = []
    update = type(context.cache.layers[0]).update

    def spied(layer: Any, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(layer, *given, **options)
        seen.append(keys)
        return keys, values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(context.cache.layers[0]), "update", spied)
        for kept in (12, 7, 1):  # sorted by length: the shortest prompts stay
            context.keep(range(kept))
            context.append(torch.full((kept,), 5))
    assert places == [x.data_ptr() for layer in context.cache.layers for x in (layer.keys, layer.values)]
    assert all(x.untyped_storage().data_ptr() in places for x in seen), "attention reads views, not copies"
    shortest, seventh = (sorted(map(len, language.prompts))[i] for i in (0, 6))
    assert shortest < seventh < width
    layers = len(context.cache.layers)
    assert [x.shape[2] for x in seen[::layers]] == [width + 1, seventh + 2, shortest + 3]


@torch.no_grad()
def test_on_a_gpu_attention_can_read_the_mask_also_after_the_longest_prompts_left(
    language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's kernel reads 16 bytes of a mask at a time: a mask that began elsewhere ended the run, misaligned."""
    monkeypatch.setattr(cache, "ALIGNED", {"cpu": cache.ALIGNED["cuda"]})
    ours, theirs = contexts(language)
    torch.testing.assert_close(ours.read_prompts(), theirs.read_prompts(), atol=1e-5, rtol=0)
    attend, masks = torch.nn.functional.scaled_dot_product_attention, list[Tensor]()

    def spied(*given: Any, **options: Any) -> Tensor:
        masks.append(options["attn_mask"])
        return attend(*given, **options)

    starts = []
    for kept in (12, 9, 7, 4, 1):
        starts.append(ours.padding[kept - 1])
        ours.keep(range(kept))
        theirs.keep(range(kept))
        tokens = torch.full((kept,), 5)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
            found = ours.append(tokens)
        torch.testing.assert_close(found, theirs.append(tokens), atol=1e-5, rtol=0)
    assert any(start % 8 for start in starts), "rows that begin at aligned slots alone show nothing"
    assert len(masks) == len(starts) * len(ours.cache.layers)
    assert all(mask.storage_offset() % 8 == 0 and mask.stride(0) % 8 == 0 for mask in masks)


def draw(model: Any, language: Any, prompts: Any, generation: GenerationConfig, skipped: int = 0) -> Samples:
    """Samples of seed 4, with the randomness of row `skipped` and those after it."""
    return sample(model, language.tokenizer, prompts, generation, 4, range(skipped, skipped + len(prompts)))


def special(kind: str, language: Any) -> Any:
    """A tiny model with sliding windows of six tokens, in every layer or in every second."""
    shape = {
        "vocab_size": len(language.tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6,
        "pad_token_id": language.tokenizer.pad_token_id, "eos_token_id": language.tokenizer.eos_token_id,
        "initializer_range": 0.4,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "mistral":
        return frozen(MistralForCausalLM(MistralConfig(**shape)))
    layers = ["sliding_attention", "full_attention"]
    return frozen(Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=layers, query_pre_attn_scalar=8)))


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_sliding_windows_are_left_to_transformers_and_agree_with_the_training_path(
    kind: str, language: Any, runtime: Runtime
) -> None:
    model = special(kind, language)
    ids, mask = pad(language.prompts, language.tokenizer.pad_token_id, side="left")
    assert isinstance(open_context(model, ids, mask.sum(1).tolist(), NEW), DynamicContext)
    samples = draw(model, language, language.prompts, GenerationConfig(max_new_tokens=24))
    batch = Packed.of(samples, range(len(language.prompts)))
    with torch.no_grad():
        stats = token_stats(model, batch.ids, batch.mask, batch.counts, runtime)
    recomputed = scatter(stats.logprobs, samples.response_mask)
    torch.testing.assert_close(samples.logprobs, recomputed, atol=1e-4, rtol=0)


@pytest.mark.parametrize("every", [3, 8, 10**6])
def test_a_stop_string_before_eos_counts_however_rarely_one_looks(
    language: Any, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EOS, another token that ends, and a word that is a stop string each follow one another within a few tokens."""
    tokenizer = copy.deepcopy(language.tokenizer)
    token, other = next(each for each in sorted(tokenizer.get_vocab()) if each[1:].isalpha()), "<|user|>"
    word = tokenizer.decode(tokenizer.convert_tokens_to_ids(token)).strip()
    set_endings(tokenizer, tokens=(other,), strings=(word,))
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([other, token])]
    model = SimpleNamespace(base_model=language.model.base_model, config=language.model.config)
    head = language.model.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0]).index_fill(0, torch.tensor(ends), 3.0)
    model.get_output_embeddings = lambda: lambda hidden: head(hidden) + bias
    ending, found = type(language)(language.model, tokenizer, language.prompts), []
    for number in (1, every):
        monkeypatch.setitem(sampling.LEAVE_EVERY, "cpu", number)
        found.append(draw(model, ending, language.prompts * 20, GenerationConfig(max_new_tokens=20)))
    often, rarely = (with_endings(each, tokenizer) for each in found)
    of = Counter(ids[n - 1] if over else -1 for ids, n, over in zip(
        often.response_ids.tolist(), often.response_lengths, often.ended.tolist(), strict=True
    ))  # fmt: skip
    assert min(of[each] for each in (*ends, -1)) >= 3 and often.other_endings == rarely.other_endings
    assert torch.equal(often.response_ids, rarely.response_ids) and torch.equal(often.ended, rarely.ended)
    assert not any(word in text for text in rarely.texts(tokenizer))
    torch.testing.assert_close(often.logprobs, rarely.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [7, 1024, 1025, 5000])
def test_the_token_drawn_is_that_of_whole_numbers_and_so_the_same_on_every_device(vocabulary: int) -> None:
    """Weights as integers of 2^-40, their sums as Python's, which have no rounding: in blocks or not. None has 0."""
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.softmax(torch.randn(60, vocabulary, generator=generator) * 6, 1)
    weights[:, ::3] = weights[:, -1:] = 0
    uniform = torch.rand(60, generator=generator)
    uniform[:2], uniform[2:4] = 0.0, 1 - 2**-24
    expected = []
    for row, u in zip(weights.tolist(), uniform.tolist(), strict=True):
        sums = list(accumulate(round(weight * 2**40) for weight in row))
        expected.append(bisect_right(sums, int(u * sums[-1])))
    found = _choose(weights, uniform.double())
    assert found.tolist() == expected and (weights.gather(1, found.unsqueeze(1)) > 0).all()
    order = torch.randperm(vocabulary, generator=generator)
    total = (weights * 2**40).round().long()
    assert torch.equal(total.sum(1), total[:, order].sum(1)), "no order changes a sum"
