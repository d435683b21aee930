"""Prepare batches for the monitors: the rows of an update, and SFT's own responses, from which the limits come."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.base.text import line
from components.data.tables.published import read_split
from components.models.batching import encode_responses
from components.models.sampling import Samples
from components.ppo.alarm_table import MONITORS
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.experience import PpoUpdate, sampled_batches
from components.ppo.models import FrozenPass, Models
from components.ppo.monitors.alarms import Alarm, Limits
from components.ppo.monitors.measures import Batch
from components.training.updates import RowTable

logger = logging.getLogger(__name__)

BLOCKS, BLOCK = 32, 256
"""Stretches of consecutive rows from which `known_tokens` reads, and the rows of each."""
FALSE_ALARMS = 0.01
"""Highest probability that a policy within the monitors' margins of SFT raises any alarm in the whole run."""
LEAST_PROMPTS = 8
"""The fewest prompts whose SFT responses are enough to set limits."""


def batch_of(
    samples: Samples,
    prompts: Sequence[Any],
    texts: Sequence[str],
    passes: FrozenPass,
    scores: Tensor,
    tokenizer: Any,
    group: int,
) -> Batch:
    """Return the batch of the first response to each prompt of `samples`, which hold `group` consecutive responses
    each.

    Args:
        scores: (B,) as judged, in SFT standard deviations.
    """
    mask = samples.response_mask
    nll = -(passes.sft.masked_fill(~mask, 0).sum(1) / mask.sum(1))
    entropy, k1 = (x.masked_fill(~mask, 0).sum(1) for x in (passes.entropy, passes.policy - passes.sft))
    read = torch.stack([x.double() for x in (nll, scores, entropy, k1)]).cpu().numpy()  # a single transfer
    likelihoods, scaled_scores, entropies, kl = read[:, ::group]
    return Batch(
        [prompt[-1]["content"] for prompt in prompts[::group]], texts[::group], samples.text_ids[::group],
        samples.special_tokens(tokenizer)[::group], np.array(samples.response_lengths[::group], dtype=np.float64),
        scaled_scores, likelihoods, entropies, kl,
    )  # fmt: skip


def known_tokens(data: Path, tokenizer: Any, max_tokens: int) -> set[int]:
    """Return the token ids that the responses of the training data hold: chosen, rejected and demonstrated ones, of at
    most `BLOCKS` times `BLOCK` rows of each split, spread over it."""
    ids = set[int]()
    for split, fields in (("pairs.train", ("chosen", "rejected")), ("demonstrations.train", ("response",))):
        rows = read_split(data / split)
        for start in np.unique(np.linspace(0, max(len(rows) - BLOCK, 0), BLOCKS, dtype=int)).tolist():
            texts = [row[field] for row in rows[start : start + BLOCK] for field in fields]
            ids.update(*encode_responses(tokenizer, texts, max_tokens))
    return ids


def limits_of_sft(models: Models, job: PpoJob, data: Path) -> Limits | None:
    """Return limits from SFT responses; None if nothing is watched, or if there are too few prompts, which is
    logged."""
    config = job.ppo.monitors
    if config.responses is None:
        return None
    count = min(config.responses, len(models.answers.ids))
    prompts = [row["prompt"] for row in read_split(data / "prompts.calibration")[:count]]
    if len(prompts) < LEAST_PROMPTS:
        logger.warning(
            "ppo.monitors: no alarm is raised, since the calibration split holds %d prompts and the limits need %d. "
            "Raise data.split.calibration.",
            len(prompts), LEAST_PROMPTS,
        )  # fmt: skip
        return None
    parts = list[Batch]()
    for some, samples, passes in sampled_batches(models, models.sft, prompts, job, models.answers):
        texts, raw = samples.texts(models.tokenizer), passes.raw_scores
        if models.rewards is not None:
            raw, *_ = models.rewards.score(raw, some, texts, ended=samples.ended.tolist())
        parts.append(batch_of(samples, some, texts, passes, models.scale(raw), models.tokenizer, 1))
    training_tokens = known_tokens(data, models.tokenizer, job.generation.max_new_tokens)
    limits = Limits.of(_joined(parts), FALSE_ALARMS, job.ppo.updates, training_tokens)
    size = job.ppo.batch_size // job.ppo.group_size
    if idle := [name for name in limits.unreachable(size) if name in config.stop_on]:
        logger.warning(
            "ppo.monitors.stop_on: a batch of responses to %d prompts cannot raise %s, because it is too small, or SFT "
            "itself is too close to the limit. Raise ppo.batch_size, or remove them from ppo.monitors.stop_on.",
            size, ", ".join(idle),
        )  # fmt: skip
    return limits


@dataclass
class Alarms(RowTable[PpoUpdate]):
    """The monitors of every batch: the first alarm of each name, in `rows`, is logged, and stops or only warns."""

    config: PpoConfig = field(kw_only=True)
    limits: Limits | None = field(kw_only=True)
    """From SFT's responses; None without monitors."""
    tokenizer: Any = field(kw_only=True)

    @classmethod
    def start(cls, models: Models, job: PpoJob, data: Path) -> "Alarms":
        """Sample SFT's responses, and return the monitors before the first batch."""
        return cls(config=job.ppo, limits=limits_of_sft(models, job, data), tokenizer=models.tokenizer)

    @property
    def fixed_limits(self) -> dict[str, float]:
        """Return the limits of the monitors whose limit is the same in every batch."""
        prompts = self.config.batch_size // self.config.group_size
        return {} if self.limits is None else self.limits.fixed(prompts)

    def first_stop(self) -> int:
        """Return the first update that raised an alarm of `stop_on`; 0 for none."""
        return next((int(row["update"]) for row in self.rows if row["name"] in self.config.monitors.stop_on), 0)

    def on_update(self, update: PpoUpdate) -> PpoUpdate:
        """Add the monitors' values, and log and show alarms that are raised for the first time."""
        if self.limits is None:
            return update
        experience = update.experience
        batch = batch_of(
            experience.samples, update.prompts, update.texts, experience.passes, experience.scaled_scores,
            self.tokenizer, self.config.group_size,
        )  # fmt: skip
        values, alarms = self.limits.judge(batch, self.config.beta_in_deviations(update.beta))
        raised = new_alarms(alarms, batch, self.rows, update.number)
        self.rows += raised
        update = update.with_metrics({f"ppo/monitor_{name}": value for name, value in values.items()})
        update = update.with_examples(alarm_samples(raised))
        names = [str(row["name"]) for row in raised if row["name"] in self.config.monitors.stop_on]
        return update.with_stop(f"ppo.monitors.stop_on names {', '.join(names)}") if names else update


def new_alarms(
    alarms: Sequence[Alarm], batch: Batch, before: Sequence[Mapping[str, object]], update: int
) -> list[dict[str, object]]:
    """Return those of `alarms` that the run raises for the first time, as JSON objects; log each as a warning."""
    names, rows = {row["name"] for row in before}, list[dict[str, object]]()
    for alarm in alarms:
        if alarm.name not in names:
            sentence = alarm.sentence(batch.texts[alarm.sample])
            logger.warning("ppo, update %d: %s", update, line(sentence))
            rows.append(
                {"update": update, "prompt": batch.prompts[alarm.sample], "response": batch.texts[alarm.sample]}
                | {"name": alarm.name, "value": alarm.value, "sft": alarm.sft, "phrase": alarm.what}
                | {"meaning": sentence}
                | ({} if alarm.share is None else {"sft_share": alarm.share})
            )
    return rows


def alarm_samples(raised: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return alarms as samples for people to read; the file and Prefect show a sample's prompt, response and
    numbers."""
    return [
        {"prompt": f"ALARM {row['name']}: {MONITORS[str(row['name'])].meaning} Prompt: {row['prompt']}"}
        | {"response": row["response"]}
        | {"alarm": row["meaning"], "value": row["value"], "sft": row["sft"]}
        for row in raised
    ]


def _joined(parts: Sequence[Batch]) -> Batch:
    def all_of(name: str) -> list[Any]:
        return [value for part in parts for value in getattr(part, name)]

    names = ("lengths", "scores", "nll", "entropies", "kl")
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return Batch(all_of("prompts"), all_of("texts"), all_of("token_ids"), all_of("special"), *arrays)
