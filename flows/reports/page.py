"""The report of a run as one HTML file: opens from disk, asks for nothing, runs no script.

What a model or the data wrote is text here and nothing else: the template escapes all of it, and the page's content
policy allows one style sheet, known by its sha256, and images that are in the page itself.
"""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, TemplateError
from markupsafe import Markup, escape

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.text import counted
from components.gates.table import OF_SOURCE, brief_metrics
from components.gates.text import number
from components.keys.code_version import code_version
from flows.reports.diff import Overlay, overlay_of
from flows.reports.facts import Curve, RunFacts, StageFacts, code_name, rests_on_import, run_facts
from flows.reports.links import elsewhere
from flows.reports.rounds import COLUMNS, rounds_chart
from flows.reports.terminal import IMPORTED, by_another, cost, ends_after, model_votes_of, simulated_note
from tasks.execution.drawing import thin
from tasks.lineage.picture import in_two_widths
from tasks.runs.status import StageStatus

TEMPLATES = Path(__file__).parent / "templates"
LONGEST = 1500
"""Characters of a text that are shown."""
ROWS = 100
"""Rows of a table of curves that are shown, evenly spaced."""


def write_page(home: Path, run: str, against: str | None = None) -> Path:
    """Write `report.html` into the run's folder; `against` is a run whose curves are drawn beside its own.

    Raises:
        UserError: there is no such run, or an imported artifact holds what no stage writes.
    """
    path = home / "runs" / run / "report.html"
    try:
        facts = run_facts(home, run)
        text = page(facts, overlay_of(home, [run, against]) if against is not None and against != run else None)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, TemplateError) as error:
        if not rests_on_import(home, run):
            raise
        raise UserError(
            f"{path} can't be written: an imported artifact of run {run} is not what a stage writes "
            f"({type(error).__name__}: {error}). Do not trust the run; remove {path.parent} if you do not need it."
        ) from error
    write_whole(path, text.encode("utf-8", "backslashreplace"))  # a quarantined row may hold what UTF-8 can't
    return path


class Table(NamedTuple):
    """Curves as numbers: a row a step."""

    columns: list[str]
    rows: list[list[float | None]]

    @property
    def told(self) -> str:
        """From where to where each curve goes, for those who do not see the chart."""
        told = []
        for column, name in enumerate(self.columns[1:], 1):
            values = [row[column] for row in self.rows if row[column] is not None]
            told += [f"{name} goes from {number(values[0])} to {number(values[-1])}"] if values else []
        return "; ".join(told)


def page(facts: RunFacts, overlay: Overlay | None = None) -> str:
    """Return the page of `run_facts`; `overlay` draws another run's curves beside its own."""
    style = (TEMPLATES / "run.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    stages = {stage.name: stage for stage in facts.stages}
    return template("run.html").render(
        facts._asdict(),
        of=stages,
        tables={stage: table(x, named, stages[stage].curves) for stage, (x, named) in SHOWN.items()},
        style=style,
        allowed=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        ending=ending(facts),
        elsewhere=elsewhere(facts.home, facts.status, facts.links),
        overlay=overlay,
        finds=_finds(facts),
        rounds_chart=rounds_chart(facts.rounds),
        rounds_columns=COLUMNS,
        written_by=code_version(),
        simulated_note=simulated_note(facts.simulated, facts.people_judge),
        model_votes_note=model_votes_of(facts.status),
        imported_note=IMPORTED,
    )


def _finds(facts: RunFacts) -> str:
    """Return what the labels that a run waits for can find; empty where it waits for none."""
    if facts.stage("human_eval").status.state != "awaiting_labels" or not facts.sheet:
        return ""
    from flows.reports.plan import finds  # brings scipy, 0.9 s of a run that computes nothing

    return finds(facts.sheet["items"], facts.sheet["raters"])


def ending(facts: RunFacts) -> list[str]:
    """Return sentences on how the run ended that the verdict does not contain."""
    told = [*_broken_contract(facts)]
    for stage in facts.status.stages:
        if stage.state == "skipped":
            told.append(_skipped(stage))
    return [*told, ends_after(facts.status)] if facts.status.until else told


def _broken_contract(facts: RunFacts) -> Iterator[str]:
    """Which checks a failed contract is about, and in which rows."""
    if any(gate.name == "validate.contract" and gate.stops for each in facts.status.stages for gate in each.gates):
        for check in facts.data.checks:
            if check["severity"] == "error" and not check["passed"]:
                rows = f" in {counted(check['rows'], 'row')}: {check['first_rows']}" if check["rows"] else ""
                yield f"The check {check['name']} fails{rows}."


def _skipped(stage: StageStatus) -> str:
    """Say that a stage was skipped, and which gates that withholds."""
    withheld = ", ".join(gate.name for gate in stage.gates if gate.withheld)
    why = f" The policy is not a candidate for promotion until a run waives these gates: {withheld}."
    return f"The stage {stage.name} was skipped: later stages use its base model.{why if withheld else ''}"


SHOWN: dict[str, tuple[str, dict[str, str]]] = {
    "sft": ("optimiser step", {"sft/train_loss": "training loss"}),
    "reward": ("optimiser step", {"reward/train_loss": "training loss"}),
    "ppo": ("PPO update", {
        "ppo/proxy_reward": "proxy reward", "ppo/gold": "gold score", "ppo/kl": "KL, nats per response",
        "ppo/kl_per_token": "KL, nats per token", "ppo/beta": "β", "ppo/entropy": "entropy, nats per token",
        "ppo/response_tokens": "response, tokens",
    }),
}  # fmt: skip
"""Stage to what a step of it is, and the curves that a table shows, with their words."""


def table(x: str, named: Mapping[str, str], curves: Mapping[str, Curve]) -> Table:
    """Return the curves named, those that the run has, by step; `x` is what a step is."""
    shown = [name for name in named if curves.get(name)]
    values = [dict(curves[name]) for name in shown]
    steps = sorted({step for each in values for step in each})
    return Table(
        [x, *(named[name] for name in shown)], [[step, *(each.get(step) for each in values)] for step in steps]
    )


@functools.cache
def template(name: str) -> Template:
    """One of the pages' templates, with the filters that all of them use."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": number, "duration": duration, "moment": moment, "value": shown, "cut": cut, "bound": bound,
        "rows": lambda table: thin(table.rows, ROWS), "breakable": breakable, "picture": picture, "code": code_name,
        "brief": brief, "in_two_widths": lambda graph: Markup(in_two_widths(graph)),
        "marked": marked, "cost": cost, "by_another": by_another,
    }  # fmt: skip
    return made.get_template(name)


def brief(stage: StageFacts) -> list[tuple[str, str]]:
    """Return the main metrics of a stage, with their words."""
    # A table of the data has the sources.
    names = [name for name in brief_metrics(stage.name, stage.metrics) if OF_SOURCE not in name]
    return [(name, name.partition("/")[2].replace("_", " ")) for name in names]


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(text: str) -> str:
    """Return an ISO time to the second, in UTC."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text


def bound(rule: str) -> str:
    """Return a gate's rule with the signs that people write."""
    return rule.replace("<=", "≤").replace(">=", "≥")


def breakable(name: str) -> Markup:
    """Return a dotted name that may break to the next line after each part; a path after each folder."""
    return Markup(re.sub(r"([._/])", r"\1<wbr>", str(escape(name))))


def marked(text: str) -> Markup:
    """Return a sentence whose `code` is shown as code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def shown(value: object) -> str:
    """Return an option's value."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def cut(text: object) -> str:
    """Return the beginning of a text, and how much more there is."""
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} … ({more:,} more characters)"


def picture(svg: Path | bytes) -> str:
    """Return a chart as the source of an image: there no script in it runs, and its ids stay its own."""
    drawn = svg if isinstance(svg, bytes) else svg.read_bytes()
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"
