"""Observers of an update's responses: warnings on their scores, metrics of the texts, and a table of samples."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from components.data.support_desk.task import task_scores
from components.ppo.experience import PpoUpdate
from components.rewards.rules import rule_metrics
from components.training.updates import Observer, RowTable

LEAST_KL = 0.5
"""Nats per response below which the reward gained per nat is mostly noise."""
SHOWN = 8
"""Number of responses in the table of samples, for each of its updates."""
MOSTLY_REPLACED = 0.5
"""Share of replaced scores in an update at which the log warns."""
logger = logging.getLogger(__name__)


@dataclass
class ScoreWarning(Observer[PpoUpdate]):
    """Warns once if the scores of an update hardly distinguish its rollouts."""

    warned: bool = False
    memory = ("warned",)

    def on_update(self, update: PpoUpdate) -> PpoUpdate:
        """Warn, unless it has."""
        self.warned = self.warned or warn_of_scores(update.number, update.metrics)
        return update


def warn_of_scores(update: int, metrics: Mapping[str, float]) -> bool:
    """Warn if the scores of an update hardly distinguish its rollouts; return whether it warned."""
    if metrics["ppo/score_spread"] == 0:
        logger.warning("update %d: all rollouts have the same score, so nothing is learnt from it.", update)
    elif metrics.get("ppo/replaced", 0.0) >= MOSTLY_REPLACED:
        logger.warning(
            "update %d: %.0f %% of the responses have no EOS, and their scores are replaced by the missing-EOS score "
            "(ppo.score.missing_eos). Raise generation.max_new_tokens, or train sft on responses that fit.",
            update, 100 * metrics["ppo/replaced"],
        )  # fmt: skip
    else:
        return False
    return True


@dataclass(frozen=True)
class ResponseMetrics(Observer[PpoUpdate]):
    """Measures the responses: reward per nat, the built-in task's true scores, violations of the team's rules."""

    data: Path

    def on_update(self, update: PpoUpdate) -> PpoUpdate:
        """Add the metrics."""
        truths = [task_scores(self.data, *pair) for pair in zip(update.prompts, update.texts, strict=True)]
        metrics = {f"ppo/{name}": sum(truth[name] for truth in truths) / len(truths) for name in truths[0]}
        if update.metrics["ppo/kl"] >= LEAST_KL:
            metrics["ppo/reward_per_nat"] = update.metrics["ppo/proxy_reward"] / update.metrics["ppo/kl"]
        if update.experience.rules.counts:
            metrics |= rule_metrics(update.experience.rules.counts, "ppo/")
        return update.with_metrics(metrics)


@dataclass
class SampleTable(RowTable[PpoUpdate]):
    """Keeps some responses every `every` updates and of the last, with `update` (from 0), scores and true scores."""

    every: int = field(kw_only=True)
    data: Path = field(kw_only=True)

    def on_update(self, update: PpoUpdate) -> PpoUpdate:
        """Add the first responses of the batch."""
        if update.is_sampled(self.every):
            experience = update.experience
            scores = experience.scaled_scores.tolist(), experience.scores.tolist()
            for prompt, text, score, reward in islice(zip(update.prompts, update.texts, *scores, strict=True), SHOWN):
                row = {"update": update.number - 1, "prompt": prompt, "response": text, "score": score}
                self.rows.append(row | {"reward": reward} | task_scores(self.data, prompt, text))
        return update
