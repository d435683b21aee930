"""Find the pages of a run on MLflow and Prefect, and the files in its folder, for its report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from components.human_eval.sheet import RATERS
from tasks.runs.awaited_labels import read_progress
from tasks.runs.journal import readable_done
from tasks.runs.status import RunStatus
from tasks.tracking.address import mlflow_page


class Link(NamedTuple):
    """A page of one of the servers."""

    server: str
    url: str


def links(home: Path, status: RunStatus) -> dict[str, list[Link]]:
    """Return the pages of each stage, and under "" those of the run; empty lists if no server has one."""
    at_prefect = {"": status.prefect, **{stage.name: stage.prefect for stage in status.stages}}
    pages = {}
    for name, address in at_prefect.items():
        urls = {"MLflow": mlflow_page(home, status.run, name), "Prefect": address}
        # Tether writes only http addresses into run.json, so anything else is not shown.
        pages[name] = [
            Link(server, url) for server, url in urls.items() if url and url.startswith(("http://", "https://"))
        ]
    return pages


def elsewhere(home: Path, status: RunStatus, links: Mapping[str, Sequence[Link]]) -> list[Link]:
    """Return links to everything about a run outside its report: its pages on servers, and files in its folder by their
    relative paths."""
    folder = home / "runs" / status.run
    pages = list(links.get("", ()))
    # Data Docs belong to the run that computed `validate`.
    computed = [done.record.run for done in readable_done(folder)[0] if done.group == "validate"]
    if docs := mlflow_page(home, (computed or [status.run])[0], "validate", "attachments/data_docs/index.html"):
        pages.append(Link("Data Docs", docs))
    pages += [Link(f"Card of {path.stem}", f"cards/{path.name}") for path in sorted((folder / "cards").glob("*.md"))]
    for name, path in (("Rating sheet", "sheet.csv"), ("Raters' files", f"{RATERS}/"), ("Report as text", "report.md")):
        if (folder / path).exists():
            pages.append(Link(name, path))
    labels = read_progress(folder)
    if labels and labels.address.startswith(("http://", "https://")):
        pages.append(Link("Review page", labels.address))
    return pages
