"""Signals to stop: held to the end of a step by those who asked for it, and by nobody else."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from components.training.stopping import SIGNALS, Held, Interrupted, graceful

ROOT = Path(__file__).resolve().parents[3]
KINDS = [(signal.SIGTERM, Interrupted), (signal.SIGINT, KeyboardInterrupt)]


@pytest.fixture(autouse=True)
def usual_handlers():
    """A shell that runs the tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "kind"), KINDS)
def test_outside_a_loop_a_signal_stops_at_once(number: int, kind: type[BaseException]) -> None:
    with pytest.raises(kind), graceful():
        signal.raise_signal(number)
        pytest.fail("it went on")


@pytest.mark.parametrize(("number", "kind"), KINDS)
def test_in_a_loop_the_first_is_held_until_it_is_asked_for_and_the_second_is_not(
    number: int, kind: type[BaseException]
) -> None:
    with pytest.raises(kind), graceful(), Held() as held:
        assert held.told is None
        held.deliver()
        signal.raise_signal(number)
        assert held.told == number
        held.deliver()
        pytest.fail("it went on")
    done = []
    with pytest.raises(kind), graceful(), Held():
        signal.raise_signal(signal.SIGTERM)
        done.append("held")
        signal.raise_signal(number)
        pytest.fail("it went on")
    assert done == ["held"]


def test_a_signal_that_came_in_the_last_step_is_not_forgotten() -> None:
    with pytest.raises(Interrupted), graceful(), Held():
        signal.raise_signal(signal.SIGTERM)


def test_an_error_of_the_step_is_not_hidden_by_a_signal_that_came_before_it() -> None:
    with pytest.raises(ZeroDivisionError), graceful(), Held():
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError


def test_a_program_that_did_not_ask_keeps_its_handlers() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Held():
        assert [signal.getsignal(number) for number in SIGNALS] == before
    with graceful(), Held():
        assert all(signal.getsignal(number) != handler for number, handler in zip(SIGNALS, before, strict=True))
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with graceful(), Held() as held:
        signal.raise_signal(signal.SIGINT)
        assert held.told is None


def test_in_a_thread_nothing_is_held_and_nothing_breaks() -> None:
    broken: list[BaseException] = []

    def work() -> None:
        try:
            with graceful(), Held():
                pass
        except BaseException as error:
            broken.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not broken


def test_a_loop_of_a_program_that_did_not_ask_dies_of_sigterm_as_ever() -> None:
    code = "import os, signal, components.training.stopping as s\nwith s.Held():\n os.kill(os.getpid(), signal.SIGTERM)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, check=False)
    assert done.returncode == -signal.SIGTERM
