"""What a run leaves for people, however it ended."""

import logging
from pathlib import Path

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.nested import group
from tasks.execution.context import RunContext
from tasks.runs.config import run_values
from tasks.runs.journal import REPORT
from tasks.runs.status import load_status

logger = logging.getLogger(__name__)


def write_reports(ctx: RunContext) -> None:
    """Write a run's pages for people, however it ended: `report.md`, `report.html`, and its models' cards."""
    from flows.models.card import write_cards
    from flows.reports.links import links
    from flows.reports.page import write_page
    from flows.reports.terminal import markdown

    status = load_status(ctx.home, ctx.run)
    text = markdown(status, what_is_simulated(ctx.home, ctx.run), links(ctx.home, status))
    write_whole(ctx.folder / "report.md", text)
    for name, write, again in (
        ("cards", lambda: write_cards(ctx), f"`tether card {ctx.run}` makes one again"),
        (REPORT, lambda: write_page(ctx.home, ctx.run), f"`tether report {ctx.run}` tries again"),
    ):
        try:
            write()
        except OSError:
            raise  # the disk: the user can mend that
        except Exception as error:  # hours of computing are not to end in a page's mistake
            logger.debug(name, exc_info=True)
            ctx.say(f"{ctx.folder / name} could not be written ({error!r}); {again}")


def what_is_simulated(home: Path, run: str) -> str:
    """Return the sentence that says what of a run is simulated, as far as its config can be read; empty where nothing
    is."""
    from flows.reports.terminal import simulated_note

    try:
        values = run_values(home, run)
    except UserError as error:
        logger.warning("%s Whether the run's data are simulated isn't known.", error)
        return ""
    generated = group(values, "data").get("preferences", "") is None
    return simulated_note(generated, group(values, "human_eval").get("judges") == "people")
