"""Servers that drip, never end, bomb, nest or lie: an answer has a bound in time, in bytes and in depth."""

import contextlib
import gzip
import itertools
import math
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator

import httpx
import pytest

from components.base.errors import Unreachable, UserError
from components.labelling.config import EndpointConfig
from components.labelling.feedback.judges import EndpointJudge
from components.rewards.config import HttpReward
from components.rewards.http import NO_VERSION, HttpSource
from components.rewards.source import Replies
from components.rollouts import asking
from components.rollouts.asking import MOST_BYTES, HttpAnswer, HttpClient
from components.rollouts.client import VllmClient
from components.rollouts.config import RolloutConfig

HEAD = b"HTTP/1.1 200 OK\r\n"
LIMIT = 0.6
"""Seconds of a client's timeout here."""


def _packed(data: bytes) -> bytes:
    """`data` compressed without the time, so that all workers collect the same tests."""
    return gzip.compress(data, mtime=0)


class Hostile:
    """A server on loopback that answers each request with the pieces of `answer()`, `pause` seconds apart."""

    def __init__(self, answer: Callable[[], Iterable[bytes]], pause: float = 0.0) -> None:
        self.answer, self.pause, self.asked, self.closed = answer, pause, 0, False
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(65536)
                self.asked += 1
                for piece in itertools.takewhile(lambda _: not self.closed, self.answer()):
                    connection.sendall(piece)
                    time.sleep(self.pause)
            except OSError:
                return


@pytest.fixture
def serve() -> Iterator[Callable[..., Hostile]]:
    servers: list[Hostile] = []

    def start(answer: Callable[[], Iterable[bytes]], pause: float = 0.0) -> Hostile:
        servers.append(Hostile(answer, pause))
        return servers[-1]

    yield start
    for each in servers:
        each.closed = True
        each.socket.close()


def whole(body: bytes, *headers: bytes) -> Callable[[], list[bytes]]:
    """An answer with a length."""
    lines = b"".join(header + b"\r\n" for header in headers)
    return lambda: [HEAD + lines + b"Content-Length: %d\r\n\r\n" % len(body), body]


def ask(server: Hostile, timeout: float = LIMIT) -> HttpAnswer:
    with HttpClient(timeout, UserError) as client:
        return client.request("GET", server.url)


SLOW = {
    "a body that drips": lambda: itertools.chain([HEAD + b"\r\n"], itertools.repeat(b" ")),
    "a body of known length that drips": lambda: itertools.chain(
        [HEAD + b"Content-Length: 99999\r\n\r\n"], itertools.repeat(b" ")
    ),
    "chunks that drip": lambda: itertools.chain(
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"], itertools.repeat(b"1\r\n \r\n")
    ),
    "headers that drip": lambda: itertools.chain([HEAD], itertools.repeat(b"a: b\r\n")),
    "a status line that drips": lambda: itertools.chain([b"HTTP/1.1 200 "], itertools.repeat(b"O")),
    "interim answers": lambda: itertools.repeat(b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "silence": lambda: itertools.repeat(b""),
}


@pytest.mark.parametrize("name", SLOW)
def test_an_answer_that_drips_ends_at_the_deadline(name: str, serve: Callable[..., Hostile]) -> None:
    server, began = serve(SLOW[name], 0.02), time.monotonic()
    with pytest.raises(httpx.ReadTimeout, match=r"no complete answer within 0.6 s"):
        ask(server)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 ", HEAD + b"a: "])
def test_a_head_that_never_ends_is_not_kept(start: bytes, serve: Callable[..., Hostile]) -> None:
    tracemalloc.start()
    with pytest.raises(httpx.TransportError):
        ask(serve(lambda: itertools.chain([start], itertools.repeat(b"a" * 65536))), 60)
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def bomb(size: int) -> bytes:
    """`size` bytes of white space, compressed about a thousand times."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(b" " * (1 << 20)) for _ in range(size >> 20)) + packer.flush()


FLOODS = {
    "endless": lambda: itertools.chain([HEAD + b"\r\n"], itertools.repeat(b" " * 65536)),
    "endless chunks": lambda: itertools.chain(
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"], itertools.repeat(b"10000\r\n" + b" " * 65536 + b"\r\n")
    ),
    "a gzip bomb": whole(bomb(256 << 20), b"Content-Encoding: gzip"),
    "a bomb called deflate": whole(bomb(256 << 20), b"Content-Encoding: Deflate"),
    "bytes after the end of gzip": lambda: itertools.chain(
        [HEAD + b"Content-Encoding: gzip\r\n\r\n" + _packed(b"{}")], itertools.repeat(b" " * 65536)
    ),
    "one byte too many": whole(b" " * (MOST_BYTES + 1)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_an_answer_of_any_length_is_read_to_the_limit(name: str, serve: Callable[..., Hostile]) -> None:
    server = serve(FLOODS[name])
    tracemalloc.start()
    with pytest.raises(UserError, match=r"longer than 16 MiB"):
        ask(server, 60)
    assert tracemalloc.get_traced_memory()[1] < 5 * MOST_BYTES
    tracemalloc.stop()


def test_the_longest_answer_and_a_compressed_one_are_read(serve: Callable[..., Hostile]) -> None:
    assert len(ask(serve(whole(b" " * MOST_BYTES)), 60).content) == MOST_BYTES
    packed = {b"gzip": _packed(b"[1]"), b"deflate": zlib.compress(b"[1]"), b"identity": b"[1]"}
    for header, body in packed.items():
        assert ask(serve(whole(body, b"Content-Encoding: " + header))).parsed() == ([1], "")


@pytest.mark.parametrize(
    ("header", "body", "problem"),
    [
        (b"gzip, gzip", _packed(_packed(b"{}")), "in the encoding 'gzip, gzip'"),
        (b"br", b"x", "in the encoding 'br'"),
        (b"gzip", b"no gzip", "compressed answer is damaged"),
    ],
)
def test_an_encoding_that_cannot_be_read_is_named(
    header: bytes, body: bytes, problem: str, serve: Callable[..., Hostile]
) -> None:
    with pytest.raises(UserError, match=problem):
        ask(serve(whole(body, b"Content-Encoding: " + header)))


BAD_JSON = {
    b"[" * 100_000: "nested more than 100 deep",
    b'{"a":' * 3000 + b"1" + b"}" * 3000: "nested more than 100 deep",
    b'{"version": 1' + b"0" * 5000 + b"}": "too many digits",
    b'{"version": 1, "version": 2}': "a key appears twice",
    b'{"version": "\\ud800"}': "not UTF-8",
    b'{"version": "\xff"}': "not UTF-8",
    b"<html>": "Expecting value",
    b"": "Expecting value",
}


@pytest.mark.parametrize("body", BAD_JSON, ids=range(len(BAD_JSON)))
def test_json_that_no_file_could_hold_is_refused(body: bytes, serve: Callable[..., Hostile]) -> None:
    value, problem = ask(serve(whole(body))).parsed()
    assert value is None and BAD_JSON[body] in problem


def test_an_address_that_no_resolver_takes_is_named() -> None:
    for url in (f"http://\u00fc{'a' * 70}/x", "http://[::1/x"):
        with HttpClient(5, UserError) as client, pytest.raises(UserError, match="not an address"):
            client.request("GET", url)


def test_a_key_that_no_header_can_have_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("geheim\n47", "gehéim"):
        monkeypatch.setenv("TETHER_REWARD_TOKEN", key)
        with pytest.raises(UserError, match="TETHER_REWARD_TOKEN has characters") as refused:
            HttpClient(1, UserError, "TETHER_REWARD_TOKEN")
        assert "geh" not in str(refused.value)
    monkeypatch.setenv("TETHER_REWARD_TOKEN", "right\n")
    with HttpClient(1, UserError, "TETHER_REWARD_TOKEN") as client:
        assert client.headers["Authorization"] == "Bearer right"


def scored(url: str) -> object:
    config = HttpReward(source=f"http:{url}/score", timeout=LIMIT, patience=0)
    with contextlib.closing(HttpSource(config)) as source:
        return source.score(Replies([[{"role": "user", "content": "q"}]], ["a"], [{}]))


def sampled(url: str) -> object:
    with VllmClient(RolloutConfig(engine="vllm", url=url, timeout=LIMIT, retries=3)) as client:
        return client.get("/weight_info")


def judged(url: str) -> object:
    config = EndpointConfig(url=f"{url}/v1", model="m", timeout=LIMIT, patience=0)
    with contextlib.closing(EndpointJudge(config)) as judge:
        return judge.answer([{"role": "user", "content": "q"}])


CLIENTS = (scored, sampled, judged)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_gives_up_on_an_answer_that_drips(
    client: Callable[[str], object], serve: Callable[..., Hostile]
) -> None:
    server, began = serve(SLOW["a body that drips"], 0.02), time.monotonic()
    with pytest.raises(Unreachable, match=r"within .*0.6 s"):
        client(server.url)
    assert server.asked == 1 and time.monotonic() - began < 5


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (FLOODS["a gzip bomb"], "longer than 16 MiB"),
        (whole(b"[" * 100_000), r"answers '\[\["),
        (whole(b'{"scores": [1], "scores": [2]}'), "answers"),
        (lambda: [b"HTTP/1.1 302 Found\r\nLocation: http://me:geheim@other/\r\nContent-Length: 0\r\n\r\n"],
         "redirects to http://other/"),
    ],
    ids=["bomb", "nested", "twice", "redirect"],
)  # fmt: skip
def test_every_client_names_an_answer_that_is_none(
    client: Callable[[str], object], answer: Callable[[], Iterable[bytes]], problem: str, serve: Callable[..., Hostile]
) -> None:
    server = serve(answer)
    with pytest.raises(UserError, match=problem) as refused:
        client(server.url)
    assert not isinstance(refused.value, Unreachable) and server.asked == 1
    assert server.url in str(refused.value) and "geheim" not in str(refused.value)


def test_a_version_that_cannot_be_read_is_none(serve: Callable[..., Hostile]) -> None:
    for body in BAD_JSON:
        config = HttpReward(source=f"http:{serve(whole(body)).url}/score")
        with contextlib.closing(HttpSource(config)) as source:
            assert source.version() == NO_VERSION


@pytest.mark.parametrize("header", ["86400", "9" * 400])
def test_a_server_cannot_make_a_run_wait_for_days(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(asking.time, "sleep", waits.append)
    busy = HttpAnswer(503, {"retry-after": header}, b"")
    with pytest.raises(Unreachable):
        asking.ask_patiently(lambda: busy, math.inf, Unreachable, retries=2)
    assert waits == [asking.LONGEST_WAIT] * 2
