"""Readers of what servers answer (a file is a whole HTTP answer, with headers), and of what the review page reads."""

import functools
import json
import shutil
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.labelling.config import EndpointConfig
from components.labelling.feedback.judges import EndpointJudge
from components.rewards.config import HttpReward
from components.rewards.http import HttpSource
from components.rewards.source import Replies
from components.rollouts.client import VllmClient
from components.rollouts.config import RolloutConfig
from flows.review.answer_progress import progress_of
from flows.review.database.connect import open_database
from flows.review.personal_links import add_raters, enter_batch
from flows.review.review_batches import find_batch
from tests.fuzz.readers import Reader, file, lines

SERVED: dict[str, bytes] = {}
"""The answer to each path; a path without one is answered by an end of the connection."""


def answer(value: Any) -> bytes:
    """An answer whose body is JSON; it says that the connection ends, else a client may ask again on one that did."""
    body = json.dumps(value).encode()
    head = f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"HTTP/1.1 200 OK\r\n{head}".encode() + body


class Handler(socketserver.StreamRequestHandler):
    """Reads a request, answers it with the bytes of its path, and closes the connection."""

    timeout = 5

    def handle(self) -> None:
        path, length = self.rfile.readline().split(b" ")[1].decode().partition("?")[0], 0
        while (line := self.rfile.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        self.rfile.read(length)
        self.wfile.write(SERVED.get(path, b""))


@functools.cache
def address() -> str:
    """The address of a server on loopback that lasts as long as this process."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


MODEL = {"dtype": "torch.float32", "max_model_len": 512, "logprobs_mode": "processed_logprobs"}
VLLM = {
    "/version": {"version": "0.29.0"},
    "/server_info": {"vllm_config": {"model_config": MODEL}, "vllm_env": {"VLLM_BATCH_INVARIANT": "1"}},
    "/v1/models": {"data": [{"id": "sft"}]},
    "/weight_info": {"weight_version": "a"},
    "/reset_prefix_cache": {"success": True},
}


def of_vllm(route: str) -> Callable[[Path], None]:
    """Read a route's answer as PPO does; the other routes' are valid."""

    def read(path: Path) -> None:
        SERVED.update({name: answer(value) for name, value in VLLM.items()} | {route: path.read_bytes()})
        with VllmClient(RolloutConfig(engine="vllm", url=address(), timeout=2.0, retries=0)) as client:
            if route in ("/version", "/server_info", "/v1/models"):
                client.facts()
            elif route == "/weight_info":
                client.weights_version()
            else:
                client.forget_prefixes()

    return read


def read_scores(path: Path) -> None:
    SERVED["/score"] = path.read_bytes()
    source = HttpSource(HttpReward(source=f"http:{address()}/score", timeout=2.0, patience=0.0))
    try:
        source.version()
        source.score(Replies([[{"role": "user", "content": "q"}]] * 2, ["one", "two"], [{}, {}]))
    finally:
        source.close()


def read_judgement(path: Path) -> None:
    SERVED["/v1/chat/completions"] = path.read_bytes()
    judge = EndpointJudge(EndpointConfig(url=f"{address()}/v1", model="m", timeout=2.0, patience=0.0))
    try:
        judge.answer([{"role": "user", "content": "A or B?"}])
    finally:
        judge.close()


def read_batch(path: Path) -> None:
    """As `tether people page FOLDER` finds what is judged."""
    find_batch(path.parent / "home", str(path.parent))


def served_batch(folder: Path) -> Path:
    """The database of a page on which one of two people has answered a pair."""
    (folder / "batch").mkdir()
    file("pairs.jsonl", lines(PAIRS))(folder / "batch")
    engine = open_database(folder / "valid.db")
    number, _ = enter_batch(engine, find_batch(folder / "home", str(folder / "batch"), overlap=2))
    add_raters(engine, number, ["Ada", "Bo"])
    engine.dispose()
    return folder / "valid.db"


def read_database(path: Path) -> None:
    """As `tether people status` reads how far a batch is, from a copy: opening upgrades a database."""
    copy = path.parent / "copy.db"
    for suffix in ("", "-wal", "-shm"):
        copy.with_name(copy.name + suffix).unlink(missing_ok=True)
    shutil.copy(path, copy)
    engine = open_database(copy, create=False)
    try:
        with engine.connect() as connection:
            progress_of(connection, 1)
    finally:
        engine.dispose()


PAIRS = [{"id": f"q{n}", "prompt": f"question {n}", "a": f"left {n}", "b": f"right {n}"} for n in range(3)]
CHOICE = {"choices": [{"message": {"role": "assistant", "content": "A"}}]}
READERS = [
    *(
        Reader(f"vLLM {route[1:]}", file("answer", answer(value)), of_vllm(route), "127.0.0.1")
        for route, value in VLLM.items()
    ),
    Reader("scores", file("answer", answer({"scores": [0.5, [[0, 1.0]]], "version": "1"})), read_scores, "127.0.0.1"),
    Reader("judgement", file("answer", answer(CHOICE)), read_judgement, "127.0.0.1"),
    Reader("pairs.jsonl of the page", file("pairs.jsonl", lines(PAIRS)), read_batch, "pairs.jsonl"),
    Reader("database of the page", served_batch, read_database, ".db"),
]
