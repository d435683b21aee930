"""Self-checks of supervised training: its texts, its passes and gradients, and the losses that it reports."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from components.data.support_desk.task import task_name
from components.distributed.ranks import is_first
from components.gates.self_checks import SelfChecks
from components.models.chat.endings import before_stop
from components.models.chat.templates import FIXED
from components.models.config import GenerationConfig
from components.models.runtime import Runtime, autocast

ROWS, BATCHES, MANY, FEW, MOST, LEARNED = 8, 10, 100_000, 200, 256, 0.055
"""Most examples that are computed again; first batches of two passes, of which fewer may be alike by chance; most rows
whose prompts are compared; fewest and most losses under other prompts (on the demo they rise by 6.6 errors), and the
largest perplexity relative to a unigram model's (on the demo 0.046) with which a model certainly reads prompts."""


def check_encoding(
    name: str, tokenizer: Any, rows: Sequence[Any], examples: Sequence[Any], limits: GenerationConfig, out: Path
) -> SelfChecks:
    """Return, and write to `out`, whether `examples` (prompt and response, or pairs of both) begin with `rows`: prompt
    in the tokenizer's own template, response, EOS. Rows beyond the limits are left out, as they may be cut."""
    checks, count, compared, wrong = SelfChecks(), min(ROWS, len(examples)), 0, list[str]()
    encoded = [ids for example in examples[:count] for ids in (example, *example[:2])]
    texts = [(row["prompt"], row[k]) for row in rows[:count] for k in ("response", "chosen", "rejected") if row.get(k)]
    for prompt, text in texts:
        rendered = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True, **FIXED)
        before, after = tokenizer([rendered, before_stop(tokenizer, text)], add_special_tokens=False)["input_ids"]
        after = [*after, tokenizer.eos_token_id]
        fits = len(before) <= limits.max_prompt_tokens and len(after) <= limits.max_new_tokens
        compared += fits
        if fits and (before, after) not in encoded and before + after not in encoded:
            wrong.append(f", such as {tokenizer.decode(before + after)!r}")
    checks.skip(name, "the first texts exceed generation.max_prompt_tokens or generation.max_new_tokens")
    if compared:
        numbers = f"{len(wrong)} of {compared} first texts are not encoded from the template's beginning to EOS"
        checks.judge(name, not wrong, "".join([numbers, *wrong[:1]]))
    write(checks, out)
    return checks


def write(checks: SelfChecks, out: Path) -> None:
    """Write the results to `out` on the first rank."""
    if is_first():
        checks.write(out)


def check_heldout(checks: SelfChecks, train: Sequence[Any], heldout: Sequence[Any]) -> None:
    """Judge that no row of `train` has a prompt of `heldout`."""
    prompts = {str(row["prompt"]) for row in heldout[:MANY]}
    both = sum(str(row["prompt"]) in prompts for row in train[:MANY])
    numbers = f"{both} of {len(train)} training demonstrations have a prompt of a held-out one"
    checks.judge("sft.heldout", not both, numbers)


def check_passes(
    checks: SelfChecks, taken: list[Sequence[int]], batch: Sequence[int], number: int, each_pass: int, count: int
) -> None:
    """Add the `batch` of step `number` (from 1) to those `taken` before, and judge the first pass over `count` examples
    and the beginning of the second. A training that was resumed is not judged."""
    if len(taken) < number - 1 or number > each_pass + BATCHES:
        return
    taken.append(array("q", batch))
    if number == each_pass:
        times = np.bincount(np.concatenate(taken), minlength=count)
        numbers = f"of {count} examples {(times == 0).sum()} were never in a batch of the first pass"
        checks.judge("training.passes", bool((times == 1).all()), f"{numbers}, and {(times > 1).sum()} repeat in it")
    elif number == each_pass + BATCHES <= 2 * each_pass and taken[each_pass:] == taken[:BATCHES]:
        checks.judge("training.passes", False, f"the first {BATCHES} batches of two passes have the same order")


def check_cleared(models: Iterable[nn.Module], checks: SelfChecks | None = None) -> None:
    """Judge, before a step's first backward pass, that no parameter has a gradient."""
    left = sum(p.grad is not None for model in models for p in model.parameters())
    numbers = f"{left} parameters have a gradient before a step computes its own"
    (checks or SelfChecks()).judge("training.gradients", not left, numbers)


def check_losses(
    checks: SelfChecks, model: Any, heldout: Any, losses: Sequence[float], runtime: Runtime,
    losses_of: Callable[..., Sequence[float]], metrics: Mapping[str, float], data: Path,
) -> None:  # fmt: skip
    """Judge the `losses` (n,), nats, of the `Examples` `heldout`, by `losses_of`: a few by transformers' forward pass,
    and how much they rise under other prompts, which may not matter in other tasks. All ranks call it."""
    pad_id, worst = model.config.pad_token_id, 0.0
    for (prompt, response), loss in zip(heldout[:ROWS], losses, strict=False):
        ids = torch.tensor([prompt + response], device=runtime.device)
        with torch.no_grad(), autocast(runtime):
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logits[:, pad_id] = -torch.inf  # it is never sampled
        plain = float(cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
        worst = max(worst, abs(plain - loss) / max(1.0, plain))
    numbers = f"held-out losses differ by up to {worst:.2g} of each from plain ones, one token after the other"
    exact = runtime.dtype == "float32" and not runtime.tf32
    checks.judge("sft.loss", worst <= (1e-3 if exact else 0.1), numbers)
    rows = list(heldout[:MOST])
    if len(rows) < FEW or metrics["sft/perplexity"] > LEARNED * metrics["sft/unigram_perplexity"]:
        checks.skip("sft.prompt_use", f"{len(rows)} demonstrations are too few, or the model has learned too little")
        return
    others = [(rows[i - len(rows) // 2][0], response) for i, (_, response) in enumerate(rows)]
    rises = np.subtract(losses_of(model, pad_id, type(heldout).of(others), runtime), losses[: len(rows)])
    errors = float(rises.mean() / max(rises.std(ddof=1) / len(rises) ** 0.5, 1e-12))
    numbers = f"{len(rows)} losses rise by {errors:.1f} standard errors under another prompt (2.5 are expected)"
    checks.judge("sft.prompt_use", errors >= 2.5, numbers, fails=errors < 1 and task_name(data) == "support-desk")
