"""What a stage says it does after its last step."""

from pathlib import Path
from typing import Any

import pytest

DOES = {
    "sft": ["evaluating on 20 held-out demonstrations", "sampling responses to 20 held-out prompts"],
    "reward": [
        "sampling and scoring SFT responses, for the scale",
        "scoring 60 held-out pairs",
        "measuring calibration, slices and baselines",
        "probing the scores with changed texts",
    ],
    "ppo": [
        "evaluating the policy on 20 held-out prompts",
        "evaluating SFT on 20 held-out prompts",
        "measuring the perplexity of demonstrations",
        "sampling the policy again",
        "sampling SFT again",
        "evaluating the best of 2 SFT responses to a prompt",
        "measuring diversity",
    ],
}
OPTIONS: dict[str, dict[str, Any]] = {"sft": {"evaluate": 20}, "reward": {}, "ppo": {"evaluate": 20, "best_of": 2}}


@pytest.mark.parametrize("stage", sorted(DOES))
def test_after_its_last_step_a_stage_says_what_it_does_and_counts_it_apart_from_its_steps(
    stage: str, stages: Any, tmp_path: Path
) -> None:
    steps: list[int] = []
    phases: dict[str, list[tuple[int, int | None]]] = {}

    def observe(step: int, metrics: Any, total: int | None = None, doing: str | None = None, **_: Any) -> None:
        if doing is None:
            assert not phases, "a step after the last one"
            steps.append(step)
        else:
            assert metrics == {}, "this would be a point"
            phases.setdefault(doing, []).append((step, total))

    options = OPTIONS[stage] | ({"updates": 2} if stage == "ppo" else {})
    stages.run(stage, tmp_path, observe, **options)
    assert steps and list(phases) == DOES[stage]
    if stage == "ppo":
        assert phases[DOES["ppo"][0]] == phases[DOES["ppo"][1]] == [(0, 20), (8, 20), (16, 20), (20, 20)]
        assert phases[DOES["ppo"][-2]][-1] == (40, 40)
