"""What the bench of the stack counts."""

import os
import signal
import subprocess
import sys

import pytest

from tests.bench.stack import at_once, grown, memory


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([], 0),
        ([("10:00", "10:05"), ("10:05", "10:09")], 1),
        ([("10:00", "10:05"), ("10:01", "10:03"), ("10:03", "10:06")], 2),
        ([("10:00", "10:09"), ("10:01", "10:08"), ("10:02", "10:03")], 3),
    ],
)
def test_runs_that_overlap_are_counted_and_one_that_begins_as_another_ends_is_not(
    spans: list[tuple[str, str]], most: int
) -> None:
    assert at_once(spans) == most


def test_a_part_that_grows_by_more_than_a_tenth_and_20_mb_is_named() -> None:
    assert grown({"a": 100.0, "b": 100.0, "c": 5.0}, {"a": 129.0, "b": 131.0, "c": 25.0}) == ["b"]


def test_memory_is_that_of_a_process_and_its_grandchildren_less_what_is_a_part_itself() -> None:
    """PostgreSQL's processes have sessions of their own."""
    hold = "import subprocess, sys, time; x = b'x' * {} * 1000000; {}; print(flush=True); time.sleep(60)"
    inner = hold.format(20, "0")
    nest = (
        f"child = subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True, stdout=subprocess.PIPE)"
    )
    outer = subprocess.Popen(
        [sys.executable, "-c", hold.format(1, f"{nest}; child.stdout.readline(); print(child.pid, end='')")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert outer.stdout is not None
    child = int(outer.stdout.readline())
    try:
        both = memory({"outer": outer.pid})["outer"]
        apart = memory({"outer": outer.pid, "inner": child})
        assert both > 20 and apart["inner"] > 20 > apart["outer"] > 0
        assert apart["outer"] + apart["inner"] == pytest.approx(both, rel=0.05)
    finally:
        for process in (child, outer.pid):
            os.kill(process, signal.SIGKILL)
        outer.communicate()
