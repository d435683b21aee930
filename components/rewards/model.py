"""Another reward model as a source. It gets conversations as text and uses its own tokenizer and chat template."""

from pathlib import Path

from components.base.errors import UserError
from components.models.runtime import Runtime
from components.reward.suites.scorer import RewardScorer
from components.rewards.config import ModelReward
from components.rewards.source import Replies


class ModelSource:
    """A reward model in a folder: an artifact of a reward stage, or a sequence classifier with one label."""

    def __init__(self, config: ModelReward, folder: Path, runtime: Runtime) -> None:
        """Load the model. Raises UserError if the folder holds neither."""
        self._config, self._scorer = config, RewardScorer.load(folder, runtime, f"ppo.rewards: {config.source}")

    def score(self, replies: Replies) -> list[float]:
        """Return raw scores. Raises UserError if one is not finite."""
        said = zip(replies.prompts, replies.responses, strict=True)
        found = self._scorer.score([[*prompt, {"role": "assistant", "content": text}] for prompt, text in said])
        if not found.scores.isfinite().all():
            raise UserError(f"ppo.rewards: {self._config.source}: a score is NaN or infinite. Use an undamaged model.")
        return found.scores.tolist()

    def close(self) -> None:
        """Do nothing: nothing is open."""
