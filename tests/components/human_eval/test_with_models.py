"""The whole comparison with two real (untrained) models on the built-in task."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from components.base.errors import CheckFailed
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.human_eval import blinded_sample, unblinded_score
from components.human_eval.config import HumanEvalConfig, SampleJob, ScoreJob
from components.human_eval.respond import SIDES
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from tests.splits import write_split


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from components.models.config import ScratchModel
    from components.models.folders import build_causal_lm, save_model
    from components.models.tokenizers import train_tokenizer

    root = tmp_path_factory.mktemp("inputs")
    demonstrations, pairs = generate(0, SupportDeskConfig(demonstrations=50, pairs=50))
    data = root / "data"
    write_split(data / "prompts.test", ({"prompt": p["prompt"], "category": p["category"]} for p in pairs))
    (data / "task.json").write_text('{"name": "support-desk"}')
    texts = [d["response"] for d in demonstrations] + [m["content"] for d in demonstrations for m in d["prompt"]]
    tokenizer = train_tokenizer(texts, 600)
    for seed, source in enumerate(SIDES.values()):
        model = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 512, seed)
        save_model(model, tokenizer, root / source / "model")
    return {"data": data, **{source: root / source for source in SIDES.values()}}


@pytest.fixture(scope="module")
def run_sample(inputs: dict[str, Path]) -> Callable[..., dict[str, float]]:
    config = HumanEvalConfig(items=10, judges="simulated", batch_size=4)
    runtime = Runtime(device="cpu", dtype="float32", threads=1)
    generation = GenerationConfig(max_new_tokens=12)
    job = SampleJob(seed=0, runtime=runtime, generation=generation, human_eval=config)
    return lambda out, **other: blinded_sample.run(job, inputs | other, out, lambda *a, **k: None)


def test_two_runs_write_the_same_bytes_and_the_judges_sheet_is_scored(
    tmp_path: Path, run_sample: Callable[..., dict[str, float]]
) -> None:
    assert run_sample(tmp_path / "one") == run_sample(tmp_path / "two")
    one, two = (sorted((tmp_path / name / "artifact").rglob("*.*")) for name in ("one", "two"))
    assert [(p.name, p.read_bytes()) for p in one] == [(p.name, p.read_bytes()) for p in two]
    folder = tmp_path / "one" / "artifact"
    job = ScoreJob(seed=0, human_eval=HumanEvalConfig(items=10, judges="simulated"))
    files = {"sample": folder, "sheet": folder / "ratings.simulated.csv"}
    metrics = unblinded_score.run(job, files, tmp_path / "scored", lambda *a, **k: None)
    assert metrics["human_eval/items"] == 10 and metrics["human_eval/labels_complete"] == 1.0
    assert 0 <= metrics["human_eval/win_rate_low"] <= metrics["human_eval/win_rate"] <= 1
    assert json.loads((tmp_path / "scored" / "artifact" / "result.json").read_text())["judges"] == "simulated"


def test_each_model_writes_its_own_responses(tmp_path: Path, run_sample: Callable[..., dict[str, float]]) -> None:
    metrics = run_sample(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "artifact" / "responses.jsonl").read_text().splitlines()]
    assert len(rows) == 10 + 1 and all(row["sft"].strip() and row["policy"].strip() for row in rows)
    assert metrics["human_eval/identical"] == 0.0 and metrics["human_eval/policy_ended"] < 0.5


def test_a_model_against_itself_draws_other_responses(
    tmp_path: Path, inputs: dict[str, Path], run_sample: Callable[..., dict[str, float]]
) -> None:
    assert run_sample(tmp_path, ppo=inputs["sft"])["human_eval/identical"] == 0.0


def test_a_sheet_of_which_one_model_wrote_both_sides_is_stopped(
    tmp_path: Path, run_sample: Callable[..., dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIDES, "policy", "sft")
    with pytest.raises(CheckFailed, match=r"human_eval.authors failed, perhaps because both replies are SFT's"):
        run_sample(tmp_path)
