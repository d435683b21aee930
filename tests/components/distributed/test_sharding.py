"""What a model is that is spread over ranks, here in a world of one that says so."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from components.base.errors import UserError
from components.training.optim import OptimizerConfig, build_optimizer


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_eight_bit_moments_of_a_spread_model_are_refused_with_what_to_do(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(UserError, match=r"Set runtime\.sharding=replicas"):
        build_optimizer(model, OptimizerConfig(learning_rate=1e-3, optimizer="adamw_8bit"))
