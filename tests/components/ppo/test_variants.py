"""PPO's variants as whole runs: each trains, resumes to the same bytes, and does what its option says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.models.folders import load_reward_model
from components.models.runtime import Runtime
from components.ppo import evaluate, stage
from components.ppo.models import Models, weights_digest
from components.reward.scoring import read_sft_scores, score_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"critic": {"kind": "shared"}},
        {"critic": {"start": "sft"}},
        {"advantage": "sequence", "kl": {"control": "fixed", "coefficient": 0.1, "form": "k2"}},
        {"advantage": "rloo", "group_size": 2},
        {"advantage": "grpo", "group_size": 4, "kl": {"control": "fixed", "coefficient": 0.1, "form": "k3"}},
        {"advantage": "reinforce++", "ratio": "sequence", "clip_range": 0.01, "aggregation": "sequence"},
        {"advantage": "rloo", "group_size": 2, "pair_labels": "soft"},
        {"kl": {"control": "fixed", "coefficient": 0.1, "refresh_every": 1}},
    ],
    ids=["shared", "from-sft", "sequence-k2", "rloo", "grpo-k3", "reinforce-gspo", "online-dpo", "refresh"],
)
def test_every_variant_trains_and_resumes_to_the_same_bytes(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], options: dict[str, Any]
) -> None:
    # On some machines no response ends: replaced scores would all be equal, and teach nothing.
    options = {"updates": 3, "learning_rate": 1e-2, "score": {"missing_eos": "keep"}} | options
    metrics = stages.run("ppo", tmp_path / "whole", **options)
    assert abs(metrics["policy/kl"]) > 1e-3, "the policy moved"  # of a few samples, so of either sign
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path / "cut", interrupting(3), **options)
    assert stages.run("ppo", tmp_path / "cut", **options) == metrics
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_a_refreshed_reference_is_the_policy_of_its_time_and_kl_to_sft_is_what_is_judged(
    stages: Any, tmp_path: Path
) -> None:
    options = {"updates": 4, "learning_rate": 1e-2}
    kl = {"control": "fixed", "coefficient": 0.1}
    metrics = stages.run("ppo", tmp_path / "refreshed", kl=kl | {"refresh_every": 2}, **options)
    history = read_rows(tmp_path / "refreshed" / "artifact" / "history.jsonl")
    assert [abs(row["ppo/kl_to_reference"]) < 1e-5 for row in history] == [True, False, True, False]
    assert history[1]["ppo/kl_to_reference"] == history[1]["ppo/kl"], "until the first refresh the reference is SFT"
    assert abs(history[2]["ppo/kl"]) > 1e-3 and history[3]["ppo/kl_to_reference"] != history[3]["ppo/kl"]
    stages.run("ppo", tmp_path / "held", kl=kl, **options)
    held = read_rows(tmp_path / "held" / "artifact" / "history.jsonl")
    assert [row["ppo/kl"] for row in held[:3]] == [row["ppo/kl"] for row in history[:3]]
    assert held[3]["ppo/kl"] != history[3]["ppo/kl"], "from there on it pulls elsewhere"
    rows = read_rows(tmp_path / "refreshed" / "artifact" / "evaluation.jsonl")
    assert metrics["policy/kl"] == pytest.approx(sum(row["policy"]["kl"] for row in rows) / len(rows))
    assert all(row["sft"]["kl"] == 0 for row in rows) and metrics["policy/kl"] > history[3]["ppo/kl_to_reference"]


def test_groups_are_responses_to_one_prompt(stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = stage.gather_experience

    def watched(models: Any, samples: Any, *rest: Any) -> Any:
        seen.append(samples)
        return real(models, samples, *rest)

    monkeypatch.setattr(stage, "gather_experience", watched)
    stages.run("ppo", tmp_path, updates=1, advantage="rloo", group_size=4)
    prompts = [ids[mask].tolist() for ids, mask in zip(seen[0].prompt_ids, seen[0].prompt_mask, strict=True)]
    assert len(prompts) == 8 and prompts[0] == prompts[3] and prompts[4] == prompts[7] and prompts[0] != prompts[4]
    assert len({tuple(ids) for ids in seen[0].response_ids.tolist()}) > 2, "each is sampled anew"


def test_a_policy_is_rewarded_by_what_the_config_makes_of_several_reward_models(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], runtime: Runtime
) -> None:
    metrics = stages.run("reward", tmp_path / "whole", members=2)
    steps = interrupting(-1)
    with pytest.raises(KeyboardInterrupt):
        stages.run("reward", tmp_path / "reward", interrupting(11), members=2)  # 7 steps each: in the second member's
    assert stages.run("reward", tmp_path / "reward", steps, members=2) == metrics
    assert digests(tmp_path / "reward" / "artifact") == digests(tmp_path / "whole" / "artifact")
    assert steps.steps[-1] == 14 and len(steps.steps) < 7, "the first member isn't trained again"
    artifact = tmp_path / "reward" / "artifact"
    first, second = (weights_digest(load_reward_model(f, runtime)[0]) for f in (artifact, artifact / "members" / "2"))
    assert first != second and metrics["reward/disagreement"] > 0

    several = type(stages)(stages.inputs | {"reward": artifact})
    raw = read_sft_scores(artifact)
    centred = raw - raw.mean(1, keepdim=True)
    for how, combined in (("mean", centred.mean(0)), ("minimum", centred.amin(0))):
        models = Models.load(several.job("ppo", score={"ensemble": how}), several.inputs)
        assert models.scale.shift == pytest.approx(combined.mean().item(), abs=1e-9)
        assert models.scale.scale == pytest.approx(combined.std().item())
        ids = torch.tensor([[7, 8, 9]])
        one = [score_tokens(m, ids, ids > 0, runtime).double() for m in models.reward_model.members]
        pair = torch.cat(one) - raw.mean(1)
        expected = pair.mean() if how == "mean" else pair.min()
        assert score_tokens(models.reward_model, ids, ids > 0, runtime).item() == pytest.approx(
            expected.item(), abs=1e-5
        )
    options = {"updates": 2, "score": {"ensemble": "lower", "missing_eos": "keep"}}
    lower = several.run("ppo", tmp_path / "lower", **options)
    options["score"] = {"missing_eos": "keep"}
    assert lower["policy/proxy_reward"] != several.run("ppo", tmp_path / "mean", **options)["policy/proxy_reward"]
    with pytest.raises(UserError, match=r"ensemble is minimum, and .* holds one reward model\. Set reward\.members"):
        stages.run("ppo", tmp_path / "one", score={"ensemble": "minimum"})


def test_best_of_n_is_chosen_by_the_judged_score_and_not_by_what_training_makes_of_it(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[evaluate.Answered] = []
    real = evaluate.respond

    def watched(*arguments: Any, **named: Any) -> list[evaluate.Answered]:
        rows = real(*arguments, **named)
        drawn.extend(rows if named.get("stream") == "best of n" else [])
        return rows

    monkeypatch.setattr(evaluate, "respond", watched)
    metrics = stages.run("ppo", tmp_path, updates=1, best_of=4)
    fours = [drawn[i : i + 4] for i in range(0, len(drawn), 4)]
    judged = [max(rows, key=lambda row: row.score) for rows in fours]
    assert any(row.reward != max(each.reward for each in rows) for row, rows in zip(judged, fours, strict=True))
    assert metrics["policy/best_of_proxy_reward"] == pytest.approx(sum(row.score for row in judged) / len(judged))
    assert metrics["policy/best_of_response_tokens"] == pytest.approx(sum(row.tokens for row in judged) / len(judged))


def test_best_of_n_is_the_likeliest_to_please_of_n_sft_responses(stages: Any, tmp_path: Path) -> None:
    metrics = stages.run("ppo", tmp_path, updates=1, learning_rate=1e-9, best_of=4, score={"missing_eos": "keep"})
    assert metrics["policy/best_of_kl_bound"] == pytest.approx(0.6362943611)  # log 4 - 3/4
    assert metrics["policy/best_of_proxy_reward"] > metrics["policy/proxy_reward"] + 0.3, "the policy is still SFT"
    assert "policy/best_of_gold" in metrics
    assert not any("best_of" in name for name in stages.run("ppo", tmp_path / "without", updates=1))
