"""Run a function over independent tasks in other processes. The output is the same for any number of processes."""

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
from multiprocessing import connection, context, popen_forkserver, spawn
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

from components.base.errors import TetherError

T = TypeVar("T")
R = TypeVar("R")

AUTO = "auto"
_PRELOADED = (
    "data_contracts.rows.working", "data_contracts.findings.texts", "transformers",
)
"""Modules that the fork server imports once, for all worker processes."""
ALONE = 2
"""Number of tasks for which no process is started, because this one completes them in the time that starting takes."""
_KILLED = (
    "A process that measures rows was killed, perhaps for its memory. Run the same command again: it continues where "
    "this one ended. With data.processes=1 it needs less memory."
)
_shared: Any = None
"""The argument that all tasks of a worker process share."""


def count_of(processes: int | str) -> int:
    """Return the number of processes that `data.processes` means; `auto` is the number of cores available to this
    process."""
    if processes != AUTO:
        return int(processes)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _about_this_process(name: str) -> dict[str, Any]:
    """Return what `spawn` tells a new process called `name` about this one, without the main module."""
    data = spawn.get_preparation_data(name)
    return {key: value for key, value in data.items() if not key.startswith("init_main_from_")}


class _Popen(popen_forkserver.Popen):
    """The standard library's, except that it tells the new process no main module.

    `_launch` asks its global `spawn` what to tell, and has no parameter for it. So this is the same code with another
    `spawn` among its globals. To replace `sys.modules["__main__"]` meanwhile would show other threads the wrong one.
    """

    _launch = FunctionType(
        popen_forkserver.Popen._launch.__code__,  # type: ignore[attr-defined]
        vars(popen_forkserver) | {"spawn": SimpleNamespace(get_preparation_data=_about_this_process)},
    )


class _Process(context.ForkServerProcess):
    """A process that does not import the main module, which may be a user's script: its calls would run again."""

    _Popen = _Popen


class _Context(context.ForkServerContext):
    """Starts processes from a fork server, since this process has threads, which a forked copy would lack."""

    Process = _Process


def _context() -> _Context:
    server = _Context()
    server.set_forkserver_preload(list(_PRELOADED))
    return server


def in_order(compute: Callable[[Any, T], R], shared: Any, tasks: Iterable[T], processes: int) -> Iterator[R]:
    """Yield `compute(shared, task)` of every task, in order, from `processes` processes; up to `ALONE` tasks run in
    this one.

    Args:
        compute: a module-level function.
        shared: an argument for all tasks; each process gets it once.

    Raises:
        TetherError: a process died.
    """
    tasks = iter(tasks)
    first = list(islice(tasks, ALONE + 1)) if processes > 1 else []
    alone = processes <= 1 or len(first) <= ALONE
    tasks = chain(iter(first), tasks)
    del first  # the list would keep these tasks in memory to the end
    if alone:
        for task in tasks:
            yield compute(shared, task)
        return
    pool = ProcessPoolExecutor(processes, _context(), _begin, (shared,))
    pending: deque[Future[R]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(_compute, compute, task))
            if len(pending) > processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TetherError(_KILLED) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        pending.clear()


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
