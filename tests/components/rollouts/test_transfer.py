"""Weights by vLLM's own trainer side, as far as no GPU is needed: what it is called with, and in which order.

`vllm` here has the names and signatures of 0.29.0 (`vllm/distributed/weight_transfer/`): the control plane
goes over HTTP, tensors by a variable. Nothing here says that CUDA IPC or NCCL works.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from components.models.adapters import Backbone
from components.models.config import AdapterConfig
from components.models.folders import load_causal_lm
from components.models.runtime import Runtime
from components.rollouts.client import VllmClient
from components.rollouts.config import RolloutConfig
from components.rollouts.transfer import VllmTransfer
from tests.components.rollouts.standin import StandIn


class ModuleSource:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()


@dataclass
class IPCTrainerInitInfo:
    packed: bool = False
    rank: int = field(kw_only=True)


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int = field(kw_only=True)


class HTTPVLLMWeightSyncClient:
    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url, self.timeout = base_url, timeout

    def post(self, route: str, body: Any = None) -> None:
        httpx.post(f"{self.base_url}/{route}", json=body, timeout=self.timeout).raise_for_status()


class WeightTransferTrainerFactory:
    wire: Callable[[dict[str, torch.Tensor]], None]
    made: list[Any] = []  # noqa: RUF012 (of the stand-in, cleared by its fixture)

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: HTTPVLLMWeightSyncClient, source: Any = None) -> Any:
        client.post("init_weight_transfer_engine", {"init_info": {}})
        engine = SimpleNamespace(source=source)

        def send_weights() -> None:
            client.post("start_weight_update")
            client.post("update_weights", {"update_info": {"names": [name for name, _ in engine.source]}})
            cls.wire({name: each.detach() for name, each in engine.source})
            client.post("finish_weight_update")

        engine.send_weights = send_weights
        cls.made.append(init_info)
        return engine


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, server: StandIn) -> type[WeightTransferTrainerFactory]:
    """vLLM as it can be imported where it is installed beside the trainer."""
    names = {
        "base": SimpleNamespace(ModuleSource=ModuleSource),
        "clients": SimpleNamespace(HTTPVLLMWeightSyncClient=HTTPVLLMWeightSyncClient),
        "factory": SimpleNamespace(WeightTransferTrainerFactory=WeightTransferTrainerFactory),
        "ipc_engine": SimpleNamespace(IPCTrainerInitInfo=IPCTrainerInitInfo),
        "nccl_engine": SimpleNamespace(NCCLTrainerInitInfo=NCCLTrainerInitInfo),
    }
    package = ModuleType("vllm.distributed.weight_transfer")
    vars(package).update(names)
    for name, module in (
        ("vllm", ModuleType("vllm")),
        ("vllm.distributed", ModuleType("d")),
        (package.__name__, package),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    WeightTransferTrainerFactory.wire = server.load
    WeightTransferTrainerFactory.made.clear()
    return WeightTransferTrainerFactory


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_it_connects_once_and_sends_what_the_policy_is_each_time(
    server: StandIn, vllm: Any, stages: Any, runtime: Runtime, asking: Callable[..., RolloutConfig], backend: str
) -> None:
    model, _ = load_causal_lm(stages.inputs["sft"], runtime)
    view = Backbone(model).add("policy", AdapterConfig(), seed=0)
    with VllmClient(asking(server, transfer=backend, address="10.0.0.7")) as client:
        transfer = VllmTransfer(client)
        for version in ("tether-a-0", "tether-a-1"):
            for each in view.parameters():
                each.data.add_(0.05)
            whole = view.merged()
            transfer.send(whole, version)
            assert server.weights == version
            for name, each in server.model.named_parameters():
                assert torch.equal(each, dict(whole.named_parameters())[name])
    (made,) = vllm.made
    assert made.rank == 0
    if backend == "nccl":
        assert made.world_size == 2 and made.master_address == "10.0.0.7" and made.master_port > 0
    steps = [each.strip("/") for each in server.called if "weight" in each and each != "/weight_info"]
    update = ["start_weight_update", "update_weights", "finish_weight_update", "update_weight_version"]
    assert steps == ["init_weight_transfer_engine", *update, *update]
