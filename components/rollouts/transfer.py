"""Send a policy's weights to the server that samples from it: as safetensors in a folder that both see."""

import logging
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from components.base.errors import UserError, disk_error, naming
from components.base.files import make_folder
from components.base.process import is_dead_mark, is_mark_from_here, process_mark
from components.distributed import ranks, sharding
from components.models.adapters import AdapterView
from components.rollouts.client import VllmClient

SENT = "sent-"
"""Prefix of the name of a process's folder of weights."""
logger = logging.getLogger(__name__)


class FolderTransfer:
    """Weights that the server's workers read (`reload_weights`), in a subfolder whose name identifies this process."""

    def __init__(self, client: VllmClient, folder: Path) -> None:
        """Also removes what killed processes of this machine left below `folder`."""
        sweep_sent(folder)
        self.client, self.folder = client, folder / f"{SENT}{process_mark()}.{secrets.token_hex(4)}"
        self.dtype = getattr(torch, client.config.dtype)
        self.last: Path | None = None

    def send(self, tensors: Mapping[str, Tensor], config: Any, version: str) -> None:
        """Make the server load these weights of a causal LM with this config as `version`; remove the one before.

        Raises:
            UserError: the folder cannot be written, for example because its disk is full.
        """
        place, partial = self.folder / version, self.folder / f".{version}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a failed attempt
            make_folder(partial)
            with naming(partial):
                save_file(dict(tensors), partial / "model.safetensors", metadata={"format": "pt"})
                config.save_pretrained(partial)
        except Exception as error:
            if (problem := disk_error(error)) is None:
                raise
            needed = sum(x.nbytes for x in tensors.values())
            raise UserError(
                f"{problem} Weights on their way to the server need {2 * needed / 1e9:.2g} GB, for two versions; "
                "ppo.rollout.folder names another folder for them."
            ) from error
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


@torch.no_grad()
def weights_on_first(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a causal LM in the host's memory on rank 0, and nothing on the others. Collective.

    Sharded parameters are gathered one by one, so that a GPU holds one whole at a time.
    """
    if isinstance(model, AdapterView):  # each rank has the whole backbone
        model = model.merged(dtype) if ranks.is_first() else nn.Module()
    sharding.only_own_part(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        whole = sharding.whole(parameter.detach())
        if ranks.is_first():
            tensors[name] = whole.to("cpu", dtype).contiguous().clone()
        del whole  # before the next is gathered
    return tensors


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
