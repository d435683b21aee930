"""Paths as users write them, and files that can be read to an end."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from components.base.errors import UserError

LARGEST_READ = 64 << 20
"""Bytes of the largest file that is read whole, if its reader names no other number. A record has a few kilobytes."""
_OF_MODELS = ("model", "members", "adapter", "additional_chat_templates")
"""Folders inside a model's folder that are read: parts of Tether's own models, and chat templates of transformers."""
_WEIGHTS = (".safetensors", ".gguf")


def user_path(text: str, field: str) -> Path:
    """Return the path that a user gave as `text` for the option `field`, with `~` expanded. It need not exist.

    Raises:
        UserError: it is empty, is not a valid path, or names a device, a pipe or a socket, which cannot be read to an
            end.
    """
    if not text.strip():
        raise UserError(f"{field}: the path is empty; is a shell variable not set? Name a file or folder.")
    short = text if len(text) <= 100 else f"{text[:97]}..."
    try:
        path = Path(text).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character; `~name` of an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(f"{field} = {short!r}: this can't be opened: {reason}. Name another path.") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(
            f"{field} = {short}: this is a device, a pipe or a socket, and Tether reads regular files only. Write "
            "the data into a file and give that."
        )
    return path


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Reading a device, or a FIFO without a writer, would never end.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most: int = LARGEST_READ) -> bytes:
    """Return a regular file's bytes, at most `most`, so that no file fills the memory.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return data


def user_text(text: str, field: str) -> str:
    """Return the content of the text file (UTF-8) that a user gave as `text` for the option `field`.

    Raises:
        UserError: it can't be read, is not UTF-8, or is empty.
    """
    path = user_path(text, field)
    try:
        content = read_regular(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{field} = {text}: the file can't be read: {error.strerror}. Name a text file.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{field} = {text}: this is not text in UTF-8. Save it as UTF-8 and start again.") from error
    if not content.strip():
        raise UserError(f"{field} = {text}: the file is empty. Write the text into it.")
    return content


def holds_model_or_data(folder: Path) -> bool:
    """Return whether a folder, by the names of its files, is a model, one of Tether's models, or a saved dataset."""
    names = set(os.listdir(folder))
    saved = "dataset_dict.json" in names or names >= {"state.json", "dataset_info.json"}
    return saved or bool(names & {"config.json", "reward.json", "model"}) or any(n.endswith(_WEIGHTS) for n in names)


def files_read(folder: Path) -> list[Path]:
    """Return the files of a model's folder or of a saved dataset that are read, sorted.

    Of a model (it has config.json or weights) these are the files in its folder and in `_OF_MODELS`, and not those of
    other folders, such as a repository's history or checkpoints. Links to files are followed, since the Hugging Face
    cache consists of them.

    Raises:
        UserError: one of them is a link to a folder, a device, a pipe or a socket.
    """
    top = sorted(folder.iterdir())
    if any(path.name == "config.json" or path.suffix in _WEIGHTS for path in top):
        top = [path for path in top if path.name in _OF_MODELS or path.is_symlink() or not path.is_dir()]
    files = []
    for path in (member for part in top for member in (part, *(part.rglob("*") if not part.is_symlink() else ()))):
        if path.is_symlink() and path.is_dir():
            raise UserError(f"{path} is a link to a folder. Give a copy without such links (`cp -rL`).")
        if not path.is_dir() and not path.is_file() and path.exists():
            raise UserError(f"{path} is a device, a pipe or a socket, which cannot be read to an end. Remove it.")
        files += [path] if path.is_file() else []
    return sorted(files)
