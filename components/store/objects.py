"""Objects of a store: file contents named by sha256, verified on lookup, and fetched from a shared store if needed."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from components.base.errors import TetherError, disk_error
from components.base.files import make_folder, sync
from components.base.hashing import canonical_json, digest_file, digest_json
from components.store.folder import FolderPlace
from components.store.place import VARIABLE, Place
from components.store.records import SHA, check_files, parse_manifest


class Objects:
    """The objects in a home's own store, which may be copies of a shared store's objects."""

    def __init__(self, local: FolderPlace, shared: Place | None) -> None:
        self.folder = local.root / "objects"
        self._local = local
        self._shared = shared
        self._verified: dict[str, tuple[int, int, int]] = {}
        self._distrusted: set[str] = set()
        """Objects of the shared store that were found damaged, to be overwritten."""

    def take(self, folder: Path) -> dict[str, str]:
        """Move the files below `folder` into the objects; return relative POSIX path to sha256.

        Raises:
            TetherError: the folder holds a link, or a name that `check_names` refuses.
        """
        make_folder(self.folder)
        names = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
        files = {name: digest_file(path) for name, path in names.items()}
        check_files(files)
        for name, path in names.items():
            self._adopt(path, files[name])
        sync(self.folder)
        return files

    def write_manifest(self, files: Mapping[str, str]) -> str:
        """Store the manifest of an artifact (its files' paths and sha256); return the artifact's digest."""
        digest = digest_json(dict(files))
        with self._local.writing(f"objects/{digest}") as temporary:
            temporary.write_text(canonical_json(dict(files)))
        return digest

    def upload(self, objects: Iterable[str]) -> None:
        """Copy objects to the shared store, if there is one, except those that it has."""
        if self._shared is None:
            return
        shared = self._shared
        for sha in dict.fromkeys(objects):
            source = self.folder / sha
            if sha in self._distrusted or shared.size(f"objects/{sha}") != source.stat().st_size:
                shared.put(f"objects/{sha}", source)
            self._distrusted.discard(sha)

    def problem(self, sha: str) -> str | None:
        """Return what is wrong with an object; None if store/objects has it and this process has verified it."""
        here = self._problem_here(sha)
        if self._shared is None:
            return here
        size = self._shared.size(f"objects/{sha}")
        if size is None:
            return f"missing in {VARIABLE}"
        if here is None and size == (self.folder / sha).stat().st_size:
            return None
        if here is not None and self.receive(sha, self._shared.chunks(f"objects/{sha}")):
            return None
        self._distrusted.add(sha)
        return f"damaged in {VARIABLE}"

    def receive(self, sha: str, chunks: Iterable[bytes]) -> bool:
        """Write an object from its chunks; return False and write nothing if their sha256 is not `sha`.

        Raises:
            TetherError: the disk is full or cannot be written.
        """
        digest = hashlib.sha256()
        try:
            with contextlib.suppress(_Damaged), self._local.writing(f"objects/{sha}") as temporary:
                with temporary.open("wb") as file:
                    for chunk in chunks:
                        digest.update(chunk)
                        file.write(chunk)
                if digest.hexdigest() != sha:
                    raise _Damaged
        except OSError as error:
            raise disk_error(error) or TetherError(f"{self.folder} can't be written: {error.strerror}") from error
        self._verified.pop(sha, None)
        return digest.hexdigest() == sha

    def manifest(self, digest: str) -> dict[str, str]:
        """Return an artifact's files: relative path to sha256.

        Raises:
            TetherError: the manifest is missing or damaged, or has a path that `check_names` refuses.
        """
        problem = "no sha256" if not SHA.fullmatch(digest) else self.problem(digest)
        if problem is not None:
            place = self._shared or self._local
            raise TetherError(f"the manifest of artifact {digest[:12]} is {problem} in {place.where}")
        return parse_manifest((self.folder / digest).read_bytes())

    def _problem_here(self, sha: str) -> str | None:
        """As `problem`, for store/objects alone. A file that this process verified is read again only if it changed."""
        path = self.folder / sha
        try:
            info = path.stat()
            mark = (info.st_ino, info.st_size, info.st_mtime_ns)
            if self._verified.get(sha) != mark:
                if digest_file(path) != sha:
                    return "damaged"
                self._verified[sha] = mark
        except OSError:
            return "missing"
        return None

    def _adopt(self, path: Path, sha: str) -> None:
        os.utime(path)  # its age in the store counts from now
        path.chmod(0o444)
        sync(path)
        try:
            # Replaces an existing object too: that may be the damaged one whose loss made the stage compute again.
            os.replace(path, self.folder / sha)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._local.put(f"objects/{sha}", path)
            path.unlink()
        self._verified.pop(sha, None)


class _Damaged(Exception):
    """The bytes that arrived do not have the expected sha256."""


def files_below(folder: Path) -> list[Path]:
    """Return every file below a folder, sorted; none if the folder does not exist.

    Raises:
        TetherError: one is a link.
    """
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    if link := next((path for path in paths if path.is_symlink()), None):
        raise TetherError(f"{link} is a symbolic link: an artifact holds plain files")
    return paths
