"""The process that calls a gate's plug-in: it reads one JSON object, answers with one, and imports nothing of Tether.

Its standard output is the channel; what the plug-in prints goes to standard error. Run as a script:
`python plugged_worker.py MODULE FUNCTION PARENT`. It ends when the process PARENT is gone.
"""

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main() -> None:
    module, name, parent = sys.argv[1:4]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.realpath(each) != here]
    json.dump(_asked(module, name, json.load(sys.stdin)), channel)
    channel.flush()
    os._exit(0)  # whatever threads the plug-in has left


def _asked(module: str, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except BaseException as error:
        return {"unusable": f"can't be imported: {type(error).__name__}: {error}"}
    if not callable(function):
        return {"unusable": "is not a function"}
    value: Any = None
    try:
        value = function(asked["metrics"], Path(asked["artifact"]))
        return {"value": float(value)}
    except (Exception, SystemExit) as error:
        gave = f" (it returned {value!r:.80})" if value is not None else ""
        return {"raised": f"raises {type(error).__name__}: {error}{gave}"}


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
