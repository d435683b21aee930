"""The embedded Prefect server: one that outlives a killed run is found and ended at the next start, by its own pid."""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.base.errors import UserError, naming
from components.base.process import describe_process, is_alive, this_process


def check_server(timeout: float = 5.0, needed_for: Mapping[str, str] | None = None) -> None:
    """Where `PREFECT_API_URL` names a server, see that it answers, and that it can reach these stages' pools.

    Args:
        timeout: seconds.
        needed_for: stage to the work pool that is to compute it.

    Raises:
        UserError: it doesn't answer, or a pool has no deployment; or there are pools and no server.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        for stage, pool in (needed_for or {}).items():
            raise UserError(
                f"runners.{stage} = {pool}: a work pool needs a Prefect server. Set PREFECT_API_URL to its address "
                f"(docs/operations.md), or set runners.{stage}=local."
            )
        return
    if error := no_answer(f"{url.rstrip('/')}/health", timeout):
        raise UserError(
            f"PREFECT_API_URL = {url}: no Prefect server answers there ({error}). Start it, or unset PREFECT_API_URL: "
            f"Tether then runs Prefect in its own process."
        ) from error
    if needed_for:
        from tasks.execution.dispatch import check_pools

        check_pools(needed_for.values())


def no_answer(url: str, timeout: float = 3.0) -> Exception | None:
    """Return why no HTTP server answers at `url` within `timeout` seconds; None where one does, whatever it says."""
    try:
        with urllib.request.urlopen(url, timeout=timeout):
            return None
    except urllib.error.HTTPError:
        return None  # it answers; whether it lets us in, the flow run will say
    except (OSError, ValueError) as error:
        return error


def is_answering(timeout: float = 3.0) -> bool:
    """Whether the server of this process's flow run, outside or embedded, is there (still)."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return all(process.poll() is None for process in _embedded())
    return no_answer(f"{url.rstrip('/')}/health", timeout) is None


def _embedded() -> list[subprocess.Popen[Any]]:
    """The servers that Prefect has started for this process (none where an outside one is used)."""
    from prefect.server.api.server import SubprocessASGIServer

    processes = [each.server_process for each in SubprocessASGIServer._instances.values()]
    return [process for process in processes if process is not None]


def note_embedded_servers(folder: Path) -> None:
    """Write down the servers that Prefect has started for this process."""
    servers = [describe_process(process.pid) for process in _embedded()]
    if servers:
        folder.mkdir(parents=True, exist_ok=True)
        note = {"owner": this_process(), "servers": servers}
        with naming(folder):
            (folder / f"{os.getpid()}.json").write_text(json.dumps(note))


def end_orphans(folder: Path) -> list[int]:
    """End the servers whose run's process is gone; returns their pids."""
    ended = []
    for path in sorted(folder.glob("*.json")):
        note = json.loads(path.read_text())
        if is_alive(note["owner"]):
            continue
        for server in note["servers"]:
            if is_alive(server) and server["host"] == this_process()["host"]:
                os.kill(int(server["pid"]), signal.SIGTERM)
                ended.append(int(server["pid"]))
        path.unlink(missing_ok=True)
    return ended
