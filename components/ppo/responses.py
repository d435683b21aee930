"""Responses of a policy to many prompts, a batch at a time, each batch with the frozen models' pass over it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.models.batching import encode_prompt
from components.models.config import GenerationConfig
from components.models.sampling import Samples, rollout_engine
from components.ppo.config import PpoJob
from components.ppo.models import Models, frozen_pass
from components.training.loop import torch_seed


class SampledBatch(NamedTuple):
    """Some prompts, with a response to each."""

    prompts: Sequence[Any]
    samples: Samples
    found: dict[str, Tensor]
    """What `frozen_pass` gives for the model that sampled, SFT and the reward model."""


def sampled_batches(
    models: Models, model: Any, prompts: Sequence[Any], job: PpoJob, stream: str,
    generation: GenerationConfig | None = None,
) -> Iterator[SampledBatch]:  # fmt: skip
    """Sample one response of `model` to each prompt, in batches of `ppo.batch_size`.

    Two models that share a `stream` share its random numbers.

    Args:
        generation: how to sample; None is the job's. `found` is always of the job's temperature.
    """
    encoded = [encode_prompt(models.tokenizer, p, job.generation.max_prompt_tokens) for p in prompts]
    asked = Models(model, models.sft, models.reward_model, None, models.tokenizer, models.scale)
    seed, size = torch_seed(job.seed, "ppo", stream), job.ppo.batch_size
    with rollout_engine(model, models.tokenizer, job.runtime) as engine:
        for start in range(0, len(prompts), size):
            batch = slice(start, min(start + size, len(prompts)))
            numbers = range(batch.start, batch.stop)
            samples = engine.sample(encoded[batch], generation or job.generation, seed, numbers)
            # without what the sampler saw: the KL that is judged is the training path's
            yield SampledBatch(prompts[batch], samples, frozen_pass(asked, replace(samples, seen=None), job))


def sft_responses(models: Models, prompts: Sequence[Any], job: PpoJob) -> tuple[list[str], Tensor]:
    """A response of the SFT policy to each prompt, as text, and the pipeline's own raw scores (n,) of them."""
    texts, raw = list[str](), list[Tensor]()
    for _, samples, found in sampled_batches(models, models.sft, prompts, job, "scales of rewards"):
        raw.append(found["raw_scores"])
        texts += samples.texts(models.tokenizer)
    return texts, torch.cat(raw)
