"""A rank's process: which device it takes, and when."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.distributed import entry
from components.models import runtime as machine
from components.models.runtime import Runtime, cpu_instruction_set
from tests.components.conftest import silent
from tests.components.distributed.conftest import FIT, SETUP
from tests.components.distributed.toy import ToyJob


@pytest.mark.parametrize(("device", "steps"), [("cuda", ["setup", "device 3"]), ("cpu", ["setup"])])
def test_a_rank_starts_cuda_after_the_setup_that_makes_it_deterministic_and_only_where_it_computes_on_a_gpu(
    device: str, steps: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Choosing a device starts CUDA, and cuBLAS then reads its workspace's size. Ranks on a CPU may outnumber GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port, entry.TIMEOUT: "60"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    done: list[str] = []
    begin = dist.init_process_group
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: done.append(f"device {number}"))
    monkeypatch.setattr(machine, "activate", lambda _: done.append("setup"))
    monkeypatch.setattr(dist, "init_process_group", lambda _, **options: begin("gloo", **options))
    monkeypatch.setattr(entry, "_observed", lambda _: silent)  # its file stays open until the process ends
    runtime = Runtime(device=device, threads=1, ranks=1, instruction_set=cpu_instruction_set(), gpu="none", cuda="none")
    job: dict[str, Any] = ToyJob(runtime=runtime, fit=FIT).model_dump(mode="json")
    toy = "tests.components.distributed.toy"
    program = {"run": f"{toy}:run", "job": f"{toy}:ToyJob", "setup": SETUP, "values": job, "inputs": {}}
    (tmp_path / entry.PROGRAM).write_text(json.dumps(program | {"out": str(tmp_path / "out")}))
    entry._compute(tmp_path, 0, [])
    assert done == steps
    assert json.loads((tmp_path / entry.METRICS).read_text())["toy/steps"] == 16.0
