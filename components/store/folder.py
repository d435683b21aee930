"""A store in a folder, on this machine or on a file system that several machines share."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from components.base.errors import UserError, naming
from components.base.files import make_folder, replacing, sync, temporary_beside
from components.base.paths import open_regular, read_regular
from components.store.place import LARGEST_READ, Entry

_CHUNK = 1 << 20


class FolderPlace:
    """A `Place` in a local or shared folder. Files are read-only; each is synced, then renamed to its name.

    Folders in it get the permissions of the root folder, whatever the umask, so that everybody who may write into the
    root may write into all of them.
    """

    exclusive = has_locks = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def entries(self, folder: str) -> list[Entry]:
        """Return every file below `folder`, without those that are removed meanwhile."""
        top, files = str(self.root / folder), []
        for parent, _, names in os.walk(top):  # pathlib takes ten times as long, and there are thousands
            for path in (os.path.join(parent, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    info = os.lstat(path)
                    files.append(Entry(path[len(top) + 1 :], info.st_size, info.st_mtime))
        return sorted(files)

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except OSError:
            return None

    def read(self, name: str) -> bytes:
        return read_regular(self.root / name, LARGEST_READ)

    def chunks(self, name: str) -> Iterator[bytes]:
        with open_regular(self.root / name) as file:
            while data := file.read(_CHUNK):
                yield data

    def put(self, name: str, source: Path) -> None:
        with self.writing(name) as temporary:
            shutil.copyfile(source, temporary)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; return False if one exists. Uses a hard link, which unlike a rename never overwrites."""
        target = self._made(name)
        temporary = temporary_beside(target)
        try:
            with naming(target):
                temporary.write_bytes(data)
            temporary.chmod(0o444)
            sync(temporary)
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            raise UserError(
                f"{self.root}: this file system has no hard links, which a store needs ({error.strerror}). Name "
                "another folder in TETHER_STORE or TETHER_HOME."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        sync(target.parent)
        return True

    def remove(self, name: str) -> None:
        """Remove a file, and its folder if that is then empty."""
        path = self.root / name
        path.unlink(missing_ok=True)
        if path.parent.parent != self.root:
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Hold a shared lock on the folder; it ends with the process. Without locks, garbage collection is refused."""
        try:
            file = self._lock()
        except OSError:
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Hold an exclusive lock on the folder: wait for its users to finish, and make later ones wait.

        At the end the empty folders of records are removed, which a killed `remove` leaves.
        """
        make_folder(self.root)
        with self._lock() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
            for folder in (self.root / "records").glob("*/"):
                with contextlib.suppress(OSError):  # it has files
                    folder.rmdir()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a temporary file that becomes `name`, read-only, if the block ends without an error."""
        target = self._made(name)
        with replacing(target) as temporary:
            yield temporary
            temporary.chmod(0o444)

    def _made(self, name: str) -> Path:
        target = self.root / name
        make_folder(self.root)
        make_folder(target.parent, stat.S_IMODE(self.root.stat().st_mode))
        return target

    def _lock(self) -> BinaryIO:
        """Open the lock file. Another user's file is enough if it is readable."""
        path = self.root / ".lock"
        try:
            file = path.open("ab")
        except PermissionError:
            return path.open("rb")
        shared, info = stat.S_IMODE(self.root.stat().st_mode) & 0o666, os.fstat(file.fileno())
        if info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) != shared:
            os.fchmod(file.fileno(), shared)
        return file
