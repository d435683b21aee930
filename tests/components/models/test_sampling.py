"""Responses are drawn from the policy's own softmax, with the log-probabilities that training will compute."""

import copy
import random
import re
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from components.base.errors import CheckFailed
from components.models import sampling
from components.models.batching import PADDING
from components.models.cache import PreallocatedContext
from components.models.config import GenerationConfig
from components.models.logprobs import token_stats
from components.models.matrices.kernels import by_onednn
from components.models.runtime import Runtime
from components.models.sampling import Samples, generate_responses, response_uniforms, rollout_engine, sample
from components.ppo.models import Packed, micro_batches


def draw(language: Any, prompts: list[list[int]], seed: int = 0, model: Any = None, **options: Any) -> Samples:
    generation = GenerationConfig(**{"max_new_tokens": 12} | options)
    return sample(model or language.model, language.tokenizer, prompts, generation, seed)


def eager(language: Any, factor: float) -> Any:
    """The model, with EOS as likely as `factor` makes it, so that responses end at different lengths."""
    model = copy.deepcopy(language.model)
    model.lm_head = torch.nn.Linear(*reversed(language.model.lm_head.weight.shape), bias=True).requires_grad_(False)
    model.lm_head.weight.copy_(language.model.lm_head.weight)
    model.lm_head.bias.zero_()[language.tokenizer.eos_token_id] = factor
    return model


def opinionated(language: Any) -> Any:
    """The model with an output layer of its own, whose likeliest token isn't just the last one again."""
    model = copy.deepcopy(language.model)
    vocabulary, width = language.model.lm_head.weight.shape
    weight = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(8)) * 0.3
    model.lm_head = torch.nn.Linear(width, vocabulary, bias=False).requires_grad_(False)
    model.lm_head.weight.copy_(weight)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_tokens_have_the_softmaxs_frequencies(language: Any, temperature: float) -> None:
    draws, prompt = 4000, language.prompts[0]
    model = opinionated(language)
    tokens = draw(language, [prompt] * draws, model=model, max_new_tokens=1, temperature=temperature).response_ids[:, 0]
    logits = model(torch.tensor([prompt])).logits[0, -1].double()
    logits[language.tokenizer.pad_token_id] = -torch.inf
    expected = (logits / temperature).softmax(-1) * draws
    often = expected >= 5
    seen = torch.bincount(tokens, minlength=len(expected)).double()
    assert seen[language.tokenizer.pad_token_id] == 0
    assert often.sum() > 10
    observed, rare = (
        [seen[often], seen[~often].sum().unsqueeze(0)],
        [expected[often], expected[~often].sum().unsqueeze(0)],
    )
    assert chisquare(torch.cat(observed).numpy(), torch.cat(rare).numpy()).pvalue > 1e-3


def test_responses_stop_at_eos_which_counts_or_at_the_cap(language: Any) -> None:
    eos, pad = language.tokenizer.eos_token_id, language.tokenizer.pad_token_id
    samples = draw(language, language.prompts * 3, model=eager(language, 4.0))
    assert samples.ended.any() and not samples.ended.all()
    for ids, mask, ended in zip(samples.response_ids, samples.response_mask, samples.ended, strict=True):
        response = ids[mask].tolist()
        assert mask[: len(response)].all(), "the mask is one run from the first token"
        assert (response[-1] == eos) == ended and eos not in response[:-1] and pad not in response
        assert ended or len(response) == 12
        assert (ids[~mask] == pad).all()
    samples = draw(language, language.prompts, model=eager(language, 1e3), max_new_tokens=1)
    assert samples.ended.all() and samples.response_mask.shape == (len(language.prompts), 1), "EOS at the cap ends one"


def test_the_same_seed_gives_the_same_responses_and_another_seed_others(language: Any) -> None:
    one, two, other = (draw(language, language.prompts, seed) for seed in (5, 5, 6))
    assert torch.equal(one.response_ids, two.response_ids) and torch.equal(one.logprobs, two.logprobs)
    assert not torch.equal(one.response_ids[:, :3], other.response_ids[:, :3])


def test_when_and_whether_its_neighbours_end_changes_no_response(language: Any) -> None:
    model = eager(language, 4.0)
    prompts = language.prompts
    whole = draw(language, prompts, seed=2, model=model)
    lengths = whole.response_mask.sum(1)
    assert lengths.min() < lengths.max(), "some rows must have ended, and left the batch, before others"
    for row in range(len(prompts)):
        neighbours = [prompts[row] if i == row else prompts[(i + 5) % len(prompts)][-9:] for i in range(len(prompts))]
        other = draw(language, neighbours, seed=2, model=model)
        n = int(lengths[row])
        assert other.response_ids[row][other.response_mask[row]].tolist() == whole.response_ids[row, :n].tolist()
        assert torch.allclose(other.logprobs[row, :n], whole.logprobs[row, :n], atol=1e-5)


def test_any_split_of_a_batch_samples_the_same_responses(language: Any, runtime: Runtime) -> None:
    """So do batches of any size, and any number of processes that share a batch out."""
    model, generation = eager(language, 4.0), GenerationConfig(max_new_tokens=12)
    with rollout_engine(model, language.tokenizer, runtime) as engine:
        whole = engine.sample(language.prompts, generation, 2**62 - 1)
        for shares in ([range(0, 12, 2), range(1, 12, 2)], [range(5), range(5, 12)], [[11, 0, 7]]):
            for share in shares:
                part = engine.sample([language.prompts[i] for i in share], generation, 2**62 - 1, share)
                for row, i in enumerate(share):
                    ids, mask = part.response_ids[row], part.response_mask[row]
                    assert ids[mask].tolist() == whole.response_ids[i][whole.response_mask[i]].tolist()
    assert len(set(whole.response_mask.sum(1).tolist())) > 1


def test_the_uniforms_are_one_stream_of_torchs_generator_a_cap_for_each_response() -> None:
    """The documented stream: a change of it changes every response that was ever sampled."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.cat([torch.rand(n, 7, generator=generator) for n in (3, 1, 4)])
    assert torch.equal(response_uniforms(5, range(8), 7), drawn)
    assert torch.equal(response_uniforms(5, [6, 2], 7), drawn[[6, 2]])
    assert response_uniforms(5, [], 7).shape == (0, 7)
    assert drawn[0, :3].tolist() == pytest.approx([0.8302518725395203, 0.12611091136932373, 0.9074696898460388], abs=0)


def test_the_engine_samples_as_the_sampler_and_gives_back_every_weight_as_it_was(
    language: Any, runtime: Runtime
) -> None:
    model, generation = by_onednn(copy.deepcopy(language.model)), GenerationConfig(max_new_tokens=12)
    before = {name: (p.data_ptr(), p.stride(), p.clone()) for name, p in model.named_parameters()}
    alone = draw(language, language.prompts, seed=3, model=model)
    with pytest.raises(KeyboardInterrupt), rollout_engine(model, language.tokenizer, runtime) as engine:
        assert model.base_model.layers[0].mlp.up_proj.packed is not None
        assert model.lm_head.packed is not None
        samples = engine.sample(language.prompts, generation, 3)
        raise KeyboardInterrupt
    assert torch.equal(samples.response_ids, alone.response_ids)
    torch.testing.assert_close(samples.logprobs, alone.logprobs, atol=1e-5, rtol=0)
    assert model.lm_head.packed is None
    for name, parameter in model.named_parameters():
        place, stride, values = before[name]
        assert (parameter.data_ptr(), parameter.stride()) == (place, stride) and torch.equal(parameter, values)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_the_sampler_saw_is_what_the_training_path_computes(
    language: Any, runtime: Runtime, temperature: float
) -> None:
    head = torch.nn.Linear(24, 1)
    generation = GenerationConfig(max_new_tokens=12, temperature=temperature)
    with rollout_engine(
        eager(language, 4.0), language.tokenizer, runtime, lambda hidden: head(hidden).squeeze(-1)
    ) as engine:
        samples = engine.sample(language.prompts, generation, 5)
    batch = Packed.of(samples, range(len(samples.ended)))
    stats = token_stats(
        eager(language, 4.0), batch.ids, batch.mask, batch.counts, runtime, temperature, with_entropy=True
    )
    mask, seen = samples.response_mask, samples.stats
    assert seen is not None and seen.values is not None and not mask.all()
    pairs = (
        (samples.logprobs, stats.logprobs), (seen.logprobs_at_1, stats.logprobs_at_1), (seen.entropy, stats.entropy),
        (seen.values, head(stats.hidden).squeeze(-1)),
    )  # fmt: skip
    for kept, recomputed in pairs:
        assert torch.allclose(kept[mask], recomputed, atol=2e-5) and not kept[~mask].any()
    rounded = runtime.model_copy(update={"dtype": "bfloat16"})
    with rollout_engine(language.model, language.tokenizer, rounded) as engine:
        assert engine.sample(language.prompts, generation, 0).stats is None


def test_a_token_takes_25_operations_outside_the_model_and_no_sort(
    language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's host launches each; under deterministic algorithms `index_put_` sorts there. (Views cost nothing.)"""
    monkeypatch.setitem(sampling.LEAVE_EVERY, "cpu", 8)
    names: list[str] = []
    tokens: list[list[str]] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view:
                names.append(func.name())
            return func(*args, **(kwargs or {}))

    def append(*inputs: Any, model: Any = PreallocatedContext.append) -> torch.Tensor:
        tokens.append(names.copy())
        hidden = model(*inputs)
        names.clear()
        return hidden  # type: ignore[no-any-return]

    monkeypatch.setattr(PreallocatedContext, "append", append)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49_152, **shape, pad_token_id=0, eos_token_id=1)).eval()
    prompts = [prompt[-9:] for prompt in language.prompts]
    with Operations():
        sample(model, language.tokenizer, prompts, GenerationConfig(max_new_tokens=25), 0)
    assert len(tokens) == 24
    by_token = tokens[1:]  # between its own forward pass and the next
    assert [len(made) for t, made in enumerate(by_token, 1) if t % 8] == [25] * 21
    assert max(map(len, by_token)) <= 48, "every eighth token the sampler checks which rows have ended"
    refused = ("sort", "index_put", "zeros", "_local_scalar_dense", "is_nonzero")
    assert not [name for made in by_token for name in made if any(word in name for word in refused)]


def test_packing_moves_tokens_and_changes_none(language: Any) -> None:
    samples = draw(language, language.prompts, model=eager(language, 4.0))
    rows = [3, 0, 7]
    packed = Packed.of(samples, rows)
    for i, row in enumerate(rows):
        assert packed.ids[i][packed.mask[i]].tolist() == samples.ids[row][samples.mask[row]].tolist()
        assert (
            packed.ids[i][packed.counts[i]].tolist() == samples.response_ids[row][samples.response_mask[row]].tolist()
        )
        assert packed.mask[i].long().diff().le(0).all(), "padding stands on the right alone"
    assert packed.ids.shape[1] == samples.mask[rows].sum(1).max()
    assert torch.equal(packed.ids.flatten()[packed.at], samples.response_ids[rows].flatten()[packed.responses])
    assert torch.equal(packed.at, packed.counts.flatten().nonzero().squeeze(1))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 9))
def test_micro_batches_hold_every_row_once_and_little_padding(lengths: list[int], size: int, seed: int) -> None:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    nothing = torch.zeros(len(lengths), 0, dtype=torch.bool)
    samples = Samples(nothing.long(), nothing, ids, mask, ids.float(), mask.any(1))
    rows = random.Random(seed).sample(range(len(lengths)), max(1, len(lengths) // 2))
    found = [micro for micro, counts in micro_batches(samples, rows, size) if counts]
    assert sorted(chain.from_iterable(found)) == sorted(rows)
    for micro in found:
        real = [lengths[i] for i in micro]
        assert len(real) <= size and len(real) * max(real) <= (1 + PADDING) * sum(real) + 1e-6
    if len(set(lengths)) == 1:
        assert len(found) == -(-len(rows) // size), "nothing to pad: as few as may be"


def test_texts_show_special_tokens_where_they_stand_and_only_the_final_eos_is_left_out(language: Any) -> None:
    tokenizer = language.tokenizer
    words = tokenizer("We will replace what is broken.", add_special_tokens=False)["input_ids"]
    system, unknown, eos = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("system", "unknown", "end"))
    rows = [[*words, eos], [system, *words[:2], system, system, *words[2:], eos], [*words, unknown], [eos], [system]]
    ended = torch.tensor([row[-1] == eos for row in rows])
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[i < len(row) for i in range(longest)] for row in rows])
    empty = torch.zeros(len(rows), 0)
    samples = Samples(empty.long(), empty.bool(), ids, mask, ids.float(), ended)
    assert samples.texts(tokenizer) == [
        "We will replace what is broken.",
        "⟨|system|⟩We will⟨|system|⟩⟨|system|⟩ replace what is broken.",
        "We will replace what is broken.⟨|unknown|⟩",
        "",
        "⟨|system|⟩",
    ]
    assert samples.special_tokens(tokenizer) == [0, 3, 1, 0, 1]
    again = tokenizer(samples.texts(tokenizer)[1], add_special_tokens=False)["input_ids"]
    assert system not in again, "what is shown is no markup to the tokenizer that reads it"


def test_generated_responses_come_back_in_the_prompts_order_with_their_tokens(language: Any, runtime: Runtime) -> None:
    messages = [[{"role": "user", "content": "Anna here. " + "Please help. " * (i * 5 % 7)}] for i in range(7)]
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=6)

    def generate(model: Any, **options: Any) -> list[Any]:
        return generate_responses(model, language.tokenizer, messages, generation, 1, runtime, **options)

    model = opinionated(language)
    found = generate(model, batch_size=3)
    assert found == generate(model, batch_size=3)
    assert [each.token_ids for each in generate(model, batch_size=7)] == [each.token_ids for each in found]
    for response in found:
        plain = language.tokenizer.decode(response.token_ids, skip_special_tokens=True)
        assert re.sub(r"⟨\|\w+\|⟩", "", response.text) == plain
        assert response.ended == (response.token_ids[-1] == language.tokenizer.eos_token_id)
    greedy = [model(torch.tensor([_ids(language, m)])).logits[0, -1, 1:].argmax().item() + 1 for m in messages]
    cold = GenerationConfig(max_new_tokens=1, temperature=1e-3)
    sharp = generate_responses(model, language.tokenizer, messages, cold, 1, runtime, 3)
    assert [r.token_ids[0] for r in sharp] == greedy
    assert len(set(greedy)) > 1


def _ids(language: Any, messages: Any) -> list[int]:
    return language.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("cap", [1, 12])
def test_weights_that_are_no_numbers_end_sampling_with_their_name(
    language: Any, value: float, where: str, cap: int
) -> None:
    model = opinionated(language)
    model.get_parameter(where).view(-1)[-1] = value
    with pytest.raises(CheckFailed, match=rf"logits are NaN or infinite .*: {where} holds NaN or infinity") as error:
        draw(language, language.prompts, model=model, max_new_tokens=cap)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("vocabulary", [60, 3000], ids=["whole", "in blocks"])
@pytest.mark.parametrize("logit", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_overflow_with_finite_weights_end_sampling_as_such(
    language: Any, monkeypatch: pytest.MonkeyPatch, vocabulary: int, logit: float
) -> None:
    def overflowing(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), vocabulary)
        logits[-1, 7] = logit
        return logits

    monkeypatch.setattr(sampling, "vocabulary_logits", overflowing)
    with pytest.raises(CheckFailed, match=r"all weights are finite, so activations overflow.* lower its learning rate"):
        draw(language, language.prompts)
