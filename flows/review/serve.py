"""Serve a batch's page until it is stopped."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import uvicorn
from sqlalchemy import update

from components.base.errors import UserError
from flows.review.answer_export import export
from flows.review.answer_progress import progress_of
from flows.review.database.connect import writing
from flows.review.database.tables import batch
from flows.review.page.app import OnComplete, make_app
from flows.review.page.guard import PromptRequests
from flows.review.rater_votes import Voting
from flows.review.review_batches import BatchSource
from tasks.runs.awaited_labels import LabelProgress

KEEP_ALIVE_S = 75
"""How long an idle connection stays open. With uvicorn's 5 s, a person's next click after thinking would fail."""
SHOWN_EVERY_S = 10.0
"""How often the progress is checked, to show it elsewhere."""


def serve(
    voting: Voting,
    host: str,
    port: int,
    address: str,
    on_complete: OnComplete | None,
    ready: Callable[[str], None],
    show: Callable[[LabelProgress], None] | None = None,
) -> None:
    """Serve the page in this process until it is stopped.

    Args:
        address: the address for people, such as `https://review.example.org`; empty for host and port themselves.
        on_complete: as in `make_app`.
        ready: called with the address once the port is bound.
        show: called with the progress at the start and after each change, from another thread.

    Raises:
        UserError: the port is in use, or the host is not an address of this machine.
    """
    with closing(_listening(host, port)) as listener:
        listening_port = listener.getsockname()[1]
        page_address = address or f"http://{f'[{host}]' if ':' in host else host}:{listening_port}"
        with writing(voting.engine) as connection:
            connection.execute(update(batch).where(batch.c.id == voting.batch.id).values(address=page_address))
        app = make_app(voting, on_complete, secure=page_address.startswith("https:"))
        config = uvicorn.Config(
            app, timeout_keep_alive=KEEP_ALIVE_S, access_log=False, log_level="warning", server_header=False,
            lifespan="off", proxy_headers=False, http=PromptRequests,
        )  # fmt: skip
        ready(page_address)
        app.state.finish()  # a server that died may not have finished the batch
        with nullcontext() if show is None else _shown(voting, show):
            uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _shown(voting: Voting, show: Callable[[LabelProgress], None]) -> Iterator[None]:
    """Call `show` with the progress at the start, after each change, and at the end."""
    ended = threading.Event()

    def repeat() -> None:
        last, done = None, False
        while not done:
            done = last is not None and ended.wait(SHOWN_EVERY_S)
            with voting.engine.connect() as connection:
                progress = progress_of(connection, voting.batch.id)
            if progress != last:
                last = progress
                show(progress)

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(SHOWN_EVERY_S)


def after_completion(
    voting: Voting, source: BatchSource, follow: Callable[[str, Path], str] | None, tell: Callable[[str], None]
) -> OnComplete:
    """Return a function for a complete batch: it writes the batch's files and calls `follow`.

    Args:
        follow: gets the batch's name and the folder of its files, and returns a sentence about what it started.
            Scoring opens the key, so `follow` must do it in another process. None for a batch that is not a run's.
    """

    def on_complete(name: str) -> None:
        files = export(voting, source)
        tell(f"{name} is complete. Wrote {', '.join(map(str, files))}")
        if follow is not None:
            tell(follow(name, files[0].parent))

    return on_complete


def _listening(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # connections wait here until the server is ready
    except OSError as error:
        listener.close()
        raise UserError(f"{host}, port {port}: {error.strerror}. Name another --port or --host.") from error
    return listener
