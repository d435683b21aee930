"""Ranks that a stage's process starts: what they give, and how they end when one of them goes wrong."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.base.errors import CheckFailed, LeaseLost, UserError, WorkerDied
from components.distributed.launching import Stopped
from components.training.optim import FitWatchConfig
from tests.components.conftest import silent
from tests.components.distributed.conftest import FIT, runtime_of
from tests.components.distributed.toy import ToyJob, run
from tests.waiting import PATIENCE, until


def ranks_alive(folder: Path) -> list[int]:
    """Processes that still work for the launch in `folder`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if str(folder) in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def has_begun(folder: Path) -> bool:
    """Whether the launch in `folder` has observed a step."""
    path = folder / "out/ranks/observed.jsonl"
    return path.is_file() and path.stat().st_size > 0


def weight(out: Path) -> float:
    """What the toy stage learnt."""
    return float.fromhex((out / "artifact" / "weight").read_text())


@pytest.fixture(autouse=True)
def no_rank_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever ends a launch, none of its processes is left."""
    yield
    assert ranks_alive(tmp_path) == []


@pytest.mark.whole
def test_two_ranks_learn_as_one_and_only_rank_0_reports_and_writes(toy: Any, tmp_path: Path) -> None:
    found = toy()
    assert [step for step, _, _ in found.points] == list(range(1, 17))
    assert found.points[-1][2]["total"] == 16
    assert found.points[0][2]["tokens"] == 8.0, "the tokens of the whole batch, not of a rank's share"
    assert found.metrics == {"toy/steps": 16.0, "toy/ranks_left": 1.0}
    alone = tmp_path / "alone"
    run(ToyJob(runtime=runtime_of(1), fit=FIT), {}, alone, silent)
    assert weight(tmp_path / "out") == pytest.approx(weight(alone), rel=1e-5)


@pytest.mark.whole
def test_the_error_of_the_rank_that_failed_keeps_its_class_and_text(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match=r"^toy: the loss is nan\. Lower toy\.learning_rate\.$"):
        toy(goes_wrong="check")
    assert time.time() - (tmp_path / "went-wrong").stat().st_mtime < PATIENCE * 30


@pytest.mark.ranks
def test_an_error_ends_the_stage_also_where_ending_the_process_group_waits_for_other_ranks(
    toy: Any, tmp_path: Path
) -> None:
    """As NCCL's end of a group does: the rank that failed waited for those that waited for it, and wrote no error."""
    wrong = tmp_path / "went-wrong"

    def patient() -> None:
        assert not wrong.exists() or time.time() - wrong.stat().st_mtime < PATIENCE * 60, "the ranks wait"

    with pytest.raises(CheckFailed, match="the loss is nan"):
        toy(goes_wrong="check", shutdown_waits=True, check=patient)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "how, kind, says",
    [
        ("user", UserError, r"^pairs\.jsonl, row 3: no prompt\. Add one\.$"),
        ("bug", ZeroDivisionError, r"^distributed, rank 1: nothing to divide by"),
        ("memory", MemoryError, r"rank 1: out of memory: 3 GiB asked for"),
        ("disk", UserError, r"^/full/disk: No space left on device\. Make room there"),
        ("kill", WorkerDied, r"rank 1 was ended by SIGKILL"),
    ],
)
def test_whatever_ends_a_rank_ends_the_stage_with_it_and_the_next_attempt_resumes(
    how: str, kind: type[Exception], says: str, toy: Any, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=says):
        toy(goes_wrong=how, at_step=9)
    assert time.time() - (tmp_path / "went-wrong").stat().st_mtime < PATIENCE * 30
    again = toy(goes_wrong=how, at_step=9)
    assert again.points[0][2]["resumed"] and again.points[0][0] >= 6


@pytest.mark.ranks
def test_ranks_whose_held_out_losses_differ_stop_at_the_step_that_rank_0_chooses(toy: Any) -> None:
    """GPUs may round differently: rank 0 was out of patience, and the other waited for its gradients for ever."""
    fit = FIT.model_copy(update={"evaluate_every": 2, "watch": FitWatchConfig(patience=1)})
    found = toy(watched=True, fit=fit, timeout=10.0)
    assert [step for step, _, _ in found.points] == [1, 2, 3, 4]


@pytest.mark.ranks
def test_a_rank_that_stands_still_is_noticed_after_the_timeout(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"for longer than runtime\.rank_timeout"):
        toy(goes_wrong="stand still", timeout=10.0)
    assert time.time() - (tmp_path / "went-wrong").stat().st_mtime < 10 + 30


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_interpreter_would_abort_while_it_shuts_down_has_done_its_work(rank: int, toy: Any) -> None:
    """One rank of some 45 ended so once its work was done: "terminate called without an active exception"."""
    assert toy(goes_wrong="abort at exit", rank=rank).metrics["toy/steps"] == 16.0


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_their_step_with_a_checkpoint(rank: int, toy: Any, tmp_path: Path) -> None:
    with pytest.raises(Stopped) as told:
        toy(goes_wrong="terminate", rank=rank, at_step=5, seconds=0.2)
    assert told.value.number == signal.SIGTERM
    again = toy(goes_wrong="terminate", rank=rank, at_step=5)
    assert again.points[0][2]["resumed"]


@pytest.mark.ranks
def test_the_stages_process_told_to_stop_lets_the_ranks_finish_their_step(toy: Any, tmp_path: Path) -> None:
    def told() -> int | None:
        return signal.SIGTERM if has_begun(tmp_path) else None

    with pytest.raises(Stopped):
        toy(seconds=0.3, check=told)
    assert list((tmp_path / "out" / "checkpoint" / "toy").glob("step-*.json"))


@pytest.mark.ranks
def test_a_lost_lease_ends_the_ranks_at_once(toy: Any, tmp_path: Path) -> None:
    lost_at = 0.0

    def check() -> None:
        nonlocal lost_at
        if has_begun(tmp_path):
            lost_at = time.monotonic()
            raise LeaseLost("another process computes this")

    with pytest.raises(LeaseLost):
        toy(seconds=1.0, check=check)
    assert time.monotonic() - lost_at < 30


@pytest.mark.ranks
def test_when_the_stages_process_is_killed_no_rank_is_left(toy: Any, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            toy(seconds=1.0)
        finally:
            os._exit(0)
    until("the launch has begun", lambda: has_begun(tmp_path), 120)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until("every rank is gone", lambda: not ranks_alive(tmp_path), 10)


@pytest.mark.ranks
def test_told_to_stop_before_its_ranks_have_begun_the_stages_process_still_stops_them(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(Stopped) as told:
        toy(seconds=0.1, check=lambda: signal.SIGTERM)
    assert told.value.number == signal.SIGTERM
