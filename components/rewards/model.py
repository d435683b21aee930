"""Another reward model as a source: it reads conversations as text, through its own tokenizer and chat template."""

from pathlib import Path

from components.base.errors import UserError
from components.models.runtime import Runtime
from components.reward.suites.scorer import RewardScorer
from components.rewards.config import ModelReward
from components.rewards.source import Replies


class ModelSource:
    """A reward model in a folder: an artifact of a reward stage, or a sequence classifier with one label."""

    def __init__(self, config: ModelReward, folder: Path, runtime: Runtime) -> None:
        """Load it. Raises UserError where the folder holds neither."""
        self._config, self._scorer = config, RewardScorer.load(folder, runtime, f"ppo.rewards: {config.source}")

    def score(self, replies: Replies) -> list[float]:
        """Raw scores. Raises UserError where one is not finite."""
        said = zip(replies.prompts, replies.responses, strict=True)
        found = self._scorer.score([[*prompt, {"role": "assistant", "content": text}] for prompt, text in said])
        if not found.scores.isfinite().all():
            raise UserError(f"ppo.rewards: {self._config.source}: a score is NaN or infinite. Use an undamaged model.")
        return found.scores.tolist()

    def close(self) -> None:
        """Nothing is open."""
