"""A store behind an fsspec URL, as s3://bucket/prefix. fsspec is imported here alone, and only when first asked."""

import contextlib
import errno
import functools
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from components.base.errors import TetherError, Unreachable, UserError, is_unreachable
from components.base.redaction import redacted
from components.store.place import LARGEST_READ, VARIABLE, Entry

_CHUNK = 1 << 20

_REFUSES_TWICE = ("s3", "s3a")
"""Protocols that can write a file only if it does not exist (S3: If-None-Match)."""


class UrlPlace:
    """A `Place` below an fsspec URL. Object stores have no locks."""

    has_locks = False

    def __init__(self, url: str, variable: str = VARIABLE, **options: Any) -> None:
        self._variable, self._options = variable, options
        """`options` are fsspec's for the file system; they override the environment."""
        self._url = url.rstrip("/")
        self.where = redacted(self._url)
        self.exclusive = url.partition("://")[0] in _REFUSES_TWICE

    def entries(self, folder: str) -> list[Entry]:
        """Return every file below `folder`.

        Raises:
            UserError: the bucket does not exist or cannot be listed.
        """
        start = f"{folder}/"
        with self._asking("list"):  # a missing folder is empty, a missing bucket an error
            files = self._fs.find(start, detail=True)
        return [Entry(p.removeprefix(start), int(info.get("size") or 0), _modified(info)) for p, info in files.items()]

    def make_root(self) -> None:
        """Create the bucket if it does not exist."""
        with self._asking("create a bucket"):
            self._fs.makedirs("", exist_ok=True)

    def size(self, name: str) -> int | None:
        try:
            with self._asking("read", FileNotFoundError):
                return int(self._fs.info(name)["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        with self._asking("read", FileNotFoundError):
            try:
                data: bytes = self._fs.cat_file(name, start=0, end=LARGEST_READ + 1)
            except Exception:
                if self._fs.info(name)["size"] != 0:
                    raise
                data = b""  # S3 refuses a range of an empty file
        if len(data) > LARGEST_READ:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST_READ} bytes", f"{self.where}/{name}")
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._asking("read"):
            file = self._fs.open(name, "rb")
        with file:
            while True:
                with self._asking("read"):
                    data = file.read(_CHUNK)
                if not data:
                    return
                yield data

    def put(self, name: str, source: Path) -> None:
        with self._asking("write"):
            self._fs.put_file(str(source), name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; return False if it exists, as far as the file system can tell."""
        try:
            with self._asking("write", FileExistsError):
                try:
                    self._fs.pipe_file(name, data, **({"mode": "create"} if self.exclusive else {}))
                except OSError as error:
                    if _is_there(error):
                        raise FileExistsError(name) from error
                    raise
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._asking("write", FileNotFoundError):
            self._fs.rm_file(name)

    def using(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    collecting = using

    @functools.cached_property
    def _fs(self) -> Any:
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.dirfs import DirFileSystem

            # A cached listing would hide what other computers publish.
            fs, root = url_to_fs(self._url, **{"use_listings_cache": False, **self._options})
            return DirFileSystem(root.rstrip("/"), fs)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{self._variable}={self.where}: {error}. For s3:// install s3fs (`pip install s3fs`)."
            ) from error

    @contextlib.contextmanager
    def _asking(self, verb: str, *answers: type[Exception]) -> Iterator[None]:
        """Turn any error of the file system's library into a UserError, except `answers`, which pass unchanged."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (TetherError, *answers)):
                raise
            kind = Unreachable if is_unreachable(error) or _is_away(error) else UserError
            raise kind(
                f"{self._variable}={self.where}: can't {verb} there ({type(error).__name__}: {error}). Check the "
                f"bucket, the credentials and the network; without {VARIABLE} the store is a local folder. Nothing is "
                f"lost: run the same command again to continue."
            ) from error


def _is_there(error: OSError) -> bool:
    """Return whether S3 refused to overwrite an existing file (status 412, to If-None-Match).

    s3fs reports this as FileExistsError only if the answer names the condition. Amazon's does, SeaweedFS's does not.
    """
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and response.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _is_away(error: BaseException | None) -> bool:
    """Return whether an S3 server, or a proxy before it, reports an outage (status 500, 502, 503 or 504)."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (500, 502, 503, 504)
        error = error.__cause__
    return False


def _modified(info: Mapping[str, object]) -> float:
    """Return seconds since 1970. If the file system does not say, return now, so that the file is not collected."""
    for name in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
