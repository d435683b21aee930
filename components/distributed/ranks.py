"""This process's rank in a stage, and communication between ranks. With one process, nothing is sent."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from components.base import errors
from components.base.errors import TetherError

T = TypeVar("T")


class Finished(BaseException):
    """The work of this rank is done: rank 0 computes the rest of the stage alone."""


def size() -> int:
    """Return the number of processes that compute this stage."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0. Only rank 0 reports and writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def share(rows: Sequence[T], of: int | None = None) -> list[T]:
    """Return this rank's share of `rows` (or that of rank `of`): every n-th row, with n the number of ranks.

    If `rows` are sorted by length, the shares have about equal total lengths.
    """
    return list(rows[rank() if of is None else of :: size()])


def joined(tensor: Tensor) -> Tensor:
    """Sum `tensor` over the ranks, in place. Exact if each element is 0 on all ranks but one."""
    if size() > 1:
        dist.all_reduce(tensor)
    return tensor


def largest(values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over the ranks."""
    return list(values) if size() == 1 else _reduced(values, dist.ReduceOp.MAX)


def summed(values: Mapping[str, float], maxima: Iterable[str] = ()) -> dict[str, float]:
    """Return metrics summed over the ranks; for those in `maxima` the maximum. All ranks must give the same names."""
    if size() == 1:
        return dict(values)
    highest = sorted(set(maxima) & set(values))
    added = sorted(set(values) - set(highest))
    out = dict(zip(added, _reduced([values[name] for name in added], dist.ReduceOp.SUM), strict=True))
    if highest:
        out |= dict(zip(highest, largest([values[name] for name in highest]), strict=True))
    return {name: out[name] for name in values}


def _reduced(values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, how)
    return tensor.tolist()


def texts_of_all(text: str) -> list[str]:
    """Return on every rank the texts of all ranks, in the ranks' order. They must be ASCII and equally long."""
    if size() == 1:
        return [text]
    encoded = torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8)
    gathered = [torch.empty_like(encoded) for _ in range(size())]
    dist.all_gather(gathered, encoded)
    return [bytes(row.tolist()).decode("ascii") for row in gathered]


def text_of_first(text: str) -> str:
    """Return on every rank the text of rank 0."""
    if size() == 1:
        return text
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if is_first() and text else torch.empty(0)
    length = torch.tensor([len(encoded)])
    dist.broadcast(length, 0)
    buffer = encoded.to(torch.uint8) if is_first() else torch.zeros(int(length), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, 0)
    return buffer.numpy().tobytes().decode()


def result_of_first(compute: Callable[[], T]) -> T:
    """Return on every rank, through JSON, what `compute` returns on rank 0; the others do not call it.

    Raises:
        TetherError: on every rank, with one class and message, if `compute` raises it on rank 0.
    """
    if size() == 1:
        return compute()
    if not is_first():
        kind, received = json.loads(text_of_first(""))
        if kind is not None:
            raise getattr(errors, kind)(received)
        return received
    try:
        result = compute()
    except TetherError as error:
        text_of_first(json.dumps([type(error).__name__, str(error)]))
        raise
    return json.loads(text_of_first(json.dumps([None, result])))[1]


def values_of_first(values: Sequence[float]) -> list[float]:
    """Return on every rank the values of rank 0, for a decision that all must take alike. Equally many on each rank."""
    if size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.broadcast(tensor, 0)
    return tensor.tolist()


@contextmanager
def in_turn() -> Iterator[None]:
    """Let the ranks of a host run the block one after the other, so that the host needs its memory once."""
    if size() == 1:
        yield
        return
    (turns,) = largest([float(os.environ["LOCAL_WORLD_SIZE"])])  # hosts may differ
    for turn in range(int(turns)):
        if turn == local_rank():
            yield
        dist.barrier()


def go_on_alone() -> None:
    """Leave the rest of the stage to rank 0. Every rank calls it once, when no joint work is left.

    Raises:
        Finished: on every rank except 0.
    """
    if size() == 1:
        return
    dist.barrier()
    first = is_first()
    dist.destroy_process_group()
    if not first:
        raise Finished


def local_rank() -> int:
    """Return the number of this process on its host, from 0, which is also the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
