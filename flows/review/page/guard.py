"""Protect the page: security headers on every response, limits on requests, and only same-origin posts."""

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LARGEST_BODY = 64 * 2**10
"""The largest form in bytes; a comment has a few thousand."""
REQUEST_S = 20.0
"""Seconds in which a whole request must arrive."""
MOST_HALF = 200
"""Most connections whose request has not arrived. The oldest is closed for a further one."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""With `no-referrer`, browsers would send `Origin: null` with the page's own forms. `same-origin` also hides the
address from other sites."""


class PromptRequests(H11Protocol):
    """uvicorn's HTTP protocol, which closes a connection whose request does not arrive in `REQUEST_S`."""

    _half: dict["PromptRequests", asyncio.TimerHandle] = {}  # noqa: RUF012 (of all connections, the oldest first)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        if (timer := self._half.pop(self, None)) is not None:
            timer.cancel()
        super().connection_lost(exc)

    def _time(self) -> None:
        """Start the timer when a request begins, and stop it when all of it is here."""
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and begun):
            if self not in self._half:
                self._half[self] = self.loop.call_later(REQUEST_S, self.transport.close)
            if len(self._half) > MOST_HALF:
                oldest = next(iter(self._half))
                self._half.pop(oldest).cancel()
                oldest.transport.close()
        elif (timer := self._half.pop(self, None)) is not None:
            timer.cancel()


class Guard:
    """ASGI middleware that protects an app."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    response_headers.setdefault(name, value)
            await send(message)

        refused = _refusal(scope, Headers(scope=scope)) if scope["type"] == "http" else None
        with suppress(ClientDisconnect):  # half of a form: nobody is left to answer
            await (refused or self.app)(scope, receive, guarded)


def _refusal(scope: MutableMapping[str, Any], headers: Headers) -> PlainTextResponse | None:
    """Return the response to send instead of the app's, if the request is refused."""
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdigit() or int(length) > LARGEST_BODY:
        return _plain(413, "This form is too large, or does not say its length.")
    if scope["method"] not in ("GET", "HEAD", "POST"):
        return _plain(405, "This page accepts only GET and POST.")
    if scope["method"] == "POST" and not _own_origin(headers):
        return _plain(403, "This form was sent by another site. Load the page again, and answer there.")
    return None


def _own_origin(headers: Headers) -> bool:
    """Return whether the browser says that a page of this server sent the form. Without that information it is
    refused."""
    site = headers.get("sec-fetch-site")
    if site not in (None, "same-origin"):
        return False
    origin = headers.get("origin", "")
    if origin in ("", "null"):
        return site == "same-origin"
    return urlsplit(origin).netloc == headers.get("host")


def _plain(status: int, text: str) -> PlainTextResponse:
    return PlainTextResponse(text + "\n", status, headers={"Connection": "close"})
