"""The embedded Prefect server: one that outlives a killed run is found and ended at the next start, by its own pid."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

from components.errors import UserError
from tasks.process import describe_process, is_alive, this_process


def check_server(timeout: float = 5.0) -> None:
    """Where `PREFECT_API_URL` names a server, see that it answers.

    Raises:
        UserError: it doesn't.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=timeout):
            return
    except urllib.error.HTTPError:
        return  # it answers; whether it lets us in, the flow run will say
    except (OSError, ValueError) as error:
        raise UserError(
            f"PREFECT_API_URL = {url}: no Prefect server answers there ({error}). Start it, or unset PREFECT_API_URL: "
            f"Tether then runs Prefect in its own process."
        ) from error


def note_embedded_servers(folder: Path) -> None:
    """Write down the servers that Prefect has started for this process (none where an outside one is used)."""
    from prefect.server.api.server import SubprocessASGIServer

    processes = [each.server_process for each in SubprocessASGIServer._instances.values()]
    servers = [describe_process(process.pid) for process in processes if process is not None]
    if servers:
        folder.mkdir(parents=True, exist_ok=True)
        note = {"owner": this_process(), "servers": servers}
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
