"""Canonical JSON (one text per value) and digests of it, from which keys, manifests and splits are computed."""

import hashlib
import json
from pathlib import Path
from typing import Any

from components.base.paths import open_regular


def canonical_json(value: Any) -> str:
    """Return `value` as JSON with sorted keys, no spaces, and text unescaped (UTF-8).

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_json(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def hash8(text: str) -> bytes:
    """Return 8 bytes that identify `text`. In a million texts, two collide with probability 1 in 37 million."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes. Raises OSError if it cannot be read, or is not a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
