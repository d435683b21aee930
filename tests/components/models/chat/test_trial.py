"""A trial has no effect here, says why it fails, and is killed beyond its limits."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from components.base.errors import TetherError
from components.models.chat import trial
from components.models.chat.trial import failure_of


def test_a_function_that_returns_has_no_effect_and_no_failure() -> None:
    calls: list[int] = []
    assert failure_of(lambda: calls.append(1), 5) is None and calls == []


def test_a_failure_is_named() -> None:
    def fail() -> None:
        raise KeyError("role\ud800")

    assert failure_of(fail, 5) == "KeyError: 'role\\ud800'"


@pytest.mark.parametrize("function", [lambda: 9**9**9, lambda: "a" * (5 << 30), lambda: os.kill(os.getpid(), 9)])
def test_a_function_beyond_its_limits_is_killed(function: object) -> None:
    assert failure_of(function, 1) == "it takes more than 1 s or 2 GiB"


def test_a_wait_is_not_processor_time() -> None:
    """A slow host refused every template."""
    assert failure_of(lambda: time.sleep(1.2), 1) is None


def test_a_fork_that_waits_for_another_threads_lock_is_forked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load beside other threads never ended."""
    monkeypatch.setattr(trial, "ASLEEP", 0.4)
    lock, held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(0.2)

    def take() -> None:
        with lock:
            pass

    threading.Thread(target=hold).start()
    held.wait()
    assert failure_of(take, 5) is None
    with lock, pytest.raises(TetherError, match="other threads held locks"):
        failure_of(take, 5, attempts=2)


def test_a_thread_tries_a_function_too() -> None:
    """In a process of its own: after a fork Python drops what other threads hold, and torch's groups block there."""
    code = (
        "from concurrent.futures import ThreadPoolExecutor; from components.models.chat.trial import failure_of\n"
        "print(ThreadPoolExecutor(1).submit(failure_of, lambda: 9**9**9, 1).result())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[4])
    assert done.stdout == "it takes more than 1 s or 2 GiB\n", done.stderr
