"""What ranks share out of a checkpoint: each rank writes and reads its own part of each tensor, as safetensors.

torch's own writer for Hugging Face's format (`torch.distributed.checkpoint`) puts the place of each part into the
file, so that any number of processes can read the whole. Its planners work rank by rank here: between ranks they would
send pickled objects.
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
"""Bytes of a file, beyond its first tensor: what is written is copied to the host file by file."""


def save_share(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write this rank's parts of `tensors`, which the ranks share out; returns the sha256 of all that it wrote.

    Each file is whole or not there. Twice its size is held on the host meanwhile.
    """
    make_folder(folder)
    own = _prefix(ranks.rank())
    _remove(folder, own)
    if ranks.is_first():  # of an attempt with more ranks
        for more in {each.name.lstrip(".")[: len(own)] for each in folder.iterdir()}:
            if more.startswith("rank-") and int(more[5:10]) >= ranks.size():
                _remove(folder, more)
    with naming(folder), tempfile.TemporaryDirectory(dir=folder, prefix=f".{own}", suffix=".tmp") as partial:
        writer = HuggingFaceStorageWriter(partial, _numbered(tensors), save_distributed=True)
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=False)
        writer.set_up_storage_writer(False)
        (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for number, written in enumerate(sorted(Path(partial).iterdir())):
            sync(written)
            os.replace(written, folder / f"{own}{number:05d}.safetensors")
        sync(folder)
    return share_digest(folder, ranks.rank())


def share_digest(folder: Path, rank: int) -> str:
    """sha256 over the names and contents of the files of `rank` in a folder of shares."""
    found = hashlib.sha256()
    for file in sorted(folder.glob(f"{_prefix(rank)}*.safetensors")):
        found.update(f"{file.name} {digest_file(file)}\n".encode())
    return found.hexdigest()


def load_share(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parts of `tensors` from the files of all ranks, however many wrote them.

    Raises:
        RuntimeError, ValueError: the files lack one of them, or hold it in another shape.
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
    """Remove a rank's files, finished or not."""
    for each in (*folder.glob(f".{prefix}*"), *folder.glob(f"{prefix}*")):
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def _numbered(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number, from 1, of the file that each tensor's part goes to."""
    number, held, numbers = 1, 0, dict[str, int]()
    for name, tensor in tensors.items():
        part = sharding.own_bytes(tensor)
        if held and held + part > AT_ONCE:
            number, held = number + 1, 0
        numbers[name], held = number, held + part
    return numbers
