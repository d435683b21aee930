"""Packing: demonstrations end to end in one row have the losses and gradients that each has in a row of its own."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, OPTConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from components.base.errors import UserError
from components.distributed import ranks
from components.models.batching import packed_runs
from components.models.folders import load_causal_lm
from components.models.runtime import Runtime
from components.sft.stage import fine_tune
from components.sft.tokenized_demonstrations import Examples, check_packing, token_losses
from components.training.loop import micro_batches

VOCABULARY = 60
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def random_model(config: Any) -> Any:
    """A model whose attention is far from even, so that a token that sees too much changes its loss."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def demonstrations(lengths: list[tuple[int, int]], seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Random tokens, so many of a prompt and of a response each."""
    rng = random.Random(seed)
    return [tuple([rng.randrange(2, VOCABULARY) for _ in range(n)] for n in two) for two in lengths]  # type: ignore[misc]


def gradient(model: Any, batch: list[Any], runtime: Runtime, packed: bool) -> tuple[Tensor, Tensor]:
    """Losses (K,) of the batch, and the gradient of their mean, flat."""
    model.zero_grad(set_to_none=True)
    losses = token_losses(model, 0, batch, runtime, packed)
    losses.mean().backward()
    return losses.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def llama() -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return random_model(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **shape, **IDS))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6))
def test_packed_losses_and_gradients_are_those_of_a_row_each_whatever_the_lengths(
    llama: Any, runtime: Runtime, lengths: list[tuple[int, int]]
) -> None:
    batch = demonstrations(lengths)
    packed, alone = (gradient(llama, batch, runtime, which) for which in (True, False))
    assert len(packed[0]) == sum(response for _, response in lengths)
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-5, atol=1e-5)  # 1.4e-6 measured
    assert (packed[1] - alone[1]).norm() <= 1e-5 * alone[1].norm()  # 5e-7 measured


def test_no_token_of_one_demonstration_moves_the_loss_of_another(llama: Any, runtime: Runtime) -> None:
    lengths = [(5, 4), (3, 6), (7, 2)]
    one, other = demonstrations(lengths), demonstrations(lengths, seed=1)
    with torch.no_grad():
        before, after = (token_losses(llama, 0, [*batch[:1], *one[1:]], runtime, packed=True) for batch in (one, other))
    assert not torch.allclose(before[:4], after[:4]) and torch.equal(before[4:], after[4:])


def test_flash_attention_is_told_where_each_demonstration_begins(
    llama: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in takes what flash attention takes: no mask, and the boundaries of the sequences in the row."""
    calls = []

    def by_boundaries(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        assert attention_mask is None and query.shape[0] == 1
        calls.append(kwargs["cu_seq_lens_q"].tolist())
        assert calls[-1] == kwargs["cu_seq_lens_k"].tolist()
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(b - a for a, b in pairwise(calls[-1]))
        found = [
            scaled_dot_product_attention(
                *(x[:, :, a:b] for x in (query, key, value)), is_causal=True, scale=kwargs["scaling"], enable_gqa=True
            )
            for a, b in pairwise(calls[-1])
        ]
        return torch.cat(found, dim=2).transpose(1, 2), None

    batch = demonstrations([(5, 4), (1, 1), (7, 12)])
    alone = gradient(llama, batch, runtime, packed=False)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", by_boundaries)
    monkeypatch.setattr(llama.config, "_attn_implementation_internal", "flash_attention_2")
    packed = gradient(llama, batch, runtime, packed=True)
    assert calls == [[0, 9, 11, 30]] * 2  # a layer each
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-5, atol=1e-5)
    assert (packed[1] - alone[1]).norm() <= 1e-5 * alone[1].norm()


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(hidden_size=16, n_layer=2, n_head=2, **IDS),
        OPTConfig(
            hidden_size=16, num_hidden_layers=2, ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=16, **IDS
        ),
    ],
    ids=["Bloom", "OPT"],
)
def test_a_model_that_reads_a_row_as_one_text_is_refused_before_it_trains(
    config: Any, stages: Any, runtime: Runtime, tmp_path: Path
) -> None:
    model, batch = random_model(config), demonstrations([(3, 4), (6, 5)] * 4)
    check_packing(model, 0, batch[:1], runtime)
    with pytest.raises(UserError, match=r"differ by .* nats a token .*ForCausalLM .* Set sft\.packing=null"):
        fine_tune(stages.job("sft", packing=64), model, 0, Examples.of(batch), tmp_path, lambda *_, **__: None)
    assert not list(tmp_path.rglob("step-*"))


def test_a_packed_training_is_the_training_of_rows_whatever_the_passes_hold(
    stages: Any, language: Any, runtime: Runtime, tmp_path: Path
) -> None:
    lengths = [(4 + i % 5, 2 + 3 * (i % 7)) for i in range(16)]
    examples, found = Examples.of(demonstrations(lengths)), []
    passes: list[int] = []
    for packing in (None, 1, 40):
        model, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
        model.base_model.register_forward_pre_hook(
            lambda _, __, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        passes.clear()
        options = {"epochs": 2, "batch_size": 8, "micro_batch_size": 8, "gradient_checkpointing": packing == 40}
        job, points = stages.job("sft", packing=packing, **options), []
        fine_tune(job, model, tokenizer.pad_token_id, examples, tmp_path / str(packing),
                  lambda step, metrics, total=None, points=points, **_: points.append(metrics))  # fmt: skip
        found.append(([p.detach().clone() for p in model.parameters()], points))
        if packing is not None:
            own = passes[5:]  # four demonstrations alone and together were compared before
            assert sum(own) == 2 * sum(examples.lengths), "each token is computed once an epoch: nothing is padding"
            assert max(own) <= max(packing, *examples.lengths)
    (plain, points), *packed = found
    for weights, own in packed:
        for a, b in zip(weights, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for mine, its in zip(own, points, strict=True):
            memory = {"sft/peak_memory_gb": its["sft/peak_memory_gb"]}
            assert mine | memory == pytest.approx(its, rel=1e-4)


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 100))
def test_packed_runs_hold_each_sequence_once_within_the_tokens_and_no_two_of_them_fit_into_one(
    lengths: list[int], tokens: int
) -> None:
    runs = packed_runs(lengths, tokens)
    assert sorted(i for run in runs for i in run) == list(range(len(lengths)))
    held = [sum(lengths[i] for i in run) for run in runs]
    assert all(total <= tokens or len(run) == 1 for run, total in zip(runs, held, strict=True))
    assert all(a + b > tokens for i, a in enumerate(held) for b in held[:i])


def test_packed_runs_put_the_longest_first_into_the_first_run_with_room() -> None:
    assert packed_runs([40, 60, 40, 60, 40, 60], 100) == [[1, 0], [3, 2], [5, 4]]
    assert packed_runs([7, 120, 90, 5], 100) == [[1], [2, 0], [3]]


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_pack_make_as_many_passes_as_each_other_over_all_rows(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [9, 30, 10, 11, 12]
    monkeypatch.setattr(ranks, "size", lambda: count)
    found = []
    for rank in range(count):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        found.append(micro_batches([0, 2, 3, 4, 1], 1, lengths, packing=32))
    assert len({len(runs) for runs in found}) == 1
    assert sorted(i for runs in found for run, counts in runs if counts for i in run) == [0, 1, 2, 3, 4]
    assert any(not counts for runs in found for _, counts in runs)
