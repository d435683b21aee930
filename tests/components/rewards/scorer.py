"""A scorer on loopback that gives the answers a test sets."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Scorer:
    """`answer(body) -> (status, answer)` of a POST, `version` of a GET (None: 404); `asked` holds the bodies."""

    def __init__(self) -> None:
        self.answer: Callable[[Any], tuple[int, object]] = lambda body: (
            200, {"scores": [float(len(each)) for each in body["responses"]]},
        )  # fmt: skip
        self.version: str | None = None
        self.asked: list[Any] = []
        self.tokens: list[str | None] = []
        """The header `Authorization` of each POST."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                outer.tokens.append(self.headers["Authorization"])
                self._send(*outer.answer(body))

            def do_GET(self) -> None:
                self._send(*((404, {}) if outer.version is None else (200, {"version": outer.version})))

            def _send(self, status: int, answer: object) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
