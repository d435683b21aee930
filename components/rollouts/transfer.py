"""Send a policy's weights to the server that samples from it, in one of three ways.

`folder` needs only a folder, and was tested against a stand-in of the server's routes. `ipc` and `nccl` use vLLM's own
code on the trainer's side (0.29: `vllm.distributed.weight_transfer`); neither has been run.
"""

import logging
import secrets
import shutil
import socket
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from components.base.errors import UserError
from components.base.files import make_folder
from components.base.process import is_dead_mark, is_mark_from_here, process_mark
from components.rollouts.client import VllmClient

SENT = "sent-"
"""Prefix of the name of a process's folder of weights."""
logger = logging.getLogger(__name__)


class WeightTransfer(Protocol):
    """A way to send weights to a server."""

    def send(self, model: Any, version: str) -> None:
        """Make the server load the current weights of `model` (a whole causal LM) as `version`."""
        ...

    def close(self) -> None:
        """Remove everything that was created."""
        ...


class FolderTransfer:
    """Weights as safetensors in a folder that the server reads (`reload_weights` of its workers).

    They are in this process's own subfolder, whose name identifies the process.
    """

    def __init__(self, client: VllmClient, folder: Path) -> None:
        """Also removes what killed processes of this machine left below `folder`."""
        sweep_sent(folder)
        self.client, self.folder = client, folder / f"{SENT}{process_mark()}.{secrets.token_hex(4)}"
        self.dtype = getattr(torch, client.config.dtype)
        self.last: Path | None = None

    def send(self, model: Any, version: str) -> None:
        """As `WeightTransfer`. The previous version's folder is removed once the server has loaded this one."""
        place, partial = self.folder / version, self.folder / f".{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a failed attempt
        make_folder(partial)
        tensors = {
            name: each.detach().to("cpu", self.dtype).contiguous().clone() for name, each in model.named_parameters()
        }
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(partial)
        partial.rename(place)
        self.client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(place)}})
        self.client.post("/update_weight_version", {"new_version": version})
        if self.last is not None:
            shutil.rmtree(self.last, ignore_errors=True)
        self.last = place

    def close(self) -> None:
        """Remove all that this process sent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.last = None


def sweep_sent(folder: Path) -> None:
    """Remove weights below `folder` from killed processes of this machine in its current boot.

    Weights from another machine, or from before this boot, stay, and a warning names them, since they may be in use.
    """
    for left in sorted(folder.glob(f"{SENT}*")) if folder.is_dir() else ():
        mark = left.name.removeprefix(SENT).partition(".")[0]
        if is_dead_mark(mark):
            shutil.rmtree(left, ignore_errors=True)
        elif not is_mark_from_here(mark):
            logger.warning(
                "%s holds weights that another machine sent to a server, or this one before it was booted. Remove the "
                "folder if no run there uses it.", left,
            )  # fmt: skip


class VllmTransfer:
    """Sends weights by vLLM's own trainer engine: CUDA IPC on one GPU, NCCL between GPUs."""

    def __init__(self, client: VllmClient) -> None:
        try:
            from vllm.distributed.weight_transfer import base, clients, factory, ipc_engine, nccl_engine
        except ImportError as error:
            raise UserError(
                f"ppo.rollout.transfer={client.config.transfer} needs vLLM beside Tether, for its trainer side, and it "
                f"can't be imported here ({error}). vLLM 0.29 needs fastapi below 0.137, and Prefect 3.8.8 a later "
                "one: use ppo.rollout.transfer=folder, with ppo.rollout.folder=/dev/shm/tether if both are on one host."
            ) from None
        self.client, self.source = client, base.ModuleSource
        self.engine: Any = None
        self._init, self._factory, self._clients = (ipc_engine, nccl_engine), factory, clients

    def send(self, model: Any, version: str) -> None:
        """As `WeightTransfer`; the first call makes the connection."""
        if self.engine is None:
            self.engine = self._connect(model)
        self.engine.source = self.source(model)
        self.engine.send_weights()
        self.client.post("/update_weight_version", {"new_version": version})

    def close(self) -> None:
        """Do nothing: the connection ends with this process."""

    def _connect(self, model: Any) -> Any:
        ipc, nccl = self._init
        config = self.client.config
        if config.transfer == "ipc":
            init = ipc.IPCTrainerInitInfo(rank=0, packed=False)
        else:
            workers = self.client.get("/get_world_size").get("world_size")
            if type(workers) is not int:
                raise self.client.something_else("/get_world_size", workers)
            init = nccl.NCCLTrainerInitInfo(
                master_address=config.address, master_port=_free_port(), world_size=workers + 1, rank=0
            )
        control = self._clients.HTTPVLLMWeightSyncClient(self.client.url, timeout=config.timeout)
        return self._factory.WeightTransferTrainerFactory.trainer_init(init, client=control, source=self.source(model))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def open_transfer(client: VllmClient, folder: Path) -> WeightTransfer:
    """Open the transfer that the config names; `folder` is the stage's own, used if the config names none."""
    if client.config.transfer != "folder":
        return VllmTransfer(client)
    if client.config.folder is not None:
        return FolderTransfer(client, Path(client.config.folder))
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed attempt
    return FolderTransfer(client, folder)
