"""Best of n: the choice has its exact distribution, the policy learns it, and a killed run ends the same."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.direct import best_of_n
from components.direct.config import DirectJob, PolicyConfig
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.ppo import experience
from components.ppo import models as ppo_models
from components.ppo.models import Models
from components.sft.tokenized_demonstrations import Examples, token_losses
from tests.components.ppo.test_learns import UNIT, Small, distance

PROMPT = [{"role": "user", "content": "one two"}]


def exact(reference: torch.Tensor, scores: torch.Tensor, n: int) -> torch.Tensor:
    """P(y is chosen) (N,), scores all different: F(y)^n - F(y-)^n with F the probability of a score up to y's."""
    order = scores.argsort()
    cumulative = reference.exp()[order].cumsum(0).clamp(max=1)
    below = torch.cat([torch.zeros(1, dtype=cumulative.dtype), cumulative[:-1]])
    chosen = torch.empty_like(cumulative)
    chosen[order] = cumulative**n - below**n
    return chosen


def test_the_choice_has_best_of_ns_exact_distribution_and_the_policy_learns_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beirami et al. 2024 (arXiv 2401.01879), lemma 1; its KL is below log n - (n - 1) / n."""
    n, count, task = 4, 6_000, Small(1)
    monkeypatch.setattr(ppo_models, "score_tokens", task.score)
    monkeypatch.setattr(experience, "encode_prompt", lambda *_: task.prompt)
    policy = PolicyConfig(method="best_of_n", n=n, micro_batch_size=128, batch_size=256, learning_rate=1e-2)
    generation = GenerationConfig(max_new_tokens=1)
    ppo = {"score": {"missing_eos": "keep"}}
    job = DirectJob(seed=0, runtime=runtime, generation=generation, policy=policy, ppo=ppo)
    models = Models(task.policy, task.reference, None, None, task.tokenizer, UNIT)
    start = task.distribution(task.policy)
    expected = exact(start, task.scores(), n)
    assert expected.sum().item() == pytest.approx(1)
    bound = math.log(n) - (n - 1) / n
    assert 0.5 * bound < distance(expected.log(), start) <= bound
    rows = best_of_n.best_of_n(models, job, [PROMPT] * count, 1)
    responses = [tuple(row.tolist()) for row in task.responses()[0]]
    seen = torch.zeros(len(responses), dtype=torch.float64)
    for row in rows:
        seen[responses.index(tuple(row["ids"]))] += 1
    kept = expected * count > 5
    chi_squared = ((seen - expected * count) ** 2 / (expected * count))[kept].sum().item()
    assert chi_squared < 40, "the 99.9th percentile at 17 degrees of freedom"
    scores = task.scores()
    assert all(row["score"] == pytest.approx(scores[responses.index(tuple(row["ids"]))].item(), abs=1e-5)
               and row["mean_score"] <= row["score"] + 1e-6 for row in rows[:50])  # fmt: skip
    examples = Examples.of((task.prompt, row["ids"]) for row in rows)
    optimizer = torch.optim.Adam(task.policy.parameters(), 1e-2)
    for step in range(90):
        batch = [examples[i] for i in range(step * 256 % (count - 256), step * 256 % (count - 256) + 256)]
        optimizer.zero_grad()
        token_losses(task.policy, task.tokenizer.pad_token_id, batch, runtime).mean().backward()
        optimizer.step()
    assert distance(expected.log(), start) > 0.15
    assert distance(task.distribution(task.policy), expected.log()) < 0.02


LONG = GenerationConfig(max_prompt_tokens=64, max_new_tokens=40)
"""At this cap some of the tiny policy's responses end before it."""
SIZES = {"n": 3, "max_prompts": 40, "rounds": 2, "batch_size": 4}
OPTIONS: dict[str, Any] = {"method": "best_of_n", "generation": LONG, **SIZES}


@pytest.fixture(scope="module")
def undisturbed(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("best")
    return out, stages.run("direct", out, **OPTIONS)


def test_each_round_samples_from_the_policy_of_the_one_before(undisturbed: Any) -> None:
    out, metrics = undisturbed
    first, second = (read_rows(out / "artifact" / f"best_of_n-{number}.jsonl") for number in (1, 2))
    assert [row["prompt"] for row in first] == [row["prompt"] for row in second] and len(first) == 40
    assert [row["ids"] for row in first] != [row["ids"] for row in second]
    history = read_rows(out / "artifact" / "history.jsonl")
    assert [row["update"] for row in history] == list(range(1, 1 + int(metrics["direct/updates"])))
    gain = sum(row["score"] - row["mean_score"] for row in second) / 40
    assert metrics["direct/best_of_n_gain"] == pytest.approx(gain) and gain > 0
    assert metrics["direct/best_of_n_ended"] == pytest.approx(sum(row["ended"] for row in second) / 40)
    ids = [row["ids"] for row in first if row["ended"]]
    assert ids and all(len(each) <= 40 for each in ids)


def test_all_of_a_later_round_is_numbered_after_the_earlier_ones(undisturbed: Any) -> None:
    out, metrics = undisturbed
    about = json.loads((out / "artifact" / "metadata.json").read_text())
    ended = sum(row["ended"] for row in read_rows(out / "artifact" / "best_of_n-1.jsonl"))
    last, first = int(metrics["direct/updates"]), math.ceil(ended / SIZES["batch_size"])
    updates = [row["update"] for row in about["evaluations"]]
    shown = {row["update"] for row in read_rows(out / "artifact" / "samples.jsonl")}
    assert updates == sorted(shown) and updates[0] > first and updates[-1] == last == about["last_update"]
    assert metrics["direct/published_update"] in updates and f"pdate {about['published_update']}" in about["reason"]
    history = {row["update"]: row for row in read_rows(out / "artifact" / "history.jsonl")}
    assert [history[row["update"]]["direct/watched_kl"] for row in about["evaluations"]] == [
        row["kl"] for row in about["evaluations"]
    ]


def test_a_round_that_breaks_the_tether_is_the_last(stages: Any, tmp_path: Path) -> None:
    options = OPTIONS | {"learning_rate": 5e-2, "evaluate_every": 2, "rounds": 3}
    metrics = stages.run("direct", tmp_path, **options, ppo={"kl": {"ceiling": 0.01}})
    assert metrics["ppo/stopped"] == 1
    assert [path.name for path in (tmp_path / "artifact").glob("best_of_n-*")] == ["best_of_n-1.jsonl"]


def test_freeing_the_frozen_models_in_each_round_changes_no_byte(
    stages: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(PolicyConfig, "unused", ())
    stages.run("direct", tmp_path, **OPTIONS)
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


@pytest.mark.parametrize("of_last", [False, True])
def test_interrupted_and_started_again_it_ends_the_same(
    of_last: bool, stages: Any, undisturbed: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    out, metrics = undisturbed
    with pytest.raises(KeyboardInterrupt):
        at = int(metrics["direct/updates"]) if of_last else 1
        stages.run("direct", tmp_path, interrupting(at), **OPTIONS)
    assert stages.run("direct", tmp_path, **OPTIONS) == metrics
    assert digests(tmp_path / "artifact") == digests(out / "artifact")


def test_killed_while_it_samples_it_keeps_what_is_chosen(
    stages: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: Callable[[Path], Any]
) -> None:
    """No chunk is sampled twice, and neither the interruption nor the chunks' size changes a byte."""
    monkeypatch.setattr(best_of_n, "AT_ONCE", 16)
    original, sampled = best_of_n.best_of_n, list[int]()

    def killed_once(models: Models, job: DirectJob, prompts: Any, number: int, first: int) -> Any:
        if len(sampled) == 1:
            sampled.append(0)
            raise KeyboardInterrupt
        sampled.append(len(prompts))
        return original(models, job, prompts, number, first)

    monkeypatch.setattr(best_of_n, "best_of_n", killed_once)
    with pytest.raises(KeyboardInterrupt):
        stages.run("direct", tmp_path, **OPTIONS)
    progress: list[tuple[int, int | None]] = []

    def observe(step: int, metrics: Any, total: int | None = None, doing: str | None = None, **_: Any) -> None:
        progress.extend([(step, total)] if doing is not None and "choosing" in doing else [])

    out, metrics = undisturbed
    assert stages.run("direct", tmp_path, observe, **OPTIONS) == metrics
    assert sampled == [16, 0, 16, 8, 16, 16, 8]
    assert progress == 2 * [(0, 40), (16, 40), (32, 40), (40, 40)]
    assert digests(tmp_path / "artifact") == digests(out / "artifact")


def test_killed_while_it_writes_the_choice_it_ends_the_same(
    stages: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: Callable[[Path], Any]
) -> None:
    out, metrics = undisturbed

    def cut(file: Path, rows: Any) -> None:
        original(file, list(rows)[:20])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        original = best_of_n.write_rows
        patch.setattr(best_of_n, "write_rows", cut)
        with pytest.raises(KeyboardInterrupt):
            stages.run("direct", tmp_path, **OPTIONS)
    assert stages.run("direct", tmp_path, **OPTIONS) == metrics
    assert digests(tmp_path / "artifact") == digests(out / "artifact")


def test_responses_that_never_end_are_refused(stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = best_of_n.best_of_n
    monkeypatch.setattr(best_of_n, "best_of_n", lambda *given: [r | {"ended": False} for r in original(*given)])
    with pytest.raises(UserError, match=r"none of 40 chosen responses has ended within generation.max_new_tokens"):
        stages.run("direct", tmp_path, **OPTIONS)
