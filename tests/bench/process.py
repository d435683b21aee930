"""One measurement of a benchmark in a process of its own, in an environment that is the same for all sides."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def measured(script: str, given: dict[str, Any], threads: int, trl: Path | None = None) -> Any:
    """What `script`, which stands beside this one, prints as its last line, given a JSON object as its argument.

    Args:
        given: its `side` and `dtype` are used here too.
        trl: the folder TRL was installed into, for TRL's side alone.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([str(trl)] if trl else [])]),
        "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_MIXED_PRECISION": "bf16" if given.get("dtype") == "bfloat16" else "no",
    }  # fmt: skip
    command = [sys.executable, str(HERE / script), json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script}, {given}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def require_trl(folder: Path) -> None:
    """Say how to get TRL where it isn't in `folder`.

    Raises:
        SystemExit: it isn't.
    """
    if not (folder / "trl").is_dir():
        raise SystemExit(f"no TRL in {folder}: pip install --no-deps --target {folder} trl==1.12.0")
