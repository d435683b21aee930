"""Whatever an input holds, its reader ends soon, in bounded memory, with a value or an error of ours.

`make fuzz` tries 5,000 damaged inputs of each reader. `make test` tries some, and others for each commit:
TETHER_FUZZ_SEED=ID repeats those of a commit. Hypothesis makes a failing input smaller and prints it; the test's folder
keeps it as a file.
"""

import contextlib
import faulthandler
import json
import os
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from components.base.errors import TetherError
from tests.fuzz import answers, artifacts, readers
from tests.fuzz.readers import MEMORY, SECONDS, Reader

READERS = [*readers.READERS, *artifacts.READERS, *answers.READERS]
CASES = 12
"""Damaged inputs of each reader in `make test`."""
LARGEST = 1 << 20
"""No damaged input is larger; what it may unpack to is its reader's business."""
TOKENS = [
    *(b"NaN", b"-Infinity", b"null", b"true", b"-1", b"1e999", b"2147483648", b"18446744073709551616", b"9" * 400),
    *(b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"]}" * 40, b'"', b"'", b"\\", b"\\u0000", b'"\\ud800"', b"\0"),
    *(b"\x1b[2J", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc0\x80", b"\r", b"\n", b"\r\n\r\n", b"\t", b",", b";", b":"),
    *(b"{", b"}", b"[", b"]", b"=cmd|' /C calc'!A0", b"../../../x", b"/dev/zero", b"%s%n{0}", b"<script>"),
    *(b"prompt", b"chosen", b"votes", b'"prompt": "again", ', b"&a [*a, *a]", b"*a", b"!!int ", b"<<: ", b"---\n"),
    *(b"!!python/name:os.system ", b"extends: x.yaml\n", b"? ", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"),
    *(b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"PAR1", b"PK\x03\x04", b"\x1f\x8b\x08\0\0\0\0\0"),
    *(b"Content-Length: 99\r\n", b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n", b" 503 \r\n"),
]
"""What readers trip over, whole."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def damaged(valid: bytes) -> st.SearchStrategy[bytes]:
    """Bytes of which up to five pieces are exchanged, or JSON of which a value is another one."""
    place = st.integers(0, len(valid))
    own = st.builds(lambda at, count: valid[at : at + count], place, st.integers(1, 1024))
    splices = st.tuples(place, st.integers(0, 64) | place, st.sampled_from(TOKENS) | st.binary(max_size=16) | own)

    def spliced(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = valid
        for at, count, piece in changes:
            data = (data[:at] + piece + data[at + count :])[:LARGEST]
        return data

    pieces = st.lists(splices, min_size=1, max_size=5).map(spliced)
    head, _, body = valid.partition(b"\r\n\r\n") if valid.startswith(b"HTTP/") else (b"", b"", valid)
    try:
        rows = [json.loads(line) for line in ([body] if b"\n " in body else body.splitlines())]
    except ValueError:
        return pieces
    places = [(number, *at) for number, row in enumerate(rows) for at in places_of(row)]

    def changed(at: tuple[Any, ...], value: Any) -> bytes:
        copy = json.loads(json.dumps(rows))
        inner = copy
        for name in at[:-1]:
            inner = inner[name]
        inner[at[-1]] = value
        text = "\n".join(map(json.dumps, copy)).encode() + b"\n"
        return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(text), b"", text]) if head else text

    return pieces | st.builds(changed, st.sampled_from(places), JSON)


def places_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value inside a JSON value, as names and numbers that lead to it."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places_of(each, (*at, name))


class TooLong(BaseException):
    """A case took longer than allowed. No `except Exception` may take it for an error of the file."""


@contextlib.contextmanager
def bounded(seconds: float = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Raise TooLong after `seconds` and MemoryError beyond `memory` bytes more than now; end a hang out of reach."""

    def stop(*_: object) -> None:
        raise TooLong(f"longer than {seconds} s")

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(2 * seconds + 1, exit=True)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (addresses + memory, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def seed_of_commit() -> str:
    """`TETHER_FUZZ_SEED`, else the commit's id: each commit tests other cases."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("TETHER_FUZZ_SEED") or told


def fuzz(reader: Reader, folder: Path, cases: int, seconds: float = SECONDS) -> None:
    """Raise what the first failing case raises, made small; the file in the folder is then that of the smallest one."""
    path = reader.make(folder)
    valid = path.read_bytes()
    reader.read(path)  # what it imports counts for nothing

    @hypothesis.seed(random.Random(f"{seed_of_commit()} {reader.name}").getrandbits(64))
    @settings(max_examples=cases, database=None, derandomize=False, deadline=None, report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])  # fmt: skip
    @hypothesis.given(damaged(valid))
    def case(data: bytes) -> None:
        path.write_bytes(data)
        with bounded(seconds):
            try:
                reader.read(path)
            except TetherError as error:
                assert not reader.named or reader.named in str(error), f"no word of {reader.named}: {error}"

    case()


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_input_ends_in_an_error_that_names_it(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own reserves gigabytes of addresses, which the limit counts
    (tmp_path / "case").mkdir()
    try:
        profile = settings.get_current_profile_name() == "fuzz"
        fuzz(reader, tmp_path / "case", settings().max_examples if profile else CASES)
    finally:
        pa.set_memory_pool(before)


def _raise(path: Path) -> None:
    raise KeyError("broken")


@pytest.mark.parametrize(
    ("fault", "error"),
    [(_raise, KeyError), (lambda path: signal.pause(), TooLong), (lambda path: bytes(2 << 30), MemoryError)],
    ids=["an error", "a hang", "memory"],
)
def test_a_reader_that_fails_is_found(tmp_path: Path, fault: Any, error: type[BaseException]) -> None:
    def read(path: Path) -> None:
        if path.read_bytes() != b"valid":
            fault(path)

    with pytest.raises(error):
        fuzz(Reader("x", readers.file("x", b"valid"), read), tmp_path, 30, seconds=1)
