"""Keep a home as this version writes it: `python tests/homes/make.py` writes tests/homes/VERSION.tar.gz (under 300 kB).

Run it once for each release, at its commit; `tests/flows/keeping/test_homes.py` then has every later version read
that home, upgrade it and rerun a stage from it. `--checkout FOLDER --name NAME` has another checkout's code write one.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SMALLEST = (
    "sft.scratch.hidden_size=8", "sft.scratch.layers=1", "sft.scratch.heads=1", "sft.epochs=1",
    "data.generator.pairs=200", "data.generator.demonstrations=60", "ppo.updates=2", "gates.sft.perplexity_ratio=null",
)  # fmt: skip
"""Changes to the profile tiny: a model of 8 dimensions on 200 pairs."""
LEFT_OUT = ("prefect", "mlartifacts", "work", "views", "report.html", "report.md", "cards")
"""What nothing here reads again, and is large: pages, charts, checkpoints, the embedded server's database."""
LARGEST = 300_000
"""Bytes of a kept home."""


def make(name: str, checkout: Path) -> Path:
    """Compute the smallest run with a checkout's code and pack its home; returns the file."""
    with tempfile.TemporaryDirectory(prefix="tether-home-") as folder:
        home = Path(folder) / "home"
        settings = [word for setting in SMALLEST for word in ("--set", setting)]
        environment = {**os.environ, "TETHER_HOME": str(home), "PYTHONPATH": str(checkout)}
        subprocess.run(
            [sys.executable, "-m", "flows.cli", "run", "tiny", *settings], env=environment, cwd=folder, check=True
        )
        target = HERE / f"{name}.tar.gz"
        with tarfile.open(target, "w:gz") as tar:
            tar.add(home, "home", filter=_kept)
    if target.stat().st_size > LARGEST:
        raise SystemExit(f"{target} has {target.stat().st_size} bytes, more than {LARGEST}")
    return target


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(member.name).parts
    if any(part in LEFT_OUT or part.endswith((".lock", ".tmp")) for part in parts):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=importlib.metadata.version("tether"))
    parser.add_argument("--checkout", type=Path, default=ROOT)
    asked = parser.parse_args()
    made = make(asked.name, asked.checkout.resolve())
    print(f"{made}: {made.stat().st_size} bytes")
