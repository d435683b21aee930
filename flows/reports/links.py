"""Where a run and its stages stand on the pages of MLflow and Prefect, for the run's report."""

from pathlib import Path
from typing import NamedTuple

from tasks.runs.status import RunStatus
from tasks.tracking.address import mlflow_page


class Link(NamedTuple):
    """A page of one of the servers."""

    server: str
    url: str


def links(home: Path, status: RunStatus) -> dict[str, list[Link]]:
    """The pages of each stage, and under "" those of the run; none where a server has no page of it."""
    at_prefect = {"": status.prefect, **{stage.name: stage.prefect for stage in status.stages}}
    found = {}
    for name, address in at_prefect.items():
        urls = {"MLflow": mlflow_page(home, status.run, name), "Prefect": address}
        # Anything else in an address of run.json is not what Tether writes there.
        found[name] = [
            Link(server, url) for server, url in urls.items() if url and url.startswith(("http://", "https://"))
        ]
    return found
