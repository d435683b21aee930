"""Find deployments whose stored parameters this version does not accept, for example after an option was removed.

The server keeps a deployment's config as it was deployed. A run of a stale one would only fail when it starts, perhaps
at night by its schedule.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName

from components.base.errors import UserError
from flows.config.run_config import check_config
from flows.deployment import flows
from flows.doctor import Finding


def stale() -> Iterator[str]:
    """Yield a sentence, with what to do, on each of the pipelines' deployments that this version can't run, and on each
    of its schedules. They are read from the server of `PREFECT_API_URL`."""
    named = FlowFilter(name=FlowFilterName(any_=[flows.rlhf.name]))
    with get_client(sync_client=True) as client:
        for deployment in client.read_deployments(flow_filter=named):
            if not (deployment.entrypoint or "").startswith(flows.__name__):
                continue  # another project's flow of this name
            problems = [problem_of(deployment.parameters)]
            for schedule in deployment.schedules:
                if schedule.parameters and (problem := problem_of({**deployment.parameters, **schedule.parameters})):
                    problems.append(f"the parameters of one of its schedules are not valid. {problem}")
            for problem in filter(None, problems):
                yield (
                    f"{flows.rlhf.name}/{deployment.name} was deployed by another version of Tether, and its runs fail "
                    f"at their start: {problem} Deploy it again with `tether deploy {deployment.name}` and the options "
                    f"it had; schedules stay."
                )


def problem_of(parameters: Mapping[str, Any]) -> str | None:
    """Return why the pipeline's flow does not accept these parameters; None if it does."""
    for name in parameters:
        if name not in flows.rlhf.parameters.properties:
            return f"{name}: there is no such parameter."
    try:
        check_config(parameters.get("config") or {}, source="config")
    except UserError as error:
        return str(error)
    return None


def findings() -> list[Finding]:
    """Return findings on stale deployments for `tether doctor`, which needs a server that answers."""
    return [Finding("fail", "deployment", text, 2) for text in stale()]
