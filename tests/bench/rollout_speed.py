"""Tokens a second of the rollout engine against `model.generate`, alternating in one process.

    OMP_WAIT_POLICY=PASSIVE python tests/bench/rollout_speed.py --sizes 1M 7M 30M 135M --rounds 5 --threads 2

64 prompts of 16 to 64 tokens. Both sides are forced to the same lengths: 8 to 64 tokens (`ragged`), or 64 for every row
(`full`). Weights are random: speed doesn't depend on them. `--against FILE` also times the `sample` of another file.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from components.batching import pad
from components.generation import GenerationConfig
from components.models import frozen
from components.ppo.rollout import rollout_engine
from components.runtime import Runtime

BATCH, SHORTEST_PROMPT, LONGEST_PROMPT, SHORTEST, CAP = 64, 16, 64, 8, 64
EOS, PAD = 0, 1
TOKENIZER = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD)
SHAPES = {  # vocabulary, width, inner width, layers, heads, key-value heads
    "1M": (600, 128, 341, 5, 4, 4),
    "7M": (4096, 256, 682, 8, 8, 8),
    "30M": (8192, 512, 1365, 8, 8, 8),
    "135M": (49152, 576, 1536, 30, 9, 3),  # SmolLM2-135M's
}


def build(size: str) -> Any:
    """A Llama of the size's shape with random weights."""
    vocabulary, width, inner, layers, heads, kv_heads = SHAPES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    return frozen(LlamaForCausalLM(config))


class ForcedEnd(LogitsProcessor):
    """EOS at each row's last token and nowhere before it."""

    def __init__(self, lengths: torch.Tensor, prompt_width: int) -> None:
        self.lengths, self.prompt_width = lengths, prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids.shape[1] - self.prompt_width + 1 == self.lengths
        scores[:, EOS], scores[:, PAD] = torch.where(last, 1e9, -1e9), -1e9
        return scores


def by_generate(model: Any, prompts: list[list[int]], lengths: torch.Tensor) -> int:
    """Tokens that count of `model.generate`."""
    ids, mask = pad(prompts, PAD, side="left")
    out = model.generate(
        ids, attention_mask=mask.long(), do_sample=True, top_k=0, top_p=1.0, temperature=1.0, use_cache=True,
        max_new_tokens=CAP, eos_token_id=EOS, pad_token_id=PAD,
        logits_processor=LogitsProcessorList([ForcedEnd(lengths, ids.shape[1])]),
    )  # fmt: skip
    return int((out[:, ids.shape[1] :] != PAD).sum())


def engine_sample(model: Any, tokenizer: Any, *given: Any) -> Any:
    """As an update samples: what the engine does once a batch is timed too."""
    with rollout_engine(model, tokenizer, Runtime(device="cpu", dtype="float32")) as engine:
        return engine.sample(*given)


def by_sampler(sampler: Callable[..., Any], model: Any, prompts: list[list[int]], lengths: torch.Tensor) -> int:
    """Tokens that count of `sampler`. EOS is token 0: inverting the distribution at 0 draws it, and not above 0.1."""
    uniforms = torch.rand(BATCH, CAP) * 0.9 + 0.1
    uniforms.scatter_(1, lengths.unsqueeze(1) - 1, 0.0)
    with mock.patch.object(torch, "rand", lambda *_, **__: uniforms):
        samples = sampler(model, TOKENIZER, prompts, GenerationConfig(max_new_tokens=CAP), torch.Generator())
    return int(samples.response_mask.sum())


def sampler_of(path: str) -> Callable[..., Any]:
    """The `sample` of another rollout.py."""
    spec = importlib.util.spec_from_file_location("another_rollout", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.sample


def main() -> None:
    """Print a line per size and kind of lengths: median tokens/s, and medians of the rounds' ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", default=["ragged", "full"], choices=["ragged", "full"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: for a machine with other work")
    parser.add_argument("--against", metavar="FILE", help="another rollout.py, timed as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    random = torch.Generator().manual_seed(1)
    widths = torch.randint(SHORTEST_PROMPT, LONGEST_PROMPT + 1, (BATCH,), generator=random).tolist()
    ragged = torch.randint(SHORTEST, CAP + 1, (BATCH,), generator=random)
    sides: dict[str, Callable[..., int]] = {
        "generate": by_generate,
        "engine": lambda *given: by_sampler(engine_sample, *given),
    }
    if options.against:
        another = sampler_of(options.against)
        sides["against"] = lambda *given: by_sampler(another, *given)
    for size in options.sizes:
        model = build(size)
        prompts = [torch.randint(2, SHAPES[size][0], (w,), generator=random).tolist() for w in widths]
        for kind in options.lengths:
            lengths = ragged if kind == "ragged" else torch.full_like(ragged, CAP)
            speeds: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(options.rounds + 1):
                for name, side in sides.items():
                    began = clock()
                    tokens = side(model, prompts, lengths)
                    if turn:  # the first round warms up
                        speeds[name].append(tokens / (clock() - began))
                    if tokens != int(lengths.sum()):
                        raise AssertionError(f"{name} made {tokens} tokens of {int(lengths.sum())}")
            shown = [f"{name} {statistics.median(s):.0f}/s" for name, s in speeds.items()]
            for name in list(sides)[:1] + list(sides)[2:]:
                pairs = zip(speeds["engine"], speeds[name], strict=True)
                shown.append(f"engine/{name} {statistics.median(a / b for a, b in pairs):.2f}")
            print(f"{size} {kind}: " + ", ".join(shown), flush=True)


if __name__ == "__main__":
    main()
