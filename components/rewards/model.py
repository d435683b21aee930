"""Another reward model as a source. It gets conversations as text and uses its own tokenizer and chat template."""

import logging
from pathlib import Path

from components.base.errors import UserError
from components.models.runtime import Runtime
from components.reward.suites.scorer import RewardScorer
from components.rewards.config import ModelReward
from components.rewards.source import Replies

logger = logging.getLogger(__name__)


class ModelSource:
    """A reward model in a folder: an artifact of a reward stage, or a sequence classifier with one label."""

    def __init__(self, config: ModelReward, folder: Path, runtime: Runtime) -> None:
        """Load the model. Raises UserError if the folder holds neither."""
        self._config, self._scorer = config, RewardScorer.load(folder, runtime, f"ppo.rewards: {config.source}")
        self._cut = self._scored = 0

    def score(self, replies: Replies) -> list[float]:
        """Return raw scores. Raises UserError if one is not finite."""
        turns = zip(replies.prompts, replies.responses, strict=True)
        conversations = [[*prompt, {"role": "assistant", "content": text}] for prompt, text in turns]
        scored = self._scorer.score(conversations, replies.ended)
        if any(scored.cut) and not self._cut:
            self._warn("so it scores them without their oldest tokens", sum(scored.cut), len(scored.cut))
        self._cut, self._scored = self._cut + sum(scored.cut), self._scored + len(scored.cut)
        if not scored.scores.isfinite().all():
            raise UserError(f"ppo.rewards: {self._config.source}: a score is NaN or infinite. Use an undamaged model.")
        return scored.scores.tolist()

    def close(self) -> None:
        """Say how many conversations were cut since the start; nothing is open."""
        if self._cut:
            self._warn("counting all since it was loaded", self._cut, self._scored)

    def _warn(self, what: str, cut: int, scored: int) -> None:
        logger.warning(
            "ppo.rewards: %s: %d of %d conversations have more tokens than the model reads (%d), %s. Use a model that "
            "reads more, or lower generation.max_prompt_tokens.",
            self._config.source, cut, scored, self._scorer.longest, what,
        )  # fmt: skip
