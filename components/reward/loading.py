"""Load a finished reward model for scoring."""

from pathlib import Path
from typing import Any

from components.models.folders import frozen, load_reward_model
from components.models.runtime import Runtime
from components.reward.config import EnsembleConfig
from components.reward.scoring import ScoreScale, as_one, member_folder, read_sft_scores, with_one_head


def load_scorer(artifact: Path, runtime: Runtime) -> tuple[Any, Any]:
    """Load a reward artifact as one frozen model with one head, and its tokenizer.

    Several members are combined into their mean score, several heads into their sum weighted as in the artifact.
    """
    sft_scores, objectives = read_sft_scores(artifact), ScoreScale.read(artifact).objectives
    loaded = [load_reward_model(member_folder(artifact, member), runtime) for member in range(len(sft_scores))]
    members = [frozen(with_one_head(model, objectives)) for model, _ in loaded]
    return as_one(members, sft_scores, EnsembleConfig())[0], loaded[0][1]
