"""Checkpoints whose parts the ranks write each for itself, here in a world of one: whole, found damaged, cleared."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from components.training import shares
from components.training.checkpoint import load_latest
from components.training.loop import restore_state, save_state
from components.training.optim import OptimizerConfig, build_optimizer

ABOVE, BELOW = 0.0, 1.0
"""GB up to which a checkpoint is whole."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Shared(nn.Module):
    """A matrix and a vector that ranks share out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        mesh, drawn = init_device_mesh("cpu", (1,)), torch.Generator().manual_seed(seed)
        self.matrix = nn.Parameter(distribute_tensor(torch.randn(5, 3, generator=drawn), mesh, [Shard(0)]))
        self.vector = nn.Parameter(distribute_tensor(torch.randn(5, generator=drawn), mesh, [Shard(0)]))


def stepped(model: Shared, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        found = model.matrix.square().sum() + (model.vector - 1).square().sum()
        found.full_tensor().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int, seed: int = 0) -> tuple[Shared, Any]:
    model = Shared(seed)
    optimizer = build_optimizer(model, OptimizerConfig(learning_rate=0.1))
    stepped(model, optimizer, steps)
    return model, optimizer


def weights(model: Shared) -> list[torch.Tensor]:
    return [each.full_tensor().detach().clone() for each in (model.matrix, model.vector)]


def saved(folder: Path, step: int, whole: float, model: Shared, optimizer: Any) -> None:
    state = {"beta": step, "weights": {"best": torch.full((2,), float(step))}}
    save_state(folder, step, {"m": model}, {"m": optimizer}, state, whole)


@pytest.mark.parametrize("whole", [ABOVE, BELOW])
def test_what_goes_on_from_parts_takes_the_steps_of_what_was_never_interrupted(tmp_path: Path, whole: float) -> None:
    model, optimizer = trained(2)
    saved(tmp_path / "c", 2, whole, model, optimizer)
    stepped(model, optimizer, 3)
    other, resumed = trained(0, seed=1)
    restored = restore_state(tmp_path / "c", {"m": other}, {"m": resumed})
    assert restored is not None and restored[0] == restored[1]["beta"] == 2
    assert restored[1]["weights"]["best"].tolist() == [2, 2]
    stepped(other, resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))
    own = tmp_path / "c" / "step-000000002.shares"
    assert own.is_dir() == (whole == ABOVE)
    if whole == ABOVE:
        (file,) = own.iterdir()
        moments = {f"m.optimizer.{i}.{name}" for i in (0, 1) for name in ("exp_avg", "exp_avg_sq")}
        assert load_file(file).keys() == {"m|matrix", "m|vector"} | moments, "safetensors, moments among them"
        assert not any(
            name in load_file(tmp_path / "c" / "step-000000002.safetensors") for name in ("m|matrix", "m|vector")
        )


def test_parts_are_written_a_file_after_the_other_where_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "AT_ONCE", 100)  # bytes: the matrix has 60, the vector 20
    model, optimizer = trained(2)
    saved(tmp_path, 2, ABOVE, model, optimizer)
    files = sorted((tmp_path / "step-000000002.shares").iterdir())
    assert [sum(t.nbytes for t in load_file(file).values()) for file in files] == [80, 60, 100]
    other, resumed = trained(0, seed=1)
    restore_state(tmp_path, {"m": other}, {"m": resumed})
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))


@pytest.mark.parametrize("damage", ["flip", "remove", "add"])
def test_a_damaged_part_falls_back_to_the_checkpoint_before_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    model, optimizer = trained(1)
    saved(tmp_path, 1, ABOVE, model, optimizer)
    kept = weights(model)
    stepped(model, optimizer, 1)
    saved(tmp_path, 2, ABOVE, model, optimizer)
    (file,) = (tmp_path / "step-000000002.shares").iterdir()
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "remove":
        file.unlink()
    else:
        file.with_name("rank-00000-00001.safetensors").write_bytes(file.read_bytes())
    with caplog.at_level(logging.WARNING):
        restored = restore_state(tmp_path, {"m": model}, {"m": optimizer})
        assert restored is not None and restored[0] == restored[1]["beta"] == 1
    assert "step 2" in caplog.text and "a rank's part is damaged" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(weights(model), kept, strict=True))
    assert not (tmp_path / "step-000000002.shares").exists()


def test_parts_of_old_and_of_killed_saves_are_removed_and_a_checkpoint_is_its_json(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    killed = tmp_path / "step-000000003.shares"
    (killed / ".rank-00000-x.tmp").mkdir(parents=True)
    (killed / "rank-00004-00000.safetensors").write_bytes(b"of more ranks")
    assert load_latest(tmp_path) is None
    for step in (1, 2, 3):
        saved(tmp_path, step, ABOVE, model, optimizer)
    assert [path.name for path in sorted(killed.iterdir())] == ["rank-00000-00000.safetensors"]
    (tmp_path / "step-000000009.shares").mkdir()
    saved(tmp_path, 4, ABOVE, model, optimizer)
    left = sorted(name for name in os.listdir(tmp_path) if name.endswith(".shares"))
    assert left == ["step-000000003.shares", "step-000000004.shares"]
