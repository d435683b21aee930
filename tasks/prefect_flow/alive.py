"""A flow run that the server has taken for dead says that it lives.

A server that was away for longer than a run may be silent, or a suspended machine, makes a run seem dead: the
automation of `tether deploy` sets it to `Crashed` while its process goes on.
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

LOOK_SECONDS = 5.0
"""How often a run asks how it stands: one small request. Meanwhile its pool may give its place to another run."""


@contextmanager
def saying_that_it_lives(flow_run_id: str, every: float = LOOK_SECONDS) -> Iterator[None]:
    """Inside, the flow run of this process is set back to `Running` where it was taken for dead.

    Args:
        flow_run_id: of the flow run.
        every: seconds between two looks.
    """
    over = threading.Event()

    def look() -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while not over.wait(every):
                try:
                    _revive(UUID(flow_run_id))
                except Exception as error:
                    if is_away(error):  # the next look asks again
                        continue
                    logger.warning("The state of this flow run can't be read and is not looked at again: %s", error)
                    return

    # With this thread's context: the server's address may be set in it.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(look,), name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # else it could revive a run that has ended


def _revive(flow_run_id: UUID) -> None:
    with get_client(sync_client=True) as client:
        if taken_for_dead(client.read_flow_run(flow_run_id)):
            alive: State[None] = Running(message="Its process lives: the server had not heard of it for a while.")
            client.set_flow_run_state(flow_run_id, alive, force=True)
