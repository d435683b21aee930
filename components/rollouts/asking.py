"""HTTP requests with retries while the server does not answer."""

import time
from collections.abc import Callable, Collection
from typing import Any

FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0
"""Seconds before a retry: the first wait and the longest, unless the server asks for a longer one."""


def ask_patiently(
    send: Callable[[], Any], patience: float, unreachable: Callable[[str], Exception], final: Collection[int] = ()
) -> Any:
    """Make the request `send` and return its answer (an `httpx.Response`).

    Retries if the connection fails or the status is 429 or 5xx. The waits double; a `Retry-After` in seconds replaces a
    shorter wait.

    Args:
        patience: seconds after which no further retry is made.
        unreachable: makes the error from the text of the last problem.
        final: status codes of 500 and above that are returned as answers.

    Raises:
        Exception: the error of `unreachable`, after `patience`. httpx.InvalidURL: the address is invalid.
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
    """Return an answer's text for a message: on one line, shortened."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def _asked_wait(header: str | None) -> float:
    """Return the seconds of a `Retry-After` header; 0 without one, or if it is a date."""
    return float(header) if header is not None and header.strip().isdecimal() else 0.0
