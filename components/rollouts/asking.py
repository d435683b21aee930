"""HTTP requests whose answers are bounded in time and size, with retries while the server does not answer."""

import asyncio
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.base.strict_json import BadJson, parse_json

FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0
"""Seconds before a retry: the first wait and the longest, unless the server asks for a longer one."""
CONNECT_SECONDS = 10.0
MOST_BYTES = 16 << 20
"""Bytes of the longest answer, after decompression. A response of 100,000 tokens with log-probabilities takes 10 MB."""


class HttpAnswer(NamedTuple):
    """A server's answer."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """Return the answer for a message; for a redirect, where it leads."""
        if 300 <= self.status_code < 400:
            return f"redirects to {self.headers.get('location')}, and redirects are not followed"
        return self.content.decode(errors="replace")

    def parsed(self) -> tuple[Any, str]:
        """Return the value of the answer's JSON and "", or None and why no file could hold it. NaN is a float."""
        try:
            value = parse_json(self.content.decode("utf-8-sig"), constants=float)
            if b"\\u" in self.content:
                json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except UnicodeError:
            return None, " (not UTF-8 text)"
        except BadJson as error:
            return None, f" (as JSON: {error})"
        return value, ""


class HttpClient(AbstractContextManager["HttpClient", None]):
    """A client for any number of threads. An answer comes whole within `timeout` seconds and has `MOST_BYTES` at most.

    httpx bounds each read alone: a server that sends a byte a second is read without end. An event loop can end a
    request wherever it waits.
    """

    def __init__(
        self, timeout: float, refuse: Callable[[str], Exception], token: str | None = None, **options: Any
    ) -> None:
        """Open the client. `refuse` makes the error for an answer or address that no retry would make valid; `token` is
        the variable with the bearer token; `options` are httpx's."""
        import httpx

        key = (os.environ.get(token) or "" if token else "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{token} has characters that an HTTP header can't have. Set it to the key alone.")
        self._timeout, self._refuse = timeout, refuse
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "gzip", **({"Authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx.Timeout(None, connect=min(CONNECT_SECONDS, timeout / 2)), **options,
        )  # fmt: skip
        self.headers, self._loop = self._http.headers, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def request(self, method: str, url: str, **options: Any) -> HttpAnswer:
        """Return the answer to a request; `options` are httpx's options.

        Raises:
            httpx.TransportError: no connection, or (ReadTimeout) no complete answer in time. Exception: that of
                `refuse`.
        """
        import httpx

        future = asyncio.run_coroutine_threadsafe(self._answer(method, url, options), self._loop)
        try:
            return future.result()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no complete answer within {self._timeout:g} s") from None
        except httpx.InvalidURL as error:
            raise self._refuse(f"this is not an address: {error}") from None
        finally:
            future.cancel()  # after Ctrl-C

    async def _answer(self, method: str, url: str, options: Mapping[str, Any]) -> HttpAnswer:
        async with asyncio.timeout(self._timeout), self._http.stream(method, url, **options) as answer:
            encoding = answer.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
                raise self._refuse(f"it answers in the encoding {encoding[:40]!r}. Make it answer uncompressed.")
            decoder = None if encoding == "identity" else zlib.decompressobj(zlib.MAX_WBITS | 32)
            content, received = bytearray(), 0
            async for chunk in answer.aiter_raw():
                received += len(chunk)
                try:
                    content += chunk if decoder is None else decoder.decompress(chunk, MOST_BYTES + 1 - len(content))
                except zlib.error as error:
                    raise self._refuse(f"its compressed answer is damaged: {error}.") from None
                if max(received, len(content)) > MOST_BYTES:
                    most = f"longer than {MOST_BYTES >> 20} MiB"
                    raise self._refuse(f"its answer is {most}. Check the address, or ask for less in one request.")
            return HttpAnswer(answer.status_code, answer.headers, bytes(content))


def ask_patiently(
    send: Callable[[], HttpAnswer], patience: float, unreachable: Callable[[str], Exception],
    final: Collection[int] = (), retries: float = math.inf,
) -> HttpAnswer:  # fmt: skip
    """Make the request `send` and return its answer.

    Retries if the connection fails or the status is 429 or 5xx. The waits double; a `Retry-After` in seconds replaces a
    shorter wait (without a limit of `patience` up to `LONGEST_WAIT`).

    Args:
        patience: seconds after which no further retry is made.
        unreachable: makes the error from the text of the last problem.
        final: status codes of 500 and above that are returned as answers.
        retries: largest number of retries.

    Raises:
        Exception: the error of `unreachable`, after `patience` or `retries`; and that of `send`.
    """
    import httpx

    limit, wait = time.monotonic() + patience, FIRST_WAIT
    while True:
        least = 0.0
        try:
            answer = send()
            status = answer.status_code
            if (status < 500 and status != 429) or status in final:
                return answer
            problem, least = f"it answers {status}: {said(answer.text)}", _asked_wait(answer.headers.get("retry-after"))
            least = least if math.isfinite(patience) else min(least, LONGEST_WAIT)
        except httpx.TransportError as error:
            problem = str(error) or type(error).__name__
        if retries < 1 or time.monotonic() + max(wait, least) > limit:
            raise unreachable(problem)
        retries -= 1
        time.sleep(max(wait, least))
        wait = min(2 * wait, LONGEST_WAIT)


def said(text: str) -> str:
    """Return an answer's text for a message: on one line, shortened."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _asked_wait(header: str | None) -> float:
    """Return the seconds of a `Retry-After` header; 0 without one, or if it is a date."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0
