"""Write a run's pages for people, however it ended."""

import logging
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.text import line
from tasks.execution.context import RunContext
from tasks.runs.config import run_values
from tasks.runs.journal import REPORT, REPORT_TEXT
from tasks.runs.status import RunStatus, load_status

logger = logging.getLogger(__name__)
PROMPTS_SHOWN = 3
LONGEST_PROMPT = 60
"""The largest number of characters of a prompt that a terminal shows."""


def write_reports(ctx: RunContext) -> None:
    """Write `report.md`, `report.html` and the model cards of a run, however it ended."""
    from flows.models.card import write_cards
    from flows.reports.page import write_page
    from flows.reports.report_links import links
    from flows.reports.terminal import markdown

    status = load_status(ctx.home, ctx.run)
    text = markdown(status, what_is_simulated(ctx.home, ctx.run), links(ctx.home, status))
    write_whole(ctx.folder / REPORT_TEXT, text)
    for name, write, again in (
        ("cards", lambda: write_cards(ctx), f"`tether export {ctx.run} --card` makes one again"),
        (REPORT, lambda: write_page(ctx.home, ctx.run), f"`tether status {ctx.run} --html` writes it again"),
    ):
        try:
            write()
        except OSError:
            raise  # a full disk, for example, which the user can fix
        except Exception as error:  # a bug in a page must not end hours of computing
            logger.debug(name, exc_info=True)
            ctx.say(f"{ctx.folder / name} could not be written ({error!r}); {again}")


def what_ppo_watched(home: Path, status: RunStatus) -> list[str]:
    """Return lines about PPO: the alarms that a run's policy raised, and the tokens and prompts that carry its KL.

    Empty if the run has no policy, or if its record or these files are missing in the store.
    """
    from flows.reports.run_facts import StageFacts

    policy = next((StageFacts.of(home, status.run, stage) for stage in status.stages if stage.name == "ppo"), None)
    if policy is None:
        return []
    named = ", ".join(f"{alarm['name']} at update {alarm['update']}" for alarm in policy.alarms)
    kl = _kl_by_token_and_prompt(policy.kl_by_token) if policy.kl_by_token else []
    return [*([f"Alarms of ppo: {named}."] if named else []), *kl]


def _kl_by_token_and_prompt(row: Mapping[str, Any]) -> list[str]:
    """Return two lines: the tokens and the prompts that carry the KL of a batch (a row of `kl_carriers.jsonl`)."""

    def with_kl(text: str, part: Mapping[str, Any]) -> str:
        share = "" if part["share"] is None else f" ({part['share']:.0%})"
        return f"{text!r} {part['nats']:.2f}{share}"

    tokens = [with_kl(line(token["token"]), token) for token in row["tokens"]]
    prompts = [with_kl(shorten(line(prompt["prompt"][-1]["content"]), LONGEST_PROMPT, placeholder=" …"), prompt)
               for prompt in row["prompts"][:PROMPTS_SHOWN]]  # fmt: skip
    of = f"KL of update {row['update']}, {row['kl']:.2f} nats a response"
    return [f"{of}, is carried most by the tokens {', '.join(tokens)};", f"and by the prompts {', '.join(prompts)}."]


def what_is_simulated(home: Path, run: str) -> str:
    """Return the sentence that says which parts of a run are simulated; empty if none are or its config can't be
    read."""
    from flows.reports.terminal import simulated_note

    try:
        values = run_values(home, run)
    except UserError as error:
        logger.warning("%s It is unknown whether the run's data are simulated.", error)
        return ""
    return simulated_note(values)
