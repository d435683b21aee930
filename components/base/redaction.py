"""Credentials out of whatever is shown or stored: of URLs, and of this process's environment."""

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
"""A variable that has one of these words in its name holds a secret, as MLFLOW_TRACKING_PASSWORD."""
_SHORTEST = 6
"""A shorter value would be taken out of words that have nothing to do with it."""


def redacted(text: str) -> str:
    """`text` without the users and passwords of URLs, secrets in their queries, and values of secret variables."""
    text = _QUERY.sub(r"\1***", _USER.sub("", text))
    for secret in _secrets():
        text = text.replace(secret, "***")
    return text


def has_credentials(text: str) -> bool:
    """Whether a URL in `text` holds a password or a secret in its query, or `text` a secret of the environment."""
    return redacted(text) != text


def _secrets() -> list[str]:
    """Secret values in this environment, as they are and percent-decoded; the longest first."""
    found = set()
    for name, value in os.environ.items():
        if _NAMES & set(name.upper().split("_")):
            found.add(value)
        if user := _USER.search(value):
            password = user[0][:-1].partition(":")[2]
            found |= {password, unquote(password)}
    return sorted((each for each in found if len(each) >= _SHORTEST), key=len, reverse=True)
