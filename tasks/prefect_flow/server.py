"""Prefect's server: whether it answers, and the one that a run starts for itself, which ends when the run does."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

from components.base.errors import TetherError, UserError
from components.base.redaction import redacted
from components.rollouts.asking import HttpClient

DRAIN_SECONDS = 5
"""How long the last events may take to reach a server that is about to be stopped."""
TAG = "tether"
"""The tag of all our flow runs and deployments. Automations match it, so that they do not touch other runs."""

HEARTBEAT_SECONDS = 30
"""Seconds between the heartbeats of a flow run on a server. Prefect accepts no less."""

PATIENCE = {"PREFECT_CLIENT_MAX_RETRIES": "9", "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504"}
"""Prefect's settings for a run that nobody waits for. It retries for 17 minutes, each wait twice as long as the one
before, also after a 500, which Prefect answers if its database is away. By default it retries for a minute, and not
after a 500."""

UNTRUSTED = (
    "its certificate is signed by a CA that is not trusted here. Set SSL_CERT_FILE to the file of that CA's "
    "certificate (PEM): Prefect's and MLflow's clients both use it then."
)

NO_API = "what answers there is not Prefect's API. Its address ends in /api, as http://127.0.0.1:4200/api."

BUSY_SECONDS = 30.0
"""How long a server may be busy before it counts as away; what it is not told meanwhile is missing on its pages."""
_away: set[str] = set()
"""Addresses that did not answer when they were asked last."""

START_SECONDS = 300.0
"""How long a run's own server may take to answer; an idle machine takes about 10 s."""


def check_server(timeout: float = 20.0, needed_for: Mapping[str, str] | None = None) -> None:
    """Check that the server at `PREFECT_API_URL`, if set, answers within `timeout` seconds, accepts us, and has the
    deployments of the stages' pools.

    `needed_for` maps a stage to the work pool that computes it.

    Raises:
        UserError: it does not answer or rejects us, a pool has no deployment, or there are pools but no server.
        TetherError: it answers with a server error.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url or is_own(url):
        for stage, pool in (needed_for or {}).items():
            raise UserError(
                f"runners.{stage} = {pool}: a work pool needs a Prefect server. Set PREFECT_API_URL to its address "
                f"(docs/operations.md), or set runners.{stage}=local."
            )
        return
    _ask_server(url, timeout)
    if needed_for:
        from tasks.execution.dispatch import check_pools

        check_pools(needed_for.values())


def _ask_server(url: str, timeout: float) -> None:
    """Make a call that needs credentials and the server's database. Raises as `check_server`."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import (
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        temporary_settings,
    )

    where = f"PREFECT_API_URL = {redacted(url)}"
    settings = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: timeout}
    try:
        with temporary_settings(settings), get_client(sync_client=True) as client:
            client.read_flows(limit=1)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UserError(
                f"{where}: the Prefect server refuses this user ({status}). Set PREFECT_API_AUTH_STRING to what its "
                "PREFECT_SERVER_API_AUTH_STRING says, USER:PASSWORD (or PREFECT_API_KEY, if it takes keys), of a user "
                "who may read flows."
            ) from error
        if status < 500:
            raise UserError(f"{where} answers {status}: {NO_API}") from error
        raise TetherError(
            f"{where}: the Prefect server answers {status}, as it does while its database is away. See its log, and "
            f"try again."
        ) from error
    except httpx.TransportError as error:
        if is_untrusted(error):
            raise UserError(f"{where}: {UNTRUSTED}") from error
        raise UserError(
            f"{where}: no Prefect server answers there ({type(error).__name__}: {error}). Start it, or unset "
            f"PREFECT_API_URL: Tether then runs Prefect in its own process."
        ) from error
    except ValueError as error:  # from pydantic or JSON, for example if it is a web page
        raise UserError(f"{where}: {NO_API}") from error


def no_answer(url: str, timeout: float = 3.0) -> Exception | None:
    """Return why no HTTP server answers at `url` within `timeout` seconds; None if one answers, with any status."""
    answer = _status(url, timeout)  # whatever the status is, the flow run will show whether it accepts us
    return answer if isinstance(answer, Exception) else None


def _status(url: str, timeout: float) -> int | Exception:
    """Return the status of the answer at `url`, or why there is none. A user in `url` is not sent.

    The certificates that Prefect's client trusts are trusted: it reads `SSL_CERT_FILE`, `PREFECT_API_SSL_CERT_FILE` and
    `PREFECT_API_TLS_INSECURE_SKIP_VERIFY`.
    """
    import httpx

    try:
        context = ssl.create_default_context(cafile=os.environ.get("PREFECT_API_SSL_CERT_FILE") or None)
        if os.environ.get("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "").lower() in ("1", "true", "yes", "on"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with HttpClient(timeout, UserError, verify=context, follow_redirects=True) as client:
            return client.request("GET", redacted(url)).status_code
    except (OSError, UserError, httpx.HTTPError) as error:
        return error


def is_untrusted(error: BaseException | None) -> bool:
    """Return whether a connection failed because the server's certificate is not signed by a trusted authority."""
    return error is not None and ("CERTIFICATE_VERIFY_FAILED" in str(error) or is_untrusted(error.__cause__))


def is_answering(patience: float = BUSY_SECONDS) -> bool:
    """Return whether the server at `PREFECT_API_URL` and its database answer; True if the variable is not set.

    One that accepts no connection is away at once. One that is slow, or says that its database is away, may be busy: it
    is asked again for `patience` seconds, unless it was away when it was asked before.
    """
    url = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    if not url:
        return True
    import httpx

    until = time.monotonic() + (0.0 if url in _away else patience)
    while True:
        answer = _status(f"{url}/ready", timeout=5.0)
        if isinstance(answer, int) and answer < 500:
            _away.discard(url)
            return True
        busy = isinstance(answer, int | httpx.TimeoutException)  # 503 means that its database is away
        if not busy or time.monotonic() >= until:
            _away.add(url)
            return False
        time.sleep(0.5)


class NoServer(Exception):
    """This process's own Prefect server did not start; the message says why."""


_SERVE = """
import os, sys, threading, uvicorn
threading.Thread(target=lambda: (sys.stdin.read(), os.kill(os.getpid(), 15)), daemon=True).start()
uvicorn.main(sys.argv[1:])
"""
"""Runs a server until its standard input ends, as it does when the run is killed."""


_own_urls: set[str] = set()
"""The URL of the server that this process has started, while it runs."""


def is_own(url: str) -> bool:
    """Return whether `url` is the API of the server that this process has started."""
    return url in _own_urls


@contextlib.contextmanager
def own_server(seconds: float = START_SECONDS) -> Iterator[str]:
    """Start a Prefect server for this process on loopback, and set `PREFECT_API_URL` to it until it is stopped. Inside
    another such block, that block's server is used.

    The server gets its own session, so that Ctrl-C or a closed terminal ends the run before the server. Its database is
    in `PREFECT_HOME`. Yields the URL of its API.

    Raises:
        NoServer: it ended, or did not answer within `seconds`.
    """
    if _own_urls:
        yield next(iter(_own_urls))
        return
    with socket.socket() as listening, tempfile.TemporaryFile() as log:
        listening.bind(("127.0.0.1", 0))  # handed over to the server, so that nobody else can take the port
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        command = [
            sys.executable, "-c", _SERVE, "--factory", "prefect.server.api.server:create_app", "--lifespan", "on",
            "--log-level", "error", "--fd", str(listening.fileno()),
        ]  # fmt: skip
        settings = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdin=subprocess.PIPE, stdout=log, stderr=log,
            pass_fds=[listening.fileno()], start_new_session=True,
        )  # fmt: skip
        listening.close()
        with process:
            try:
                _wait_for(process, url, log, seconds)
                os.environ["PREFECT_API_URL"] = url
                _own_urls.add(url)
                yield url
            finally:
                # Prefect has one events worker per process, bound to its first server. Draining it gives a later run a
                # new one.
                if worker := sys.modules.get("prefect.events.worker"):
                    worker.EventsWorker.drain_all(timeout=DRAIN_SECONDS)
                os.environ.pop("PREFECT_API_URL", None)
                _own_urls.discard(url)
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()


def _wait_for(process: subprocess.Popen[Any], url: str, log: IO[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while no_answer(f"{url}/health"):
        if process.poll() is not None:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            why = redacted(lines[-1].strip())[:300] if lines else f"it ended with exit code {process.returncode}"
            raise NoServer(why)
        if time.monotonic() > deadline:
            raise NoServer(f"no answer within {seconds:.0f} s")
        time.sleep(0.1)
