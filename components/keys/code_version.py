"""The version of Tether's code that runs."""

import functools
import importlib.metadata
import subprocess
from pathlib import Path

from typing_extensions import TypedDict

from components.keys.fingerprint import PACKAGES, ROOT


class CodeVersion(TypedDict, total=False):
    """A version of Tether's code, as records store it."""

    version: str | None
    commit: str | None
    dirty: bool | None
    """Whether a tracked file of Tether's packages differs from the commit."""


@functools.cache
def code_version(root: Path = ROOT) -> CodeVersion:
    """Return the version of the checkout at `root`; commit and dirty are None if `root` is not a checkout.

    Keys contain the digests of the code's syntax trees in any case; the version is for people.
    """
    try:
        version = importlib.metadata.version("tether")
    except importlib.metadata.PackageNotFoundError:
        version = None
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *PACKAGES) if commit else None
    return {"version": version, "commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(root: Path, *arguments: str) -> str | None:
    """Return git's output; None without git or a checkout, or in a folder inside another repository."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
