"""Find deployments whose stored parameters this version does not accept, for example after an option was removed.

The server keeps a deployment's config as it was deployed. A run of a stale one would only fail when it starts, perhaps
at night by its schedule.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName

from components.base.errors import UserError
from flows.config.run_config import check_config
from flows.deployment import flows
from flows.doctor import Finding


class Stale(NamedTuple):
    """A deployment that can't run, or one of its schedules."""

    name: str
    problem: str

    @property
    def text(self) -> str:
        """Return one sentence for a person, with what to do."""
        profile = self.name.partition("/")[2]
        return (
            f"{self.name} was deployed by another version of Tether, and its runs fail at their start: {self.problem} "
            f"Deploy it again with `tether deploy {profile}` and the options it had; schedules stay."
        )


def stale() -> Iterator[Stale]:
    """Yield the pipelines' deployments on the server of `PREFECT_API_URL` that this version can't run."""
    named = FlowFilter(name=FlowFilterName(any_=[flows.rlhf.name]))
    with get_client(sync_client=True) as client:
        for each in client.read_deployments(flow_filter=named):
            if not (each.entrypoint or "").startswith(flows.__name__):
                continue  # another project's flow of this name
            name = f"{flows.rlhf.name}/{each.name}"
            if problem := problem_of(each.parameters):
                yield Stale(name, problem)
            for schedule in each.schedules:
                if schedule.parameters and (problem := problem_of({**each.parameters, **schedule.parameters})):
                    yield Stale(name, f"the parameters of one of its schedules are not valid. {problem}")


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
    return [Finding("fail", "deployment", each.text, 2) for each in stale()]
