"""Decoding by a captured step, which repeats kernels with their addresses, samples what the ordinary step samples."""

import copy
import math
import weakref
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
from components.models.cache import Graphs, can_be_captured
from components.models.chat.endings import set_endings
from components.models.config import AdapterConfig, GenerationConfig
from components.models.folders import frozen
from components.models.runtime import Runtime
from components.models.sampling import LocalEngine, Samples, _kept_graphs, sample, sampling_copy
from components.models.tokenizers import visible_text
from tests.components.models.test_architectures import TABLE

aten = torch.ops.aten
CAPTURES = cache.Captures
MODELS = {config.model_type: (config, shape) for config, shape in TABLE.values()}
"""Shapes by type, of which `CAPTURED_TYPES` are captured."""
CAP, WINDOW, ALIGNMENT = 40, 7, cache.CAPTURED_TOKENS
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


def draw(model: Any, language: Any, graphs: Graphs | None = None, seed: int = 4, **options: Any) -> Samples:
    generation = GenerationConfig(**{"max_new_tokens": CAP, "max_prompt_tokens": 9} | options)
    return sample(model, language.tokenizer, language.prompts, generation, seed, graphs=graphs)


def same(one: Samples, two: Samples) -> None:
    assert torch.equal(one.response_ids, two.response_ids) and torch.equal(one.response_mask, two.response_mask)
    assert torch.equal(one.ended, two.ended)
    torch.testing.assert_close(one.logprobs, two.logprobs, atol=1e-6, rtol=1e-6)
    assert one.stats is not None and two.stats is not None
    torch.testing.assert_close(one.stats.entropy, two.stats.entropy, atol=1e-6, rtol=2e-6)


def equal(one: Samples, two: Samples) -> bool:
    pairs = ((one.response_ids, two.response_ids), (one.logprobs, two.logprobs), (one.ended, two.ended))
    return all(torch.equal(*pair) for pair in pairs)


def test_every_type_that_is_captured_is_tested_and_masks_are_aligned() -> None:
    assert MODELS.keys() >= set(cache.CAPTURED_TYPES)
    assert ALIGNMENT % cache.ALIGNED["cuda"] == 0


@pytest.mark.parametrize(("name", "every"), [("llama", 1), *((name, 8) for name in cache.CAPTURED_TYPES)])
def test_tokens_and_log_probabilities_are_those_of_the_ordinary_step(
    name: str, every: int, language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over prompts of different lengths, rows that end at different times, several windows and numbers of rows; also by
    graphs that an earlier batch captured, and after the weights changed in place."""
    monkeypatch.setitem(sampling.LEAVE_EVERY, "cpu", every)
    model, kept = make(name, language), Graphs()
    assert can_be_captured(model)
    plain, captured = draw(model, language), draw(model, language, kept)
    same(plain, captured)
    lengths = sorted(plain.response_lengths)
    assert len({len(p) for p in language.prompts}) > 3 and len(set(lengths)) > 5 and lengths[-1] > 2 * WINDOW
    first, graphs_of = Recorded.captured, [key[:2] for key in kept.replays]
    assert first == len(graphs_of) and len({last for _, last in graphs_of}) == math.ceil(lengths[-1] / WINDOW)
    assert {12, 6} <= {rows for rows, _ in graphs_of} <= {12, 6, 3, 2}, "halves of the batch"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05
    changed = draw(model, language, kept, seed=5)
    same(draw(model, language, seed=5), changed)
    second = Recorded.captured
    assert equal(changed, draw(model, language, Graphs(), seed=5)), "new graphs give the same bytes"
    assert second - first < Recorded.captured - second


def test_a_captured_step_computes_with_the_adapter_of_its_model(language: Any) -> None:
    backbone = Backbone(make("llama", language))
    view, plain = backbone.add("policy", AdapterConfig(rank=2), seed=1), type(backbone.add("x", AdapterConfig(), 2))
    generator = torch.Generator().manual_seed(3)
    for weight in backbone.adapter_weights("policy").values():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.2
    assert can_be_captured(view)
    adapted, reference = draw(view, language, Graphs()), plain(backbone)
    same(draw(view, language), adapted)
    alone = draw(reference, language, Graphs())
    same(draw(reference, language), alone)
    assert not torch.equal(alone.response_ids, adapted.response_ids)


def test_a_response_that_ended_at_a_stop_string_and_stays_ends_at_its_first(
    language: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step drops no row until half have ended, so that a string may occur again."""
    model = make("llama", language, ending=0.0)
    monkeypatch.setattr(cache, "FEWEST_ROWS", 100)
    free = draw(model, language).response_ids.tolist()
    tokenizer = copy.deepcopy(language.tokenizer)
    texts = [visible_text(tokenizer, ids) for ids in free]
    string = max("etaoinsr", key=lambda letter: sum(text.count(letter) > 1 for text in texts))
    set_endings(tokenizer, strings=(string,))
    stopping = type(language)(language.model, tokenizer, language.prompts)
    plain, captured = draw(model, stopping), draw(model, stopping, Graphs())
    same(plain, captured)
    again = [texts[i].count(string) > 1 and bool(ended) for i, ended in enumerate(captured.ended)]
    assert sum(again) > 3 and len(set(captured.response_lengths)) > 1


def test_values_of_a_shared_trunk_and_cooler_sampling_by_the_same_graphs(language: Any) -> None:
    model, kept, head = make("llama", language), Graphs(), torch.nn.Linear(16, 1).requires_grad_(False)
    draw(model, language, kept)
    cooler, found = GenerationConfig(max_new_tokens=CAP, temperature=0.7), []
    for used in (None, kept):
        drawn = sample(
            model, language.tokenizer, language.prompts, cooler, 5, graphs=used,
            value_head=lambda hidden: head(hidden).squeeze(-1),
        )  # fmt: skip
        found.append(drawn)
    same(*found)
    values = [samples.stats.values for samples in found if samples.stats is not None]
    torch.testing.assert_close(*values, atol=1e-6, rtol=0)
    assert values[0] is not None and values[0].any()


def test_a_bfloat16_copy_is_refreshed_and_its_graphs_are_used_again(language: Any, runtime: Runtime) -> None:
    backbone = Backbone(make("llama", language))
    rounded = runtime.model_copy(update={"dtype": "bfloat16"})
    generation = GenerationConfig(max_new_tokens=CAP)
    for model in (make("llama", language), backbone.add("policy", AdapterConfig(rank=2), seed=1)):
        kept, captured = Graphs(), list[int]()
        for step in range(3):
            drawn = []
            for used in (None, kept, Graphs()):
                Recorded.captured = 0
                with sampling_copy(model, rounded, used) as sampler:
                    engine = LocalEngine(sampler, language.tokenizer, rounded, None, used)
                    drawn.append(engine.sample(language.prompts, generation, 4))
                captured.append(Recorded.captured)
            torch.testing.assert_close(drawn[0].logprobs[:, 0], drawn[1].logprobs[:, 0], atol=0, rtol=0)
            assert equal(drawn[1], drawn[2]), f"graphs that were kept give other bytes in step {step}"
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05
        assert captured[1] == captured[2] and captured[4] + captured[7] < captured[1]


def test_graphs_are_kept_for_the_model_sampled_last_on_a_gpu(language: Any, runtime: Runtime) -> None:
    """A record of a version without the option is read with it on, also one of a CPU."""
    assert not _kept_graphs(language.model, runtime.model_copy(update={"cuda_graphs": True}))
    on_gpu = runtime.model_copy(update={"device": "cuda", "cuda_graphs": True})
    assert not _kept_graphs(language.model, on_gpu.model_copy(update={"cuda_graphs": False}))
    one, two = make("llama", language), make("llama", language)
    first = _kept_graphs(one, on_gpu)
    assert first is not None and _kept_graphs(one, on_gpu) is first
    weak = weakref.ref(first)
    del first
    assert weak() is not None
    second = _kept_graphs(two, on_gpu)
    assert weak() is None and second is not None
    weak = weakref.ref(second)
    del second, two
    assert weak() is None


def test_models_whose_step_the_host_steers_are_not_captured(language: Any) -> None:
    for changed in ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}):
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=9, **MODELS["llama"][1], **changed))
        assert can_be_captured(model) == (not changed)
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
