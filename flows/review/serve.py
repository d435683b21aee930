"""Serve a batch's page until somebody stops it."""

import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import uvicorn
from sqlalchemy import update

from components.base.errors import TetherError, UserError
from flows.review.batches import BatchSource
from flows.review.database.connect import writing
from flows.review.database.tables import batch
from flows.review.export import export
from flows.review.page.app import OnComplete, make_app
from flows.review.votes import Voting

KEEP_ALIVE_S = 75
"""How long a connection may idle: people think longer than uvicorn's 5 s, and their next click would then fail."""


def serve(
    voting: Voting, host: str, port: int, address: str, on_complete: OnComplete | None, ready: Callable[[str], None]
) -> None:
    """Serve the page in this process.

    Args:
        address: where people reach the page, as `https://review.example.org`; empty for host and port themselves.
        ready: called with the address once the port is ours.

    Raises:
        UserError: the port is taken, or the host is none of this machine's.
    """
    with closing(_listening(host, port)) as listener:
        own = listener.getsockname()[1]
        shown = address or f"http://{f'[{host}]' if ':' in host else host}:{own}"
        with writing(voting.engine) as connection:
            connection.execute(update(batch).where(batch.c.id == voting.batch.id).values(address=shown))
        app = make_app(voting, on_complete, secure=shown.startswith("https:"))
        config = uvicorn.Config(
            app, timeout_keep_alive=KEEP_ALIVE_S, access_log=False, log_level="warning", server_header=False,
            lifespan="off", proxy_headers=False,
        )  # fmt: skip
        ready(shown)
        app.state.finish()  # a server that died may have left that
        uvicorn.Server(config).run(sockets=[listener])


def after_completion(voting: Voting, source: BatchSource, score: bool, tell: Callable[[str], None]) -> OnComplete:
    """What a complete batch is followed by: its files are written, and with `score` its run is scored.

    Scoring opens the key, so that a process of its own does it.
    """

    def on_complete(name: str) -> None:
        files = export(voting, source)
        tell(f"{name} is complete. Wrote {', '.join(map(str, files))}")
        if source.kind != "sample":
            return
        words = ["human-eval", "score", str(files[0].parent), "--run", name]
        if not score:
            tell(f"Score it with: tether {' '.join(words)}")
            return
        done = subprocess.run([sys.executable, "-m", "flows.cli", *words], check=False)
        if done.returncode not in (0, UserError.exit_code, 3):
            raise TetherError(f"scoring {name} ended with exit code {done.returncode}")

    return on_complete


def read_guidelines(file: Path | None) -> str | None:
    """The text of a file of guidelines.

    Raises:
        UserError: it can't be read, or is empty.
    """
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--guidelines {file}: this can't be read as text in UTF-8 ({error}).") from error
    if not text.strip():
        raise UserError(f"--guidelines {file}: the file is empty. Write down what raters are to prefer.")
    return text


def _listening(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # who comes before the server is ready waits
    except OSError as error:
        listener.close()
        raise UserError(f"{host}, port {port}: {error.strerror}. Name another --port or --host.") from error
    return listener
