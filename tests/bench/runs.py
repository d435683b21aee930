"""Runs that a bench needs once: each is kept as a file in its home, and is not run again."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.base.jsonl import read_rows, write_json
from components.store.store import ArtifactStore
from tests.bench.thresholds import settings

REAL = Path(".tether/bench/real")
"""The home of runs on real data, which share the data, the SFT policy and reward models."""


def tether(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this interpreter's environment."""
    environment = os.environ | {"TETHER_HOME": str(home)}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def with_models(home: Path) -> Path:
    """The absolute path of a bench's home, which is made; it finds the models that `tether fetch` fetched."""
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    fetched = Path(os.environ.get("TETHER_HOME", ".tether")).resolve() / "models"
    if not (home / "models").exists() and fetched.is_dir():
        (home / "models").symlink_to(fetched)
    return home


def stage_of_run(home: Path, name: str, profile: str, until: str, given: Sequence[str]) -> dict[str, Any]:
    """What the last stage of a run that ends there gave, with every gate off.

    That is `metrics`, `seconds` and, of PPO, `history` and the held-out `evaluations`.

    Args:
        home: where the run is kept, as `name`.json.
        until: the stage; not human_eval.
        given: options as of `--set`.
    """
    kept = home / f"{name}.json"
    if not kept.exists():
        home.mkdir(parents=True, exist_ok=True)
        asked = [*given, *settings(until)]
        done = tether(home, "run", profile, *(x for s in asked for x in ("--set", s)))
        if done.returncode != 3:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        stages = json.loads(tether(home, "status", "--json").stdout)["stages"]
        stage = next(each for each in stages if each["name"] == until)
        found = {"metrics": stage["metrics"], "seconds": stage["seconds"]}
        if until == "ppo":
            folder = ArtifactStore(home).path(stage["digest"])
            found["history"] = list(read_rows(folder / "history.jsonl"))
            found["evaluations"] = json.loads((folder / "metadata.json").read_text())["evaluations"]
        write_json(kept, found)
    return dict(json.loads(kept.read_text()))
