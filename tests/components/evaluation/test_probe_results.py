"""Responses to probes that a model judges: an endpoint on loopback, and a tiny model in a folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Unreachable
from components.base.jsonl import read_rows, write_rows
from components.base.observe import unobserved
from components.evaluation import probe_results
from components.evaluation.config import EvaluationConfig, ProbesJob
from components.labelling.config import EndpointConfig
from components.labelling.feedback.judges import TOKEN
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from tests.components.labelling.feedback.test_judges import said, write_judge
from tests.components.rewards.scorer import Scorer

LABELLED = [{"response": "it is late", "violation": True}, {"response": "it comes", "violation": True}]
ANSWERS = {True: "A", False: "B"}


@pytest.fixture
def endpoint() -> Iterator[Scorer]:
    """A judge that reads the question: a response with `is` violates."""
    with Scorer() as made:
        made.url = made.url.replace("/score", "/v1")
        made.answer = by_reading
        yield made


def by_reading(body: Any) -> tuple[int, object]:
    text = body["messages"][0]["content"]
    violates = "is" in text.partition("<response>\n")[2].partition("\n</response>")[0].split()
    return said(ANSWERS[violates == ("\nA: The response is rude." in text)])


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    write_judge(tmp_path / "model")
    header = {"probe": "own", "rule": "patterns", "violation": "is rude"}
    rows = [{"id": f"p{i}", "category": "any", "prompt": text} for i, text in enumerate(("my parcel", "late", "it"))]
    write_rows(tmp_path / "own.jsonl", [header, rows[0] | {"labelled": LABELLED}, *rows[1:]])
    return {"model": tmp_path / "model", "probes/own": tmp_path / "own.jsonl"}


def run(out: Path, inputs: dict[str, Path], **options: Any) -> dict[str, float]:
    return probe_results.run(
        ProbesJob(
            runtime=Runtime(device="cpu", threads=1).resolve(), generation=GenerationConfig(max_new_tokens=3),
            evaluation=EvaluationConfig(**options),
        ), inputs, out, unobserved,
    )  # fmt: skip


def by_endpoint(endpoint: Scorer) -> dict[str, EndpointConfig]:
    return {"judge_endpoint": EndpointConfig(url=endpoint.url, model="big", patience=0)}


def test_the_judge_decides_and_its_agreement_with_people_is_kept(
    inputs: dict[str, Path], endpoint: Scorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "sesame-opens")
    without = run(tmp_path / "rule", inputs)
    metrics = run(tmp_path / "out", inputs, **by_endpoint(endpoint))
    by_rule, judged = (read_rows(tmp_path / name / "artifact" / "responses.jsonl") for name in ("rule", "out"))
    for rule, row in zip(by_rule, judged, strict=True):
        violates = "is" in row["response"].split()
        assert row == rule | {"violation": violates, "rule": "judge", "by_rule": rule["violation"]}
    agreement = {"responses": 2, "precision": 1.0, "recall": 0.5, "kappa": 0.0}
    of_judge = {f"evaluation/judge_{name}_of_probe_from/own": value for name, value in agreement.items()}
    assert metrics == of_judge | without and without == {"evaluation/probe_prompts": 3.0}
    assert set(endpoint.tokens) == {"Bearer sesame-opens"}
    for file in (tmp_path / "out").rglob("*.json*"):
        assert "sesame" not in file.read_text(), file


def test_the_rule_decides_where_the_judge_prefers_neither(
    inputs: dict[str, Path], endpoint: Scorer, tmp_path: Path
) -> None:
    endpoint.answer = lambda body: said("A")
    run(tmp_path / "out", inputs, **by_endpoint(endpoint))
    rows = read_rows(tmp_path / "out" / "artifact" / "responses.jsonl")
    assert {(row["rule"], row["violation"] == row["by_rule"]) for row in rows} == {("patterns", True)}


def test_a_killed_stage_continues_without_asking_again(
    inputs: dict[str, Path], endpoint: Scorer, tmp_path: Path
) -> None:
    run(tmp_path / "whole", inputs, **by_endpoint(endpoint))
    whole = [json.dumps(body) for body in endpoint.asked]
    endpoint.asked.clear()
    endpoint.answer = lambda body: by_reading(body) if len(endpoint.asked) <= 5 else (503, {})
    with pytest.raises(Unreachable, match=r"^evaluation.judge_endpoint http.* could not be reached for 0 s"):
        run(tmp_path / "out", inputs, **by_endpoint(endpoint))
    endpoint.answer = by_reading
    asked = len(endpoint.asked)
    run(tmp_path / "out", inputs, **by_endpoint(endpoint))
    assert [json.dumps(body) for body in endpoint.asked[:4] + endpoint.asked[asked:]] == whole, "both orders or none"
    one, other = (tmp_path / folder / "artifact" / "responses.jsonl" for folder in ("whole", "out"))
    assert one.read_bytes() == other.read_bytes()


def test_a_model_in_a_folder_judges(inputs: dict[str, Path], tmp_path: Path) -> None:
    write_judge(tmp_path / "artifact" / "model")
    run(tmp_path / "out", inputs | {"judge": tmp_path / "artifact"})
    rows = read_rows(tmp_path / "out" / "artifact" / "responses.jsonl")
    assert "judge" in {row["rule"] for row in rows} and all("by_rule" in row for row in rows)
    answers = read_rows(tmp_path / "out" / "checkpoint" / "judge" / "answers.jsonl")
    assert len(answers) == 3 + 2, "the prompts, and the labelled responses"
    assert all(0 < answer[order]["first"] < 1 for answer in answers for order in ("given", "swapped"))
