"""One text has one score: alone, in a batch, padded on either side; and the unit of scores is SFT's own spread."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from components.gates.judging import GatesConfig, judge
from components.models import logprobs
from components.models.batching import pad
from components.models.folders import load_reward_model
from components.models.runtime import Runtime
from components.reward.config import EnsembleConfig
from components.reward.scoring import ScoreScale, combine, invariance, last_counted, score_sequences, score_tokens

SCALE = ScoreScale(shift=2.0, scale=0.5, missing_eos_score=-2.5, temperature=1.5, responses=16)


@pytest.fixture(scope="module")
def model(stages: Any, runtime: Runtime) -> Any:
    return load_reward_model(stages.inputs["reward"], runtime)[0]


@pytest.fixture(scope="module")
def sequences(language: Any) -> list[list[int]]:
    return [p[: 5 + 3 * i] for i, p in enumerate(language.prompts)]


def test_the_score_is_read_at_the_last_token_that_counts_on_either_side() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]]).bool()
    assert last_counted(mask).tolist() == [1, 3, 3, 2, 0]


def test_scores_come_back_in_the_order_of_the_texts(model: Any, sequences: list[list[int]], runtime: Runtime) -> None:
    one_by_one = [score_sequences(model, 0, [s], runtime).item() for s in sequences]
    shuffled = sequences[::-1]
    assert torch.allclose(score_sequences(model, 0, shuffled, runtime, 3), torch.tensor(one_by_one[::-1]), atol=1e-5)
    assert len({round(s, 5) for s in one_by_one}) > 6


def test_padding_and_company_change_no_score(model: Any, sequences: list[list[int]], runtime: Runtime) -> None:
    assert invariance(model, 0, sequences, runtime) <= 1e-4
    bfloat16 = runtime.model_copy(update={"dtype": "bfloat16"})
    assert invariance(model, 0, sequences, bfloat16) <= 1e-4, "it measures masks, not rounding"


@pytest.mark.parametrize("broken", ["positions", "attention", "last"])
def test_a_score_that_depends_on_padding_is_seen(
    model: Any, sequences: list[list[int]], runtime: Runtime, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = copy.deepcopy(model)
    if broken == "positions":
        # rotary positions are relative: a shift alone changes nothing, so stretch those of rows padded on the left
        monkeypatch.setattr(
            logprobs, "position_ids", lambda mask: torch.arange(mask.shape[1]) * (2 - mask[:, :1].long())
        )
    elif broken == "attention":
        forward = whole.base_model.forward
        whole.base_model.forward = lambda input_ids, attention_mask=None, **rest: forward(
            input_ids, attention_mask=torch.ones_like(input_ids), **rest
        )
    else:
        monkeypatch.setattr("components.reward.scoring.last_counted", lambda mask: mask.shape[1] - 1)
    assert invariance(whole, 0, sequences, runtime) > 1e-3


def test_a_score_that_is_no_number_on_one_side_alone_fails_the_gate(
    model: Any, sequences: list[list[int]], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost_on_the_left(model: Any, ids: torch.Tensor, mask: torch.Tensor, *rest: Any) -> torch.Tensor:
        return score_tokens(model, ids, mask, *rest).where(mask[:, 0], torch.nan)

    monkeypatch.setattr("components.reward.scoring.score_tokens", lost_on_the_left)
    found = invariance(model, 0, sequences, runtime)
    gates = GatesConfig.model_validate({"reward": {"invariance": 1e-4}})
    (failed,) = [v for v in judge("reward", {"reward/invariance": found}, gates) if not v.passed]
    assert failed.name == "reward.invariance" and math.isnan(found)


def test_what_the_padding_holds_changes_no_score(model: Any, sequences: list[list[int]], runtime: Runtime) -> None:
    for side in ("left", "right"):
        ids, mask = pad(sequences, 0, side)  # type: ignore[arg-type]
        garbage = torch.where(mask, ids, torch.randint_like(ids, 1, 100))
        with torch.no_grad():
            assert torch.allclose(*(score_tokens(model, x, mask, runtime) for x in (ids, garbage)), atol=1e-5)


def test_a_scaled_score_counts_sft_standard_deviations_from_sfts_mean() -> None:
    assert SCALE(torch.tensor([2.0, 2.5, 1.0])).tolist() == [0.0, 1.0, -2.0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"ensemble": "mean"}, [2.0, -1.0]),
        ({"ensemble": "minimum"}, [1.0, -4.0]),
        ({"ensemble": "lower"}, [2.0 - 1.0, -1.0 - 3.0]),
    ],
)
def test_members_scores_are_combined_after_each_ones_own_level_is_taken_off(
    config: dict[str, Any], expected: list[float]
) -> None:
    # centred: (1, 2, 3) and (-4, -1, 2), deviations 1 and 3
    raw = torch.tensor([[11.0, 6.0], [2.0, -1.0], [3.5, 2.5]])
    shifts = torch.tensor([10.0, 0.0, 0.5])
    assert combine(raw, shifts, EnsembleConfig(**config)).tolist() == pytest.approx(expected)
    assert combine(raw[:1], shifts[:1], EnsembleConfig(**config)).tolist() == [11.0, 6.0], (
        "one model's score is its own"
    )


def test_a_scale_of_0_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValidationError, match="scale"):
        SCALE.model_validate(SCALE.model_dump() | {"scale": 0})
    (tmp_path / "reward.json").write_text(json.dumps(SCALE.model_dump()))
    assert ScoreScale.read(tmp_path) == SCALE
