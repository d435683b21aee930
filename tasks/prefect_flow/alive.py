"""Correct the state of a flow run that the server wrongly took for dead.

If a server was away for longer than a run may be silent, or a machine was suspended, a run seems dead: the automation
of `tether deploy` sets it to `Crashed` although its process is running.
"""

import contextvars
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Running

from tasks.execution.away import is_away
from tasks.execution.dispatch import taken_for_dead

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""How often a run checks its state, with one small request. Its pool may give its slot to another run meanwhile."""


@contextmanager
def saying_that_it_lives(flow_run_id: str, every: float = CHECK_SECONDS) -> Iterator[None]:
    """While the block runs, set this process's flow run back to `Running` if it was taken for dead."""
    over = threading.Event()

    def check() -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while not over.wait(every):
                try:
                    _revive(UUID(flow_run_id))
                except Exception as error:
                    if is_away(error):  # the next check asks again
                        continue
                    logger.warning("The state of this flow run can't be read and is not looked at again: %s", error)
                    return

    # In this thread's context, because the server's address may be set there.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(check,), name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # otherwise it could revive a run that has ended


def _revive(flow_run_id: UUID) -> None:
    with get_client(sync_client=True) as client:
        if taken_for_dead(client.read_flow_run(flow_run_id)):
            alive: State[None] = Running(message="Its process lives: the server had not heard of it for a while.")
            client.set_flow_run_state(flow_run_id, alive, force=True)
