"""Servers and workers as docs/operations/local.md starts them, runs ordered there, and what is asked of them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun

from flows.deployment.local_servers import free_port
from tasks.runs.points import read_points
from tasks.runs.status import load_status
from tests.servers import clean_environment
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DOC = (ROOT / "docs" / "operations" / "local.md").read_text()

Local = Callable[..., "Future[list[str]]"]


def end(what: str, process: subprocess.Popen[bytes]) -> None:
    """End a command as an operator does, and print how long that took."""
    process.terminate()
    until(what, lambda: process.poll() is not None, 60)


class Stack:
    """Servers and workers as the page says, each in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.ports = {"4200": str(free_port(0)), "5000": str(free_port(0))}
        self.logs = folder
        self.blocks = [self._here(block) for block in re.findall(r"```sh\n(.*?)```", DOC, re.S)]
        self.environment = {
            **clean_environment(),
            "PREFECT_SERVER_API_PORT": self.ports["4200"],
            "MLFLOW_PORT": self.ports["5000"],
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",  # less to wait for each run
            "CUDA_VISIBLE_DEVICES": "7",
            "TETHER_LOG_FORMAT": "json",
        }
        self.api = f"http://127.0.0.1:{self.ports['4200']}/api"

    def _here(self, block: str) -> str:
        for usual, port in self.ports.items():
            block = block.replace(usual, port)
        return block.replace("$PWD/.tether", str(self.home)).replace(".venv/bin/", f"{BIN}/")

    def terminal(self, number: int, *, go_on: bool = False) -> subprocess.Popen[bytes]:
        """Run a block of the page in a shell; with `go_on`, its last command stays in the foreground."""
        *before, last = self.blocks[number].strip().split("\n")
        script = "\n".join(["set -e", *before, f"exec {last}" if go_on else last])
        with (self.logs / f"terminal-{number}.log").open("wb") as log:
            return subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def said(self, number: int) -> str:
        return (self.logs / f"terminal-{number}.log").read_text()


def trigger(client: SyncPrefectClient, **changes: Any) -> FlowRun:
    """A run of the pipeline with `ppo` keys changed."""
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    return create(client, {**config, "ppo": {**config["ppo"], **changes}})


def create(client: SyncPrefectClient, config: dict[str, Any], retries: int = 0, **parameters: Any) -> FlowRun:
    """A run of the pipeline with this config, which `tether serve` continues `retries` times, without a wait."""
    deployment = client.read_deployment_by_name("rlhf/tiny")
    parameters |= {"profile": "tiny", "config": {**config, "retries": retries, "retry_seconds": 0}}
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def ended(client: SyncPrefectClient, run: FlowRun, what: str, seconds: float = 400) -> FlowRun:
    def look() -> FlowRun | None:
        found = client.read_flow_run(run.id)
        return found if found.state is not None and found.state.is_final() else None

    return until(what, look, seconds)


def log(client: SyncPrefectClient, run: FlowRun) -> str:
    lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200)
    return "\n".join(line.message for line in lines)


def child(client: SyncPrefectClient, parent: FlowRun) -> FlowRun | None:
    """The run that computes PPO for a pipeline."""
    filter_ = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent.id]))
    return next(iter(client.read_flow_runs(flow_run_filter=filter_)), None)


def tasks_of(client: SyncPrefectClient, run: FlowRun, *stages: str) -> dict[str, str | None]:
    """The states of a flow run's tasks by name, once these stages have ended there.

    Prefect's server writes task runs down behind the flow run's end.
    """

    def look() -> dict[str, str | None] | None:
        found = client.read_task_runs(flow_run_filter=only(run))
        ended = {task.name.split("-")[0] for task in found if task.state is not None and task.state.is_final()}
        return {task.name.split("-")[0]: task.state_name for task in found} if ended >= set(stages) else None

    return until("all tasks are told", look, 60)


def has_ended(client: SyncPrefectClient, run: FlowRun) -> str:
    """How a flow run has ended; nothing while it goes on."""
    state = client.read_flow_run(run.id).state
    return f"{run.name} has ended: {state.name}: {state.message}" if state is not None and state.is_final() else ""


def working_child(client: SyncPrefectClient, home: Path, parent: FlowRun, steps: int = 3) -> FlowRun:
    """The same, once it has a few updates behind it."""
    found = until("PPO is ordered", lambda: child(client, parent), failed=lambda: has_ended(client, parent))
    points = home / "work" / found.parameters["order"]["key"] / "points.jsonl"
    until(f"PPO is {steps} updates on", lambda: len(read_points(points)) >= steps,
          failed=lambda: has_ended(client, parent))  # fmt: skip
    return client.read_flow_run(found.id)


def pid(run: FlowRun) -> int:
    """Of a flow run's process."""
    assert run.infrastructure_pid is not None
    return int(str(run.infrastructure_pid).rpartition(":")[2])


def kill(run: FlowRun) -> None:
    """SIGKILL a flow run's process."""
    os.kill(pid(run), signal.SIGKILL)


def environment(run: FlowRun) -> list[str]:
    """Of a flow run's process."""
    return Path(f"/proc/{pid(run)}/environ").read_text().split("\0")


def digests(home: Path) -> list[str]:
    return [stage.digest for stage in load_status(home).stages]


def only(run: FlowRun) -> FlowRunFilter:
    return FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
