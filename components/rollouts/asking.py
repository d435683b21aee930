"""Requests over HTTP that go again while the other side does not answer."""

import time
from collections.abc import Callable, Collection
from typing import Any

FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0
"""Seconds before a request goes again: the first wait, and the longest, unless the other side asks for a longer one."""


def ask_patiently(
    send: Callable[[], Any], patience: float, unreachable: Callable[[str], Exception], final: Collection[int] = ()
) -> Any:
    """The answer (an `httpx.Response`) to the request that `send` makes.

    It goes again where the connection fails and where the answer is 429 or 5xx. The waits double; a `Retry-After` in
    seconds replaces a shorter one.

    Args:
        patience: seconds after which nothing is sent any more.
        unreachable: makes the error of the last problem.
        final: status codes of 500 and above that are answers.

    Raises:
        Exception: what `unreachable` makes, after `patience`. httpx.InvalidURL: the address is none.
    """
    import httpx

    limit, wait = time.monotonic() + patience, FIRST_WAIT
    while True:
        least = 0.0
        try:
            found = send()
            status = found.status_code
            if (status < 500 and status != 429) or status in final:
                return found
            problem, least = f"it answers {status}: {said(found.text)}", _asked_wait(found.headers.get("retry-after"))
        except httpx.TransportError as error:
            problem = str(error) or type(error).__name__
        if time.monotonic() + max(wait, least) > limit:
            raise unreachable(problem)
        time.sleep(max(wait, least))
        wait = min(2 * wait, LONGEST_WAIT)


def said(text: str) -> str:
    """An answer for a message: on one line, cut short."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _asked_wait(header: str | None) -> float:
    """Seconds of a `Retry-After`; 0 without one, or where it is a date."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0
