"""A Prefect server that may be away, as it is while it restarts or its database does."""

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

AWAY = (408, 429, 500, 502, 503, 504)
"""What a server answers where it, its database or a proxy before it is not up; a 500 is what Prefect says then."""
AGAIN_SECONDS = 1.0
"""Between two tries of a call that has to succeed."""

Say = Callable[[str], None]
T = TypeVar("T")


def is_away(error: BaseException | None) -> bool:
    """Return whether an error of a call of Prefect says that its server, or the database behind it, is away."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in AWAY
    return isinstance(error, httpx.TransportError)


def _in_a_word(error: BaseException) -> str:
    return str(error.response.status_code) if isinstance(error, httpx.HTTPStatusError) else type(error).__name__


class Server:
    """Asks a Prefect server that may be away; its absence is said once, and so is its return."""

    def __init__(self, name: str, meanwhile: str, say: Say) -> None:
        self._name, self._meanwhile, self._say = name, meanwhile, say
        self._away = False

    def ask(self, call: Callable[[], T]) -> T | None:
        """Return what `call` gives; None where the server, or the database behind it, is away."""
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
        """Return what `call` gives, once the server is there."""
        while (value := self.ask(call)) is None:
            time.sleep(AGAIN_SECONDS)
        return value
