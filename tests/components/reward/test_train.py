"""What a reward model can learn from, and what comes out: votes, weights, heads, members, their average."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForSequenceClassification

from components.base.errors import UserError
from components.data.tables.published import read_split
from components.models.batching import pad
from components.models.folders import load_causal_lm, load_reward_model
from components.models.runtime import Runtime
from components.ppo.models import Models
from components.reward.config import RewardConfig
from components.reward.scoring import ScoreScale, read_sft_scores, score_sequences, score_tokens
from components.reward.train import start_model
from components.reward.training_pairs import NO_VOTES, encode_pairs, member_rows
from tests.components.conftest import of_steps
from tests.splits import write_split

LORA = {"lora": {"rank": 2}, "learning_rate": 1e-2}
OBJECTIVES = {"objectives": {"shorter": 0.5, "longer": 2.0}}


def voted(row: dict[str, Any], number: int) -> dict[str, Any]:
    """`row` with votes: people who like length, people who don't and looked at two pairs of three, and all of them."""
    gap = len(row["chosen"]) - len(row["rejected"])
    longer = 0.5 if gap == 0 else float(gap > 0)
    votes = {"longer": longer} | ({"shorter": 1 - longer} if number % 3 else {})
    return row | {"soft_label": 0.7 if number % 4 else None, "weight": 0.25 if number % 2 else 1.0, "objectives": votes}


@pytest.fixture(scope="module")
def desk(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stages on pairs with votes; the first thirty training pairs are of one prompt."""
    data = shutil.copytree(stages.inputs["data"], tmp_path_factory.mktemp("voted") / "data")
    for split in ("train", "calibration", "test"):
        rows = [voted(row, i) for i, row in enumerate(read_split(data / f"pairs.{split}"))]
        if split == "train":
            rows[:30] = [row | {"prompt": rows[0]["prompt"]} for row in rows[:30]]
        write_split(data / f"pairs.{split}", rows)
    return type(stages)(stages.inputs | {"data": data})


def steps_of(desk: Any, out: Path, **options: Any) -> list[dict[str, float]]:
    """The metrics of every step of a reward stage."""
    seen: list[dict[str, float]] = []
    desk.run("reward", out, of_steps(lambda step, metrics, **_: seen.append(dict(metrics))), **options)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {"labels": "shares"},
        OBJECTIVES | LORA,
        {"members": 2, "member_share": 0.6, "epochs": 2},
    ],
    ids=["shares", "objectives-lora", "members"],
)
def test_every_option_resumes_to_the_same_bytes(
    desk: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], options: dict[str, Any]
) -> None:
    metrics = desk.run("reward", tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        desk.run("reward", tmp_path / "cut", interrupting(9 if "members" in options else 5), **options)
    again = interrupting(-1)
    assert desk.run("reward", tmp_path / "cut", again, **options) == metrics
    assert again.steps[0] > 4, "what a checkpoint holds isn't done again"
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_votes_are_read_from_the_row_and_a_row_without_them_is_the_majoritys(language: Any, desk: Any) -> None:
    rows = read_split(desk.inputs["data"] / "pairs.train")[:4]
    plain = [{k: v for k, v in row.items() if k not in ("soft_label", "weight", "objectives")} for row in rows]
    generation = desk.job("reward").generation

    def pairs(rows: list[dict[str, Any]], **config: Any) -> list[Any]:
        return encode_pairs(language.tokenizer, rows, generation, RewardConfig(**config))

    assert [p.weight for p in pairs(rows)] == [1.0, 0.25, 1.0, 0.25] and {p.weight for p in pairs(plain)} == {1.0}
    assert {p.shares for p in [*pairs(rows), *pairs(plain, labels="shares")]} == {(1.0,)}
    assert [p.shares for p in pairs(rows, labels="shares")] == [(1.0,), (0.7,), (0.7,), (0.7,)]
    given = [p.shares for p in pairs(rows, **OBJECTIVES)]
    assert all(share[0] in (0.0, 0.5, 1.0) for share in given), "heads stand in the order of their names"
    assert [share[1] != share[1] for share in given] == [True, False, False, True]
    assert all(share != share for share in pairs(plain, **OBJECTIVES)[0].shares) and NO_VOTES != NO_VOTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "shares"}, r"pairs\.train: none of its 100 rows, from row 1 on, has soft_label.*labels"),
        ({"objectives": {"kind": 1}}, r"pairs\.train: none .* row 1 on, has objectives\.kind.*take kind out"),
    ],
)
def test_votes_that_nobody_gave_are_the_users_mistake(
    stages: Any, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        stages.run("reward", tmp_path, **options)
    assert not (tmp_path / "artifact").exists()


def test_trained_on_shares_it_says_what_share_of_people_agree_and_on_majorities_that_all_do(
    desk: Any, tmp_path: Path, runtime: Runtime
) -> None:
    rows = [row | {"soft_label": 0.7, "weight": 1.0} for row in read_split(desk.inputs["data"] / "pairs.train")[40:56]]
    data = shutil.copytree(desk.inputs["data"], tmp_path / "data")
    write_split(data / "pairs.train", rows)
    said = {}
    for labels in ("shares", "majority"):
        out = tmp_path / labels
        type(desk)(desk.inputs | {"data": data}).run(
            "reward", out, labels=labels, epochs=60, learning_rate=1e-2, checkpoint_every=100
        )
        model, tokenizer = load_reward_model(out / "artifact", runtime)
        pairs = encode_pairs(tokenizer, rows, desk.job("reward").generation)
        scores = [score_sequences(model, 0, [pair[side] for pair in pairs], runtime) for side in (0, 1)]
        said[labels] = torch.sigmoid(scores[0] - scores[1])
    assert said["shares"].mean().item() == pytest.approx(0.7, abs=0.03) and said["shares"].std() < 0.06
    assert said["majority"].median() > 0.99, "(one pair is two equal responses, once they are cut)"


@pytest.fixture(scope="module")
def objectives(desk: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stages on a reward model with a head that likes length and one that doesn't."""
    out = tmp_path_factory.mktemp("objectives")
    desk.run("reward", out, epochs=20, learning_rate=1e-2, checkpoint_every=1000, **OBJECTIVES)
    return type(desk)(desk.inputs | {"reward": out / "artifact"})


def test_each_head_learns_its_own_votes_and_the_published_model_names_them(objectives: Any, runtime: Runtime) -> None:
    artifact = objectives.inputs["reward"]
    model = AutoModelForSequenceClassification.from_pretrained(artifact / "model").eval()
    assert model.config.num_labels == 2 and model.config.id2label == {0: "longer", 1: "shorter"}
    assert model.config.label2id == {"longer": 0, "shorter": 1}
    assert ScoreScale.read(artifact).objectives == OBJECTIVES["objectives"]
    _, tokenizer = load_reward_model(artifact, runtime)
    rows = read_split(objectives.inputs["data"] / "pairs.train")
    pairs = encode_pairs(tokenizer, rows, objectives.job("reward").generation)
    logits = []
    for side in (0, 1):
        ids, mask = pad([pair[side] for pair in pairs], tokenizer.pad_token_id)
        with torch.no_grad():
            logits.append(model(input_ids=ids, attention_mask=mask.long()).logits)
    longer = torch.tensor([row["objectives"]["longer"] for row in rows])
    right = (logits[0] > logits[1]) == (longer == 1).unsqueeze(1)
    asked = longer != 0.5
    assert right[asked, 0].float().mean() > 0.85, "longer wins"
    assert right[asked, 1].float().mean() < 0.15, "shorter wins"


def test_ppo_and_its_critic_see_the_weighted_sum_of_the_heads(
    objectives: Any, tmp_path: Path, language: Any, runtime: Runtime
) -> None:
    artifact = objectives.inputs["reward"]
    model = AutoModelForSequenceClassification.from_pretrained(artifact / "model").eval()
    models = Models.load(objectives.job("ppo"), objectives.inputs)
    ids, mask = pad(language.prompts[:6], model.config.pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask.long()).logits
        combined = 2.0 * logits[:, 0] + 0.5 * logits[:, 1]
        assert torch.allclose(score_tokens(models.reward_model, ids, mask, runtime), combined, atol=1e-5)
        critic: Any = models.critic
        assert torch.allclose(score_tokens(critic.model, ids, mask, runtime), combined, atol=1e-5)
    scores = read_sft_scores(artifact)
    assert models.scale.shift == pytest.approx(scores.mean().item()) and scores.shape == (1, 16)
    assert critic.scale.shift == models.scale.shift and critic.scale.scale == models.scale.scale
    metrics = objectives.run("ppo", tmp_path, updates=2)
    assert json.loads((tmp_path / "artifact" / "metrics.json").read_text()) == metrics


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "lora"])
def test_heads_that_start_from_zeros_begin_at_the_loss_of_a_coin_and_learn(
    desk: Any, tmp_path: Path, lora: dict[str, Any]
) -> None:
    options = {"head_start": "zeros", "members": 2, "epochs": 3, "learning_rate": 1e-2, **lora}
    seen = steps_of(desk, tmp_path, **options)
    for member in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        assert member[0]["reward/train_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert member[-1]["reward/train_loss"] < math.log(2) - 0.05


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "lora"])
def test_members_start_with_heads_of_their_own(
    desk: Any, lora: dict[str, Any]
) -> None:
    job = desk.job("reward", members=2, **lora)
    first = start_model(job, desk.inputs["sft"], 0)
    one, other = (dict(m.named_parameters()) for m in (first, start_model(job, desk.inputs["sft"], 1, first)))
    drawn = [name for name in one if name.endswith(("score.weight", *(["lora_A_weight"] if lora else [])))]
    assert len(drawn) > bool(lora) and not any(torch.equal(one[name], other[name]) for name in drawn)


def test_members_steps_are_counted_through_also_where_they_have_more_or_fewer_pairs(desk: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    desk.run("reward", tmp_path, of_steps(lambda step, metrics, total=0, **_: seen.append((step, total))),
             members=3, member_share=0.5, epochs=2)  # fmt: skip
    rows = read_split(desk.inputs["data"] / "pairs.train")
    sizes = [len(member_rows(rows, 0.5, 0, member)) for member in range(3)]
    total = sum(2 * -(-size // 16) for size in sizes)
    assert len(set(sizes)) > 1 and seen == [(step, total) for step in range(1, total + 1)]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.floats(0.05, 1), st.integers(0, 3))
def test_a_members_rows_are_all_those_of_its_share_of_the_prompts(of: list[int], share: float, seed: int) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"order {i}"}]} for i in of]
    kept = member_rows(rows, share, seed, member=1).tolist()
    prompts = {of[i] for i in kept}
    assert kept == [i for i, prompt in enumerate(of) if prompt in prompts], "whole prompts, in the data's order"
    assert len(prompts) == max(1, round(share * len(set(of))))
    assert kept == member_rows(rows, share, seed, member=1).tolist()


def test_members_shares_differ() -> None:
    rows = [{"prompt": str(i)} for i in range(200)]
    one, other = (set(member_rows(rows, 0.5, 0, member).tolist()) for member in (0, 1))
    assert len(one) == len(other) == 100 and 30 < len(one & other) < 70
    assert [member_rows(rows, 1.0, 0, member).tolist() for member in (0, 1)] == [list(range(200))] * 2


def test_micro_batches_of_weighted_pairs_take_the_steps_of_the_whole_batch(desk: Any, tmp_path: Path) -> None:
    options = {"learning_rate": 1e-3, "epsilon": 1e-3} | OBJECTIVES
    whole = steps_of(desk, tmp_path / "whole", micro_batch_size=16, **options)
    parts = steps_of(desk, tmp_path / "parts", micro_batch_size=3, **options)
    for name in ("reward/train_loss", "reward/grad_norm"):
        assert [m[name] for m in parts] == pytest.approx([m[name] for m in whole], rel=1e-3), name
    assert parts[0]["reward/train_accuracy"] == pytest.approx(whole[0]["reward/train_accuracy"])


@pytest.mark.parametrize(
    "options",
    [{"objectives": {"a": 0.0}}, {"objectives": {"a": float("inf")}}, {"member_share": 0.0},
     {"objectives": {"a": 1.0}, "labels": "shares"}],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig(**options)


def test_the_order_in_which_objectives_are_named_changes_nothing() -> None:
    assert RewardConfig(objectives={"b": 1, "a": 2}).heads == RewardConfig(objectives={"a": 2, "b": 1}).heads


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_tells_the_tokens_that_it_computed_padding_to_the_pairs_longer_response_among_them(
    stages: Any, tmp_path: Path, runtime: Runtime, shared: bool
) -> None:
    told: list[float | None] = []
    stages.run("reward", tmp_path, of_steps(lambda step, metrics, *, tokens=None, **_: told.append(tokens)),
               shared_prompts=shared, max_pairs=16)  # fmt: skip
    _, tokenizer = load_reward_model(stages.inputs["reward"], runtime)
    rows = read_split(stages.inputs["data"] / "pairs.train")[:16]
    pairs = encode_pairs(tokenizer, rows, stages.job("reward").generation)
    longer = sum(max(len(p.chosen), len(p.rejected)) for p in pairs)
    sides = [list(zip(p.chosen[:-1], p.rejected[:-1], strict=False)) for p in pairs]
    once = sum(next((i for i, (a, b) in enumerate(both) if a != b), len(both)) for both in sides)
    assert told == [sum(len(p.chosen) + len(p.rejected) for p in pairs) - once if shared else 2 * longer]


def test_a_sources_weight_multiplies_the_loss_of_its_pairs_and_no_accuracy(
    stages: Any, tmp_path: Path, runtime: Runtime
) -> None:
    """Σ w s l / Σ w of ranking weights w, source's weights s and losses l: s is not in the divisor, so that batches of
    one source are weighted too. The held-out loss is Σ w l / Σ w."""
    data = shutil.copytree(stages.inputs["data"], tmp_path / "data")
    w, s = [1.0, 0.25] * 8, [1.6] * 5 + [0.4] * 11
    rows = [r | {"weight": w[i], "source_weight": s[i]} for i, r in enumerate(read_split(data / "pairs.train")[:16])]
    write_split(data / "pairs.train", rows, weighted=True)
    own = type(stages)(stages.inputs | {"data": data})
    job = own.job("reward")
    model, (_, tokenizer) = start_model(job, own.inputs["sft"], 0), load_causal_lm(own.inputs["sft"], job.runtime)
    pairs = encode_pairs(tokenizer, rows, job.generation)
    assert [(pair.weight, pair.source_weight) for pair in pairs] == list(zip(w, s, strict=True))
    sides = [p.chosen for p in pairs], [p.rejected for p in pairs]
    chosen, rejected = (score_sequences(model, tokenizer.pad_token_id, side, runtime).tolist() for side in sides)
    losses = [math.log1p(math.exp(b - a)) for a, b in zip(chosen, rejected, strict=True)]
    right = [float(a > b) for a, b in zip(chosen, rejected, strict=True)]
    (step,) = steps_of(own, tmp_path / "out", micro_batch_size=5)
    expected = sum(w[i] * s[i] * losses[i] for i in range(16)) / sum(w)
    assert step["reward/train_loss"] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - sum(w[i] * losses[i] for i in range(16)) / sum(w)) > 1e-3
    assert step["reward/train_accuracy"] == pytest.approx(sum(w[i] * right[i] for i in range(16)) / sum(w))
