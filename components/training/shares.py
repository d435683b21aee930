"""Sharded checkpoints: each rank writes and reads its own part of each tensor, as safetensors.

torch's writer for Hugging Face's format (`torch.distributed.checkpoint`) stores the position of each part in the file,
so that any number of processes can read the whole. Its planners run on each rank separately here, because between ranks
they would send pickled objects.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from components.base.errors import naming
from components.base.files import make_folder, sync
from components.base.hashing import digest_file
from components.distributed import ranks, sharding

AT_ONCE = 10**9
"""Largest size of a file in bytes, unless it has a single tensor. Tensors are copied to the host file by file."""


def save_share(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write this rank's parts of the sharded `tensors`; return the sha256 of everything that it wrote.

    Each file is written atomically. Writing needs twice a file's size of host memory.
    """
    make_folder(folder)
    share = _prefix(ranks.rank())
    _remove(folder, share)
    if ranks.is_first():  # left by an attempt with more ranks
        for more in {path.name.lstrip(".")[: len(share)] for path in folder.iterdir()}:
            if more.startswith("rank-") and int(more[5:10]) >= ranks.size():
                _remove(folder, more)
    with naming(folder), tempfile.TemporaryDirectory(dir=folder, prefix=f".{share}", suffix=".tmp") as partial:
        writer = HuggingFaceStorageWriter(partial, _numbered(tensors), save_distributed=True)
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=False)
        writer.set_up_storage_writer(False)
        (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for number, written in enumerate(sorted(Path(partial).iterdir())):
            sync(written)
            os.replace(written, folder / f"{share}{number:05d}.safetensors")
        sync(folder)
    return share_digest(folder, ranks.rank())


def share_digest(folder: Path, rank: int) -> str:
    """Return the sha256 over the names and contents of the files of `rank` in a folder of shares."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob(f"{_prefix(rank)}*.safetensors")):
        digest.update(f"{file.name} {digest_file(file)}\n".encode())
    return digest.hexdigest()


def load_share(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parts of `tensors` from the files of all ranks, which may have been more or fewer.

    Raises:
        RuntimeError, ValueError: the files lack a tensor, or have it in a different shape.
    """
    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def _prefix(rank: int) -> str:
    return f"rank-{rank:05d}-"


def _remove(folder: Path, prefix: str) -> None:
    """Remove a rank's files, complete or not."""
    for path in (*folder.glob(f".{prefix}*"), *folder.glob(f"{prefix}*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _numbered(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number, from 1, of the file for each tensor's part."""
    number, bytes_so_far, numbers = 1, 0, dict[str, int]()
    for name, tensor in tensors.items():
        part = sharding.own_bytes(tensor)
        if bytes_so_far and bytes_so_far + part > AT_ONCE:
            number, bytes_so_far = number + 1, 0
        numbers[name], bytes_so_far = number, bytes_so_far + part
    return numbers
