"""Held-out evaluations of a supervised training: what is published, when it stops, and that they leave no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from components.base.errors import CheckFailed
from components.stats.intervals import clustered_mean
from components.training.heldout import HeldOut, LossEvaluations
from components.training.loop import TrainingExamples, fit
from components.training.optim import FitConfig

SETTINGS: dict[str, Any] = {
    "epochs": 6, "batch_size": 4, "micro_batch_size": 4, "checkpoint_every": 3, "checkpoint_minutes": None,
    "learning_rate": 0.2, "decay": "none", "warmup": 0.0, "evaluate_every": 2,
}  # fmt: skip


class Constant(nn.Module):
    """Predicts one number, and is drawn to 10."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1))


def train(
    out: Path, truth: float | list[float], observe: Any = lambda step, metrics, total=None, **_: None, **options: Any
) -> tuple[Constant, LossEvaluations | None, int]:
    """Train on examples that are 10; the held-out ones are `truth`: where it is 1, the best is passed on the way."""
    model, config = Constant(), FitConfig(**SETTINGS | options)

    def loss(batch: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        value = (model.weight - 10).square().mean()
        return value, {"sft/train_loss": value}

    given = truth if isinstance(truth, list) else [truth + 0.01 * i for i in range(8)]
    weights = [1.0 + i % 2 for i in range(8)]

    def heldout() -> tuple[list[float], dict[str, float]]:
        assert not torch.is_grad_enabled() and not model.training
        return [w * (float(model.weight) - y) ** 2 for w, y in zip(weights, given, strict=True)], {}

    examples = HeldOut(heldout, weights, [str(i) for i in range(8)], "nats a token")
    evaluations = LossEvaluations(config, "sft", examples)
    steps = fit(
        model.train(), TrainingExamples(loss, [1] * 8, [1.0] * 8), config, seed=1, group="sft", out=out,
        observe=observe, observers={"evaluations": evaluations} if config.evaluate_every else {},
    )  # fmt: skip
    assert model.training
    return model, evaluations, steps


def test_a_step_whose_held_out_loss_is_certainly_lower_is_published_in_place_of_the_last(tmp_path: Path) -> None:
    told: list[Any] = []
    model, result, steps = train(tmp_path, 1.0, lambda step, metrics, **_: told.append((step, metrics)))
    assert result is not None and steps == 12
    assert [look["step"] for look in result.checkpoints.evaluations] == [2, 4, 6, 8, 10, 12]
    losses = {look["step"]: look["loss"] for look in result.checkpoints.evaluations}
    best = min(losses, key=losses.__getitem__)
    assert 2 < best < 12, "else this tests nothing"
    values = [metrics["sft/watched_loss"] for _, metrics in told if "sft/watched_loss" in metrics]
    assert values == list(losses.values()) and all("sft/watched_seconds" in m for s, m in told if s % 2 == 0)
    last = float(model.weight.detach())
    metrics = result.publish(model)
    # the loss is a weighted mean: of weights 1 and 2 in turn over (w - y)²
    given = [(1.0 + i % 2, 1 + 0.01 * i) for i in range(8)]
    for weight, name in ((float(model.weight.detach()), "watched_loss"), (last, "last_watched_loss")):
        plain = sum(w * (weight - y) ** 2 for w, y in given) / sum(w for w, _ in given)
        assert metrics[f"sft/{name}"] == pytest.approx(plain, rel=1e-6)
    assert metrics["sft/published_step"] == best and metrics["sft/last_step"] == 12
    about = result.document()
    assert about["published_step"] == best and about["evaluations"] == result.checkpoints.evaluations
    assert f"Step {best} is published" in about["reason"] and "certainly lower" in about["reason"]


def test_a_lower_loss_that_may_be_chance_leaves_the_last_published(tmp_path: Path) -> None:
    spread = [-40.0, 21.0, -39.0, 22.0, -41.0, 21.0, -40.0, 22.0]  # the best is passed by far less than they differ
    model, result, _ = train(tmp_path, spread)
    assert result is not None and result.checkpoints.number < 12
    last = float(model.weight.detach())
    assert result.publish(model)["sft/published_step"] == 12 and float(model.weight.detach()) == last
    assert "no earlier one is certainly better" in result.document()["reason"]
    pairs = result.checkpoints.last_values["losses"], result.checkpoints.best_values["losses"]
    excess = [last - best for last, best in zip(*pairs, strict=True)]
    weights = [1.0 + i % 2 for i in range(8)]
    ratio, mean = sum(excess) / sum(weights), sum(weights) / 8
    linear = [ratio + (e - ratio * w) / mean for e, w in zip(excess, weights, strict=True)]
    worse = clustered_mean(linear, range(8), 1 - 0.05 / 6)
    assert worse.low < 0 < worse.value and f"[{worse.low:.3g}, {worse.high:.3g}]" in result.document()["reason"]


def test_the_last_is_published_where_it_is_the_best_and_where_nothing_was_evaluated(tmp_path: Path) -> None:
    model, result, _ = train(tmp_path / "best", 10.0)
    assert result is not None and result.publish(model)["sft/published_step"] == 12
    assert "Step 12, the last, is published" in result.document()["reason"]
    model, result, _ = train(tmp_path / "never", 1.0, evaluate_every=100)
    assert result is not None and result.publish(model) == {} and "before its first" in result.document()["reason"]


@pytest.mark.parametrize("at", [4, 5, 8, 12])
def test_interrupted_between_an_evaluation_and_a_checkpoint_it_publishes_the_same(
    tmp_path: Path, at: int, interrupting: Any
) -> None:
    whole, whole_run, _ = train(tmp_path / "whole", 1.0)
    plain, _, _ = train(tmp_path / "plain", 1.0, evaluate_every=None)
    assert torch.equal(whole.weight, plain.weight), "evaluations leave no trace in the training"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", 1.0, interrupting(at))
    resumed, again, _ = train(tmp_path / "cut", 1.0)
    assert whole_run is not None and again is not None
    assert again.document() == whole_run.document() and again.publish(resumed) == whole_run.publish(whole)
    assert torch.equal(whole.weight, resumed.weight)


def test_patience_stops_the_training_once_and_for_all(tmp_path: Path, interrupting: Any) -> None:
    _, result, _ = train(tmp_path, 1.0, watch={"patience": 2})
    assert result is not None and result.checkpoints.evaluations[-1]["step"] == result.checkpoints.number + 4 < 12
    again = interrupting(-1)
    _, resumed, _ = train(tmp_path, 1.0, again, watch={"patience": 2})
    assert again.steps == [] and resumed is not None and resumed.document() == result.document()
    with pytest.raises(ValidationError, match=r"watch\.patience counts evaluations"):
        FitConfig(watch={"patience": 2})  # type: ignore[arg-type]


def test_a_held_out_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"sft: the loss of a held-out example isn't finite after step 2\. Lower"):
        train(tmp_path, float("nan"))
