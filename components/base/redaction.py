"""Remove credentials from texts that are shown or stored: those that a text names as such, and this environment's."""

import functools
import os
import re
from urllib.parse import quote, unquote

_BEGIN = r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
_END = r"(?:(?<=[a-z])(?![a-z])|(?<=[A-Z])(?![A-Za-z]))"
"""A part of a name begins and ends at another character than a letter, or where camelCase does."""
_WORD = (
    r"(?i:passwords?|passwds?|passphrases?|sshpass|secrets?|credentials?|(?:api|access|secret|private|account)[_.-]?keys?"
    rf"|(?<!eos_|bos_|pad_|unk_|sep_|cls_|ask_|top_|ext_|ial_|per_|per )token){_END}"
)
"""The end of a part that names a secret, as in PGPASSWORD and `apiKey`. Tokens of a vocabulary are none."""
_PART = rf"{_BEGIN}(?i:key|auth|pass|pwd|pw){_END}"
"""A whole part of a variable's name that says so. In a sentence these words say nothing."""
_VALUE = r"""('(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|(?!\*\*\*)\S+)"""
_VARIABLE = re.compile(rf"{_WORD}|{_PART}")
_NO_SECRET = re.compile(r"(?i:^(old)?pwd|(?:^|_)(?:file|path|dir|sock))$")

_USER = re.compile(
    r"""(?<=://)(?:
        (?!(?:[^\s/?#:'"<>]*@)?(?:localhost|[^\s/?#:@'"<>]*\.[^\s/?#:@'"<>]*|\[[\da-f:.]+\]):\d{0,5}(?![^\s/?#'"<>),;\]}])
          |\[[\da-f:.]+\](?:[\s/?#'"<>),;\]}]|$))
        [^\s/?#:'"<>]{0,500}:\S{0,4000}
        |[^\s/?#'"<>]*
    )@""",
    re.VERBOSE,
)
"""The user and password of a URL, up to the last `@` of the word, because a password may contain `/`, `#` and `?`. A
host with a dot and its port is no user with a password: an `@` in its path stays."""
_NAMED = tuple(
    re.compile(pattern)
    for pattern in (
        # a URL's query
        rf"([?&;][\w.-]{{0,40}}?(?:{_WORD}|{_PART}|{_BEGIN}(?i:sig|signature){_END})[\w.-]{{0,40}}=)([^\s&;#'\"<>]+)",
        # a header
        r"(?i:(\bauthorization\\?['\"]?[ \t]*[:=][ \t]*\\?['\"]?"
        r"(?:(?:basic|bearer|digest|token|apikey|negotiate)[ \t]+)?+))"
        r"((?!\*\*\*)[^\s'\"]+)",
        r"(?i:(\b(?:basic|bearer)[ \t]+)((?=[^\s'\"]*\d|[^\s'\"]{20})[^\s'\"]+))",
        # NAME=value as in a DSN, "name": "value", and a line or header `name: value`
        rf"(?m)((?:{_WORD}|{_BEGIN}(?i:pwd){_END}|(?<=_)(?:KEY|AUTH|PASS|PW))[\w.-]{{0,40}}"
        r"(?:\\?['\"]?[ \t]*=[ \t]*|\\?['\"][ \t]*:[ \t]*"
        rf"|(?<![^-\n]\b[Tt]oken)(?<!ials)(?<!ecrets):[ \t]+(?=\S+[ \t]*$))){_VALUE}",
        # an option and its value
        rf"((?<!\S)--?[\w-]{{0,40}}?(?:{_WORD}|{_PART})[\w-]{{0,40}}[ \t]+(?!-)){_VALUE}",
    )
)
"""What says of a value that it is secret, and the value."""
_SHORTEST = 6
"""Length of the shortest value that counts as a secret. Shorter ones occur inside unrelated words."""
_TOKEN_LENGTH = 16
"""Length from which a URL's user without a password counts as a token, wherever else it occurs."""


def redacted(text: str) -> str:
    """Return `text` without URLs' users and passwords, values that their names call secret, and this environment's
    secrets."""
    for secret in _secrets(tuple(os.environ.items())):
        text = text.replace(secret, "***")
    text = _USER.sub("", text)
    for pattern in _NAMED:
        text = pattern.sub(r"\1***", text)
    return text


def has_credentials(text: str) -> bool:
    """Return whether `text` contains a secret that `redacted` would remove."""
    return redacted(text) != text


@functools.lru_cache(1)
def _secrets(environment: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the secret values of an environment in every form in which libraries quote them, the longest first."""
    secrets = set()
    for name, value in environment:
        if _VARIABLE.search(name) and not _NO_SECRET.search(name):
            secrets |= {value, value.strip(), value.partition(":")[2]}
        # a variable that is a URL as a whole may have white space in its password
        if match := _USER.search(re.sub(r"\s", "_", value) if re.match(r"[\w.+-]+://", value) else value):
            user, _, password = value[match.start() : match.end() - 1].partition(":")
            secrets |= {password, user if len(user) >= _TOKEN_LENGTH and not password else ""}
        secrets |= {match[2].strip("'\"") for pattern in _NAMED for match in pattern.finditer(value)}
    forms = (lambda text: text, unquote, quote, lambda text: quote(text, ""), lambda text: repr(text)[1:-1])
    quoted = {form(secret) for secret in secrets for form in forms}
    return sorted((secret for secret in quoted if len(secret) >= _SHORTEST), key=len, reverse=True)
