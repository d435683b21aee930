"""Which error ends a stage whose ranks failed."""

import signal
from pathlib import Path

import pytest

from components.base.errors import CheckFailed, TetherError, WorkerDied
from components.distributed.outcome import error_of, failed, read_ended, told_to_stop, write_ended
from components.training.stopping import Interrupted

LOST = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]")
LATE = RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation")


def test_the_rank_that_failed_is_blamed_not_those_that_missed_it(tmp_path: Path) -> None:
    write_ended(tmp_path, failed(0, LOST))
    write_ended(tmp_path, failed(1, CheckFailed("ppo: the loss is nan.")))
    error = error_of("ppo", read_ended(tmp_path), {0: 1, 1: 1})
    assert type(error) is CheckFailed and str(error) == "ppo: the loss is nan."


def test_a_killed_rank_is_named_though_another_wrote_that_it_lost_it(tmp_path: Path) -> None:
    write_ended(tmp_path, failed(0, LOST))
    error = error_of("ppo", read_ended(tmp_path), {0: 1, 1: -signal.SIGKILL})
    assert type(error) is WorkerDied and "rank 1 was ended by SIGKILL" in str(error)
    error = error_of("ppo", read_ended(tmp_path), {1: -signal.SIGKILL, 0: -signal.SIGTERM})
    assert "rank 1 was ended by SIGKILL" in str(error), "the agent ended rank 0 then"


def test_a_rank_that_does_not_answer_is_not_called_killed_though_it_was_in_the_end(tmp_path: Path) -> None:
    write_ended(tmp_path, failed(0, LATE))
    error = error_of("ppo", read_ended(tmp_path), {0: 1, 1: -signal.SIGKILL})
    assert type(error) is WorkerDied and "waited for another rank for longer than runtime.rank_timeout" in str(error)


def test_an_error_of_no_class_of_ours_keeps_a_builtin_class_and_its_trace(tmp_path: Path) -> None:
    class Unknown(Exception):
        pass

    write_ended(tmp_path, failed(1, KeyError("chosen")))
    assert type(error_of("sft", read_ended(tmp_path), {})) is KeyError
    write_ended(tmp_path, failed(1, Unknown("what?")))
    error = error_of("sft", read_ended(tmp_path), {})
    assert type(error) is TetherError and "Unknown: what?" in str(error)
    assert "In rank 1" in error.__notes__[0]


def test_a_stop_is_no_error_unless_an_error_came_first(tmp_path: Path) -> None:
    write_ended(tmp_path, failed(1, Interrupted(signal.SIGHUP)))
    write_ended(tmp_path, failed(0, LOST))
    assert told_to_stop(read_ended(tmp_path), {1: 1, 0: 1}) == signal.SIGHUP
    write_ended(tmp_path, failed(1, CheckFailed("no")))
    write_ended(tmp_path, failed(0, Interrupted(signal.SIGTERM)))
    assert told_to_stop(read_ended(tmp_path), {1: 1, 0: 1}) == 0


def test_a_signal_that_the_agent_sent_the_others_is_no_stop(tmp_path: Path) -> None:
    write_ended(tmp_path, failed(0, Interrupted(signal.SIGTERM)))
    assert told_to_stop(read_ended(tmp_path), {1: -signal.SIGKILL, 0: 1}) == 0
    assert told_to_stop([], {1: -signal.SIGKILL, 0: -signal.SIGTERM}) == 0
    assert told_to_stop([], {1: -signal.SIGTERM, 0: -signal.SIGTERM}) == signal.SIGTERM
    write_ended(tmp_path, failed(1, LATE))
    write_ended(tmp_path, failed(0, Interrupted(signal.SIGTERM)))
    assert told_to_stop(read_ended(tmp_path), {1: 1, 0: 1}) == 0


@pytest.mark.parametrize("error", [CheckFailed("gloo/ is in this text"), ValueError("a plain error")])
def test_only_an_error_of_the_connection_blames_another_rank(error: Exception) -> None:
    assert not failed(0, error).of_ranks


def test_a_rank_that_ended_without_a_word_is_named_where_no_exit_code_is_known(tmp_path: Path) -> None:
    error = error_of("sft", [], {}, [1])
    assert isinstance(error, WorkerDied) and "sft: rank 1 ended without an error message" in str(error)
    assert "rank 0 was ended by SIGKILL" in str(error_of("sft", [], {0: -signal.SIGKILL}, [1]))
