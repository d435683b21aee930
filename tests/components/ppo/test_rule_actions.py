"""`ppo.rules.drop` and `ppo.rules.penalty`: what an update learns from, to the byte and by hand; balanced prompts."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.models.sampling import Samples
from components.ppo import experience
from components.ppo.config import PpoJob
from components.ppo.experience import Experience, advantages_of, gather_experience
from components.ppo.learner import Learner
from components.ppo.maths import leave_one_out
from components.ppo.models import FrozenPass, Models, frozen_pass, weights_digest
from components.ppo.stage import prompts_of
from components.training.loop import balanced_passes
from tests.splits import write_split

Load = Callable[..., tuple[PpoJob, Models, Samples]]
PROMISE: dict[str, Any] = {"patterns": {"promise": "promise", "refund": "refund"}, "drop": ["promise"]}
ADVANTAGES: list[dict[str, Any]] = [
    {},
    {"critic": {"kind": "shared"}},
    {"critic": {"clip_range": 0.2}, "aggregation": "sequence"},
    {"advantage": "sequence", "aggregation": "cap", "kl": {"control": "fixed", "form": "k2"}},
    {"advantage": "reinforce++"},
    {"advantage": "rloo", "group_size": 2},
    {"advantage": "grpo", "group_size": 2},
    {"advantage": "rloo", "group_size": 2, "pair_labels": "soft"},
]


def counted(violating: Sequence[int], size: int = 8, name: str = "promise") -> Any:
    """Rules by which the responses `violating` violate the rule `name` once."""
    rows = [{"violations": float(i in violating), "promise": 0.0, "refund": 0.0} for i in range(size)]
    for i in violating:
        rows[i][name] = 1.0
    return SimpleNamespace(count=lambda prompts, responses: rows)


def some(samples: Samples, rows: list[int]) -> Samples:
    """The responses `rows` of `samples`, padded as there."""
    names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "logprobs", "ended")
    return Samples(**{name: getattr(samples, name)[rows] for name in names})


def learned(load: Load, violating: Sequence[int], rows: list[int], **options: Any) -> tuple[Learner, Experience]:
    """What is to be learned from the responses `rows` alone, or from all, of which `violating` violate a rule.

    The frozen pass is always that of all eight, so that padding changes no bit.
    """
    job, models, samples = load(**{"warmup": 0.0, "decay": "none", "score": {"missing_eos": "keep"}} | options)
    models.rules = counted(violating, len(rows))
    passes = [None if tensor is None else tensor[rows] for tensor in frozen_pass(models, samples, job)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experience, "frozen_pass", lambda *_: FrozenPass(*passes))
        found = gather_experience(models, some(samples, rows), job, beta=0.1)
    return Learner.start(models, job), found


@pytest.mark.parametrize("options", ADVANTAGES, ids=str)
def test_dropping_responses_is_training_on_a_batch_without_them(load: Load, options: dict[str, Any]) -> None:
    """Six of eight are left: two minibatches of three, or one of three pairs."""
    left, pairs = [0, 1, 4, 5, 6, 7], "pair_labels" in options
    sizes = (8, 6) if pairs else (4, 3)  # three pairs make no two minibatches of equal size
    options = {"micro_batch_size": 2 if pairs else 1, "epochs": 2, "stop_epochs_above": None} | options
    whole, every = learned(load, [2, 3], list(range(8)), rules=PROMISE, minibatch_size=sizes[0], **options)
    apart, without = learned(load, [], left, batch_size=6, minibatch_size=sizes[1], **options)
    assert every.rules.rows == left and without.rules.rows is None
    assert torch.equal(every.advantages[left], without.advantages) and not every.advantages[2:4].any()
    assert every.kl_weight == without.kl_weight
    metrics, expected = whole.update(every, 0), apart.update(without, 0)
    assert metrics == expected and metrics["ppo/optimizer_steps"] == (2 if pairs else 4)
    for name, model in whole.models.trained().items():
        assert weights_digest(model) == weights_digest(apart.models.trained()[name]), name
    assert every.metrics["ppo/proxy_reward"] == pytest.approx(every.scaled_scores.mean().item()), "over all eight"
    shares = {name: every.metrics[f"ppo/{name}"] for name in ("left_out", "dropped_promise")}
    assert shares == {"left_out": 0.25, "dropped_promise": 0.25}


def test_each_step_has_as_many_responses_as_any_other_or_one_more(load: Load) -> None:
    job, models, _ = load(epochs=2, minibatch_size=4)
    steps = list(Learner.start(models, job)._minibatches(3, [0, 2, 3, 5, 7]))
    assert [len(rows) for _, rows in steps] == [2, 3, 2, 3]
    assert [number for number, _ in steps] == [12, 13, 14, 15], "as in a whole batch, so that demonstrations go on"
    assert all(sorted(a + b) == [0, 2, 3, 5, 7] for (_, a), (_, b) in list(pairwise(steps))[::2])


@pytest.mark.parametrize("advantage", ["rloo", "grpo"])
def test_a_group_is_compared_without_its_dropped_responses(load: Load, advantage: str) -> None:
    """Of the first group two responses are dropped; of the second three, so that the last has nothing beside it."""
    job, models, samples = load(advantage=advantage, group_size=4, rules=PROMISE, score={"missing_eos": "keep"})
    models.rules = counted([1, 2, 4, 5, 7])
    found = gather_experience(models, samples, job, beta=0.0)
    assert found.rules.rows == [0, 3] and found.metrics["ppo/left_out"] == 6 / 8
    assert found.metrics["ppo/dropped_promise"] == 5 / 8
    a, b = found.scores[0].item(), found.scores[3].item()
    high = (a - b) if advantage == "rloo" else (a - b) / 2 / (abs(a - b) / math.sqrt(2) + 1e-4)
    expected = torch.zeros(8)
    expected[0], expected[3] = high, -high
    assert abs(a - b) > 1e-3 and torch.allclose(found.advantages[:, 0], expected, atol=1e-5)
    assert found.advantages[[1, 2, 4, 5, 6, 7]].count_nonzero() == 0


def test_advantages_of_what_is_left_are_whitened_by_hand(load: Load) -> None:
    """Two responses of one and two tokens with rewards 1, 2 and 6; the third, of reward 99, is left out."""
    job, _, _ = load(advantage="reinforce++")
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    rewards = torch.tensor([[1.0, 0.0], [2.0, 6.0], [99.0, 99.0]])
    found = advantages_of([0, 1], rewards, torch.zeros(3), None, mask, job.ppo)
    to_come, mean = [1.0, 8.0, 6.0], 5.0  # deviation: sqrt((16 + 9 + 1) / 2) = sqrt(13)
    expected = [(x - mean) / math.sqrt(13) for x in to_come]
    assert found.advantages[mask].tolist() == pytest.approx([*expected, 0, 0], abs=1e-6)
    assert found.unit == pytest.approx(math.sqrt(13), rel=1e-6)


def test_a_penalty_is_taken_from_the_rewarded_score_once_and_nothing_else_changes(load: Load) -> None:
    rules = {"patterns": {"promise": "promise", "refund": "refund"}, "penalty": {"refund": 0.75, "violations": 0.25}}
    job, models, samples = load(advantage="rloo", group_size=4)
    plain = gather_experience(models, samples, job, beta=0.1)
    job = job.model_copy(update={"ppo": job.ppo.model_validate(job.ppo.model_dump() | {"rules": rules})})
    models.rules = counted([1, 6], name="refund")
    models.rules.count(None, None)[6]["refund"] = 5.0  # it counts once
    models.rules.count(None, None)[2]["violations"] = 1.0
    found = gather_experience(models, samples, job, beta=0.1)
    penalties = torch.tensor([0, 1.0, 0.25, 0, 0, 0, 1.0, 0])
    assert torch.equal(found.scores, plain.scores - penalties)
    assert torch.equal(found.scaled_scores, plain.scaled_scores) and found.rules.rows is None
    assert torch.allclose(found.advantages[:, 0], plain.advantages[:, 0] - leave_one_out(penalties, 4), atol=1e-5)
    assert found.metrics["ppo/rewarded_score"] == pytest.approx(plain.metrics["ppo/rewarded_score"] - 2.25 / 8)
    assert found.metrics["ppo/proxy_reward"] == plain.metrics["ppo/proxy_reward"]
    assert (found.metrics["ppo/penalised_refund"], found.metrics["ppo/penalised_violations"]) == (2 / 8, 3 / 8)
    assert "ppo/left_out" not in found.metrics


@pytest.mark.parametrize("options", ADVANTAGES, ids=str)
def test_a_batch_of_which_nothing_is_left_makes_no_step_and_says_so(
    load: Load, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    learner, found = learned(load, range(8), list(range(8)), rules=PROMISE, **options)
    before = {name: weights_digest(model) for name, model in learner.models.trained().items()}
    metrics = learner.update(found, 4)
    assert {name: weights_digest(model) for name, model in learner.models.trained().items()} == before
    assert metrics == {"ppo/learning_rate": learner.job.ppo.peak, "ppo/optimizer_steps": 0.0}
    assert not any(optimizer.state for optimizer in learner.optimizers.values())
    assert found.metrics["ppo/left_out"] == 1 and all(map(math.isfinite, found.metrics.values()))
    assert "update 5: ppo.rules.drop leaves out every response, so no step is made." in caplog.text


ACTING: dict[str, Any] = {
    "balance": "category",
    "rules": {"patterns": {"word": "refund|allowed|post", "letter": "9"}, "drop": ["word"], "penalty": {"letter": 0.5}},
}


@pytest.mark.parametrize("options", [{}, {"critic": {"kind": "shared"}, "lora": {"rank": 2}}], ids=str)
def test_a_run_with_actions_continues_to_the_same_bytes(
    options: dict[str, Any], stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    if "lora" in options:
        stages.run("reward", tmp_path / "reward", lora=options["lora"])
        stages = type(stages)(stages.inputs | {"reward": tmp_path / "reward" / "artifact"})
    one, two = tmp_path / "one", tmp_path / "two"
    metrics = stages.run("ppo", one, **ACTING, **options)
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", two, interrupting(4), **ACTING, **options)
    assert stages.run("ppo", two, **ACTING, **options) == metrics
    assert digests(one / "artifact") == digests(two / "artifact")
    history = read_rows(one / "artifact" / "history.jsonl")
    out = [row["ppo/left_out"] for row in history]
    assert 0 < sum(out) < len(out) and all(row["ppo/dropped_word"] == row["ppo/left_out"] for row in history)
    assert metrics["ppo/left_out"] == pytest.approx(sum(out) / len(out))
    assert any(row["ppo/penalised_letter"] for row in history)
    for row in history:
        assert row["ppo/dropped_word"] <= row["ppo/rule_word"] and row["ppo/penalised_letter"] <= row["ppo/rule_letter"]


def test_a_run_that_drops_everything_ends_with_sfts_weights(stages: Any, tmp_path: Path) -> None:
    rules = {"patterns": {"any": r"\w|\W"}, "drop": ["any"]}
    metrics = stages.run("ppo", tmp_path, updates=2, evaluate_every=None, rules=rules)
    assert metrics["ppo/left_out"] == 1.0 and "ppo/clip_fraction_max" not in metrics
    assert abs(metrics["policy/kl"]) < 1e-5


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7), size=st.integers(1, 12), seed=st.integers(0, 99)
)  # fmt: skip
def test_batches_are_balanced_and_no_prompt_returns_before_its_category_is_through(
    sizes: list[int], size: int, seed: int
) -> None:
    groups: Mapping[str, Sequence[int]] = {f"c{i}": [100 * i + j for j in range(n)] for i, n in enumerate(sizes)}
    steps = 40
    batches = [balanced_passes(groups, size, step, seed, "ppo", "prompts") for step in range(steps)]
    for taken in (*batches, [row for batch in batches for row in batch]):
        counts = Counter(row // 100 for row in taken)
        of_each = [counts[i] for i in range(len(sizes))]
        assert max(of_each) - min(of_each) <= 1 and len(taken) % size == 0
    for i, count in enumerate(sizes):
        of_category = [row for batch in batches for row in batch if row // 100 == i]
        for start in range(0, len(of_category) - count + 1, count):
            assert sorted(of_category[start : start + count]) == list(groups[f"c{i}"])
    assert batches[7] == balanced_passes(groups, size, 7, seed, "ppo", "prompts"), "of its number alone"


def test_the_order_of_categories_and_prompts_is_the_seeds(load: Load) -> None:
    job, _, _ = load(batch_size=8, group_size=2, advantage="rloo")
    groups = {"a": range(0, 20), "b": range(20, 40), "c": range(40, 43)}
    first, again, other = (prompts_of(range(43), job.ppo, 1, seed, groups) for seed in (1, 1, 2))
    assert first == again != other and first[::2] == first[1::2] and len(set(first)) == 4


def test_a_prompt_without_a_category_is_refused_by_its_text(stages: Any, desk_data: Path, tmp_path: Path) -> None:
    from shutil import copytree, rmtree

    data = copytree(desk_data, tmp_path / "data")
    rmtree(data / "prompts.train")
    prompt = [{"role": "user", "content": "Where is it?"}]
    write_split(data / "prompts.train", [{"prompt": prompt, "category": "late"}, {"prompt": prompt}])
    lacking = type(stages)(stages.inputs | {"data": data})
    with pytest.raises(UserError, match=r"^ppo.balance: 1 of the 2 prompts .* such as 'Where is it\?'. Add the field"):
        lacking.run("ppo", tmp_path / "out", balance="category")
