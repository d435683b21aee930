"""Continue deployed runs that crashed: the same run, from its checkpoint, as often as its config allows.

`tether serve` and the keeper of `tether stack` do this for their pools. An automation of the server would have to rely
on events, which arrive late and out of order after an outage, and could start a living run a second time.
"""

from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from prefect.states import AwaitingRetry

from flows.config.run_config import Options
from tasks.execution.attempts import Attempts
from tasks.execution.away import is_away
from tasks.execution.dispatch import DOUBT_SECONDS, taken_for_dead
from tasks.prefect_flow.server import TAG

Say = Callable[[str], object]

FLOWS = ("rlhf", "human-eval")
"""The flows that are continued. Not `compute`: the pipeline that ordered it orders again."""
OLDEST = timedelta(days=1)
"""Runs that crashed earlier than this are left alone, because nobody waits for them any more."""
AGAIN = "It crashed and continues from its checkpoint"
"""The start of the message of such a retry. A run's retries are counted by it."""


def resume_crashed(pools: Collection[str], say: Say) -> None:
    """Reschedule the crashed runs of `pools` that have a retry left, when it is due.

    If the server is away, nothing happens, and the next call asks again. Other errors of Prefect's client are raised.
    """
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            for run in _crashed(client):
                if run.deployment_id is not None and run.work_pool_name in pools:
                    _resume(client, run, say)
    except Exception as error:
        if not is_away(error):
            raise


def crash_watch(
    pools: Collection[str], say: Say, url: str | None = None, login: str | None = None
) -> Callable[[], None]:
    """Return a function that calls `resume_crashed` for `pools`, raises nothing, and reports each kind of failure once.

    Args:
        pools: the pools whose runs are continued.
        say: gets lines for a person.
        url: the server's API; None uses the environment's URL and login.
        login: `user:password`.
    """
    told: set[str] = set()
    settings = {} if url is None else {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: login}

    def watch() -> None:
        try:
            with temporary_settings(settings):
                resume_crashed(pools, say)
        except Exception as error:  # the workers continue without retries
            if (text := f"Crashed runs can't be retried: {error}") not in told:
                told.add(text)
                say(text)

    return watch


def _crashed(client: SyncPrefectClient) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=list(FLOWS))),
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=[TAG]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
            end_time=FlowRunFilterEndTime(after_=datetime.now(UTC) - OLDEST),
        ),
    )


def _resume(client: SyncPrefectClient, run: FlowRun, say: Say) -> None:
    attempts = attempts_of(run)
    retry = 1 + sum((state.message or "").startswith(AGAIN) for state in client.read_flow_run_states(run.id))
    if retry > attempts.retries or run.state is None:
        return
    wait = max(attempts.wait(retry), DOUBT_SECONDS if taken_for_dead(run) else 0.0)
    if datetime.now(UTC) - run.state.timestamp < timedelta(seconds=wait):
        return
    client.set_flow_run_state(run.id, AwaitingRetry(message=f"{AGAIN}: retry {retry} of {attempts.retries}."))
    say(f"{run.name} crashed and continues from its checkpoint: retry {retry} of {attempts.retries}")


def attempts_of(run: FlowRun) -> Attempts:
    """Return how often a deployed run is retried, from its config or the default."""
    config = {**(run.parameters.get("config") or {}), **(run.parameters.get("changes") or {})}
    retries, seconds = (Options.model_fields[name].default for name in ("retries", "retry_seconds"))
    return Attempts(int(config.get("retries", retries)), float(config.get("retry_seconds", seconds)))
