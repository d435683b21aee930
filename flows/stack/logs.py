"""The output of a stack's parts: a log file of limited size for each, which `tether stack logs` follows."""

import json
import os
import shutil
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from components.base.errors import UserError
from components.base.redaction import redacted
from components.base.text import line
from flows.deployment.supervision import Say
from flows.stack.config import Stack
from flows.stack.parts import part_names

KEEPER = "keeper"


def log_of(stack: Stack, part: str) -> Path:
    """Return the log file of a part."""
    return stack.logs / f"{part}.log"


def bound_logs(stack: Stack, say: Say) -> None:
    """Empty each log that is longer than the config allows; its content replaces `PART.log.1`.

    The parts open their logs for appending, so they continue at the new end. If the disk has no room for the copy, the
    log is emptied without one.
    """
    for name in (KEEPER, *part_names(stack)):
        path = log_of(stack, name)
        with suppress(FileNotFoundError):
            if path.stat().st_size > stack.config.log_megabytes * 1_000_000:
                try:
                    shutil.copyfile(path, path.with_suffix(".log.1"))
                except OSError as error:
                    say(f"{path} is being emptied without a copy: {error}")
                os.truncate(path, 0)


def follow(stack: Stack, part: str | None, lines: int, go_on: bool, say: Say) -> None:
    """Print the last lines of the parts' logs, then each new line.

    Args:
        stack: the stack.
        part: one of its parts, or `keeper`; None for all.
        lines: how many lines of each log to print first.
        go_on: continue until Ctrl-C.
        say: prints a line.

    Raises:
        UserError: there is no such part.
    """
    names = [KEEPER, *part_names(stack)]
    if part is not None and part not in names:
        raise UserError(f"{part}: the stack has no such part. It has {', '.join(names)}.")
    width = max(map(len, names))
    with ExitStack() as opened:
        files: dict[str, BinaryIO] = {}
        while True:
            for name in names if part is None else [part]:
                fresh = name not in files
                if fresh:
                    try:
                        files[name] = opened.enter_context(log_of(stack, name).open("rb"))
                    except FileNotFoundError:
                        continue
                for text in _new_lines(files[name], lines if fresh else None):
                    say(f"{name:<{width}}  {redacted(text)}" if part is None else redacted(text))
            if not go_on:
                return
            time.sleep(0.5)


def _new_lines(file: BinaryIO, last: int | None) -> list[str]:
    """Return a log's last lines (`last`: how many), or with None the complete lines added since the previous call."""
    if os.fstat(file.fileno()).st_size < file.tell():
        file.seek(0)  # the log was emptied
    found = file.readlines()
    if last is not None:
        found = found[-last:] if last else []
    elif found and not found[-1].endswith(b"\n"):
        file.seek(-len(found.pop()), os.SEEK_CUR)
    return [each.decode(errors="replace").rstrip("\n") for each in found]


def last_line(stack: Stack, part: str) -> str:
    """Return the last line that a part printed, with its log file; only the file if it printed nothing."""
    path = log_of(stack, part)
    try:
        told = [each for each in path.read_text(encoding="utf-8", errors="replace").splitlines() if each.strip()]
    except OSError:
        told = []
    return f"{redacted(line(_message(told[-1])))[:300]} ({path})" if told else str(path)


def _message(text: str) -> str:
    """Return the message of a log line: the field of a JSON line (`tasks.execution.logs`), or the whole line."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return str(found.get("message", text)) if isinstance(found, dict) else text
