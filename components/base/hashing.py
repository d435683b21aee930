"""One JSON text for one value, and digests of it: what keys, manifests and splits are computed from."""

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys, no spaces, text as it is.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_json(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def hash8(text: str) -> bytes:
    """8 bytes that stand for `text` where only equality counts; two of a million share them once in 37 million sets."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
