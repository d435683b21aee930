"""Serve a batch's page until somebody stops it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import uvicorn
from sqlalchemy import update

from components.base.errors import UserError
from flows.review.batches import BatchSource
from flows.review.database.connect import writing
from flows.review.database.tables import batch
from flows.review.export import export
from flows.review.page.app import OnComplete, make_app
from flows.review.progress import ReviewProgress, progress_of
from flows.review.votes import Voting

KEEP_ALIVE_S = 75
"""How long a connection may idle: people think longer than uvicorn's 5 s, and their next click would then fail."""
SHOWN_EVERY_S = 10.0
"""How often progress is looked at, to be shown elsewhere."""


def serve(
    voting: Voting,
    host: str,
    port: int,
    address: str,
    on_complete: OnComplete | None,
    ready: Callable[[str], None],
    show: Callable[[ReviewProgress], None] | None = None,
) -> None:
    """Serve the page in this process.

    Args:
        address: where people reach the page, as `https://review.example.org`; empty for host and port themselves.
        ready: called with the address once the port is ours.
        show: called with the progress at the start, and when it has changed; from a thread of its own.

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
        with _shown(voting, show):
            uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _shown(voting: Voting, show: Callable[[ReviewProgress], None] | None) -> Iterator[None]:
    """Tell `show` of the progress while this lasts, and at its end."""
    ended, last = threading.Event(), None

    def look() -> None:
        nonlocal last
        with voting.engine.connect() as connection:
            found = progress_of(connection, voting.batch.id)
        if show is not None and found != last:
            last = found
            show(found)

    def repeat() -> None:
        look()
        while not ended.wait(SHOWN_EVERY_S):
            look()

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    if show is None:
        yield
        return
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(SHOWN_EVERY_S)
        look()


def after_completion(
    voting: Voting, source: BatchSource, follow: Callable[[str, Path], str] | None, tell: Callable[[str], None]
) -> OnComplete:
    """Return what a complete batch is followed by: its files are written, and `follow` is told of them.

    Args:
        follow: takes the batch's name and the folder of its files, and returns what it began, in a sentence. Scoring
            opens the key, so that it is done in another process. None for a batch that is no run's.
    """

    def on_complete(name: str) -> None:
        files = export(voting, source)
        tell(f"{name} is complete. Wrote {', '.join(map(str, files))}")
        if follow is not None:
            tell(follow(name, files[0].parent))

    return on_complete


def read_guidelines(file: Path | None) -> str | None:
    """Return the text of a file of guidelines.

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
