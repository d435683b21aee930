"""Runs readers on mutated files in a process of its own, one after the other.

    python -m tests.fuzz.harness --cases 5000 [--seed TEXT] [--folder DIR] [READER ...]

A case fails that ends in another error than a `TetherError`, takes longer than `SECONDS` or more memory than `MEMORY`;
hypothesis then makes it smaller, and the file that is left in the folder is the one to look at. The same seed makes the
same cases.
"""

import argparse
import contextlib
import faulthandler
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz import artifacts, readers
from tests.fuzz.readers import MEMORY, SECONDS, Reader

ROOT = Path(__file__).resolve().parents[2]
READERS = [*readers.READERS, *artifacts.READERS]


def seed_of_commit() -> str:
    """`TETHER_FUZZ_SEED`, else the commit's id: each commit tests other cases."""
    named = os.environ.get("TETHER_FUZZ_SEED")
    return (
        named
        or subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )


def fuzz(
    seed: str, cases: int, folder: Path, *readers: str, output: int | None = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run so many cases of each of `readers` (none: of all) in another process, its files in `folder`."""
    command = [sys.executable, "-m", "tests.fuzz.harness", "--inside", "--seed", seed, "--cases", str(cases)]
    # Arrow's own allocator reserves gigabytes of addresses at once, which the limit of memory would count.
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--folder", str(folder), *readers],
        cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


class TooLong(BaseException):
    """A case took longer than `SECONDS`. No `except Exception` may take it for an error of the file."""


def run_reader(reader: Reader, seed: str, cases: int, folder: Path) -> None:
    """Raise what the first failing case raises, made small; the file is then the smallest one."""
    import hypothesis
    from hypothesis import HealthCheck, Phase

    from components.base.errors import TetherError
    from tests.fuzz.mutations import MUTATIONS, mutated

    folder.mkdir(parents=True)
    path = reader.make(folder)
    valid = path.read_bytes()
    reader.read(path)  # what it imports counts for nothing

    def case(mutations: Any) -> None:
        path.write_bytes(mutated(valid, mutations))
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # where no handler of Python's is called any more
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            with contextlib.suppress(TetherError):
                reader.read(path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()

    settings = hypothesis.settings(
        max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False, derandomize=False,
    )  # fmt: skip
    number = random.Random(f"{seed} {reader.name}").getrandbits(64)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_addresses() + MEMORY, before[1]))
    try:
        hypothesis.seed(number)(settings(hypothesis.given(MUTATIONS)(case)))()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _stop(*_: object) -> None:
    raise TooLong(f"longer than {SECONDS} s")


def main() -> int:
    """Run what the arguments name; 1 where a case failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", action="store_true", help="this is the other process")
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--seed", default=seed_of_commit())
    parser.add_argument("--folder", type=Path)
    parser.add_argument("readers", nargs="*")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="tether-fuzz-"))
    if not given.inside:
        return fuzz(given.seed, given.cases, folder, *given.readers, output=None).returncode
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _stop)
    for reader in READERS:
        if given.readers and reader.name not in given.readers:
            continue
        place = folder / reader.name.replace(" ", "-")
        print(f"{reader.name}: {given.cases} cases, seed {given.seed}, the case at work is in {place}", flush=True)
        run_reader(reader, given.seed, given.cases, place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
