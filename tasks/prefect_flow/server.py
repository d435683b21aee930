"""The run's own Prefect server: one that outlives a killed run is found and ended at the next start, by its own pid."""

import contextlib
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components.base.errors import UserError
from components.base.process import Process, describe_process, is_alive, this_process
from components.base.redaction import redacted
from tasks.runs.journal import write_model

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 5
"""How long the last events may take to reach a server that is about to end."""
TAG = "tether"
"""Every flow run of ours has it, and the deployments: automations match it, so that they touch nobody else's runs."""

HEARTBEAT_SECONDS = 30
"""How often a flow run on a server says that its process lives. Prefect takes no less."""

PATIENCE = {"PREFECT_CLIENT_MAX_RETRIES": "9", "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504"}
"""Prefect's settings of a run that nobody waits for. It tells its state for 17 minutes, each wait twice the last one,
also where the database behind the server is away, which Prefect says by a 500. The default is a minute, and no second
try after a 500."""

UNTRUSTED = (
    "its certificate is signed by a CA that is not trusted here. Set SSL_CERT_FILE to the file of that CA's "
    "certificate (PEM): Prefect's and MLflow's clients both use it then."
)

START_SECONDS = 120.0
"""How long a run's own server may take to answer; on an idle machine it takes about 10 s."""


def check_server(timeout: float = 5.0, needed_for: Mapping[str, str] | None = None) -> None:
    """See that the server of `PREFECT_API_URL`, if set, answers within `timeout` seconds, lets us in, and can reach
    stages' pools.

    `needed_for` maps a stage to the work pool that is to compute it.

    Raises:
        UserError: it doesn't answer or refuses us, or a pool has no deployment; or there are pools and no server.
        TetherError: it answers that it is out of order.
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
        if is_untrusted(error):
            raise UserError(f"PREFECT_API_URL = {url}: {UNTRUSTED}") from error
        raise UserError(
            f"PREFECT_API_URL = {url}: no Prefect server answers there ({error}). Start it, or unset PREFECT_API_URL: "
            f"Tether then runs Prefect in its own process."
        ) from error
    from tasks.prefect_flow.access import ask_server

    ask_server()
    if needed_for:
        from tasks.execution.dispatch import check_pools

        check_pools(needed_for.values())


def no_answer(url: str, timeout: float = 3.0) -> Exception | None:
    """Return why no HTTP server answers at `url` within `timeout` seconds; None where one does, whatever it says."""
    try:
        with urlopen(url, timeout):
            return None
    except urllib.error.HTTPError:
        return None  # it answers; whether it lets us in, the flow run will say
    except (OSError, ValueError) as error:
        return error


def urlopen(url: str, timeout: float) -> AbstractContextManager[Any]:
    """`urllib`'s, that trusts the certificates that Prefect's client trusts; `url` may name a user, which is not sent.

    Both read `SSL_CERT_FILE`; this reads `PREFECT_API_SSL_CERT_FILE` and `PREFECT_API_TLS_INSECURE_SKIP_VERIFY` too.
    """
    context = ssl.create_default_context(cafile=os.environ.get("PREFECT_API_SSL_CERT_FILE") or None)
    if os.environ.get("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "").lower() in ("1", "true", "yes", "on"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.urlopen(redacted(url), timeout=timeout, context=context)


def is_untrusted(error: BaseException | None) -> bool:
    """Return whether an error of a connection says that the server's certificate is signed by nobody we trust."""
    return error is not None and ("CERTIFICATE_VERIFY_FAILED" in str(error) or is_untrusted(error.__cause__))


def is_answering(timeout: float = 3.0) -> bool:
    """Return whether the server that `PREFECT_API_URL` names, if it does, is there (still), and its database too."""
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        return True
    try:
        with urlopen(f"{url.rstrip('/')}/ready", timeout):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500  # it answers; 503 is its word for a database that is away
    except (OSError, ValueError):
        return False


class _Note(BaseModel):
    """A file that names a run's process and the servers that it has started."""

    owner: Process
    servers: list[Process]


class NoServer(Exception):
    """This process's own Prefect server did not start; the message says why."""


@contextlib.contextmanager
def own_server(home: Path, seconds: float = START_SECONDS) -> Iterator[str]:
    """Start a Prefect server for this process on loopback, and name it in `PREFECT_API_URL` until it is ended.

    It gets a session of its own, so that Ctrl-C in the terminal, or a terminal that closes, ends the run and not the
    server under it. It is noted, for `end_orphans` where this process is killed.

    Args:
        home: the `TETHER_HOME`; the server's database is in its `prefect/`.
        seconds: how long to wait for its first answer.

    Yields:
        The URL of its API.

    Raises:
        NoServer: it ended, or did not answer in time.
    """
    folder = home / "prefect" / "embedded"
    folder.mkdir(parents=True, exist_ok=True)
    note, log = folder / f"{os.getpid()}.json", folder / f"{os.getpid()}.log"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))  # and handed over: nobody else takes the port meanwhile
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        command = [
            sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--lifespan", "on",
            "--log-level", "error", "--fd", str(listening.fileno()),
        ]  # fmt: skip
        settings = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                pass_fds=[listening.fileno()], start_new_session=True,
            )  # fmt: skip
    try:
        write_model(note, _Note(owner=this_process(), servers=[describe_process(process.pid)]))
        _wait_for(process, url, log, seconds)
        os.environ["PREFECT_API_URL"] = url
        yield url
    finally:
        # Prefect keeps one worker of events a process, with its first server: a later run gets one of its own.
        if worker := sys.modules.get("prefect.events.worker"):
            worker.EventsWorker.drain_all(timeout=DRAIN_SECONDS)
        os.environ.pop("PREFECT_API_URL", None)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        note.unlink(missing_ok=True)
        log.unlink(missing_ok=True)


def _wait_for(process: subprocess.Popen[Any], url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while no_answer(f"{url}/health"):
        if process.poll() is not None:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise NoServer(
                redacted(said[-1].strip()[:300]) if said else f"it ended with exit code {process.returncode}"
            )
        if time.monotonic() > deadline:
            raise NoServer(f"no answer within {seconds:.0f} s")
        time.sleep(0.1)


def end_orphans(folder: Path) -> list[int]:
    """End the servers whose run's process is gone; returns their pids."""
    ended = []
    for path in sorted(folder.glob("*.json")):
        try:
            note = _Note.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            logger.warning("%s is damaged and was removed; a Prefect server that it named may still run", path)
        else:
            if is_alive(note.owner):
                continue
            for server in note.servers:
                if is_alive(server) and server.get("host") == this_process()["host"]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(server["pid"]), signal.SIGTERM)
                    ended.append(int(server["pid"]))
        path.unlink(missing_ok=True)
        path.with_suffix(".log").unlink(missing_ok=True)
    return ended
