"""The process that runs a user's function: it answers each JSON line with one, and imports nothing of Tether.

Its standard input and output are the channel; the function reads an empty input, and what it prints goes to standard
error. Run as a script: `python function_worker.py ROOT MODULE NAME PARENT [installed]`. MODULE is imported from ROOT,
or with `installed` from the environment. The process ends when its input closes or the process PARENT is gone.
"""

import importlib
import json
import linecache
import operator
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    root, module, name, parent = sys.argv[1:5]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    requests, channel = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    here = os.path.dirname(os.path.realpath(__file__))
    first = [] if sys.argv[5:] == ["installed"] else [root]
    sys.path[:] = first + [path for path in sys.path if os.path.realpath(path) != here]
    unusable = None
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part, None)
        if not callable(function):
            unusable = f"{module} has no function of this name. Check the name."
    except BaseException as error:
        unusable = f"importing {module} raises {_traced(error, root)}. Correct it."
    for line in requests:
        request = json.loads(line)
        if unusable:
            answer = {"unusable": unusable}
        elif "artifact" in request:
            answer = _measured(function, root, **request)
        else:
            answer = _scored(function, root, **request) if request else {}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


def _end_with(parent: int) -> None:
    """End this process, even in the middle of a call, once its parent was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _measured(function: Any, root: str, metrics: dict[str, float], artifact: str) -> dict[str, Any]:
    value: Any = None
    try:
        value = function(metrics, Path(artifact))
        return {"value": float(value)}
    except (Exception, SystemExit) as error:
        gave = f" (it returned {value!r:.80})" if value is not None else ""
        return {"error": f"{_traced(error, root)}{gave}"}


def _scored(function: Any, root: str, prompts: list[Any], responses: list[str], rows: list[Any]) -> dict[str, Any]:
    try:
        returned = list(function(prompts, responses, rows))
    except (Exception, SystemExit) as error:
        return {"error": _traced(error, root), "row": _first_bad(function, prompts, responses, rows)}
    scores = [
        [_plain(part, pair=True) for part in score] if isinstance(score, list | tuple) else _plain(score)
        for score in returned
    ]
    return {"scores": scores, "modules": _modules(root)}


def _plain(value: Any, pair: bool = False) -> Any:
    """Return a score, or a pair of its parts, as JSON. What is none becomes text, which the stage refuses."""
    if value is None or isinstance(value, bytes):
        return None if value is None else repr(value)[:80]
    try:
        if pair:
            offset, number = value
            return [operator.index(offset), float(number)]
        return str(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return repr(value)[:80]


def _first_bad(function: Any, prompts: list[Any], responses: list[str], rows: list[Any]) -> int | None:
    """Return the first response for which the function also raises when called with that response alone."""
    for index in range(len(responses)):
        here = slice(index, index + 1)
        try:
            function(prompts[here], responses[here], rows[here])
        except Exception:
            return index
    return None


def _traced(error: BaseException, root: str) -> str:
    """Return the error with the innermost line of the user's own code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if frame.filename.startswith(root + os.sep)]
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename and not user_frames:
        return f"{text} ({error.filename}, line {error.lineno})"
    if not user_frames:
        return text
    last = user_frames[-1]
    code = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{text} ({os.path.relpath(last.filename, root)}, line {last.lineno}, in {last.name}: {code})"


def _modules(root: str) -> list[str]:
    """Return the files below `root` that have been imported, without those of installed distributions."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = {os.path.realpath(file) for file in files if file and os.path.realpath(file).startswith(root + os.sep)}
    installed = sys.prefix + os.sep
    return sorted(path for path in paths if "-packages" + os.sep not in path and not path.startswith(installed))


if __name__ == "__main__":
    main()
