"""The supervised loop: accumulation is exact, broken numbers stop it, and an interruption leaves no trace."""

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from components.base.errors import CheckFailed
from components.training import checkpoint
from components.training.loop import TrainingExamples, fit, restore_state, save_state, seeded, torch_seed
from components.training.optim import FitConfig, OptimizerConfig, build_optimizer, learning_rate_at
from components.training.stopping import SIGNALS, Interrupted, graceful

LENGTHS = [3, 9, 4, 1, 7, 7, 2, 8, 5, 6]


class Line(nn.Module):
    """Fits y = 2x + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))


def train(out: Path, observe: Any = lambda step, metrics, total=None, **_: None, **options: Any) -> tuple[Line, int]:
    part, given = options.pop("part", None), options.pop("weights", None) or [1.0] * len(LENGTHS)
    model = Line()
    spoil = options.pop("spoil", lambda loss: loss)
    weights = torch.tensor(given)

    def loss(batch: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        x, counted = torch.tensor([float(LENGTHS[i]) for i in batch]), weights[batch]
        errors = (x * model.weight.squeeze() + model.bias - 2 * x - 1).square()
        value = (errors * counted).sum() / counted.sum() * 0.01
        return spoil(value), {"sft/train_loss": value}

    settings: dict[str, Any] = {
        "epochs": 3, "batch_size": 4, "micro_batch_size": 4, "checkpoint_every": 2, "checkpoint_minutes": None,
        "learning_rate": 0.05, "epsilon": 1e-3,
    }  # fmt: skip
    examples, config = TrainingExamples(loss, LENGTHS, given), FitConfig(**settings | options)
    return model, fit(model, examples, config, seed=1, group="sft", out=out, observe=observe, part=part)


def test_accumulated_micro_batches_take_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    whole, steps = train(tmp_path / "whole")
    assert steps == 9  # three batches (4, 4, 2) an epoch
    for micro in (1, 3):
        parts, _ = train(tmp_path / str(micro), micro_batch_size=micro)
        assert torch.allclose(whole.weight, parts.weight, atol=1e-5) and torch.allclose(
            whole.bias, parts.bias, atol=1e-5
        )


def test_accumulated_micro_batches_of_weighted_examples_take_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    weights = [1.0, 0.1, 0.5, 1.0, 0.25, 1.0, 0.05, 1.0, 0.3, 0.7]

    def weighted(micro: int) -> tuple[Line, list[float]]:
        losses: list[float] = []
        model, _ = train(
            tmp_path / str(micro),
            lambda step, metrics, total=None, **_: losses.append(metrics["sft/train_loss"]),
            micro_batch_size=micro,
            weights=weights,
        )
        return model, losses

    whole, losses = weighted(4)
    for micro in (1, 3):
        parts, same = weighted(micro)
        assert torch.allclose(whole.weight, parts.weight, atol=1e-5)
        assert torch.allclose(whole.bias, parts.bias, atol=1e-5)
        assert same == pytest.approx(losses, rel=1e-4), "the loss that is reported, too"
    plain, _ = train(tmp_path / "plain")
    ones, _ = train(tmp_path / "ones", weights=[1.0] * 10)
    assert torch.equal(plain.weight, ones.weight) and torch.equal(plain.bias, ones.bias)
    assert not torch.allclose(plain.weight, whole.weight, atol=1e-4)


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_interrupted_anywhere_and_started_again_it_ends_with_the_same_weights(
    tmp_path: Path, at: int, interrupting: Any
) -> None:
    whole, _ = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", interrupting(at))
    again = interrupting(-1)
    resumed, _ = train(tmp_path / "cut", again)
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)
    kept = at // 2 * 2 if at < 9 else 9
    assert len(again.steps) == 9 - kept, "what a checkpoint holds isn't done again"
    assert again.resumed == ([(kept, 9)] if kept else []), "and it says so"


def without_step(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's optimiser state with the steps at 0, or with moments of 0."""
    return {key: torch.zeros_like(value) if key.endswith(name) else value for key, value in state.items()}


@pytest.mark.parametrize("lost, words", [(".step", "counts 0 steps"), (".exp_avg_sq", "second moments")])
def test_an_optimizer_that_lost_its_state_on_the_way_is_named(
    tmp_path: Path, interrupting: Any, monkeypatch: pytest.MonkeyPatch, lost: str, words: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, interrupting(5))
    unpack = checkpoint.unpack_optimizer
    monkeypatch.setattr(
        checkpoint, "unpack_optimizer",
        lambda optimizer, name, tensors, groups: unpack(optimizer, name, without_step(lost, tensors), groups),
    )  # fmt: skip
    with pytest.raises(CheckFailed, match=rf"training\.resumed failed.*{words}"):
        train(tmp_path, interrupting(-1))


def test_a_slow_loop_checkpoints_by_the_clock_and_resumes_to_the_same_weights(
    tmp_path: Path, interrupting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 3 minutes: with 5 minutes asked for, every second step is checkpointed, and none by its number."""
    whole, _ = train(tmp_path / "whole")
    clock = iter(range(0, 10**6, 180))
    slow = functools.partial(checkpoint.Pace, clock=lambda: float(next(clock)))
    monkeypatch.setattr(checkpoint, "Pace", slow)
    by_time = {"checkpoint_every": 1000, "checkpoint_minutes": 5.0}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", interrupting(5), **by_time)
    again = interrupting(-1)
    resumed, _ = train(tmp_path / "cut", again, **by_time)
    assert again.steps == [5, 6, 7, 8, 9]
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)


def test_dropout_is_drawn_from_the_seed_and_the_step_alone(tmp_path: Path, interrupting: Any) -> None:
    dropout = nn.Dropout(0.5)

    def trained(
        name: str, stream: int, observe: Any = lambda step, metrics, total=None, **_: None, **options: Any
    ) -> Tensor:
        torch.manual_seed(stream)
        model, _ = train(tmp_path / name, observe, spoil=lambda loss: dropout(loss.expand(8)).mean(), **options)
        return model.weight

    whole = trained("whole", 1)
    with pytest.raises(KeyboardInterrupt):
        trained("cut", 2, interrupting(5))
    assert torch.equal(trained("cut", 3), whole)
    assert torch.equal(trained("micro", 1, micro_batch_size=2), trained("again", 2, micro_batch_size=2))
    assert not torch.equal(trained("member", 1, part=1), trained("other", 1, part=2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_finishes_the_step_checkpoints_and_reports_it(tmp_path: Path, number: int) -> None:
    if number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:  # a shell's job in the background
        signal.signal(number, signal.default_int_handler)
    whole, _ = train(tmp_path / "whole")
    reported: list[int] = []

    def told_in_step_4(loss: Tensor) -> Tensor:
        if len(reported) == 3:
            signal.raise_signal(number)
        return loss

    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyboardInterrupt) as stopped, graceful():
        train(
            tmp_path / "cut",
            lambda step, metrics, total=None, **_: reported.append(step),
            spoil=told_in_step_4,
            checkpoint_every=1000,
        )
    assert isinstance(stopped.value, Interrupted) == (number == signal.SIGTERM)
    assert reported == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "cut").rglob("*.json")] == ["step-000000004.json"]
    assert [signal.getsignal(each) for each in SIGNALS] == before
    resumed, _ = train(tmp_path / "cut")
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, value: float) -> None:
    with pytest.raises(CheckFailed, match=r"sft: the loss is .* at step 1\. Lower sft\.learning_rate"):
        train(tmp_path, spoil=lambda loss: loss * value)


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * float("nan")

    with pytest.raises(CheckFailed, match="gradient's norm is nan"):
        train(tmp_path, spoil=Spoiled.apply)
    assert not (tmp_path / "checkpoint").exists()


def test_the_gradient_norm_is_clipped_and_reported_as_it_was(tmp_path: Path) -> None:
    norms: list[float] = []
    model, _ = train(tmp_path, lambda step, metrics, total=None, **_: norms.append(metrics["sft/grad_norm"]),
                     max_grad_norm=1e-6, epsilon=1.0)  # fmt: skip
    assert norms[0] > 0.1
    assert model.weight.abs().item() < 1e-4, "a gradient clipped to a millionth hardly moves it"


def test_it_reports_every_step_with_rate_and_total(tmp_path: Path) -> None:
    seen: list[Any] = []
    train(
        tmp_path,
        lambda step, metrics, total=None, **other: seen.append((step, total, metrics, other)),
        epochs=12,
        learning_rate=0.2,
        epsilon=1e-8,
    )
    assert [(step, total) for step, total, *_ in seen] == [(i, 36) for i in range(1, 37)]
    reported = {"sft/train_loss", "sft/grad_norm", "sft/learning_rate", "sft/peak_memory_gb"}
    assert all(metrics.keys() == reported for *_, metrics, _ in seen)
    assert sum(other["tokens"] for *_, other in seen) == 12 * sum(LENGTHS)
    assert seen[-1][2]["sft/train_loss"] < 0.2 * seen[0][2]["sft/train_loss"]


def test_the_rate_rises_over_the_warm_up_and_decays_linearly_or_stays() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup=0.2)
    assert [learning_rate_at(i, 10, config) for i in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.875])
    assert learning_rate_at(9, 10, config) == pytest.approx(0.125)
    flat = OptimizerConfig(learning_rate=1.0, warmup=0.0, decay="none")
    assert {learning_rate_at(i, 10, flat) for i in range(10)} == {1.0}
    assert all(0 < learning_rate_at(i, n, config) <= 1 for n in range(1, 30) for i in range(n))


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model = Line()
    matrices, vectors = build_optimizer(model, OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)).param_groups
    assert [g["weight_decay"] for g in (matrices, vectors)] == [0.1, 0.0]
    assert matrices["params"][0] is model.weight and vectors["params"][0] is model.bias
    model.bias.requires_grad_(False)
    assert len(build_optimizer(model, OptimizerConfig(learning_rate=1e-3)).param_groups) == 1


def test_each_use_of_the_seed_has_a_stream_of_its_own() -> None:
    assert torch_seed(0, "a") == torch_seed(0, "a")
    uses = [torch_seed(0, "a"), torch_seed(0, "b"), torch_seed(1, "a"), torch_seed(0, "a", 1)]
    assert len(set(uses)) == 4
    assert seeded(0, "a", 1).random() != seeded(0, "a", 11).random()


def test_state_comes_back_as_it_was_saved_and_none_where_nothing_was(tmp_path: Path) -> None:
    assert restore_state(tmp_path / "none", {}, {}) is None
    one, other = Line(), Line()
    with torch.no_grad():
        one.weight.fill_(3.0)
    save_state(tmp_path, 4, {"model": one}, {}, {"beta": 0.1 + 0.2})
    assert restore_state(tmp_path, {"model": other}, {}) == (4, {"beta": 0.1 + 0.2})
    assert other.weight.item() == 3.0
