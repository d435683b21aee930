"""The PPO stage as a whole: its checks, its files, and that an interruption leaves no trace in them."""

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from components.base.errors import CheckFailed, UserError
from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.gates.renamed import METRICS_OF_TRAINING
from components.ppo import experience, stage
from components.ppo.config import PpoConfig
from components.ppo.learner import Learner
from components.ppo.models import Models
from components.ppo.monitors import responses
from components.ppo.stage import prompts_of
from components.training.stopping import Interrupted, graceful
from tests.forks import Forked
from tests.splits import write_split
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def undisturbed(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("ppo")
    return out, stages.run("ppo", out)


def test_the_artifact_holds_what_the_design_names(undisturbed: tuple[Path, dict[str, float]], stages: Any) -> None:
    out, metrics = undisturbed
    artifact = out / "artifact"
    files = {
        "model",
        "history.jsonl",
        "kl_carriers.jsonl",
        "samples.jsonl",
        "evaluation.jsonl",
        "evaluation_samples.jsonl",
        "worst.jsonl",
        "metrics.json",
        "metadata.json",
    }
    assert {p.name for p in artifact.iterdir()} == files
    history = read_rows(artifact / "history.jsonl")
    assert [row["update"] for row in history] == [1, 2, 3, 4, 5]
    assert not any("second" in name for row in history for name in row), "timings have no place in a digest"
    assert abs(history[0]["ppo/kl"]) < 1e-5 and any(row["ppo/kl"] != 0 for row in history[1:])
    assert {row["update"] for row in read_rows(artifact / "samples.jsonl")} == {0, 2, 4}
    evaluation = read_rows(artifact / "evaluation.jsonl")
    assert len(evaluation) == metrics["policy/evaluated"] == 8
    assert evaluation[0].keys() == {"prompt", "policy", "sft"}
    again = read_rows(artifact / "evaluation_samples.jsonl")
    assert [row["prompt"] for row in again] == [row["prompt"] for row in evaluation for _ in range(3)]
    assert json.loads((artifact / "metrics.json").read_text()) == metrics
    names = (
        "kl kl_high kl_per_token proxy_reward reward_gain reward_gain_low demonstration_perplexity_ratio repetition "
        "rewarded_score both_ended distinct_ratio dissimilarity_ratio entropy_ratio special_tokens sft_special_tokens "
        "distinct length_ratio ended echo gold violations violations_excess entropy response_tokens"
    )
    assert {f"policy/{name}" for name in names.split()} <= metrics.keys()
    names = "beta clip_fraction approx_kl explained_variance ratio_max replaced_max score_spread_min"
    assert {f"ppo/{name}" for name in names.split()} <= metrics.keys()
    assert all(torch.isfinite(torch.tensor(v)) for v in metrics.values())


def test_one_sample_a_prompt_is_judged_without_further_ones(stages: Any, tmp_path: Path) -> None:
    metrics = stages.run("ppo", tmp_path, updates=1, repeats={"samples": 1})
    assert (tmp_path / "artifact" / "evaluation_samples.jsonl").read_bytes() == b""
    assert {"policy/worse_prompts_excess_high", "policy/kl_beyond_ceiling_high"} <= metrics.keys()
    # A final metric of the training is named in the list, or an earlier release's name for it would be rewritten.
    assert {name[4:] for name in metrics if name.startswith("ppo/")} <= {*METRICS_OF_TRAINING}


def test_the_proxy_reward_of_an_update_is_the_judged_score_and_samples_show_it_beside_the_rewarded_one(
    undisturbed: tuple[Path, dict[str, float]],
) -> None:
    artifact = undisturbed[0] / "artifact"
    history, samples = read_rows(artifact / "history.jsonl"), read_rows(artifact / "samples.jsonl")
    assert len(samples) == 3 * 8, "all of the batch is shown"
    for update in (0, 2, 4):
        rows = [row for row in samples if row["update"] == update]
        for name, metric in (("score", "ppo/proxy_reward"), ("reward", "ppo/rewarded_score")):
            assert history[update][metric] == pytest.approx(sum(row[name] for row in rows) / 8, abs=1e-5)
    assert any(abs(row["score"] - row["reward"]) > 0.01 for row in samples), "a missing EOS is replaced in training"


def test_final_numbers_are_those_of_the_held_out_responses(undisturbed: tuple[Path, dict[str, float]]) -> None:
    out, metrics = undisturbed
    rows = read_rows(out / "artifact" / "evaluation.jsonl")
    kl = [row["policy"]["kl"] for row in rows]
    assert metrics["policy/kl"] == pytest.approx(sum(kl) / len(kl)) and metrics["policy/kl_high"] > metrics["policy/kl"]
    tokens = sum(row["policy"]["tokens"] for row in rows)
    assert metrics["policy/kl_per_token"] == pytest.approx(sum(kl) / tokens)
    gain = [row["policy"]["score"] - row["sft"]["score"] for row in rows]
    assert metrics["policy/reward_gain"] == pytest.approx(sum(gain) / len(gain))
    assert all(row["sft"]["kl"] == 0 for row in rows), "the SFT policy is the reference"


@pytest.mark.parametrize("at", [1, 4, 5])
def test_interrupted_and_started_again_it_ends_with_the_same_bytes(
    stages: Any, undisturbed: Any, tmp_path: Path, at: int, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path, interrupting(at))  # a checkpoint every 2 updates, and after the last
    again = interrupting(-1)
    assert stages.run("ppo", tmp_path, again) == undisturbed[1]
    assert again.steps == [1, 2, 3, 4, 5], "the curve is whole: what the checkpoint holds is reported again"
    assert again.resumed == {1: [], 4: [(4, 5)], 5: [(5, 5)]}[at]
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


def test_told_to_stop_it_finishes_the_update_and_started_again_it_ends_with_the_same_bytes(
    stages: Any, undisturbed: Any, tmp_path: Path, digests: Callable[[Path], Any]
) -> None:
    heard: list[int] = []

    def observe(step: int, metrics: Mapping[str, float], total: int | None = None, **_: Any) -> None:
        heard.append(step)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted), graceful():
        stages.run("ppo", tmp_path, observe, checkpoint_every=100)
    assert heard == [1, 2, 3], "the update after the signal is finished and reported"
    assert [path.name for path in tmp_path.rglob("step-*.json")] == ["step-000000003.json"]
    assert stages.run("ppo", tmp_path) == undisturbed[1]
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


def test_updates_longer_than_the_minutes_between_checkpoints_are_each_checkpointed(
    stages: Any, undisturbed: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    seldom = {"checkpoint_every": 100, "checkpoint_minutes": 1e-9}
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path, interrupting(3), **seldom)
    assert sorted(path.name for path in tmp_path.rglob("step-*.json")) == ["step-000000002.json", "step-000000003.json"]
    stages.run("ppo", tmp_path)
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


def test_an_adaptive_tethers_state_survives_an_interruption(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    options = {"updates": 13, "learning_rate": 1e-2, "checkpoint_every": 4,
               "kl": {"control": "adaptive", "coefficient": 0.1, "target": 0.2, "horizon": 1}}  # fmt: skip
    stages.run("ppo", tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path / "cut", interrupting(6), **options)
    stages.run("ppo", tmp_path / "cut", **options)
    betas = [row["ppo/beta"] for row in read_rows(tmp_path / "whole" / "artifact" / "history.jsonl")]
    assert len(set(betas)) > 4, "the coefficient must move for this to test anything"
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def killed(stages: Any, out: Path, at: int, **options: Any) -> int | None:
    """Run the stage in a forked process that SIGKILL ends at step `at`; its exit code."""

    def observe(step: int, *_: Any, **__: Any) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    process = Forked(target=lambda: stages.run("ppo", out, observe, **options))
    process.start()
    process.join(PATIENCE * 200)
    return process.exitcode


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_by_the_system_and_started_again_it_ends_with_the_same_bytes(
    stages: Any, undisturbed: Any, tmp_path: Path, digests: Callable[[Path], Any]
) -> None:
    assert killed(stages, tmp_path, at=3) == -signal.SIGKILL
    assert list((tmp_path / "checkpoint").rglob("*.safetensors")), "it was killed after a checkpoint"
    assert not (tmp_path / "artifact").exists()
    assert stages.run("ppo", tmp_path) == undisturbed[1]
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


@pytest.mark.parametrize("unit", ["response", "token"])
def test_a_run_stops_above_its_ceiling_and_says_so_interrupted_or_not(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], unit: str
) -> None:
    ceiling = 0.02 if unit == "response" else 0.002
    kl = {"control": "fixed", "coefficient": 0.0, "ceiling": ceiling, "unit": unit}
    options = {"updates": 24, "learning_rate": 0.02, "stop_epochs_above": None, "kl": kl}
    metrics = stages.run("ppo", tmp_path / "whole", **options)
    history = read_rows(tmp_path / "whole" / "artifact" / "history.jsonl")
    assert metrics["ppo/stopped"] == 1 and metrics["ppo/updates"] == len(history) < 24
    held = "ppo/kl" if unit == "response" else "ppo/kl_per_token"
    above = [row[held] > ceiling for row in history]
    far = [row[f"{held}_low"] > 3 * ceiling for row in history]
    assert far[-1] or all(above[-5:])
    assert not any(far[:-1]) and not any(all(above[n : n + 5]) for n in range(len(above) - 5))
    if unit == "token":
        return  # one of both goes on from a checkpoint
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path / "cut", interrupting(len(history) - 1), **options)
    stages.run("ppo", tmp_path / "cut", **options)
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_a_check_that_stops_the_run_leaves_its_batch_and_the_checkpoint_before_it(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: Callable[[Path], Any], undisturbed: Any
) -> None:
    real = experience.token_rewards
    updates = itertools.count(1)

    def spoilt(*arguments: Any) -> Tensor:
        rewards = real(*arguments)
        return rewards * float("nan") if next(updates) == 4 else rewards

    with monkeypatch.context() as patch:
        patch.setattr(experience, "token_rewards", spoilt)
        with pytest.raises(CheckFailed, match=r"loss is nan.* batch of update 4 is kept in .*stopped-4\.safetensors"):
            stages.run("ppo", tmp_path)
    batch = load_file(tmp_path / "checkpoint" / "stopped-4.safetensors")
    assert batch["returns"].isnan().any() and batch["response_ids"].shape == batch["policy"].shape
    assert batch.keys() >= {"prompt_ids", "response_mask", "scores", "advantages", "values", "reference"}
    assert stages.run("ppo", tmp_path) == undisturbed[1], "it continues from the checkpoint"
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


@pytest.mark.parametrize(("which", "named"), [("sft", "SFT policy"), ("reward_model", "reward model")])
def test_a_held_model_that_changes_stops_the_run(
    stages: Any, tmp_path: Path, which: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Learner.update

    def update(self: Learner, experience: Any, number: int) -> dict[str, float]:
        if number == 1:
            with torch.no_grad():
                next(getattr(self.models, which).parameters()).view(-1)[-1].add_(1e-4)
        return whole(self, experience, number)

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(CheckFailed, match=f"the {named} changed during training"):
        stages.run("ppo", tmp_path, updates=2)
    assert not (tmp_path / "artifact" / "metrics.json").exists()


def test_dropout_that_the_sft_model_was_trained_with_is_off(stages: Any, tmp_path: Path) -> None:
    sft = tmp_path / "sft" / "model"
    sft.mkdir(parents=True)
    for file in (stages.inputs["sft"] / "model").iterdir():
        (sft / file.name).write_bytes(file.read_bytes())
    config = json.loads((sft / "config.json").read_text())
    (sft / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    other = type(stages)(stages.inputs | {"sft": sft.parent})
    other.run("ppo", tmp_path, updates=2)
    drift = [row["ppo/sampler_drift"] for row in read_rows(tmp_path / "artifact" / "history.jsonl")]
    assert len(drift) == 2 and max(drift) <= 1e-4


def test_more_than_4_epochs_warn_and_no_prompts_are_the_users_mistake(stages: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_split(data / "prompts.train", [])
    other = type(stages)(stages.inputs | {"data": data})
    with pytest.warns(UserWarning, match=r"epochs is 5"), pytest.raises(UserError, match="no training prompt"):
        other.run("ppo", tmp_path / "out", epochs=5)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"ppo/score_spread": 0.0}, "update 3: all rollouts have the same score"),
        ({"ppo/score_spread": 0.4, "ppo/replaced": 0.5}, "update 3: 50 % of the responses have no EOS"),
        ({"ppo/score_spread": 0.4, "ppo/replaced": 0.49}, ""),
        ({"ppo/score_spread": 0.4}, ""),
    ],
)
def test_scores_that_hardly_tell_rollouts_apart_warn(metrics: dict[str, float], said: str, caplog: Any) -> None:
    assert responses.warn_of_scores(3, metrics) is bool(said)
    assert [said in record.getMessage() for record in caplog.records] == [True] * bool(said)


def test_every_prompt_is_met_once_a_pass_whatever_the_batch() -> None:
    for count, size in ((10, 4), (3, 8), (7, 7)):
        config = PpoConfig(batch_size=size, minibatch_size=size, micro_batch_size=size)
        met = [i for number in range(1, count * 2 + 1) for i in prompts_of(range(count), config, number, seed=1)]
        for start in range(0, len(met) - count + 1, count):
            assert sorted(met[start : start + count]) == list(range(count))
    config = PpoConfig(batch_size=8, minibatch_size=8, micro_batch_size=8, group_size=2)
    first, other = (prompts_of(range(50), config, 1, seed) for seed in (1, 2))
    assert first != other and first[::2] == first[1::2] and len(set(first)) == 4


def test_reports_tell_metrics_by_step_with_speed_and_the_total(stages: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, Mapping[str, float], int | None]] = []
    tokens: list[float] = []

    def observe(step: int, metrics: Mapping[str, float], total: int | None = None, **other: Any) -> None:
        if "doing" not in other:
            seen.append((step, metrics, total))
            tokens.append(other["tokens"])

    began = time.perf_counter()
    stages.run("ppo", tmp_path, observe, updates=2)
    names = (
        "proxy_reward kl kl_per_token beta entropy response_tokens clip_fraction approx_kl explained_variance "
        "ratio_max learning_rate samples_per_second tokens_per_second gold violations replaced score_spread"
    )
    assert [(step, total) for step, _, total in seen] == [(1, 2), (2, 2)]
    assert tokens == pytest.approx([8 * metrics["ppo/response_tokens"] for _, metrics, _ in seen])
    assert all({f"ppo/{name}" for name in names.split()} <= metrics.keys() for _, metrics, _ in seen)
    assert all(8 / (time.perf_counter() - began) < m["ppo/samples_per_second"] < 1e5 for _, m, _ in seen)


def test_updates_ask_no_prompt_but_the_first_max_prompts(stages: Any, tmp_path: Path, monkeypatch: Any) -> None:
    encode, asked = stage.encode_prompts, []
    monkeypatch.setattr(stage, "encode_prompts", lambda t, prompts, n: asked.extend(prompts) or encode(t, prompts, n))
    stages.run("ppo", tmp_path / "out", max_prompts=2, updates=2)
    first = [row["prompt"] for row in read_split(stages.inputs["data"] / "prompts.train")[:2]]
    assert [asked.count(prompt) for prompt in first] == [len(asked) / 2] * 2


def test_people_s_data_have_no_gold_and_the_run_needs_none(stages: Any, tmp_path: Path) -> None:
    data = shutil.copytree(stages.inputs["data"], tmp_path / "data")
    (data / "task.json").write_text('{"name": "none"}')
    metrics = type(stages)(stages.inputs | {"data": data}).run("ppo", tmp_path / "out", updates=1, evaluate=512)
    assert metrics["policy/evaluated"] == 30, "all that there are, though 512 are asked for"
    assert not {"policy/gold", "policy/violations"} & metrics.keys() and "policy/reward_gain" in metrics


def test_the_stage_is_given_seeds_of_its_own(stages: Any, tmp_path: Path, undisturbed: Any) -> None:
    torch.manual_seed(12345)  # the global stream is nobody's source
    assert stages.run("ppo", tmp_path / "same") == undisturbed[1]
    assert stages.run("ppo", tmp_path / "other", seed=1) != undisturbed[1]
    assert responses.SHOWN == 8


def test_each_update_draws_afresh_and_a_repeated_update_the_same(stages: Any, tmp_path: Path) -> None:
    from components.rollouts.engine import open_rollouts

    job = stages.job("ppo")
    models = Models.load(job, stages.inputs)
    prompts = [row["prompt"] for row in read_split(stages.inputs["data"] / "prompts.train")[:8]]
    opened = open_rollouts(job.ppo.rollout, models.tokenizer, job.runtime, tmp_path)
    with opened as rollouts:
        first, again, second = (stage.sample(models, prompts, job, n, rollouts).response_ids for n in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first[:, :2], second[:, :2])
