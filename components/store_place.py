"""Where a store is kept: one small interface, and the local or shared folder. A URL's is in `store_url`."""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from components.errors import UserError
from components.files import replacing, sync, temporary_beside

VARIABLE = "TETHER_STORE"
"""Names another folder or an fsspec URL for the store; unset: HOME/store."""

_CHUNK = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Entry(NamedTuple):
    """A file of a place."""

    name: str
    """Relative to the folder that was asked for."""
    size: int
    """Bytes."""
    modified: float
    """Seconds since 1970 by the place's own clock."""


class Place(Protocol):
    """Files by name (`objects/<sha256>`, `records/<key>/<attempt>.json`, `pins/<run>.json`), whole or not there."""

    where: str
    """For people: the folder, or the URL."""
    exclusive: bool
    """Whether `create` is refused where another computer was first; else names have to be unique."""

    def entries(self, folder: str) -> list[Entry]:
        """Every file below `folder`, however deep."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""

    def read(self, name: str) -> bytes:
        """A small file. Raises FileNotFoundError where there is none."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file, piece by piece; it has to be there."""

    def put(self, name: str, source: Path) -> None:
        """Copy a local file to `name`, over what is there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; False, and nothing is written, where there is one."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def using(self) -> contextlib.AbstractContextManager[None]:
        """Held while files are needed that no record or run names yet: nobody collects garbage meanwhile."""

    def collecting(self) -> contextlib.AbstractContextManager[float]:
        """Held while garbage is collected: nobody uses the place meanwhile. Gives the time by the place's clock."""


class FolderPlace:
    """A folder of this machine, or one that several share. Files are read-only, synced and renamed into place."""

    exclusive = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def entries(self, folder: str) -> list[Entry]:
        """Every file below `folder`; what goes while we look is left out."""
        top, found = str(self.root / folder), []
        for parent, folders, names in os.walk(top):  # pathlib takes ten times as long, and there are thousands
            links = (name for name in folders if os.path.islink(os.path.join(parent, name)))
            for path in (os.path.join(parent, name) for name in (*names, *links)):
                with contextlib.suppress(FileNotFoundError):
                    info = os.lstat(path)
                    found.append(Entry(path[len(top) + 1 :], info.st_size, info.st_mtime))
        return sorted(found)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        try:
            return (self.root / name).stat().st_size
        except OSError:
            return None

    def read(self, name: str) -> bytes:
        """A small file."""
        return (self.root / name).read_bytes()

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file, piece by piece."""
        with (self.root / name).open("rb") as file:
            while data := file.read(_CHUNK):
                yield data

    def put(self, name: str, source: Path) -> None:
        """Copy a local file to `name`, over what is there."""
        with self.writing(name) as temporary:
            shutil.copyfile(source, temporary)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; False where there is one. A link, unlike a rename, is refused onto another's file."""
        target = self._made(name)
        temporary = temporary_beside(target)
        try:
            temporary.write_bytes(data)
            temporary.chmod(0o444)
            sync(temporary)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_without_links(target, data)
        finally:
            temporary.unlink(missing_ok=True)
        sync(target.parent)
        return True

    def remove(self, name: str) -> None:
        """Remove a file, and the folder that it leaves empty."""
        path = self.root / name
        path.unlink(missing_ok=True)
        if path.parent.parent != self.root:
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """A shared lock on the folder. It dies with its process. Where there can be none, nobody can collect."""
        try:
            file = (self.root / ".lock").open("a")
        except OSError:
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def collecting(self) -> Iterator[float]:
        """An exclusive lock on the folder: waits for those who use it, and they wait for us."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield time.time()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A temporary file that becomes `name`, read-only, when the block ends well."""
        target = self._made(name)
        with replacing(target) as temporary:
            yield temporary
            temporary.chmod(0o444)
        sync(target.parent)

    def _made(self, name: str) -> Path:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _create_without_links(self, target: Path, data: bytes) -> bool:
        """For file systems without hard links. A kill may leave half a record; it doesn't verify."""
        try:
            with target.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        target.chmod(0o444)
        return True


def shared_place(home: Path) -> Place | None:
    """What `TETHER_STORE` names; None where it is unset or the home's own folder.

    Raises:
        UserError: a relative folder: two commands from two directories would use two stores.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return None
    if "://" in value and not value.startswith("file://"):
        from components.store_url import UrlPlace

        return UrlPlace(value)
    folder = Path(value.removeprefix("file://")).expanduser()
    if not folder.is_absolute():
        raise UserError(f"{VARIABLE}={value}: give an absolute folder or a URL, as s3://bucket/prefix.")
    return None if folder.resolve() == (home / "store").resolve() else FolderPlace(folder)
