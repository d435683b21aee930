"""A stage's checkpoints: named tensors as safetensors, and JSON. No pickle; incomplete files are ignored."""

import contextlib
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

from components.base.files import make_folder, read_with_digest, replacing, with_digest
from components.base.hashing import digest_file
from components.distributed import ranks, sharding
from components.training.shares import share_digest
from components.training.stopping import Held

logger = logging.getLogger(__name__)

KEPT = 2
"""Number of checkpoints that are kept: the newest, and the one before it in case the newest is damaged."""

_NAME = re.compile(r"^step-(\d{9})\.json$")


class Pace:
    """Decides when a training loop writes a checkpoint and when it stops for a signal; a context around its steps.

    The loop checkpoints after `every` steps or after `minutes` (of the monotonic clock), whichever comes first, after
    the last step, and before it stops.
    """

    def __init__(self, every: int, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._seconds = float("inf") if minutes is None else 60 * minutes
        self._saved, self._stopping, self._held = clock(), 0, Held()

    def __enter__(self) -> "Pace":
        self._held.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._held.__exit__(*exception)

    def due(self, step: int, last: bool) -> bool:
        """Return whether to checkpoint after `step` steps (from 1). Call it once per step, and save if it says so.

        All ranks get the same answer: a signal to one rank, or its clock, counts for all.
        """
        now = self._clock()
        signal, late = ranks.largest([float(self._held.told or 0), float(now - self._saved >= self._seconds)])
        self._stopping = int(signal)
        due = last or self._stopping > 0 or step % self._every == 0 or late > 0
        if due:
            self._saved = now
        return due

    def stop_if_told(self) -> None:
        """Stop the loop if a signal came before `due`. Call it when the step is checkpointed and reported."""
        if self._stopping:
            self._held.told = self._stopping  # maybe another rank's
            self._held.deliver()


@dataclass(frozen=True)
class Checkpoint:
    """State after `step` steps, as it was given to `save` (tensors on the CPU)."""

    step: int
    tensors: dict[str, torch.Tensor]
    state: Any
    """The state, as read from JSON."""
    shares: "Shares | None" = None
    """The tensors of which each rank wrote its own part; None if rank 0 wrote all."""


@dataclass(frozen=True)
class Shares:
    """Tensors of a checkpoint of which each rank wrote its own part to `shares_folder`."""

    names: Sequence[str]
    sha256: Sequence[str]
    """The `share_digest` of each rank's files."""


def shares_folder(folder: Path, step: int) -> Path:
    """Return the folder of the ranks' own parts of the checkpoint of `step`."""
    return folder / f"step-{step:09d}.shares"


def save(
    folder: Path, step: int, tensors: Mapping[str, torch.Tensor], state: object, shares: Shares | None = None
) -> None:
    """Write the state after `step` steps, then remove all but the newest `KEPT` checkpoints.

    A kill at any instant leaves the older checkpoints, or this one complete. A checkpoint exists once its JSON file,
    which has the sha256 of the tensors file and its own, is renamed to its final name.

    Args:
        shares: the parts that all ranks have already written to `shares_folder`.

    Raises:
        TypeError: `state` has a value that JSON cannot represent.
    """
    make_folder(folder)
    for killed in folder.glob(".step-*.tmp"):
        killed.unlink()
    tensors_file = folder / f"step-{step:09d}.safetensors"
    with replacing(tensors_file) as temporary:
        save_file(_unshared(tensors), temporary)
        digest = digest_file(temporary)
    document = {"step": step, "tensors_sha256": digest, "state": state}
    text = with_digest(document if shares is None else document | {"shares": asdict(shares)})
    with replacing(_json_file(folder, step)) as temporary:
        temporary.write_text(text, encoding="utf-8")
    for old in _steps(folder)[KEPT:]:
        _remove(folder, old)
    shares_folders = {shares_folder(folder, kept_step) for kept_step in _steps(folder)}
    for left in set(folder.glob("step-*.shares")) - shares_folders:  # left by a killed save
        shutil.rmtree(left)


def load_latest(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint in `folder`; None if there is none. Rank 0 searches for all ranks.

    A damaged one is removed with a warning in the log, and the one before it is tried. If it stayed, `save` would keep
    it as one of the newest, and remove checkpoints of the steps that are now repeated.
    """
    while True:
        newest = _load_latest(folder) if ranks.is_first() else None
        step_text = ranks.text_of_first("" if newest is None else str(newest.step))
        newest = _load(folder, int(step_text)) if step_text and not ranks.is_first() else newest
        if newest is None or newest.shares is None:
            return newest
        place = shares_folder(folder, newest.step)
        checked = ranks.share(list(enumerate(newest.shares.sha256)))
        damaged = any(share_digest(place, rank) != digest for rank, digest in checked)
        if not max(ranks.largest([float(damaged)])):
            return newest
        if ranks.is_first():
            logger.warning("ignoring the checkpoint of step %d in %s: a rank's part is damaged", newest.step, folder)
            _remove(folder, newest.step)


def _load_latest(folder: Path) -> Checkpoint | None:
    steps = _steps(folder)
    for step in steps:
        try:
            return _load(folder, step)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            logger.warning("ignoring the damaged checkpoint of step %d in %s: %s", step, folder, error)
            with contextlib.suppress(OSError):
                _remove(folder, step)
    if steps:
        logger.warning("no checkpoint in %s is valid: starting from the first step", folder)
    return None


def pack_optimizer(optimizer: AdamW, prefix: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return an optimiser's moments as tensors `prefix.<parameter>.<moment>`, and its groups' options, for `save`."""
    whole = optimizer.state_dict()
    tensors = {f"{prefix}.{i}.{name}": tensor for i, named in whole["state"].items() for name, tensor in named.items()}
    return tensors, whole["param_groups"]


def unpack_optimizer(
    optimizer: AdamW, prefix: str, tensors: Mapping[str, torch.Tensor], groups: Sequence[dict[str, Any]]
) -> None:
    """Restore what `pack_optimizer` returned into `optimizer`, built over the same parameters in the same order.

    Entries of `tensors`, the checkpoint's, whose names do not start with `prefix` are ignored.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for full_name, tensor in tensors.items():
        if full_name.startswith(f"{prefix}."):
            index, name = full_name.removeprefix(f"{prefix}.").split(".")
            state[int(index)][name] = sharding.like(tensor, parameters[int(index)]) if tensor.dim() else tensor
    groups = [group | {"betas": tuple(group["betas"])} for group in groups]  # a list in JSON
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _load(folder: Path, step: int) -> Checkpoint:
    document = read_with_digest(_json_file(folder, step))
    tensors_file = folder / f"step-{step:09d}.safetensors"
    digest = digest_file(tensors_file)
    if document["tensors_sha256"] != digest:
        raise ValueError(f"{tensors_file.name} has sha256 {digest[:12]}, not {document['tensors_sha256'][:12]}")
    shares = Shares(**document["shares"]) if "shares" in document else None
    return Checkpoint(document["step"], load_file(tensors_file), document["state"], shares)


def _steps(folder: Path) -> list[int]:
    """Return the steps with a JSON file in `folder`, newest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((int(match[1]) for name in names if (match := _NAME.match(name))), reverse=True)


def _remove(folder: Path, step: int) -> None:
    _json_file(folder, step).unlink()
    (folder / f"step-{step:09d}.safetensors").unlink(missing_ok=True)
    shutil.rmtree(shares_folder(folder, step), ignore_errors=True)


def _json_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.json"


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return CPU copies for safetensors: contiguous, and no two names sharing storage (tied weights)."""
    out: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage().data_ptr()
        out[name] = copy.clone() if storage in seen else copy
        seen.add(storage)
    return out
