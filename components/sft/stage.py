"""The SFT stage: cross-entropy on responses, held-out perplexity against baselines, sample generations."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from components.base.errors import UserError
from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.base.text import counted
from components.data.support_desk.task import task_scores
from components.data.tables.published import read_split
from components.distributed.ranks import go_on_alone, in_turn
from components.distributed.sharding import spread
from components.models.folders import build_causal_lm, load_base
from components.models.matrices.kernels import by_onednn
from components.models.runtime import release_memory
from components.models.sampling import generate_responses
from components.models.tokenizers import Demonstration, texts_of, train_tokenizer
from components.sft.config import SftConfig, SftJob
from components.sft.tokenized_demonstrations import (
    Examples,
    TokenizedDemonstrations,
    check_packing,
    choose_demonstrations,
    loss_a_token,
    perplexity_ratio,
    response_losses,
    token_losses,
)
from components.stats.intervals import clustered_proportion
from components.training.heldout import HeldOut, LossEvaluations
from components.training.loop import TrainingExamples, fit, torch_seed
from components.training.trained_weights import save_whole
from components.training.training_checks import check_encoding, check_heldout, check_losses

SHOWN = 8
"""Number of held-out prompts whose responses are shown at each evaluation during training."""
CHECKED = 4
"""Number of demonstrations whose packed losses are checked before training. They are the longest, since a layer with a
sliding window treats shorter ones correctly."""


def run(job: SftJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Train on `inputs["data"]` from `inputs["base"]` or from scratch; publish the model, samples and metrics.

    If `sft.train` is false, the base itself is published, and measured in the same way.

    Raises:
        UserError: without overlong demonstrations less than a batch is left, or nothing to evaluate on.
    """
    train: Sequence[Demonstration] = read_split(inputs["data"] / "demonstrations.train")
    heldout: Sequence[Demonstration] = read_split(inputs["data"] / "demonstrations.heldout")
    heldout, unjudged = shared_out(heldout, job.sft)
    train = train[: None if "base" in inputs else job.sft.max_demonstrations]
    model, tokenizer = _untrained(job, inputs, train)
    pad_id = tokenizer.pad_token_id
    chosen, evaluated = (
        choose_demonstrations(tokenizer, rows, job.generation, job.sft.overlong, most, out)
        for rows, most in ((train, job.sft.max_demonstrations), (heldout, job.sft.evaluate))
    )
    _need_enough(job.sft.batch_size if job.sft.train else 0, job, chosen, evaluated)
    examples, heldout_examples = chosen.examples, evaluated.examples
    checks = check_encoding("sft.encoding", tokenizer, train, examples, job.generation, out)
    check_heldout(checks, train, read_split(inputs["data"] / "demonstrations.heldout"))
    metrics = {"sft/demonstrations": float(job.sft.train * len(examples))}
    metrics["sft/overlong"] = chosen.overlong / chosen.seen
    tokens = int(heldout_examples.responses.lengths.sum())
    subject = counted(len(heldout_examples), "held-out demonstration")
    baseline = unigram_losses(examples, heldout_examples, len(tokenizer))
    metrics["sft/unigram_perplexity"] = math.exp(sum(baseline) / tokens)
    if "base" in inputs:
        observe(0, {}, doing=f"evaluating the base model on {subject}")
        baseline = response_losses(model, pad_id, heldout_examples, job.runtime)
        metrics["sft/base_perplexity"] = math.exp(sum(baseline) / tokens)

    losses, evaluations = baseline, None
    if job.sft.train:
        further = choose_demonstrations(tokenizer, unjudged, job.generation, job.sft.overlong, None).examples
        prompts = [row["prompt"] for row in unjudged[:SHOWN]]
        model, evaluations = fine_tune(
            job, model, pad_id, examples, out, observe, unseen(further, heldout_examples),
            lambda model: _answered(job, inputs["data"], model, tokenizer, prompts, "shown")[0])  # fmt: skip
        model.eval()
    if evaluations is not None:
        observe(0, {}, doing=f"evaluating the last model on {subject}")
        last = loss_a_token(response_losses(model, pad_id, heldout_examples, job.runtime), heldout_examples)
        metrics |= {**last.metrics("sft/last_loss"), "sft/last_perplexity": math.exp(last.value)}
        metrics |= evaluations.publish(model, lambda: save_whole(model, tokenizer, out / "artifact" / "last" / "model"))
    save_whole(model, tokenizer, out / "artifact" / "model")
    if job.sft.train:
        observe(0, {}, doing=f"evaluating on {subject}")
        losses = response_losses(model, pad_id, heldout_examples, job.runtime)
    loss = loss_a_token(losses, heldout_examples)
    metrics |= {**loss.metrics("sft/loss"), "sft/perplexity": math.exp(loss.value)}
    metrics |= perplexity_ratio(losses, baseline, heldout_examples).metrics("sft/perplexity_ratio")
    check_losses(checks, model, heldout_examples, losses, job.runtime, response_losses, metrics, inputs["data"])
    metrics |= _sample(job, inputs["data"], model, tokenizer, out, observe)  # after this only the first rank goes on
    checks.write(out)
    if evaluations is not None:
        write_json(out / "artifact" / "metadata.json", evaluations.document())
    write_json(out / "artifact" / "metrics.json", metrics)
    return metrics


def _untrained(job: SftJob, inputs: Mapping[str, Path], train: Sequence[Demonstration]) -> tuple[Any, Any]:
    """Return the base model, or a model from scratch with the vocabulary of `train`, and its tokenizer."""
    if "base" not in inputs:
        longest = job.generation.max_prompt_tokens + job.generation.max_new_tokens
        tokenizer = train_tokenizer(texts_of(train), job.sft.scratch.vocabulary, job.generation.stop)
        model = build_causal_lm(job.sft.scratch, tokenizer, max(longest, 512), torch_seed(job.seed, "sft", "weights"))
        return _placed(model, job), tokenizer
    with in_turn():  # a base that is not in float32 is converted whole on the host
        model, tokenizer = load_base(inputs["base"], template=job.sft, stop=job.generation.stop)
        return _placed(model, job), tokenizer


def _placed(model: Any, job: SftJob) -> Any:
    """Move a model to the device; one that trains is sharded over the ranks."""
    model = by_onednn(model).requires_grad_(job.sft.train)
    sharding = job.runtime.sharding if job.sft.train else "replicas"
    return spread(model, sharding, job.runtime.device, job.runtime.dtype)


def _need_enough(
    least_trained: int, job: SftJob, train: TokenizedDemonstrations, heldout: TokenizedDemonstrations
) -> None:
    for chosen, use, least, name in (
        (train, "to train on", least_trained, "sft.batch_size"), (heldout, "to evaluate on", 1, "the least"),
    ):  # fmt: skip
        if len(chosen.examples) < min(least, chosen.seen):
            raise UserError(
                f"{chosen.overlong} of {counted(chosen.seen, 'demonstration')} {use} have a response of more than "
                f"{job.generation.max_new_tokens} tokens (generation.max_new_tokens, EOS included) and are left out. "
                f"{len(chosen.examples)} are left, fewer than {least} ({name}). Raise generation.max_new_tokens, give "
                "shorter demonstrations, or cut the long ones with sft.overlong=cut: the model then learns not to end."
            )


def shared_out(
    heldout: Sequence[Demonstration], config: SftConfig
) -> tuple[Sequence[Demonstration], Sequence[Demonstration]]:
    """Split held-out demonstrations into those for the final evaluation and, at most the last half, those evaluated
    during training."""
    count = 0 if config.evaluate_every is None else min(config.watch.examples, len(heldout) // 2)
    return heldout[: len(heldout) - count], heldout[len(heldout) - count :]


def unseen(further: Examples, evaluated: Examples) -> Examples:
    """Return the `further` demonstrations whose prompt, as cut, is not among those of the `evaluated` ones."""
    prompts = set(map(tuple, evaluated.prompts))
    return Examples.of(example for example in further if tuple(example[0]) not in prompts)


def fine_tune(
    job: SftJob, model: Any, pad_id: int, examples: Examples, out: Path, observe: Observe,
    heldout: Examples | None = None, responses: Callable[[Any], list[dict[str, object]]] = lambda model: [],
) -> tuple[Any, LossEvaluations | None]:  # fmt: skip
    """Train all weights of `model` (in eval mode) on the examples' responses; resumes from `out/checkpoint`.

    Returns the model after the last step and, if `sft.evaluate_every` is set, the results of its evaluations on the
    `heldout` demonstrations. At each of them, `responses` returns rows for people to read.

    Raises:
        UserError: evaluations are asked for with fewer than two `heldout` demonstrations; or the model cannot separate
            demonstrations that `sft.packing` puts into one row.
    """

    def batch_loss(batch: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = token_losses(model, pad_id, [examples[i] for i in batch], job.runtime, packing is not None).mean()
        return loss, {"sft/train_loss": loss}

    def heldout_losses() -> tuple[list[float], dict[str, float]]:
        return response_losses(model, pad_id, heldout or Examples.of(()), job.runtime), {}

    evaluations = None
    if job.sft.evaluate_every is not None:
        if heldout is None or len(heldout) < 2:
            raise UserError(
                f"sft.evaluate_every needs two held-out demonstrations that no gate judges, and there are "
                f"{len(heldout or ())}, with prompts of their own and responses of at most "
                f"{job.generation.max_new_tokens} tokens. Give more demonstrations, raise data.split.test, or set "
                "sft.evaluate_every=null."
            )
        weights = heldout.responses.lengths.astype(float).tolist()
        prompts = list(map(tuple, heldout.prompts))
        evaluated = HeldOut(heldout_losses, weights, prompts, "nats a response token", lambda: responses(model))
        evaluations = LossEvaluations(job.sft, "sft", evaluated)
    packing = job.sft.packing
    if packing is not None:
        longest = np.argsort(examples.lengths, kind="stable")[-CHECKED:].tolist()
        check_packing(model, pad_id, [examples[i] for i in longest], job.runtime)
    data = TrainingExamples(batch_loss, examples.lengths, weights=examples.responses.lengths, packing=packing)
    observers = {} if evaluations is None else {"evaluations": evaluations}
    fit(model.train(), data, job.sft, seed=job.seed, group="sft", out=out, observe=observe, observers=observers)
    release_memory(job.runtime.device)
    return model, evaluations


def unigram_losses(train: Examples, heldout: Examples, vocabulary: int) -> list[float]:
    """Return the loss of each held-out response (n,), nats, under a unigram model with add-one smoothing.

    This is the baseline that ignores all context.
    """
    counts = Counter(token for response in train.responses for token in response)
    total = sum(counts.values()) + vocabulary
    return [sum(math.log(total / (counts[token] + 1)) for token in response) for response in heldout.responses]


def _sample(job: SftJob, data: Path, model: Any, tokenizer: Any, out: Path, observe: Observe) -> dict[str, float]:
    """Sample responses to held-out prompts; return the share that ended and, on the built-in task, the gold score.

    All ranks call it and share the sampling; then the first goes on alone.
    """
    prompts = [row["prompt"] for row in read_split(data / "prompts.test")[: job.sft.evaluate]]
    observe(0, {}, doing=f"sampling responses to {counted(len(prompts), 'held-out prompt')}")
    samples, scores = _answered(job, data, model, tokenizer, prompts, "samples")
    go_on_alone()
    write_rows(out / "artifact" / "samples.jsonl", samples)
    means = {f"sft/{name}": sum(s[name] for s in scores) / len(scores) for name in scores[0] if name != "echoes"}
    ended = clustered_proportion([row["ended"] for row in samples], [str(p) for p in prompts])
    return ended.metrics("sft/ended") | means


def _answered(
    job: SftJob, data: Path, model: Any, tokenizer: Any, prompts: Sequence[Any], stream: str
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Sample a response to each prompt; return rows of prompt, response and scores, and the scores alone."""
    seed = torch_seed(job.seed, "sft", stream)
    responses = generate_responses(model, tokenizer, prompts, job.generation, seed, job.runtime)
    scores = [task_scores(data, p, r.text) for p, r in zip(prompts, responses, strict=True)]
    rows = zip(prompts, responses, scores, strict=True)
    return [{"prompt": p, "response": r.text, "ended": r.ended} | s for p, r, s in rows], scores
