"""Continue deployed runs that crashed: the same run, from its checkpoint, as often as its config allows.

`tether serve` does this beside its workers, because Prefect does not: a flow's `retries` and `on_crashed` hooks need
the process or its worker, which may both be dead, and an automation can't count the retries of a run. It would also
rely on events, which arrive late and out of order after an outage, and could start a living run a second time.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry

from flows.config.run_config import Options
from flows.deployment.alerts import DISK_AGAIN_SECONDS, FLOWS, report_low_disk
from tasks.execution.attempts import Attempts
from tasks.execution.away import is_away
from tasks.execution.dispatch import DOUBT_SECONDS, taken_for_dead
from tasks.prefect_flow.server import TAG

Say = Callable[[str], object]

CHECK_SECONDS = 10.0
OLDEST = timedelta(days=1)
"""Runs that crashed earlier than this are left alone, because nobody waits for them any more."""
AGAIN = "It crashed and continues from its checkpoint"
"""The start of the message of such a retry. A run's retries are counted by it."""


async def resume_while_served(
    home: Path, pools: Collection[str], say: Say, busy_runs: Callable[[], Collection[object]]
) -> None:
    """Continue the crashed runs of `pools` and report that the disk of `home` is nearly full, until cancelled.

    `busy_runs` returns the ids of runs to leave alone: those that a worker of this process has not let go yet. A kind
    of failure is reported once, and the workers continue without retries.
    """
    reported: set[str] = set()
    disk_due = 0.0
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        if time.monotonic() >= disk_due and report_low_disk(home):
            disk_due = time.monotonic() + DISK_AGAIN_SECONDS
        try:
            await resume_crashed(pools, say, busy_runs())
        except Exception as error:
            if (text := f"Crashed runs can't be retried: {error}") not in reported:
                reported.add(text)
                say(text)


async def resume_crashed(pools: Collection[str], say: Say, busy_runs: Collection[object] = ()) -> None:
    """Reschedule the crashed runs of `pools` that have a retry left, when it is due.

    If the server is away, nothing happens, and the next call asks again. Other errors of Prefect's client are raised.
    """
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            async with get_client() as client:
                for run in await _crashed(client):
                    if run.deployment_id is not None and run.work_pool_name in pools and run.id not in busy_runs:
                        await _resume(client, run, say)
    except Exception as error:
        if not is_away(error):
            raise


async def _crashed(client: PrefectClient) -> list[FlowRun]:
    wanted = {
        "tags": {"all_": [TAG]},
        "state": {"type": {"any_": [StateType.CRASHED]}},
        "end_time": {"after_": datetime.now(UTC) - OLDEST},
    }
    return await client.read_flow_runs(
        flow_filter=FlowFilter.model_validate({"name": {"any_": list(FLOWS)}}),
        flow_run_filter=FlowRunFilter.model_validate(wanted),
    )


async def _resume(client: PrefectClient, run: FlowRun, say: Say) -> None:
    attempts = attempts_of(run)
    states = await client.read_flow_run_states(run.id)
    retry = 1 + sum((state.message or "").startswith(AGAIN) for state in states)
    if retry > attempts.retries or run.state is None:
        return
    wait = max(attempts.wait(retry), DOUBT_SECONDS if taken_for_dead(run) else 0.0)
    if datetime.now(UTC) - run.state.timestamp < timedelta(seconds=wait):
        return
    await client.set_flow_run_state(run.id, AwaitingRetry(message=f"{AGAIN}: retry {retry} of {attempts.retries}."))
    say(f"{run.name} crashed and continues from its checkpoint: retry {retry} of {attempts.retries}")


def attempts_of(run: FlowRun) -> Attempts:
    """Return how often a deployed run is retried, from its config or the default."""
    config = {**(run.parameters.get("config") or {}), **(run.parameters.get("changes") or {})}
    retries, seconds = (Options.model_fields[name].default for name in ("retries", "retry_seconds"))
    return Attempts(int(config.get("retries", retries)), float(config.get("retry_seconds", seconds)))
