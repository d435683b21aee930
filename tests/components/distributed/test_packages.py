"""What a GPU host has to have: PPO where the packages of contracts, tracking, servers and the terminal are absent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.store.store import ArtifactStore, Record
from tasks.execution.computing import _cpu_model
from tasks.execution.dispatch import Order
from tasks.execution.keying import key_of
from tasks.result import Input
from tasks.stages import STAGES
from tests.components.distributed.conftest import runtime_of
from tests.components.distributed.test_stages import on_ranks

ROOT = Path(__file__).resolve().parents[3]
OF_SERVERS = (
    "mlflow", "great_expectations", "fastapi", "uvicorn", "alembic", "multipart", "typer", "sklearn", "rensa",
    "py3langid", "gguf",
)  # fmt: skip
"""Packages that only other stages and processes import. (`datasets`, which reads splits, imports pandas.)"""
OF_A_WORKER = ("prefect", "rich", "pythonjsonlogger", "matplotlib", "sqlalchemy", "psutil")
"""Packages that a worker imports, and the processes that it starts for a stage's ranks do not."""
ABSENT = """
import os, sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in os.environ["ABSENT"].split()
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""
WORKER = """
import sys
from pathlib import Path
import flows.deployment.flows  # what Prefect's worker imports to compute an order
from components.store.store import ArtifactStore
from tasks.execution.dispatch import Order, receive
order = Order.model_validate_json(Path(sys.argv[1]).read_text())
receive(order, ArtifactStore(Path(sys.argv[2])), lambda point: None, print)
"""


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hides packages from the processes that are started from here."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ABSENT)

    def hide(*packages: str) -> None:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        monkeypatch.setenv("ABSENT", " ".join(packages))
        for package in packages:
            tried = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True)
            assert "ModuleNotFoundError" in tried.stderr, package

    return hide


@pytest.mark.whole
def test_ranks_of_ppo_need_only_the_learnings_packages(stages: Any, without: Any, tmp_path: Path) -> None:
    without(*OF_SERVERS, *OF_A_WORKER)
    assert on_ranks(stages, "ppo", tmp_path / "out", updates=1).metrics["ppo/updates"] == 1
    joins = [sys.executable, "-m", "tasks.rank_processes", "--help"]
    assert subprocess.run(joins, cwd=ROOT, capture_output=True).returncode == 0, "another host joins by this command"


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_computes_ppo_without_the_packages_of_other_stages(
    ranks: int, stages: Any, without: Any, tmp_path: Path
) -> None:
    """And the record names its processor; of a GPU `runtime.gpu` has the name."""
    home, stage, inputs = tmp_path / "home", STAGES["ppo"], dict[str, Input]()
    store, job = ArtifactStore(home), stages.job("ppo", updates=1)
    job = job.model_copy(update={"runtime": runtime_of(ranks)})
    for name, folder in stages.inputs_of("ppo").items():
        copied = shutil.copytree(folder, tmp_path / name)
        digest = store.publish(name[0] * 64, copied, None, {"stage": name}).digest
        inputs[name] = Input(name=name, digest=digest, path=store.path(digest), stage=name, stored=True)
    key, parts = key_of(stage, job, inputs)
    order = Order(stage="ppo", key=key, run="r", job=job.model_dump(mode="json"), inputs=inputs, parts=parts)
    (tmp_path / "order.json").write_text(order.model_dump_json())
    without(*OF_SERVERS)
    command = [sys.executable, "-c", WORKER, str(tmp_path / "order.json"), str(home)]
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    worker = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert worker.returncode == 0, worker.stderr
    record = store.lookup(key)
    assert isinstance(record, Record) and record.environment["cpu"] == _cpu_model() and record.environment["host"]
    runtime = record.job["runtime"]
    assert isinstance(runtime, dict)
    assert (runtime["device"], runtime["gpu"], runtime["ranks"]) == ("cpu", "none", ranks)
