"""Register with a Prefect server: work pools, deployments, and the automation that detects dead runs."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow
from prefect.types.entrypoint import EntrypointType
from prefect.utilities.callables import ParameterSchema
from prefect.utilities.urls import url_for
from pydantic import JsonValue

from components.base.errors import UserError
from components.base.redaction import has_credentials, redacted
from components.store.place import VARIABLE
from flows.config.run_config import CPU_POOL, GPU_POOL, RunConfig, Runner, check_config, to_values
from flows.deployment import flows, form
from flows.deployment.automations import notice_dead_runs
from flows.deployment.local_servers import CPU_RUNS
from flows.deployment.schedules import Schedule, set_schedule
from flows.deployment.stale import stale
from tasks.allowed import CODE, FILES
from tasks.prefect_flow.server import HEARTBEAT_SECONDS, PATIENCE, TAG

HIGH = "high"
"""The queue of each pool that workers serve first."""


class Deployed(NamedTuple):
    """A registered deployment."""

    name: str
    pool: str
    url: str | None


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return `config` with absolute paths, which are also valid in a worker's folder."""
    return check_config(cast(dict[str, JsonValue], _absolute(to_values(config))), source="config")


def _absolute(value: JsonValue, name: str = "") -> JsonValue:
    """Return `value`, of the option `name` or of a group of options, with absolute paths of what is here."""
    if isinstance(value, dict):  # the keys of an option's own dictionary are no options
        return {k: _absolute(item, name if name in FILES else f"{name}.{k}".strip(".")) for k, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, name) for item in value]
    if isinstance(value, str) and value and name in (*FILES, *CODE):
        path = value.removeprefix("model:")
        return f"{value.removesuffix(path)}{Path(path).absolute()}" if Path(path).exists() else value
    return value


def deploy(
    home: Path,
    profile: str,
    config: RunConfig,
    schedule: Schedule | None,
    pools: Iterable[str] = (),
    queue: str | None = None,
) -> tuple[list[Deployed], list[str]]:
    """Register everything, or update it, on the server at `PREFECT_API_URL`.

    Args:
        home: the Tether home of the workers, which must be able to access it.
        profile: the name of the pipeline's deployment, and in its runs' ids.
        config: the pipeline's defaults, not resolved, because the machine that runs it resolves them. PPO goes to the
            GPU pool unless they set its runner.
        schedule: the pipeline's schedule; None leaves that of an earlier call unchanged. Schedules that people made on
            the page always stay.
        pools: further pools that compute stages, in addition to cpu and gpu.
        queue: the queue in the pool cpu for the pipeline's runs; None leaves it unchanged.

    Returns:
        The deployments, and a line about each schedule and each deployment that this version can't run.

    Raises:
        UserError: the schedule is invalid, the pool has no such queue, or a stage's pool is the one that runs the
            pipelines.
    """
    home.mkdir(parents=True, exist_ok=True)
    runners = {"ppo": Runner(pool=GPU_POOL), **config.runners}
    config = with_absolute_paths(config.model_copy(update={"runners": runners}))
    flows.refuse_own_pool(config, CPU_POOL)
    if schedule is not None:
        schedule.checked()  # before anything is registered
    computing = list(dict.fromkeys([CPU_POOL, GPU_POOL, *pools]))
    for pool in computing:
        _make_pool(pool)
    if queue is not None and queue not in (there := _queues(CPU_POOL)):
        raise UserError(f"--queue {queue}: the pool {CPU_POOL} has no such queue. It has {', '.join(there)}.")
    schema = form.schema(flows.rlhf, config)
    defaults: dict[str, JsonValue] = {"profile": profile, "config": to_values(config)}
    done = [
        _register(flows.rlhf, profile, CPU_POOL, home, defaults, schema, queue or _queue(profile)),
        _register(flows.human_eval, "score", CPU_POOL, home, {}),
        *(_register(flows.compute, pool, pool, home, {}) for pool in computing),
    ]
    with get_client(sync_client=True) as client:
        pipeline = client.read_deployment_by_name(f"{flows.rlhf.name}/{profile}")
        lines = set_schedule(client, pipeline.id, schedule)
    notice_dead_runs()
    lines += [f"Stale: {text}" for text in stale()]
    return done, lines


def _queue(profile: str) -> str | None:
    """Return the queue of an earlier deployment, which Prefect would change to `default`; None if there is none."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_deployment_by_name(f"{flows.rlhf.name}/{profile}").work_queue_name
        except ObjectNotFound:
            return None


def _register(
    flow: Flow[..., Any],
    name: str,
    pool: str,
    home: Path,
    parameters: dict[str, JsonValue],
    schema: ParameterSchema | None = None,
    queue: str | None = None,
) -> Deployed:
    deployment = RunnerDeployment.from_flow(
        flow,
        name,
        parameters=parameters,
        work_pool_name=pool,
        work_queue_name=queue,
        job_variables={"env": _environment(home)},
        tags=[TAG],
        description=flow.description,
        entrypoint_type=EntrypointType.MODULE_PATH,
        enforce_parameter_schema=True,
    )
    if schema is not None:
        deployment._parameter_openapi_schema = schema
    deployment.model_fields_set.discard("schedules")  # `from_flow` sets it to none, which would remove all that exist
    made = cast(UUID, deployment.apply())
    return Deployed(f"{flow.name}/{name}", pool, redacted(url_for("deployment", made) or ""))


def _environment(home: Path) -> dict[str, str]:
    """Return the environment variables that a worker gives our runs; the flow sets the others when it begins.

    They override the worker's own environment, so variables that differ between workers (CUDA_VISIBLE_DEVICES) are left
    out. Prefect's server stores them, so a URL with a password is left out too and comes from the worker.
    """
    urls = {name: os.environ.get(name, "") for name in ("MLFLOW_TRACKING_URI", VARIABLE)}
    set_here = {name: url for name, url in urls.items() if url and not has_credentials(url)}
    return {
        "TETHER_HOME": str(home),
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "INFO",  # the run's log, for its page
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        **PATIENCE,
        **set_here,
    }


def _make_pool(name: str) -> None:
    """Create a work pool of processes if there is none. A person's changes to a pool stay.

    A pool's limit is shared by all machines. A new pool has none, because each worker sets how much its machine runs.
    Prefect gives each pool the queue `default`. The queue `high` is created before it; a person's changes to it stay.
    """
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=name, type="process"))
        if HIGH not in _queues(name):
            about = "Workers take runs from this queue before those of the pool's other queues."
            client.create_work_queue(HIGH, about, priority=1, work_pool_name=name)  # the others move down by one


def _queues(pool: str) -> list[str]:
    with get_client(sync_client=True) as client:
        queues = client.read_work_queues(work_pool_name=pool)
    return [queue.name for queue in sorted(queues, key=lambda queue: queue.priority or 0)]


def describe(registered: Iterable[Deployed]) -> list[str]:
    """Return lines for a person: what was registered, and which workers it needs."""
    deployed = list(registered)
    lines = [f"{entry.name:<17} {entry.pool:<5} {entry.url or ''}".rstrip() for entry in deployed]
    for pool in dict.fromkeys(entry.pool for entry in deployed):
        runs = CPU_RUNS if pool == CPU_POOL else 1
        lines.append(f"A worker: prefect worker start --pool {pool} --type process --limit {runs}")
    return lines
