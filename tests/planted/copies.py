"""A copy of the project's code with a fault planted, and the command `tether` of that copy in a home of its own."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.planted import transforms
from tests.planted.catalogue import ROOT, Fault, edited

PACKAGES = ("components", "data_contracts", "flows", "tasks")
CHECKS = (
    "components/gates", "components/ppo/monitors", "components/reward/evaluation", "components/training/loop.py",
    "components/training/training_checks.py",
    "components/training/training_checks.py",
    "components/human_eval/sheet_checks.py", "components/reward/substages/sheet_scores.py", "data_contracts",
    "flows/config/profiles/demo.yaml",
)  # fmt: skip
"""Where self-checks, gates, alarms and their thresholds are."""
SIZE = (
    "ppo.updates=16", "ppo.kl.horizon=1.25", "ppo.kl.coefficient=0.2", "ppo.kl.target=2.5", "ppo.checkpoint_every=4",
)  # fmt: skip
"""Of the demo's 40 updates 16. The horizon lets the controller still reach its target. Tuned on seeds 0 and 1 for gates
that hold and a gold clearly above SFT's (-0.8): with the demo's coefficient of 0.1 KL overshoots to 4.3 nats, and
`policy.kl_beyond_ceiling` stops seed 1; with 0.2 both end at 3.0 with gold 0.54 and 0.47, but the coefficient falls to
the end, which is an alarm on seed 0; with the lower target seed 0 raises none (3.5 nats, gold 0.62). Checkpoints change
nothing."""
TASK = "components/data/support_desk"
PLANTED = """

from components.data.support_desk import planted_rows as _planted

_written = generate


def generate(seed: int, config: SupportDeskConfig) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    return _planted.changed("{name}", seed, *_written(seed, config))
"""
"""What is appended to the built-in task for a fault in data."""
OFTEN = 0.5
"""Seconds between looks at a run that is to be interrupted."""


def commit(root: Path = ROOT) -> str:
    """Return the commit of the checkout, 12 hex digits, with `-changed` if a file of the packages differs from it."""
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    return head + ("-changed" if _git(root, "status", "--porcelain", "--", *PACKAGES) else "")


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def files_of(root: Path = ROOT, within: Sequence[str] = (*PACKAGES, "pyproject.toml")) -> list[str]:
    """Return the names of the files `within` these folders that git does not ignore, sorted."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "--", *within)
    return sorted(name for name in listed.splitlines() if (root / name).is_file())


def code_digest(root: Path = ROOT, within: Sequence[str] = (*PACKAGES, "pyproject.toml")) -> str:
    """Return 12 hex digits of the names and contents of the files `within` these folders, by default the packages."""
    digest = hashlib.sha256()
    for name in files_of(root, within):
        digest.update(f"{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def copied(folder: Path, root: Path = ROOT) -> Path:
    """Copy the packages' files into `folder`; return it."""
    for name in files_of(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, folder / name)
    return folder


def plant(fault: Fault, code: Path) -> None:
    """Apply a fault to a copy of the code. Raises ValueError if it no longer applies."""
    if fault.transform:
        shutil.copyfile(transforms.__file__, code / TASK / "planted_rows.py")
        with (code / TASK / "desk.py").open("a", encoding="utf-8") as file:
            file.write(PLANTED.format(name=fault.transform))
        return
    path = code / fault.file
    path.write_text(edited(path.read_text(encoding="utf-8"), fault), encoding="utf-8")


@dataclass
class Ended:
    """How a command ended."""

    code: int
    output: str
    """What it printed, both streams."""
    seconds: float
    """Wall time."""
    cpu: float
    """Processor seconds of it and of the processes that it waited for."""
    run: str = ""
    """The run that it began; empty if it began none."""


@dataclass(frozen=True)
class Tether:
    """The command of a copy of the code, in a home."""

    code: Path
    home: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables, for example of a Prefect server that commands share: one of its own costs each some 13 s."""

    def __call__(self, *arguments: str, interrupted_after: int | None = None, timeout: float = 3600) -> Ended:
        """Run `tether ARGUMENTS` with one thread. `interrupted_after` sends Ctrl-C after so many updates of PPO.

        Raises:
            RuntimeError: the command was killed, or found no Prefect server, so that it says nothing about a fault.
        """
        given = {n: v for n, v in os.environ.items() if not n.startswith(("PREFECT_", "MLFLOW_", "TETHER_"))}
        variables = given | {
            "TETHER_HOME": str(self.home), "PYTHONPATH": str(self.code), "OMP_NUM_THREADS": "1", "COLUMNS": "300",
            "OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1",
            **self.environment,
        }  # fmt: skip
        earlier = {path.name for path in self.home.glob("runs/*")}
        command, began = [sys.executable, "-m", "flows.cli", *arguments], time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=self.code, env=variables, stdout=output, stderr=output, start_new_session=True
            )
            limit = threading.Timer(timeout, process.kill)
            limit.start()
            if interrupted_after is not None:
                self._interrupt(process, interrupted_after)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            limit.cancel()
            output.seek(0)
            begun = sorted({path.parent.name for path in self.home.glob("runs/*/run.json")} - earlier)
            seconds, cpu, text = time.monotonic() - began, used.ru_utime + used.ru_stime, output.read()
            if process.returncode < 0 or process.returncode in (137, 143) or "no Prefect server answers" in text:
                raise RuntimeError(f"tether {arguments[0]} was stopped from outside: {text[-500:]}")
            return Ended(process.returncode, text, seconds, cpu, begun[-1] if begun else "")

    def _interrupt(self, process: subprocess.Popen[Any], updates: int) -> None:
        earlier = {*self.home.glob("runs/*")}
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if any(_updates(run) >= updates for run in {*self.home.glob("runs/*")} - earlier):
                process.send_signal(signal.SIGINT)
                return
            time.sleep(OFTEN)

    def status(self, run: str = "") -> dict[str, Any]:
        """Return the run.json of a run, by default the newest."""
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in self.home.glob(f"runs/{run or '*'}/run.json")]
        return max(runs, key=lambda one: one["started"])

    def artifact(self, run: str, stage: str, name: str) -> str | None:
        """Return the text of a file of a stage's artifact in a run; None if there is none."""
        digest = next((s["digest"] for s in self.status(run)["stages"] if s["name"] == stage), None)
        manifest = self.home / "store" / "objects" / str(digest)
        if digest is None or not manifest.is_file():
            return None
        sha = json.loads(manifest.read_text(encoding="utf-8")).get(name)
        path = self.home / "store" / "objects" / str(sha)
        return path.read_text(encoding="utf-8") if sha and path.is_file() else None


def _updates(run: Path) -> int:
    """Return the last update of PPO of which a run has reported metrics; 0 for none."""
    path = run / "metrics" / "ppo.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def damage(home: Path, stage: str) -> None:
    """Flip a bit in the middle of the weights that the newest run's `stage` stored."""
    tether = Tether(ROOT, home)
    digest = next(s["digest"] for s in tether.status()["stages"] if s["name"] == stage)
    files = json.loads((home / "store" / "objects" / digest).read_text(encoding="utf-8"))
    sha = next(sha for name, sha in files.items() if name.endswith(".safetensors"))
    path = home / "store" / "objects" / sha
    data = bytearray(path.read_bytes())
    data[len(data) // 2 | 3] ^= 0x08  # of a float32's exponent
    path.chmod(0o644)
    path.write_bytes(data)


def parted(arguments: Sequence[str]) -> list[str]:
    """Return options `KEY=VALUE` as arguments of the command line."""
    return [part for option in arguments for part in ("--set", option)]
