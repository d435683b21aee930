"""A reward model that ignores the prompt is named in the built-in task, and is in doubt on other data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from components.base.errors import CheckFailed
from components.gates.self_checks import SelfChecks
from components.reward.evaluation import boundaries
from components.reward.evaluation.boundaries import check_prompt_use, with_other_prompts

Score = Callable[[str, str], float]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, stages: Any) -> Callable[..., SelfChecks]:
    """Judge a reward model that is a function of prompt and response, on 250 pairs whose prompts name the answer."""

    def judge(score: Score, task: str = "support-desk", count: int = 250) -> SelfChecks:
        rows = [
            {
                "prompt": [{"role": "user", "content": f"say {i % 7}"}],
                "chosen": f"{i % 7}",
                "rejected": f"{(i + 1) % 7}",
            }
            for i in range(count)
        ]

        def scored(model: Any, pad_id: int, pairs: Any, runtime: Any) -> Any:
            sides = ("chosen", "rejected")
            return tuple(np.array([score(row["prompt"][0]["content"], row[side]) for row in pairs]) for side in sides)

        monkeypatch.setattr(boundaries, "encode_pairs", lambda tokenizer, rows, generation, config: rows)
        monkeypatch.setattr(boundaries, "score_pairs", scored)
        return check_prompt_use(None, type("Tokenizer", (), {"pad_token_id": 0}), rows, stages.job("reward"), task)

    return judge


def noise(text: str) -> float:
    """A number in (0, 0.5) that depends on the text alone."""
    return float(torch.rand(1, generator=torch.Generator().manual_seed(sum(map(ord, text))))) / 2


def by_prompt(prompt: str, response: str) -> float:
    """1 for the answer that the prompt names."""
    return float(prompt.endswith(response)) + noise(response)


def of_the_response(prompt: str, response: str) -> float:
    """A score that knows the chosen responses, without the prompt: they are smaller, save one in seven."""
    return -float(response)


def test_a_model_that_reads_the_prompt_passes(judge: Callable[..., SelfChecks]) -> None:
    result = judge(by_prompt).results["reward.prompt_use"]
    assert result.verdict == "held" and "is 1.000, and" in result.numbers


def test_a_model_that_ignores_the_prompt_is_named(
    judge: Callable[..., SelfChecks], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckFailed, match=r"reward\.prompt_use failed, perhaps because pairs were read"):
        judge(of_the_response)
    assert judge(of_the_response, task="none").results["reward.prompt_use"].verdict == "doubtful"
    assert "reward.prompt_use is in doubt" in caplog.text


def test_few_pairs_and_a_model_near_chance_are_not_judged(judge: Callable[..., SelfChecks]) -> None:
    for checks in (judge(by_prompt, count=100), judge(lambda prompt, response: noise(response))):
        assert checks.results["reward.prompt_use"].verdict == "not judged"


def test_each_row_gets_a_prompt_that_is_not_its_own() -> None:
    rows: list[Any] = [{"prompt": p, "chosen": "", "rejected": ""} for p in "aabbcc"]
    assert [row["prompt"] for row in with_other_prompts(rows)] == [*"bccaab"]
    assert [row["prompt"] for row in with_other_prompts(rows[:2])] == ["a", "a"], "there is no other"
