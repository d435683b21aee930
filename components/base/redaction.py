"""Remove credentials from texts that are shown or stored: those in URLs, and this environment's secrets."""

import os
import re
from urllib.parse import unquote

_USER = re.compile(r"(?<=://)[^\s/?#'\"<>]*@")
"""The user and password of a URL (RFC 3986, section 3.2.1)."""
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:password|passwd|pwd|secret|token|api_?key|access_?key|credential|signature|sig)[\w.-]*=)"
    r"[^\s&;#'\"<>]+",
    re.IGNORECASE,
)
_NAMES = {"PASSWORD", "PASSWD", "PASS", "SECRET", "TOKEN", "KEY", "CREDENTIAL", "CREDENTIALS", "AUTH"}
"""A variable with one of these words in its name (as MLFLOW_TRACKING_PASSWORD) is taken to hold a secret."""
_SHORTEST = 6
"""Length of the shortest value that counts as a secret. Shorter ones occur inside unrelated words."""


def redacted(text: str) -> str:
    """Return `text` without URLs' users and passwords, secrets in their queries, and values of secret variables."""
    text = _QUERY.sub(r"\1***", _USER.sub("", text))
    for secret in _secrets():
        text = text.replace(secret, "***")
    return text


def has_credentials(text: str) -> bool:
    """Return whether `text` contains a secret of this environment, or a URL with a password or a secret query value."""
    return redacted(text) != text


def _secrets() -> list[str]:
    """Return the secret values of this environment, as they are and percent-decoded, the longest first."""
    found = set()
    for name, value in os.environ.items():
        if _NAMES & set(name.upper().split("_")):
            found.add(value)
        if user := _USER.search(value):
            password = user[0][:-1].partition(":")[2]
            found |= {password, unquote(password)}
    return sorted((each for each in found if len(each) >= _SHORTEST), key=len, reverse=True)
