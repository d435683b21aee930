"""Paths as users write them."""

import stat
from pathlib import Path

from components.base.errors import UserError


def user_path(text: str, field: str) -> Path:
    """Return the path that a user gave as `text` for the option `field`, with `~` expanded. It need not exist.

    Raises:
        UserError: it is empty, is not a valid path, or names a device, a pipe or a socket, which cannot be read to an
            end.
    """
    if not text.strip():
        raise UserError(f"{field}: the path is empty; is a shell variable not set? Name a file or folder.")
    shown = text if len(text) <= 100 else f"{text[:97]}..."
    try:
        path = Path(text).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character; `~name` of an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(f"{field} = {shown!r}: this can't be opened: {reason}. Name another path.") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(
            f"{field} = {shown}: this is a device, a pipe or a socket, and Tether reads regular files only. Write "
            "the data into a file and give that."
        )
    return path
