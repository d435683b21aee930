"""Decoding by a captured step, which repeats kernels with their addresses, samples what the ordinary step samples."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig

from components.base.errors import UserError
from components.models import cache, sampling
from components.models.adapters import Backbone
from components.models.batching import pad
from components.models.cache import GraphedContext, PreallocatedContext, can_be_captured, open_context
from components.models.chat.endings import set_endings
from components.models.config import AdapterConfig, GenerationConfig
from components.models.folders import frozen
from components.models.runtime import Runtime
from components.models.sampling import Samples, rollout_engine, sample
from components.models.tokenizers import visible_text
from tests.components.models.test_architectures import TABLE

aten = torch.ops.aten
CAPTURES = cache.Captures
MODELS = {config.model_type: (config, shape) for config, shape in TABLE.values()}
"""Shapes by type, of which `CAPTURED_TYPES` are captured."""
CAP, WINDOW = 40, 7
HOST = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default)
"""Operations whose result the host reads: CUDA refuses them in a capture."""


class Recorded(TorchDispatchMode):
    """A CUDA graph on a CPU: every operation with the tensors that it was given, not the Python that called it."""

    captured = 0

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        Recorded.captured += 1
        with self:
            step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in HOST, f"the host waits: {func}"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        made: dict[int, Tensor] = {}

        def now(x: Any) -> Any:
            return made.get(id(x), x)

        for func, args, kwargs, out in self.calls:
            new = func(*tree_map(now, args), **tree_map(now, kwargs))
            made.update((id(old), each) for old, each in zip(tree_leaves(out), tree_leaves(new), strict=True))


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorded.captured = 0
    monkeypatch.setattr(cache, "Captures", lambda: lambda step: Recorded(step).replay)
    monkeypatch.setattr(cache, "CAPTURED_TOKENS", WINDOW)
    monkeypatch.setattr(cache, "FEWEST_ROWS", 2)
    monkeypatch.setattr(cache, "FEWEST_TOKENS", 5)


def make(name: str, language: Any, ending: float = 2.5) -> Any:
    """A random model of an architecture that ends responses at different lengths."""
    config, shape = MODELS[name]
    torch.manual_seed(0)
    ids = {"pad_token_id": language.tokenizer.pad_token_id, "eos_token_id": language.tokenizer.eos_token_id}
    model = AutoModelForCausalLM.from_config(config(vocab_size=len(language.tokenizer), **ids, **shape)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    head = torch.nn.Linear(16, len(language.tokenizer))
    head.weight.data = model.get_output_embeddings().weight.detach().clone()
    head.bias.data.zero_()[language.tokenizer.eos_token_id] = ending
    model.set_output_embeddings(head)
    return frozen(model)


def draw(model: Any, language: Any, graphs: bool, **options: Any) -> Samples:
    generation = GenerationConfig(**{"max_new_tokens": CAP} | options)
    return sample(model, language.tokenizer, language.prompts, generation, 4, graphs=graphs)


def same(one: Samples, two: Samples) -> None:
    assert torch.equal(one.response_ids, two.response_ids) and torch.equal(one.response_mask, two.response_mask)
    assert torch.equal(one.ended, two.ended)
    torch.testing.assert_close(one.logprobs, two.logprobs, atol=1e-6, rtol=1e-6)
    assert one.stats is not None and two.stats is not None
    torch.testing.assert_close(one.stats.entropy, two.stats.entropy, atol=1e-6, rtol=2e-6)


def test_every_type_that_is_captured_is_tested_here() -> None:
    assert MODELS.keys() >= set(cache.CAPTURED_TYPES)


@pytest.mark.parametrize(("name", "every"), [("llama", 1), *((name, 8) for name in cache.CAPTURED_TYPES)])
def test_tokens_and_log_probabilities_are_those_of_the_ordinary_step(
    name: str, every: int, language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over prompts of different lengths, rows that end at different times, several windows and numbers of rows."""
    monkeypatch.setitem(sampling.LEAVE_EVERY, "cpu", every)
    model = make(name, language)
    assert can_be_captured(model)
    plain = draw(model, language, graphs=False)
    assert Recorded.captured == 0
    captured = draw(model, language, graphs=True)
    same(plain, captured)
    lengths = sorted(plain.response_lengths)
    assert len({len(p) for p in language.prompts}) > 3 and len(set(lengths)) > 5 and lengths[-1] > 2 * WINDOW
    assert math.ceil((lengths[-1] - 1) / WINDOW) < Recorded.captured <= math.ceil(CAP / WINDOW) + 3


def test_with_the_masks_alignment_of_a_gpu_too(language: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ALIGNED", {"cpu": cache.ALIGNED["cuda"]})
    attend, masks = torch.nn.functional.scaled_dot_product_attention, list[Tensor]()

    def spied(*given: Any, **options: Any) -> Tensor:
        masks.append(options["attn_mask"])
        return attend(*given, **options)

    model = make("llama", language)
    plain = draw(model, language, graphs=False)
    step = GraphedContext._step

    def watched(context: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
            step(context)

    monkeypatch.setattr(GraphedContext, "_step", watched)
    same(plain, draw(model, language, graphs=True))
    assert len(masks) > 6
    assert all(x.storage_offset() == 0 and x.stride(0) % 8 == 0 and x.shape[-1] % 8 == 0 for x in masks)


def test_a_captured_step_computes_with_the_adapter_of_its_model(language: Any) -> None:
    backbone = Backbone(make("llama", language))
    view, plain = backbone.add("policy", AdapterConfig(rank=2), seed=1), type(backbone.add("x", AdapterConfig(), 2))
    generator = torch.Generator().manual_seed(3)
    for weight in backbone.adapter_weights("policy").values():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.2
    assert can_be_captured(view)
    adapted = draw(view, language, graphs=True)
    same(draw(view, language, graphs=False), adapted)
    reference = plain(backbone)
    same(draw(reference, language, graphs=False), draw(reference, language, graphs=True))
    assert not torch.equal(draw(reference, language, graphs=True).response_ids, adapted.response_ids)


def test_a_response_that_ended_at_a_stop_string_and_stays_in_the_batch_ends_at_its_first(
    language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step drops no row until half have ended, so that a string may occur again."""
    model = make("llama", language, ending=0.0)
    monkeypatch.setattr(cache, "FEWEST_ROWS", 100)
    free = draw(model, language, graphs=False).response_ids.tolist()
    tokenizer = copy.deepcopy(language.tokenizer)
    texts = [visible_text(tokenizer, ids) for ids in free]
    string = max("etaoinsr", key=lambda letter: sum(text.count(letter) > 1 for text in texts))
    set_endings(tokenizer, strings=(string,))
    stopping = type(language)(language.model, tokenizer, language.prompts)
    plain, captured = (draw(model, stopping, graphs=graphs) for graphs in (False, True))
    same(plain, captured)
    again = [texts[i].count(string) > 1 and bool(ended) for i, ended in enumerate(captured.ended)]
    assert sum(again) > 3 and len(set(captured.response_lengths)) > 1


def test_values_of_a_shared_trunk_and_cooler_sampling_too(language: Any) -> None:
    model = make("llama", language)
    head = torch.nn.Linear(16, 1).requires_grad_(False)
    cooler, found = GenerationConfig(max_new_tokens=CAP, temperature=0.7), []
    for graphs in (False, True):
        drawn = sample(
            model, language.tokenizer, language.prompts, cooler, 5, graphs=graphs,
            value_head=lambda hidden: head(hidden).squeeze(-1),
        )  # fmt: skip
        found.append(drawn)
    same(*found)
    assert Recorded.captured > 2
    values = [samples.stats.values for samples in found if samples.stats is not None]
    torch.testing.assert_close(*values, atol=1e-6, rtol=0)
    assert values[0] is not None and values[0].any()


def test_a_cpu_decodes_without_graphs_whatever_a_runtime_says_and_a_gpu_as_it_says(
    language: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of a version without the option is read with it on, also one of a CPU."""
    said: list[bool] = []

    def sampled(*given: Any) -> Any:
        said.append(given[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "sample", sampled)
    for device, graphs in (("cpu", True), ("cuda", True), ("cuda", False)):
        here = runtime.model_copy(update={"device": device, "cuda_graphs": graphs})
        with pytest.raises(KeyboardInterrupt), rollout_engine(language.model, language.tokenizer, here) as engine:
            engine.sample(language.prompts, GenerationConfig(), 0)
    assert said == [False, True, False]


@torch.no_grad()
def test_a_captured_step_keeps_its_addresses_and_nothing_is_allocated_per_token(language: Any) -> None:
    model = make("llama", language)
    ids, mask = pad(sorted(language.prompts, key=len), language.tokenizer.pad_token_id, side="left")
    context = open_context(model, ids, mask.sum(1).tolist(), CAP, graphs=True)
    assert isinstance(context, GraphedContext)
    context.read_prompts()

    def addresses() -> list[int]:
        used = (context.tokens, context.hidden, context.bias, context.positions, *context.stacks)
        return [x.data_ptr() for x in used]

    tokens = torch.full((len(ids),), 5)
    context.append(tokens)
    before, replay = addresses(), context.replay
    for _ in range(WINDOW - 1):
        context.append(tokens)
    assert addresses() == before and context.replay is replay and Recorded.captured == 1
    context.append(tokens)
    assert addresses() == before and context.replay is not replay and Recorded.captured == 2


@torch.no_grad()
def test_rows_are_dropped_when_half_are_left_and_each_keeps_its_own_states(
    language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama", language)
    prompts = sorted(language.prompts, key=len)
    ids, mask = pad(prompts, language.tokenizer.pad_token_id, side="left")
    lengths = mask.sum(1).tolist()
    ours, plain = (open_context(model, ids, lengths, CAP, graphs=graphs) for graphs in (True, False))
    torch.testing.assert_close(ours.read_prompts(), plain.read_prompts(), atol=1e-5, rtol=0)
    assert [ours.shrinks(count) for count in (11, 7, 6, 3, 1)] == [False, False, True, True, True]
    with monkeypatch.context() as patch:
        patch.setattr(cache, "FEWEST_TOKENS", CAP + 1)
        assert not ours.shrinks(1), "a capture would not pay"
    assert plain.shrinks(11)
    rows = torch.arange(len(prompts))
    for t, kept in enumerate((None, [0, 11, 2, 10, 4], None, [0, 4, 2], None, [1], None)):
        tokens = 2 + (rows * 7 + t) % 50
        torch.testing.assert_close(ours.append(tokens), plain.append(tokens), atol=1e-5, rtol=0)
        if kept:
            rows = rows[kept]
            ours.keep(kept)
            plain.keep(kept)
    assert isinstance(ours, GraphedContext) and ours.window.rows.stop == 2


def test_models_whose_step_the_host_steers_are_not_captured(language: Any) -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    for changed in ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=9, **MODELS["llama"][1], **changed))
        assert can_be_captured(model) == (not changed)
        assert isinstance(open_context(model, ids, [3, 3], 4, graphs=True), GraphedContext) == (not changed)
        assert type(open_context(model, ids, [3, 3], 4)) is PreallocatedContext
    falcon = FalconConfig(vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    assert not can_be_captured(AutoModelForCausalLM.from_config(falcon))


class FakeGraph:
    """`torch.cuda.CUDAGraph` that notes what it is told."""

    told: ClassVar[list[str]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.told.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.told.append("end")

    def replay(self) -> None:
        self.told.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's graphs are told, in place of a GPU with little free memory."""
    told = FakeGraph.told = []
    fakes: dict[str, Any] = {
        "CUDAGraph": FakeGraph, "MemPool": lambda: SimpleNamespace(id=(0, 7)), "Stream": lambda: None,
        "stream": lambda _: nullcontext(), "current_blas_handle": lambda: told.append("workspace"),
        "mem_get_info": lambda: (10, 100), "empty_cache": lambda: told.append("empty"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    cache._capture_stream.cache_clear()
    return told


def test_a_capture_frees_unused_memory_only_if_little_is_left_and_replays(
    cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture fails if the memory that it needs is the allocator's, unused; freeing it always would slow training."""
    captures = CAPTURES()
    captures(lambda: cuda.append("step"))()
    one = ["workspace", "begin in (0, 7), thread_local", "step", "end"]
    assert cuda == ["empty", *one, "replay"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20, 100))
    captures(lambda: cuda.append("step"))
    assert cuda[6:] == one, "the second capture is in the same pool, and frees nothing"
    cache._capture_stream.cache_clear()


def test_a_step_that_cannot_be_captured_names_the_option_that_helps(cuda: list[str]) -> None:
    def waiting() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    with pytest.raises(
        UserError, match=r"\(operation not permitted when stream is capturing\)\. Set runtime.cuda_graphs"
    ):
        CAPTURES()(waiting)
    assert cuda[-1] == "end", "the stream captures no longer"

    def full() -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CAPTURES()(full)
    cache._capture_stream.cache_clear()
