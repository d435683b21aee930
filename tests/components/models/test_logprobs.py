"""Log-probabilities of given tokens are the model's own, wherever the padding stands and whatever it holds."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from components.models import logprobs
from components.models.batching import pad
from components.models.logprobs import token_stats
from components.models.runtime import Runtime


def responses(language: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts with responses of different lengths (random tokens, EOS and pad's neighbour among them)."""
    generator = torch.Generator().manual_seed(0)
    return [
        (p, torch.randint(1, len(language.tokenizer), (2 + 3 * i % 7,), generator=generator).tolist())
        for i, p in enumerate(language.prompts[:5])
    ]


def padded(language: Any, side: Any) -> tuple[Tensor, Tensor, Tensor]:
    pairs = responses(language)
    ids, mask = pad([p + r for p, r in pairs], language.tokenizer.pad_token_id, side)
    counts = torch.zeros_like(mask)
    for row, (p, r) in enumerate(pairs):
        counts[row, mask[row].nonzero().squeeze(1)[len(p) : len(p) + len(r)]] = True
    return ids, mask, counts


@pytest.mark.parametrize(("temperature", "side"), [(1.0, "right"), (0.7, "left")])
def test_they_equal_transformers_own_forward(language: Any, runtime: Runtime, temperature: float, side: str) -> None:
    stats = token_stats(language.model, *padded(language, side), runtime, temperature, with_entropy=True)
    expected, entropies = [], []
    for prompt, response in responses(language):
        logits = language.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
        logits[:, language.tokenizer.pad_token_id] = -torch.inf
        logp = (logits / temperature).log_softmax(-1)
        expected.append(logp.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1))
        entropies.append(torch.distributions.Categorical(logits=logits / temperature).entropy())
    assert stats.logprobs.dtype == torch.float32
    assert torch.allclose(stats.logprobs.double(), torch.cat(expected), atol=1e-5)
    assert torch.allclose(stats.entropy.double(), torch.cat(entropies), atol=1e-4)


def test_at_another_temperature_those_at_1_stand_beside_them(language: Any, runtime: Runtime) -> None:
    batch = padded(language, "right")
    one, other = (token_stats(language.model, *batch, runtime, t) for t in (1.0, 0.7))
    assert torch.equal(one.logprobs, one.logprobs_at_1) and torch.equal(one.logprobs, other.logprobs_at_1)
    assert not torch.allclose(one.logprobs, other.logprobs, atol=1e-2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_the_padding_holds_changes_nothing(language: Any, runtime: Runtime, side: str) -> None:
    ids, mask, counts = padded(language, side)
    garbage = torch.where(mask, ids, torch.randint_like(ids, 1, len(language.tokenizer)))
    assert not torch.equal(ids, garbage)
    one, other = (token_stats(language.model, x, mask, counts, runtime, with_entropy=True) for x in (ids, garbage))
    assert torch.allclose(one.logprobs, other.logprobs, atol=1e-6)


def test_the_pad_token_has_probability_0_and_the_others_sum_to_1(language: Any, runtime: Runtime) -> None:
    from components.models.logprobs import last_hidden, vocabulary_logits

    prompt = torch.tensor([language.prompts[0]])
    hidden = last_hidden(language.model, prompt, torch.ones_like(prompt, dtype=torch.bool))
    probabilities = vocabulary_logits(language.model, hidden).softmax(-1)
    assert (probabilities[..., language.tokenizer.pad_token_id] == 0).all()
    assert torch.allclose(probabilities.sum(-1), torch.tensor(1.0))
    assert (probabilities > 0).sum(-1).eq(len(language.tokenizer) - 1).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_no_gradient_reaches_tokens_that_stand_in_the_padding_alone(language: Any, runtime: Runtime, side: str) -> None:
    model = copy.deepcopy(language.model).requires_grad_(True)
    untied = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)  # else every row gets the softmax's
    model.lm_head = untied
    ids, mask, counts = padded(language, side)
    unused = next(t for t in range(10, len(language.tokenizer)) if not (ids == t).any())
    stats = token_stats(
        model, torch.where(mask, ids, torch.full_like(ids, unused)), mask, counts, runtime, with_entropy=True
    )
    assert stats.entropy is not None
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    gradient = model.get_input_embeddings().weight.grad
    assert not gradient[unused].any()
    assert gradient[ids[mask].unique()].any(1).sum() > 10, "the tokens that count get one"
    assert not untied.weight.grad[language.tokenizer.pad_token_id].any()
    assert not torch.isnan(gradient).any()


def test_logits_taken_in_turns_give_the_same_numbers_and_gradients(
    language: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(language.model).requires_grad_(True)
    batch, found, held = padded(language, "left"), [], []
    real = logprobs.vocabulary_logits
    monkeypatch.setattr(logprobs, "vocabulary_logits", lambda m, h: held.append(len(h)) or real(m, h))
    for at_once in (logprobs.LOGITS_AT_ONCE, 3 * len(language.tokenizer)):
        monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", at_once)
        model.zero_grad()
        stats = token_stats(model, *batch, runtime, 0.7, with_entropy=True)
        (stats.logprobs.sum() + stats.entropy.sum()).backward()
        found.append([*stats, torch.cat([p.grad.flatten() for p in model.parameters()])])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    tokens = len(found[0][0])
    assert held[0] == tokens > 6 and max(held[1:]) == 3, "never more than that are held"
    assert sum(held[1:]) == 2 * tokens, "and they are computed again for the gradient"
