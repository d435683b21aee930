"""The throughput benchmark's table of lengths, its forced ends, its counts of bytes and operations, its ratios."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from components.models.config import GenerationConfig, ScratchModel
from components.models.folders import build_causal_lm
from components.models.matrices.kernels import by_onednn
from components.models.sampling import Samples, sample
from tests.bench import throughput
from tests.bench.throughput import ratio, table
from tests.bench.workload import (
    CAP,
    PRODUCTS,
    SIZES,
    ForcedLengths,
    Lengths,
    Workload,
    decoding_bytes,
    numbers_tokenizer,
    scalar_model,
    training_flops,
    trunk_parameters,
)  # fmt: skip

TINY = ScratchModel(hidden_size=32, layers=2, heads=2, vocabulary=300)


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """A small model and its tokenizer."""
    tokenizer = numbers_tokenizer(TINY.vocabulary)
    tokenizer.padding_side = "left"
    return build_causal_lm(TINY, tokenizer, max_positions=2 * CAP, seed=0), tokenizer


def sampled(tiny: tuple[Any, Any], lengths: Lengths, prompts: list[list[int]], seed: int = 3) -> Samples:
    """Responses of the first update, from our sampler."""
    with ForcedLengths(lengths.ends[0], tiny[1]).in_our_sampler(seed):
        return sample(*tiny, prompts, GenerationConfig(max_new_tokens=CAP), seed)


def test_lengths_are_in_their_bounds_and_the_same_for_both_sides() -> None:
    work = Workload("7m", "ragged", "float32", updates=9)
    lengths, again = work.lengths(), work.lengths()
    assert lengths.prompts.shape == (32,) and lengths.ends.shape == (10, 32)
    assert 16 <= lengths.prompts.min() < lengths.prompts.max() <= 64
    assert lengths.ends.min() == 8 and lengths.ends.max() == 64
    assert lengths.ends[0].tolist() != lengths.ends[1].tolist()
    assert torch.equal(lengths.ends, again.ends) and torch.equal(lengths.prompts, again.prompts)


def test_the_first_update_counts_only_where_it_is_the_only_one() -> None:
    assert [[*range(n + 1)][Workload("7m", "full", "float32", n).measured] for n in (0, 1, 2)] == [[0], [1], [1, 2]]


def test_in_the_full_variant_nothing_is_short_and_nothing_ends() -> None:
    lengths = Workload("135m", "full", "float32", updates=1).lengths()
    assert (lengths.prompts == CAP).all() and (lengths.responses == CAP).all() and (lengths.ends > CAP).all()
    assert lengths.ends.shape == (2, 8)


@pytest.mark.parametrize("size", [name for name, shape in SIZES.items() if shape])
def test_sizes_are_about_what_they_are_called(size: str) -> None:
    shape = SIZES[size]
    assert shape
    with torch.device("meta"):
        model = build_causal_lm(shape, numbers_tokenizer(shape.vocabulary), 2 * CAP, seed=0)
    unit = {"m": 1e6, "b": 1e9}[size[-1]]
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(float(size[:-1]) * unit, rel=0.08)


@pytest.mark.parametrize("variant", ["ragged", "full"])
def test_responses_end_where_the_table_says(tiny: tuple[Any, Any], variant: Any) -> None:
    work = Workload("135m", variant, "float32", updates=0)
    lengths = work.lengths()
    prompts = work.prompts(tiny[1], lengths.prompts)
    inputs = tiny[1].pad({"input_ids": prompts}, return_tensors="pt")
    torch.manual_seed(0)
    # Pad and EOS are likely, so that some must be exchanged.
    hook = tiny[0].lm_head.register_forward_hook(lambda _, __, logits: logits + 4 * (torch.arange(300) < 2))
    ours = sampled(tiny, lengths, prompts)
    with ForcedLengths(lengths.ends[0], tiny[1]).in_generate():
        theirs = tiny[0].generate(**inputs, max_new_tokens=CAP, do_sample=True, top_k=0)
    hook.remove()
    theirs = theirs[:, inputs["input_ids"].shape[1] :]
    for ids in (ours.response_ids, theirs):
        assert (ids != tiny[1].pad_token_id).sum(1).tolist() == lengths.responses[0].tolist()
        ends = [(row == tiny[1].eos_token_id).nonzero().flatten().tolist() for row in ids]
        assert ends == [[n - 1] if n <= CAP else [] for n in lengths.ends[0].tolist()]
        assert len(ids.unique()) > 50, "it is sampled"
    assert ours.ended.tolist() == [variant == "ragged"] * work.batch


@pytest.mark.whole
def test_tokens_that_need_no_exchange_are_the_sampler_s_own(tiny: tuple[Any, Any]) -> None:
    work = Workload("135m", "full", "float32", updates=0)
    prompts = work.prompts(tiny[1], torch.full((8,), 16))
    forced = sampled(tiny, work.lengths(), prompts)
    free = sample(*tiny, prompts, GenerationConfig(max_new_tokens=CAP), 3)
    untouched = free.response_mask.sum(1).min() - 1
    assert untouched > 0 and torch.equal(forced.response_ids[:, :untouched], free.response_ids[:, :untouched])


def test_a_scalar_model_is_the_policy_s_trunk_and_shares_nothing(tiny: tuple[Any, Any]) -> None:
    made = scalar_model(tiny[0], seed=1)
    ids = torch.tensor([[5, 6, 7]])
    found = made.model(ids).last_hidden_state
    assert torch.equal(found, tiny[0].model(ids).last_hidden_state)
    assert made(ids).logits.shape == (1, 1)
    assert not {p.data_ptr() for p in made.parameters()} & {p.data_ptr() for p in tiny[0].parameters()}


def test_bytes_read_in_decoding_are_those_of_the_weights_and_the_cache(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = tiny[0], []
    # A tied output layer reads the whole embedding; looking tokens up reads next to nothing.
    forward, weights = model.model.forward, sum(p.nbytes for p in model.parameters())

    def counted(**inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] == 1:  # the prompts are read in parts, and count as one reading of the weights
            layers = inputs["past_key_values"].layers
            seen = [x[i.window.rows, :, i.window.start : i.window.end] for i in layers for x in (i.keys, i.values)]
            read.append(weights + sum(x.nbytes for x in seen))
        return forward(**inputs)

    monkeypatch.setattr(model.model, "forward", counted)
    ends = torch.tensor([[9, 30, 12]])
    prompts = [[5, 6, 7, 8, 9]] * 3
    sampled(tiny, Lengths(torch.tensor([5, 5, 5]), ends), prompts)
    assert len(read) == 29
    assert decoding_bytes(model.config, trunk_parameters(model), [5] * 3, ends[0].tolist(), width=4) == weights + sum(
        read
    )


def test_operations_of_training_are_those_that_torch_counts(tiny: tuple[Any, Any]) -> None:
    model, prompt, response = tiny[0], 20, 12
    rows, tokens = 2, prompt + response
    model.set_attn_implementation("eager")  # torch then counts all of attention's products, the masked ones too
    ids = torch.randint(2, 300, (rows, tokens))
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(input_ids=ids).last_hidden_state[:, prompt - 1 : -1]
        model.get_output_embeddings()(hidden).sum().backward()
    model.zero_grad()
    masked = 6 * 2 * 32 * tokens**2 * rows
    norms = 6 * 32 * 5 * rows * tokens
    once = training_flops(model.config, trunk_parameters(model), [prompt] * rows, [response] * rows, 1, 1)
    assert once == counter.get_total_flops() - masked + norms
    thrice = training_flops(model.config, trunk_parameters(model), [prompt] * rows, [response] * rows, 3, 2)
    assert thrice == 3 * (2 * once - 6 * 300 * 32 * response * rows)


@pytest.mark.parametrize("causal", [True, False])
def test_operations_of_the_cpus_own_products_and_attention_are_counted_as_torch_counts_the_others(
    tiny: tuple[Any, Any], causal: bool
) -> None:
    def count(linear: torch.nn.Linear, attention: Any) -> int:
        x = torch.ones(2, 5, 32, requires_grad=True)
        with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter:
            heads = linear(x).unflatten(2, (4, 8)).transpose(1, 2)
            attention(heads, heads, heads, is_causal=causal).sum().backward()
        return counter.get_total_flops()

    def by_bmm(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    plain, ours = torch.nn.Linear(32, 32), by_onednn(torch.nn.Linear(32, 32))
    forward = 2 * 2 * 5 * 32 * 32
    pairs = 2 * 4 * 5 * 5 * 8 * 2
    # Attention's gradient has four products of its own, and its kernel computes the scores once more.
    assert count(ours, functional.scaled_dot_product_attention) == 3 * forward + (2 + 5) * pairs
    assert count(plain, by_bmm) == 3 * forward + (2 + 4) * pairs


def test_a_share_of_the_bound_is_the_measured_ratio_over_that_of_the_operations() -> None:
    phases = ("rollout", "scoring", "training", "other")

    def counted(*gflop: float) -> dict[str, float]:
        by_phase = dict(zip(phases, gflop, strict=True)) | {"update": sum(gflop)}
        return {f"{phase} operations": value * 1e9 for phase, value in by_phase.items()}

    def run(update: float) -> dict[str, Any]:
        return {"samples_per_second": 32 / update, "seconds": {"update cpu": update * 1.5}}

    operations = {"trl": counted(2, 4, 34, 0), "separate": counted(1, 3, 16, 0), "shared": counted(1, 2, 7, 0)}
    measured = {
        ("trl", "float32"): [run(8.0), run(4.0), run(6.0)],
        ("separate", "float32"): [run(4.0), run(4.0), run(2.0)],
        ("shared", "float32"): [run(2.0)] * 3,
    }
    lines = throughput.bounds(operations, measured, "float32").splitlines()
    assert lines[4] == "| training, GFLOP | 34.0 | 16.0 | 2.12 | 7.0 | 4.86 |"
    assert lines[5] == "| other, GFLOP | 0.0 | 0.0 |  | 0.0 |  |"
    assert lines[6] == "| update, GFLOP | 40.0 | 20.0 | 2.00 | 10.0 | 4.00 |"
    assert lines[7:] == ["| share of the bound |  |  | 100% |  | 75% |", "| by processor time |  |  | 100% |  | 75% |"]


def test_ratios_are_medians_of_pairs_and_say_whether_they_meet_their_bars() -> None:
    def run(update: float, peak: float) -> dict[str, Any]:
        seconds = {"rollout": update / 4, "scoring": update / 4, "training": update / 2, "other": 0.0, "update": update}
        return {
            "seconds": seconds | {f"{name} cpu": value for name, value in seconds.items()},
            "samples_per_second": 32 / update,
            "peak": peak,
        }

    assert ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0
    measured = {
        ("trl", "float32"): [run(8.0, 2e9), run(4.0, 2e9), run(6.0, 2e9)],
        ("separate", "float32"): [run(4.0, 1.5e9)] * 3,
        ("shared", "float32"): [run(2.0, 1e9)] * 3,
    }
    lines = table(measured, "7m", "ragged", "float32").splitlines()
    assert lines[2] == "| rollout, s | 1.50 | 1.00 | 1.50 | 0.50 | 3.00 |"
    assert lines[-2] == "| samples/s | 5.33 | 8.00 | 1.50 (≥ 1.5 met) | 16.00 | 3.00 (≥ 2.8 met) |"
    assert lines[-1] == "| memory, GB | 2.00 | 1.50 | 0.75 (≤ 0.7 MISSED) | 1.00 | 0.50 (≤ 0.6 met) |"
    assert table(measured, "1m", "ragged", "float32").splitlines()[-1].endswith("| 0.75 | 1.00 | 0.50 |")


def test_a_run_that_was_cut_short_goes_on_where_its_journal_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measured(script: str, given: dict[str, Any], *_: Any) -> dict[str, int]:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(given["side"])
        return {"order": len(asked)}

    monkeypatch.setitem(sys.modules, "process", SimpleNamespace(measured=measured))
    monkeypatch.setattr(sys, "argv", ["throughput.py", "--pairs", "2", "--out", str(tmp_path / "journal.jsonl")])
    options = throughput.arguments()
    with pytest.raises(KeyboardInterrupt):
        throughput.alternate(options, "7m", "ragged")
    assert asked == ["trl", "separate", "shared", "shared"]
    asked.clear()
    found = throughput.alternate(options, "7m", "ragged")
    assert asked == ["separate", "trl"]
    assert found["shared", "float32"] == [{"order": 3}, {"order": 4}]
    with pytest.raises(KeyboardInterrupt):
        throughput.alternate(options, "7m", "full")
    assert asked == ["separate", "trl", "trl", "separate"]  # another variant is another measurement
