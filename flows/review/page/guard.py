"""Protect the page: security headers on every response, a limit on request bodies, and only same-origin posts."""

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 64 * 2**10
"""The largest form in bytes; a comment has a few thousand."""
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


class _TooLarge(Exception):
    pass


class Guard:
    """ASGI middleware that protects an app."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    own.setdefault(name, value)
            await send(message)

        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > LARGEST_BODY:
                raise _TooLarge
            return message

        if (refused := _refusal(scope, headers)) is not None:
            await refused(scope, receive, guarded)
            return
        try:
            await self.app(scope, limited, guarded)
        except _TooLarge:
            if not started:
                await _plain(413, "This form is too large.")(scope, receive, guarded)


def _refusal(scope: MutableMapping[str, Any], headers: Headers) -> PlainTextResponse | None:
    """Return the response to send instead of the app's, if the request is refused."""
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > LARGEST_BODY:
        return _plain(413, "This form is too large.")
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
