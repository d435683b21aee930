"""An independent judge in PPO: asked in evaluations alone, and without a trace in what is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.jsonl import read_rows
from components.data.support_desk.desk import SupportDeskConfig, generate_careful
from components.data.tables.published import read_split
from components.models.chat.endings import endings_of, set_endings
from components.models.sampling import sample, with_endings
from components.ppo import models as ppo_models
from components.ppo.evaluate import evaluate_last, respond
from components.ppo.models import Models
from components.reward.config import JudgeConfig, JudgeJob
from components.reward.scoring import ScoreScale, load_scorer, score_sequences
from components.reward.substages.judge import run as train_judge
from components.stats.intervals import paired_gain
from tests.splits import published, write_split

WATCHED: dict[str, Any] = {
    "updates": 2, "evaluate_every": 1, "watch": {"prompts": 8}, "stop_early": False, "evaluate": 16,
}  # fmt: skip


def write_judge_data(data: Path) -> Path:
    """Careful pairs in splits, cut without hashing: 60 to train on, 20 and 20 to calibrate and test."""
    rows = generate_careful(5, SupportDeskConfig(judge_pairs=100))
    for split, part in (("train", rows[:60]), ("calibration", rows[60:80]), ("test", rows[80:])):
        numbered = ({**row, "row": number, "source": "careful"} for number, row in enumerate(part, 1))
        write_split(data / f"pairs.{split}", published(numbered))
    return data


@pytest.fixture(scope="module")
def judge(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("judge")
    job = stages.job("reward")
    own = JudgeJob(**dict(job), judge=JudgeConfig())
    inputs = {**stages.inputs, "judge_data": write_judge_data(tmp_path_factory.mktemp("judge_data"))}
    train_judge(own, inputs, out, lambda *_, **__: None)
    return out / "artifact"


@pytest.fixture(scope="module")
def runs(
    stages: Any, judge: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, float]]]:
    """The same PPO with the judge and without it: the artifact and the metrics."""
    from components.ppo import stage

    found = {}
    for name, more in (("with", {"judge": judge}), ("without", {})):
        out = tmp_path_factory.mktemp(name)
        metrics = stage.run(stages.job("ppo", **WATCHED), {**stages.inputs, **more}, out, lambda *_, **__: None)
        found[name] = out / "artifact", metrics
    return found


def test_what_is_trained_is_the_same_to_the_byte_with_a_judge(runs: Any, digests: Any) -> None:
    (judged, _), (plain, _) = runs["with"], runs["without"]
    assert digests(judged / "model") == digests(plain / "model")
    history = read_rows(judged / "history.jsonl")
    told = {name for row in history for name in row if "judge" in name}
    assert told == {f"ppo/watched_judge_gain{end}" for end in ("", "_low", "_high")}
    assert [{k: v for k, v in row.items() if k not in told} for row in history] == read_rows(plain / "history.jsonl")


def test_the_gain_is_that_of_the_judges_own_scores_on_its_own_scale(runs: Any, judge: Path, stages: Any) -> None:
    artifact, metrics = runs["with"]
    rows, scale = read_rows(artifact / "evaluation.jsonl"), ScoreScale.read(judge)
    assert len(rows) == 16
    gain = paired_gain(
        *([row[of]["judge"] for row in rows] for of in ("policy", "sft")), [str(r["prompt"]) for r in rows]
    )
    for end, value in (("", gain.value), ("_low", gain.low), ("_high", gain.high)):
        assert metrics[f"policy/judge_gain{end}"] == metrics[f"policy/judge_trained_gain{end}"] == pytest.approx(value)
    job = stages.job("ppo", **WATCHED)
    models = Models.load(job, {**stages.inputs, "judge": judge})
    model, tokenizer = load_scorer(judge, job.runtime)
    prompts = [row["prompt"] for row in read_split(stages.inputs["data"] / "prompts.test")[:16]]
    found = list(ppo_models_scored(models, prompts, job, model, tokenizer, scale))
    assert [row["sft"]["judge"] for row in rows] == pytest.approx(found, abs=1e-4)
    assert not any("judge" in name for name in runs["without"][1])
    assert "judge" not in read_rows(runs["without"][0] / "evaluation.jsonl")[0]["sft"]


def ppo_models_scored(models: Models, prompts: Any, job: Any, model: Any, tokenizer: Any, scale: ScoreScale) -> Any:
    """The judge's scores of the SFT model's responses, by the code that scores whole token lists."""
    from components.ppo.experience import sampled_batches

    for _, samples, _ in sampled_batches(models, models.sft, prompts, job, "evaluation"):
        ids = [row[mask].tolist() for row, mask in zip(samples.ids, samples.mask, strict=True)]
        yield from scale(score_sequences(model, tokenizer.pad_token_id, ids, job.runtime)).tolist()


def test_rollouts_never_ask_the_judge(stages: Any, judge: Path, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from components.ppo.experience import gather_experience

    job, models, samples = load(of=stages._replace(inputs={**stages.inputs, "judge": judge}))
    assert models.judge is not None and models.judge_scale is not None
    asked, real = [], ppo_models.score_tokens

    def counting(model: Any, *given: Any, **more: Any) -> torch.Tensor:
        asked.append(model is models.judge)
        return real(model, *given, **more)

    monkeypatch.setattr(ppo_models, "score_tokens", counting)
    gather_experience(models, samples, job, 0.1)
    assert asked and not any(asked)
    prompts = [row["prompt"] for row in read_split(stages.inputs["data"] / "prompts.test")[:4]]
    assert respond(models, models.sft, prompts, job, stages.inputs["data"])[0].judge is None and not any(asked)
    assert respond(models, models.sft, prompts, job, stages.inputs["data"], by_judge=True)[0].judge is not None


def test_the_last_policys_gain_stands_beside_the_published_ones(stages: Any, judge: Path, tmp_path: Path) -> None:
    job = stages.job("ppo", **WATCHED)
    models = Models.load(job, {**stages.inputs, "judge": judge})
    with torch.no_grad():
        for weights in models.policy.parameters():
            weights.add_(0.05 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(0)))
    metrics = evaluate_last(models, job, stages.inputs["data"], tmp_path)
    mine = [row["judge"] for row in read_rows(tmp_path / "artifact" / "last.jsonl")]
    prompts = [row["prompt"] for row in read_split(stages.inputs["data"] / "prompts.test")[:16]]
    its = [row.judge for row in respond(models, models.sft, prompts, job, stages.inputs["data"], by_judge=True)]
    gain = paired_gain(mine, its, map(str, prompts))
    assert metrics["policy/last_judge_gain"] == pytest.approx(gain.value) and gain.value != 0
    assert metrics["policy/last_judge_gain_high"] == pytest.approx(gain.high)


def test_a_response_that_another_token_ended_is_scored_with_eos_by_reward_model_and_judge(
    stages: Any, judge: Path, load: Any
) -> None:
    """They were trained on texts that end with EOS. The ending is replaced by hand here."""
    from components.ppo.models import frozen_pass

    job, models, free = load(of=stages._replace(inputs={**stages.inputs, "judge": judge}))
    set_endings(models.tokenizer, [models.tokenizer.convert_ids_to_tokens(int(free.response_ids[0, 2]))])
    eos, other = endings_of(models.tokenizer).ids
    prompts = [row[mask].tolist() for row, mask in zip(free.prompt_ids, free.prompt_mask, strict=True)]
    samples = with_endings(sample(models.policy, models.tokenizer, prompts, job.generation, 0), models.tokenizer)
    said = [row[mask].tolist() for row, mask in zip(samples.response_ids, samples.response_mask, strict=True)]
    assert 0 < sum(ids[-1] == other for ids in said) < len(said)
    whole = [[*p, *ids[:-1], eos if ids[-1] == other else ids[-1]] for p, ids in zip(prompts, said, strict=True)]
    found = frozen_pass(models, samples, job, by_judge=True)
    for name, model in (("raw_scores", models.reward_model), ("judge_scores", models.judge)):
        expected = score_sequences(model, models.tokenizer.pad_token_id, whole, job.runtime)
        torch.testing.assert_close(getattr(found, name), expected.to(torch.float32), rtol=0, atol=1e-5)
