"""The real command line in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

Tether = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tether() -> Tether:
    """`tether(*arguments, home=..., cwd=..., python=(...), **environment)` runs the console script's code."""

    def run(
        *arguments: str, home: Path, cwd: Path | None = None, python: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        variables = {**kept, "TETHER_HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "160", **environment}
        command = [sys.executable, *python, "-m", "flows.cli", *arguments]
        return subprocess.run(
            command, cwd=cwd or home.parent, env=variables, capture_output=True, text=True, check=False, timeout=540
        )

    return run
