"""Whatever is in a file, its reader ends soon, in bounded memory, with a value or an error of ours.

`make fuzz` runs 5,000 mutations of each reader; here a sample of them, another one for each commit.
"""

import re
from pathlib import Path

import pytest

from tests.fuzz import harness, readers
from tests.fuzz.mutations import LARGEST, MUTATIONS, mutated

CASES = 12
"""Mutations of each reader: a few seconds in all."""


def test_no_mutated_file_ends_a_reader_in_a_stack_trace_a_hang_or_without_memory(tmp_path: Path) -> None:
    seed = harness.seed_of_commit()
    done = harness.fuzz(seed, CASES, tmp_path / "fuzz")
    again = f"python -m tests.fuzz.harness --seed {seed} --cases {CASES} READER"
    assert done.returncode == 0, f"the last reader named failed, on the file in its folder. {again}\n{done.stdout}"
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if f": {CASES} cases, seed" in line] == [
        reader.name for reader in harness.READERS
    ]


BROKEN = """
import sys, time
from pathlib import Path
import faulthandler, signal
from tests.fuzz import harness, readers
harness.SECONDS = 1
def read(path):
    data = path.read_bytes()
    if b"NaN" not in data and b"null" not in data:
        return
    {fault}
faulthandler.enable()
signal.signal(signal.SIGALRM, harness._stop)
harness.run_reader(readers.Reader("x", readers.file("x", b"valid"), read), "one", 300, Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise KeyError('broken')", "KeyError: 'broken'"),
        ("time.sleep(60)", "TooLong: longer than 1 s"),
        ("bytes(2 << 30)", "MemoryError"),
        ("import ctypes; ctypes.string_at(0)", "Segmentation fault"),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(60)", "Timeout"),
    ],
    ids=["an error", "a hang", "memory", "a crash", "a hang out of reach"],
)
def test_a_reader_that_fails_is_found_and_its_file_is_left(tmp_path: Path, fault: str, said: str) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", BROKEN.format(fault=fault), str(tmp_path / "case")],
        cwd=harness.ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and said in done.stderr, done.stderr
    assert re.search(rb"NaN|null", (tmp_path / "case" / "x").read_bytes())


def test_the_same_seed_makes_the_same_cases_and_another_one_others(tmp_path: Path) -> None:
    seen: list[list[bytes]] = []
    for n, seed in enumerate(("one", "one", "two")):
        contents: list[bytes] = []
        make = readers.file("x", b"valid" * 9)
        reader = readers.Reader("x", make, lambda path, to=contents: to.append(path.read_bytes()))
        harness.run_reader(reader, seed, 40, tmp_path / str(n))
        seen.append(contents)
    assert seen[0] == seen[1] != seen[2] and len(set(seen[0])) > 20


def test_a_mutated_file_is_bounded() -> None:
    from hypothesis import given, settings

    @settings(max_examples=50, deadline=None, database=None)
    @given(MUTATIONS)
    def bounded(mutations: list) -> None:
        assert len(mutated(b"valid" * 1000, mutations)) <= LARGEST

    bounded()
