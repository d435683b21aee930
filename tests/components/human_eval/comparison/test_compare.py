"""A comparison of several models, of which people see two at a time: drawn, blinded, scored."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import read_rows
from components.data.spreadsheet import write_csv
from components.human_eval.comparison import comparison_sample, comparison_score
from components.human_eval.comparison.model_pairs import models_of
from components.human_eval.config import HumanEvalConfig, SampleJob, ScoreJob
from components.human_eval.sheet import SheetRow, as_record
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from flows.models.compared_models import result_text
from tests.sheets import read_sheet
from tests.splits import write_split

VOICES = ("Dear", "Hey", "Yo")
TASTE = {"Dear": 0.0, "Hey": 1.5, "Yo": -1.0}
"""How strong a rater finds each, on the logit."""


def voiced(job: Any, inputs: Any, prompts: Any, out: Any, observe: Any, sides: Any) -> dict[str, list[dict[str, Any]]]:
    """Each model's response is what its file says, and the question."""
    voices = {side: inputs[name].read_text() for side, name in sides.items()}
    return {s: [{"text": f"{v} {p[0]['content']}", "ended": True} for p in prompts] for s, v in voices.items()}


class Case:
    """A comparison on disk."""

    def __init__(self, root: Path, voices: tuple[str, ...] = VOICES, **options: Any) -> None:
        self.root, self.config = root, HumanEvalConfig(**{"items": 60, "raters": 2, "repeats": 0.1} | options)
        (root / "data").mkdir(parents=True)
        (root / "data" / "task.json").write_text('{"name": "none"}')
        rows = [{"prompt": [{"role": "user", "content": f"Question {i}"}], "category": "xyz"[i % 3]} for i in range(60)]
        write_split(root / "data" / "prompts.test", rows)
        inputs = {"data": root / "data", "seal": root / "seal"}
        (root / "seal").write_text("secret")
        for number, voice in enumerate(voices, 1):
            inputs[f"model_{number}"] = root / f"voice_{number}"
            inputs[f"model_{number}"].write_text(voice)
        job = SampleJob(seed=0, runtime=Runtime(), generation=GenerationConfig(), human_eval=self.config)
        self.metrics = comparison_sample.run(job, inputs, root, lambda *a, **k: None)
        self.sample = root / "artifact"

    def score(self, rate: Any) -> tuple[dict[str, float], dict[str, Any]]:
        rows = read_sheet(self.sample / "sheet.csv", self.config.raters, self.config.ratings)
        filled = [row._replace(ratings=tuple(rate(row, rater) for rater in range(self.config.raters))) for row in rows]
        write_csv(self.root / "filled.csv", list(as_record(filled[0])), map(as_record, filled))
        job = ScoreJob(seed=0, human_eval=self.config)
        files = {"sample": self.sample, "sheet": self.root / "filled.csv"}
        metrics = comparison_score.run(job, files, self.root / "scored", lambda *a, **k: None)
        return metrics, json.loads((self.root / "scored" / "artifact" / "comparison.json").read_text())


@pytest.fixture(autouse=True)
def _voiced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_sample, "respond", voiced)


def liked(row: SheetRow, rater: int) -> str:
    """The reply that a rater likes, whichever side it stands on."""
    drawn = random.Random(f"{row.prompt} {rater}")
    one, other = sorted((TASTE[text.split()[0]], side) for side, text in (("a", row.response_a), ("b", row.response_b)))
    if drawn.random() < 0.2:
        return "tie"
    return other[1] if drawn.random() < 1 / (1 + math.exp(one[0] - other[0])) else one[1]


def test_each_two_models_come_equally_often_and_the_key_says_which_stands_where(tmp_path: Path) -> None:
    case = Case(tmp_path)
    models, of = models_of(case.sample)
    key = json.loads((case.sample / "key.json").read_text())
    rows = {row["item"].split("-")[0]: row for row in read_rows(case.sample / "sheet.jsonl")}
    first = [item for item in of if item not in key["repeat_of"]]
    assert models == 3 and len(first) == 60 and len(of) == 66
    assert Counter(of[item] for item in first) == {(0, 1): 20, (0, 2): 20, (1, 2): 20}
    for two in ((0, 1), (0, 2), (1, 2)):
        sides = Counter(key["policy_side"][item] for item in first if of[item] == two)
        assert abs(sides["a"] - sides["b"]) <= 3, "at most one a stratum"
    for item, (one, other) in of.items():
        texts = (rows[item]["response_a"], rows[item]["response_b"])
        shown = texts[::-1] if key["policy_side"][item] == "a" else texts
        assert [text.split()[0] for text in shown] == [VOICES[one], VOICES[other]]
    told = (case.sample / "sheet.json").read_text() + (case.sample / "sheet.csv").read_text()
    assert "model_" not in told and "models" not in told, "the sheet tells who wrote what"


def test_every_pair_of_models_on_each_prompt_where_all_are_asked_for(tmp_path: Path) -> None:
    _, of = models_of(Case(tmp_path, pairs="all", repeats=0.0).sample)
    assert Counter(of.values()) == {(0, 1): 60, (0, 2): 60, (1, 2): 60}


def test_strengths_and_win_rates_are_those_of_the_raters_taste(tmp_path: Path) -> None:
    metrics, result = Case(tmp_path, pairs="all", raters=8).score(liked)
    assert result["baseline"] == "model_1" and result["interval_over"] == "prompts and raters"
    for each, voice in zip(result["models"], VOICES, strict=True):
        assert each["low"] <= TASTE[voice] <= each["high"], voice
    rows = {(row["first"], row["second"]): row for row in result["pairs"]}
    assert rows["model_1", "model_2"]["win_rate"] < 0.4 < 0.6 < rows["model_2", "model_3"]["win_rate"]
    row = rows["model_1", "model_3"]
    assert row["wins"] + row["ties"] + row["losses"] == 60 * 8 and row["items"] == 60
    assert (row["wins"] + row["ties"] / 2) / (60 * 8) == pytest.approx(row["win_rate"])
    assert metrics["human_eval/win_rate_model_1_model_2"] == rows["model_1", "model_2"]["win_rate"]
    assert metrics["human_eval/strength_model_2"] == result["models"][1]["strength"]
    assert metrics["human_eval/self_agreement"] > 0.3 and metrics["human_eval/labels_complete"] == 1


def test_the_order_in_which_models_are_named_moves_the_baseline_alone(tmp_path: Path) -> None:
    _, one = Case(tmp_path / "one", pairs="all").score(liked)
    _, other = Case(tmp_path / "other", ("Hey", "Yo", "Dear"), pairs="all").score(liked)
    first = {voice: each["strength"] for voice, each in zip(VOICES, one["models"], strict=True)}
    again = {voice: each["strength"] for voice, each in zip(("Hey", "Yo", "Dear"), other["models"], strict=True)}
    for voice in VOICES:
        assert first[voice] - first["Hey"] == pytest.approx(again[voice] - again["Hey"], abs=1e-4)


def test_a_model_that_always_wins_is_said_to_in_words_and_in_the_table(tmp_path: Path) -> None:
    def rate(row: SheetRow, rater: int) -> str:
        for side, text in (("a", row.response_a), ("b", row.response_b)):
            if text.startswith("Hey"):
                return side
        return liked(row, rater)

    case = Case(tmp_path)
    metrics, result = case.score(rate)
    assert result["better"] == ["model_2"] and {each["strength"] for each in result["models"]} == {None}
    assert not any(name.startswith("human_eval/strength") for name in metrics)
    assert metrics["human_eval/win_rate_model_1_model_2"] == 0
    text = result_text(tmp_path / "scored" / "artifact", dict(zip(("model_1", "model_2"), ("old", "new"), strict=True)))
    assert "one side won every comparison" in text and "(new against old, model_3)" in text
    assert "| old against new | 20 | 0 | 0 | 40 | 0.000 (0.000 to" in text
