"""AdamW with moments of 8 bits: bytes, error, checkpoint and resume."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from components.base.errors import UserError
from components.models.matrices import eight_bit
from components.training.loop import clip_gradient, restore_state, save_state, step_and_clear
from components.training.optim import OptimizerConfig, build_optimizer

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, optimizer="adamw_8bit")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps `first` to `last`, on a batch of each one's own."""
    for step in range(first, last):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        clip_gradient(model, 1.0)
        step_and_clear(optimizer)


def test_a_run_that_is_resumed_ends_with_the_same_bytes(model: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="8-bit moments need bitsandbytes")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(model, CONFIG)
    steps(model, optimizer, 0, 3)
    save_state(tmp_path, 3, {"model": model}, {"model": optimizer}, {})
    steps(model, optimizer, 3, 6)
    undisturbed = {name: value.clone() for name, value in model.state_dict().items()}

    model.load_state_dict(start)
    again = build_optimizer(model, CONFIG)
    assert restore_state(tmp_path, {"model": model}, {"model": again}) == (3, {})
    steps(model, again, 3, 6)
    assert all(torch.equal(value, undisturbed[name]) for name, value in model.state_dict().items())
    kept, found = (each.state_dict()["state"] for each in (optimizer, again))
    assert all(torch.equal(kept[i][name], found[i][name]) for i in kept for name in kept[i])
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".safetensors"]


def test_moments_of_matrices_are_bytes_and_steps_are_near_those_of_float32(model: nn.Module) -> None:
    pytest.importorskip("bitsandbytes", reason="8-bit moments need bitsandbytes")
    twin = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96))
    twin.load_state_dict(model.state_dict())
    start = model.state_dict()["0.weight"].clone()
    mine, its = build_optimizer(model, CONFIG), build_optimizer(twin, CONFIG.model_copy(update={"optimizer": "adamw"}))
    steps(model, mine, 0, 20)
    steps(twin, its, 0, 20)
    state = mine.state[model[0].weight]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    apart = (model[0].weight - twin[0].weight).norm() / (twin[0].weight - start).norm()
    assert 0 < apart < 0.1


def test_without_bitsandbytes_an_error_says_what_to_install(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    eight_bit._adamw_class.cache_clear()
    with pytest.raises(UserError, match=r"optimizer=adamw_8bit needs bitsandbytes.*tether\[bitsandbytes\]"):
        build_optimizer(model, CONFIG)
