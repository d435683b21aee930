"""Calls to a Prefect server that may be away, for example while it or its database restarts."""

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

AWAY = (408, 429, 500, 502, 503, 504)
"""Status codes that say that a server, its database or a proxy is down. Prefect answers 500 then."""
AGAIN_SECONDS = 1.0
"""Seconds between two tries of a call that has to succeed."""

Say = Callable[[str], None]
T = TypeVar("T")


def is_away(error: BaseException | None) -> bool:
    """Return whether an error of Prefect's client means that the server, or the database behind it, is away."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in AWAY
    return isinstance(error, httpx.TransportError)


def _in_a_word(error: BaseException) -> str:
    return str(error.response.status_code) if isinstance(error, httpx.HTTPStatusError) else type(error).__name__


class Server:
    """Calls a Prefect server that may be away. Reports its absence once, and its return once."""

    def __init__(self, name: str, meanwhile: str, say: Say) -> None:
        self._name, self._meanwhile, self._say = name, meanwhile, say
        self._away = False

    def ask(self, call: Callable[[], T]) -> T | None:
        """Return the result of `call`; None if the server, or the database behind it, is away."""
        try:
            value = call()
        except Exception as error:
            if not is_away(error):
                raise
            if not self._away:
                self._say(f"{self._name} does not answer ({_in_a_word(error)}); {self._meanwhile}")
            self._away = True
            return None
        if self._away:
            self._say(f"{self._name} answers again")
        self._away = False
        return value

    def insist(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, waiting until the server is back."""
        while (value := self.ask(call)) is None:
            time.sleep(AGAIN_SECONDS)
        return value
