"""PPO on several sources of reward: what is logged of each, their unit, judges, resuming, and other models."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.models.batching import encode_prompt, encode_response
from components.models.folders import load_reward_model, save_model
from components.models.runtime import Runtime
from components.ppo import stage
from components.reward.scoring import ScoreScale, score_sequences
from components.rewards.config import ModelReward
from components.rewards.model import ModelSource
from components.rewards.source import Replies
from components.rewards.weighted import agreement
from tests.components.ppo.test_stage import killed
from tests.components.rewards.scorer import Scorer


class Forgetful(Scorer):
    """Gives a response its length, and 5 more if it is asked for the same again; it reports no version."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()
        self.answer = self.score

    def score(self, body: Any) -> tuple[int, object]:
        told = list(map(str, zip(body["prompts"], body["responses"], strict=True)))
        scores = [len(each) + 5.0 * (each in self.seen) for each in told]
        self.seen |= set(told)
        return 200, {"scores": scores}


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Forgetful]:
    with Forgetful() as made:
        yield made


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, forgetful: Forgetful) -> dict[str, Any]:
    """The pipeline's model, a function and an HTTP scorer, and a judge."""
    root = tmp_path_factory.mktemp("own")
    (root / "mine.py").write_text(
        "def brief(prompts, responses, rows):\n    return [-len(each) for each in responses]\n"
    )
    return {"updates": 3, "evaluate": 16, "rewards": [
        {"source": "pipeline"}, {"source": "function:mine:brief", "root": str(root), "weight": 0.5},
        {"source": f"http:{forgetful.url}", "weight": -0.25},
        {"source": "verifier:regex", "value": "order", "name": "topic", "judge": True, "scale": 1.0},
    ]}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(stages: Any, options: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("several")
    return out, stages.run("ppo", out, **options)


def test_each_source_is_logged_apart_and_the_reward_is_their_weighted_sum(undisturbed: Any) -> None:
    out, metrics = undisturbed
    for row in read_rows(out / "artifact" / "history.jsonl"):
        names = {name for name in row if name.startswith("ppo/reward_")}
        assert names == {f"ppo/reward_{name}" for name in ("pipeline", "brief", "http", "rank_correlation")}
        assert -1 <= row["ppo/reward_rank_correlation"] <= 1
    total = json.loads((out / "artifact" / "rewards.json").read_text())["sum"]
    for each in read_rows(out / "artifact" / "evaluation.jsonl"):
        row = each["policy"]
        summed = row["reward_pipeline"] + 0.5 * row["reward_brief"] - 0.25 * row["reward_http"]
        assert row["score"] == pytest.approx((summed - total["shift"]) / total["scale"], abs=1e-4)
    assert metrics["policy/reward_gain"] != metrics["policy/reward_pipeline_gain"]


def test_a_judge_has_a_gain_with_an_interval_and_is_in_no_reward(undisturbed: Any) -> None:
    out, metrics = undisturbed
    rows = read_rows(out / "artifact" / "evaluation.jsonl")
    gain = [row["policy"]["reward_topic"] - row["sft"]["reward_topic"] for row in rows]
    assert metrics["policy/judge_topic_gain"] == pytest.approx(sum(gain) / len(gain))
    assert (
        metrics["policy/judge_topic_gain_low"]
        <= metrics["policy/judge_topic_gain"]
        <= metrics["policy/judge_topic_gain_high"]
    )
    assert "ppo/reward_topic" not in read_rows(out / "artifact" / "history.jsonl")[0]


def test_scales_are_measured_on_sft_responses(undisturbed: Any) -> None:
    """The first update's responses are SFT's, to other prompts: their scaled scores are near mean 0."""
    first = read_rows(undisturbed[0] / "artifact" / "history.jsonl")[0]
    assert abs(first["ppo/reward_brief"]) < 1.5 and abs(first["ppo/reward_http"]) < 1.5
    assert abs(first["ppo/proxy_reward"]) < 1.5


def test_interrupted_and_resumed_it_ends_with_the_same_bytes_though_the_scorer_answers_otherwise_by_then(
    stages: Any, options: Any, undisturbed: Any, forgetful: Forgetful, tmp_path: Path, interrupting: Any,
    digests: Callable[[Path], Any],
) -> None:  # fmt: skip
    forgetful.seen.clear()
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path, interrupting(3), **options)  # a checkpoint after 2: update 3 is scored again
    assert stages.run("ppo", tmp_path, **options) == undisturbed[1]
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


def test_the_pipelines_model_alone_in_the_list_trains_as_without_a_list(stages: Any, tmp_path: Path) -> None:
    """Shift and scale come from other SFT responses; with those of the reward stage set by hand, all is the same."""
    plain = {"updates": 2, "evaluate": 8, "score": {"missing_eos": "keep"}}
    unit = ScoreScale.read(stages.inputs["reward"])
    stages.run("ppo", tmp_path / "plain", **plain)
    listed = [{"source": "pipeline", "shift": unit.shift, "scale": unit.scale}]
    stages.run("ppo", tmp_path / "listed", **plain, rewards=listed)
    one, other = (read_rows(tmp_path / name / "artifact" / "history.jsonl") for name in ("listed", "plain"))
    for a, b in zip(one, other, strict=True):
        assert a["ppo/proxy_reward"] == pytest.approx(b["ppo/proxy_reward"], abs=1e-5)
        assert a["ppo/kl"] == pytest.approx(b["ppo/kl"], abs=1e-5)
    assert not (tmp_path / "plain" / "artifact" / "rewards.json").exists()


def test_a_source_that_gives_all_sft_responses_one_score_needs_a_scale_by_hand(stages: Any, tmp_path: Path) -> None:
    never = {"source": "verifier:exact", "value": "no such reply"}
    with pytest.raises(UserError, match="gives each of 16 SFT responses the same score"):
        stages.run("ppo", tmp_path, rewards=[never])


def test_our_reward_model_as_an_external_one_scores_512_texts_as_the_stage_does(stages: Any) -> None:
    from components.ppo.models import Models

    models = Models.load(stages.job("ppo"), stages.inputs)
    rows = [row for split in ("train", "calibration", "test") for row in read_split(
        stages.inputs["data"] / f"pairs.{split}")]  # fmt: skip
    said = [(row["prompt"], row[side]) for row in rows for side in ("chosen", "rejected")]
    said = [(prompt, f"{text} {i}" if i >= len(said) else text) for i, (prompt, text) in enumerate([*said, *said])][
        :512
    ]
    source = ModelSource(ModelReward(source="model:x"), stages.inputs["reward"], stages.job("ppo").runtime)
    found = source.score(Replies([p for p, _ in said], [t for _, t in said], [{}] * len(said)))
    ids = [encode_prompt(models.tokenizer, p, 1 << 30) + encode_response(models.tokenizer, t, 1 << 30) for p, t in said]
    stage_scores = score_sequences(models.reward_model, models.tokenizer.pad_token_id, ids, stages.job("ppo").runtime)
    assert len(found) == 512
    assert (torch.tensor(found) - stage_scores).abs().max() < 1e-4


def test_a_response_that_was_cut_is_scored_without_an_ending(stages: Any, runtime: Runtime) -> None:
    """As the stage scores it by the pipeline's own model; another classifier's template ends turns too."""
    prompts, texts = [[{"role": "user", "content": "my order is late"}]] * 2, ["it arrives", "it arrives"]
    replies = Replies(prompts, texts, [{}] * 2, [True, False])
    for folder in (stages.inputs["reward"], stages.inputs["reward"] / "model"):
        model, tokenizer = load_reward_model(stages.inputs["reward"], runtime)
        source = ModelSource(ModelReward(source="model:x"), folder, runtime)
        found = source.score(replies)
        ids = encode_prompt(tokenizer, prompts[0], 1 << 30) + encode_response(tokenizer, texts[0], 1 << 30)
        assert ids[-1] == tokenizer.eos_token_id
        expected = score_sequences(model, tokenizer.pad_token_id, [ids, ids[:-1]], runtime)
        assert found == pytest.approx(expected.tolist(), abs=1e-5) and abs(found[0] - found[1]) > 1e-4


def test_conversations_that_a_reward_model_cuts_are_counted_and_said(
    stages: Any, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    source = ModelSource(ModelReward(source="model:x"), stages.inputs["reward"], runtime)
    source._scorer.longest = 20
    prompts = [[{"role": "user", "content": "late " * number}] for number in (1, 30, 30)]
    for _ in range(2):
        source.score(Replies(prompts, ["it arrives"] * 3, [{}] * 3))
    source.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert "model:x: 2 of 3 conversations have more tokens than the model reads (20)" in first
    assert "model:x: 4 of 6 conversations" in last


def test_a_reward_model_with_a_tokenizer_of_its_own_rewards_ppo_as_its_own_forward_scores(
    stages: Any, tmp_path: Path
) -> None:
    """A random Llama over bytes: its raw score of each evaluated response, computed by transformers alone."""
    torch.manual_seed(5)
    tokenizer = Tokenizer(BPE({each: i for i, each in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    by_bytes = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    by_bytes.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    shape = LlamaConfig(
        vocab_size=len(by_bytes), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=by_bytes.pad_token_id, eos_token_id=by_bytes.eos_token_id, initializer_range=0.5,
    )  # fmt: skip
    theirs = LlamaForSequenceClassification(shape).eval()
    save_model(theirs, by_bytes, tmp_path / "theirs")
    job = stages.job("ppo", updates=1, evaluate=8, rewards=[{"source": "model:x", "name": "theirs"}])
    given = {**stages.inputs, "rewards/theirs": tmp_path / "theirs"}
    stage.run(job, given, tmp_path / "out", lambda *_, **__: None)
    unit = json.loads((tmp_path / "out" / "artifact" / "rewards.json").read_text())["sources"]["theirs"]
    for row in read_rows(tmp_path / "out" / "artifact" / "evaluation.jsonl"):
        said = [*row["prompt"], {"role": "assistant", "content": row["policy"]["response"]}]
        told = by_bytes.apply_chat_template(said, tokenize=False)
        if not row["policy"]["ended"]:
            told = told.removesuffix("<end>")  # nothing ended it
        with torch.no_grad():
            raw = float(theirs(torch.tensor([by_bytes(told, add_special_tokens=False)["input_ids"]])).logits)
        assert row["policy"]["reward_theirs"] * unit["scale"] + unit["shift"] == pytest.approx(raw, abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_by_the_system_with_a_function_a_scorer_and_a_verifier_it_goes_on_to_the_same_bytes(
    stages: Any, options: Any, forgetful: Forgetful, tmp_path: Path, digests: Callable[[Path], Any]
) -> None:
    """SIGKILL ends function's process and stage alike; a new process of the function scores what is left."""
    verifier = {"source": "verifier:regex", "value": "order", "name": "topic", "scale": 1.0}
    own = {**options, "checkpoint_every": 1, "rewards": [*options["rewards"][:3], verifier]}
    forgetful.seen.clear()
    metrics = stages.run("ppo", tmp_path / "whole", **own)
    forgetful.seen.clear()
    out = tmp_path / "killed"
    assert killed(stages, out, at=2, **own) == -signal.SIGKILL
    assert list((out / "checkpoint").rglob("*.safetensors"))
    assert stages.run("ppo", out, **own) == metrics
    assert digests(out / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_the_lowest_rank_correlation_of_any_two_sources_is_their_agreement() -> None:
    a = torch.tensor([1.0, 2, 3, 4])
    assert agreement({"a": a, "b": a**3, "c": -a}) == pytest.approx(-1)
    assert agreement({"a": a, "b": torch.tensor([1.0, 3, 2, 4])}) == pytest.approx(0.8)
    assert agreement({"a": a, "b": torch.ones(4)}) is None
