"""Which version of our code runs."""

import functools
import importlib.metadata
import subprocess
from pathlib import Path

from typing_extensions import TypedDict

from components.keys.fingerprint import PACKAGES, ROOT


class CodeVersion(TypedDict, total=False):
    """A version of our code, as a record keeps it."""

    version: str | None
    commit: str | None
    dirty: bool | None
    """Whether a tracked file of our packages differs from the commit."""


@functools.cache
def code_version(root: Path = ROOT) -> CodeVersion:
    """Return the version of the checkout at `root`; commit and dirty are None where it is none.

    What runs is in every key anyhow, as the digests of its syntax trees; this is the name that people know it by.
    """
    try:
        version = importlib.metadata.version("tether")
    except importlib.metadata.PackageNotFoundError:
        version = None
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *PACKAGES) if commit else None
    return {"version": version, "commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, None where it can't say: no git, no checkout, or a folder inside somebody else's."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
