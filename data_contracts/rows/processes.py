"""Run a function over independent tasks in several processes; the output is the same for any number of processes."""

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import connection, forkserver
from typing import Any, TypeVar

from components.base.errors import TetherError

T = TypeVar("T")
R = TypeVar("R")

AUTO = "auto"
_PRELOADED = ("data_contracts.rows.working", "data_contracts.findings.texts", "transformers")
"""Modules that the fork server imports once, for all worker processes."""
_shared: Any = None
"""The argument that all tasks of a worker process share."""


def count_of(processes: int | str) -> int:
    """Return the number of processes that `data.processes` means; `auto` is the number of cores available to this
    process."""
    if processes != AUTO:
        return int(processes)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare() -> None:
    """Start the fork server, which imports modules while this process continues."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    forkserver.ensure_running()


def in_order(compute: Callable[[Any, T], R], shared: Any, tasks: Iterable[T], processes: int) -> Iterator[R]:
    """Yield `compute(shared, task)` of every task, in order, from `processes` processes; a single task runs in this
    one.

    Args:
        compute: a module-level function.
        shared: an argument for all tasks; each process gets it once.

    Raises:
        TetherError: a process died.
    """
    tasks = iter(tasks)
    first = list(islice(tasks, 2)) if processes > 1 else []
    if len(first) < 2:
        for task in chain(first, tasks):
            yield compute(shared, task)
        return
    context = multiprocessing.get_context("forkserver")  # this process has threads, which a forked copy would lack
    context.set_forkserver_preload(list(_PRELOADED))
    pool = ProcessPoolExecutor(processes, context, _begin, (shared,))
    pending: deque[Future[R]] = deque()
    try:
        for task in chain(first, tasks):
            pending.append(pool.submit(_compute, compute, task))
            if len(pending) > processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TetherError(
            "A process that measures rows was killed, perhaps for its memory. Run the same command again: it continues "
            "where this one ended. With data.processes=1 it needs less memory."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _compute(compute: Callable[[Any, T], R], task: T) -> R:
    return compute(_shared, task)


def _begin(shared: Any) -> None:
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    logging.disable(logging.INFO)
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent is gone, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
