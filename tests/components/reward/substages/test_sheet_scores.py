"""The reward model scores what stands on the sheet, as it scores held-out pairs."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import CheckFailed
from components.base.jsonl import read_rows, write_rows
from components.models.folders import load_reward_model
from components.models.runtime import Runtime
from components.reward.config import SheetScoresJob
from components.reward.scoring import ScoreScale, load_scorer, score_sequences
from components.reward.substages import sheet_scores
from components.reward.substages.sheet_scores import run
from components.reward.training_pairs import encode_pairs
from tests.components.conftest import GENERATION, silent

REPLIES = ("Thanks, we send a refund.", "No.", "Thanks, we send a refund and a refund and a refund and a refund again.")


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A sheet of three items and an attention check, the third the first one again with its sides exchanged."""
    prompt = [{"role": "user", "content": "My parcel is broken. What now?"}]
    shown = [(REPLIES[0], REPLIES[1]), (REPLIES[2], REPLIES[1]), (REPLIES[1], REPLIES[0]), ("No.", "Refund a.")]
    write_rows(tmp_path / "responses.jsonl", [{"item": f"q000{n}", "prompt": prompt} for n in (1, 2, 3)])
    write_rows(
        tmp_path / "sheet.jsonl",
        [{"item": f"q000{n}-abcdef01", "response_a": a, "response_b": b} for n, (a, b) in enumerate(shown, 1)],
    )
    return tmp_path


def scored(reward: Path, sample: Path, out: Path, runtime: Runtime) -> list[dict[str, Any]]:
    job = SheetScoresJob(seed=0, runtime=runtime, generation=GENERATION)
    assert run(job, {"sample": sample, "reward": reward}, out, silent) == {"human_eval/scored_by_reward": 3.0}
    return read_rows(out / "artifact" / "scores.jsonl")


def test_a_judged_pair_has_the_scores_that_it_would_have_as_a_held_out_pair(
    stages: Any, sample: Path, tmp_path: Path, runtime: Runtime
) -> None:
    reward = stages.inputs["reward"]
    found = scored(reward, sample, tmp_path / "out", runtime)
    model, tokenizer = load_reward_model(reward, runtime)
    prompt = read_rows(sample / "responses.jsonl")[0]["prompt"]
    rows: Any = [{"prompt": prompt, "chosen": chosen, "rejected": REPLIES[1]} for chosen in (REPLIES[0], REPLIES[2])]
    pairs = encode_pairs(tokenizer, rows, GENERATION)
    assert len(pairs[1].chosen) - len(pairs[1].rejected) < 10, "the long reply is cut"
    alone = score_sequences(model, tokenizer.pad_token_id, [s for p in pairs for s in (p.chosen, p.rejected)], runtime)
    expected = [("q0001", alone[0], alone[1]), ("q0002", alone[2], alone[3]), ("q0003", alone[1], alone[0])]
    assert [row["item"] for row in found] == [item for item, _, _ in expected]
    for row, (_, a, b) in zip(found, expected, strict=True):
        assert (row["a"], row["b"]) == (pytest.approx(a.item(), abs=1e-5), pytest.approx(b.item(), abs=1e-5))
    about = json.loads((tmp_path / "out" / "artifact" / "scores.json").read_text())
    assert about == {"temperature": ScoreScale.read(reward).temperature}


FAULTS = {
    "sides exchanged": ("score_sequences", lambda scores: scores.reshape(-1, 2).flip(1).reshape(-1)),
    "without the prompt": ("encode_prompt", lambda ids: ids[-1:]),
    "another temperature": ("write_json", lambda _: None),
}


@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_scores_that_are_not_those_of_the_sheets_sides_stop_the_stage(
    stages: Any, sample: Path, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    right = getattr(sheet_scores, name)

    def faulty(*arguments: Any) -> Any:
        if name == "write_json":
            return right(arguments[0], {"temperature": 0.5})
        return fault(right(*arguments)) if name == "encode_prompt" or len(arguments[2]) > 1 else right(*arguments)

    monkeypatch.setattr(sheet_scores, name, faulty)
    with pytest.raises(CheckFailed, match=r"human_eval.scores failed.*`components/reward/substages/sheet_scores.py`"):
        scored(stages.inputs["reward"], sample, tmp_path / "out", runtime)


def test_several_reward_models_score_by_their_mean_less_each_ones_own_constant(
    stages: Any, sample: Path, tmp_path: Path, runtime: Runtime
) -> None:
    stages.run("reward", tmp_path / "two", members=2)
    two = tmp_path / "two" / "artifact"
    found = scored(two, sample, tmp_path / "out", runtime)
    of_sft = json.loads((two / "sft_scores.json").read_text())
    members = [load_reward_model(folder, runtime)[0] for folder in (two, two / "members" / "2")]
    tokenizer = load_scorer(two, runtime)[1]
    rows: Any = [
        {"prompt": read_rows(sample / "responses.jsonl")[0]["prompt"], "chosen": REPLIES[0], "rejected": "No."}
    ]
    (pair,) = encode_pairs(tokenizer, rows, GENERATION)
    each = [score_sequences(model, tokenizer.pad_token_id, [pair.chosen], runtime).item() for model in members]
    less = [score - sum(own) / len(own) for score, own in zip(each, of_sft, strict=True)]
    assert each[0] != each[1] and found[0]["a"] == pytest.approx(sum(less) / 2, abs=1e-5)
