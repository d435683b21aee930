"""Write a run's report as one HTML file that opens from disk, loads nothing and runs no script.

Text from a model or from the data is only ever shown as text: the template escapes all of it, and the page's content
security policy allows only one style sheet, known by its sha256, and images embedded in the page.
"""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markupsafe import Markup, escape

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.text import counted, line
from components.gates.gate_text import number
from components.gates.table import OF_SOURCE, brief_metrics
from components.keys.code_version import code_version
from components.store.graph import Graph
from components.store.store import ArtifactStore
from flows.reports.compared_rounds import COLUMNS
from flows.reports.evaluation_facts import evaluation_facts
from flows.reports.report_links import elsewhere
from flows.reports.run_facts import Curve, RunFacts, StageFacts, code_name, run_facts
from flows.reports.terminal import by_another, cost, ends_after, model_votes_of
from tasks.execution.drawing import thin
from tasks.lineage.picture import in_html
from tasks.runs.status import load_status

TEMPLATES = Path(__file__).parent / "templates"
LONGEST = 1500
"""The largest number of characters of a text that the page shows."""
ROWS = 100
"""The largest number of rows in a table of curves; more are thinned evenly."""


def write_page(home: Path, run: str) -> Path:
    """Write `report.html` into the run's folder and return its path.

    Raises:
        UserError: there is no such run, or an imported artifact has content that no stage writes.
    """
    path = home / "runs" / run / "report.html"
    try:
        text = page(run_facts(home, run))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, TemplateError) as error:
        digests = [stage.digest for stage in load_status(home, run).stages if stage.digest]
        if not Graph.of(ArtifactStore(home)).rests_on_import(digests):
            raise
        raise UserError(
            f"{path} can't be written: an imported artifact of run {run} has content that no stage writes "
            f"({type(error).__name__}: {error}). Do not trust the run; remove {path.parent} if you do not need it."
        ) from error
    write_whole(path, text.encode("utf-8", "backslashreplace"))  # a quarantined row may contain lone surrogates
    return path


class Table(NamedTuple):
    """Curves as numbers, one row per step."""

    columns: list[str]
    rows: list[list[float | None]]

    @property
    def told(self) -> str:
        """Return the first and last value of each curve in words, for readers who can't see the chart."""
        changes = []
        for column, name in enumerate(self.columns[1:], 1):
            values = [row[column] for row in self.rows if row[column] is not None]
            changes += [f"{name} goes from {number(values[0])} to {number(values[-1])}"] if values else []
        return "; ".join(changes)


def page(facts: RunFacts) -> str:
    """Return the page for the result of `run_facts`."""
    stages = {stage.name: stage for stage in facts.stages}
    return rendered(
        "run.html",
        **facts._asdict(),
        of=stages,
        tables={stage: table(x, named, stages[stage].curves) for stage, (x, named) in SHOWN.items()},
        ending=ending(facts),
        elsewhere=elsewhere(facts.home, facts.status, facts.links),
        finds=_finds(facts),
        evaluated=evaluation_facts(facts),
        rounds_columns=COLUMNS,
        model_votes_note=model_votes_of(facts.status),
    )


def rendered(name: str, /, **values: object) -> str:
    """Return the page of a template in the frame of all pages: `page.html` with the style sheet, and a content security
    policy that allows no other and only inline pictures."""
    style = (TEMPLATES / "run.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    allowed = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return _templates().get_template(name).render(style=style, allowed=allowed, written_by=code_version(), **values)


def _finds(facts: RunFacts) -> str:
    if facts.stage("human_eval").status.state != "awaiting_labels" or not facts.sheet:
        return ""
    from flows.reports.plan import finds  # loads scipy, which takes 0.9 s

    return finds(facts.sheet["items"], facts.sheet["raters"])


def ending(facts: RunFacts) -> list[str]:
    """Return sentences on the run's end that the verdict does not contain."""
    sentences, stages = [], facts.status.stages
    if any(gate.name == "validate.contract" and gate.stops for stage in stages for gate in stage.gates):
        for check in facts.data.checks:
            if check["severity"] == "error" and not check["passed"]:
                rows = f" in {counted(check['rows'], 'row')}: {check['first_rows']}" if check["rows"] else ""
                sentences.append(f"The check {check['name']} fails{rows}.")
    for stage in (stage for stage in stages if stage.state == "skipped"):
        withheld = ", ".join(gate.name for gate in stage.gates if gate.withheld)
        why = f" The policy is not a candidate for promotion until a run waives these gates: {withheld}."
        skipped = f"The stage {stage.name} was skipped: later stages use its base model."
        sentences.append(skipped + (why if withheld else ""))
    return [*sentences, ends_after(facts.status)] if facts.status.until else sentences


SHOWN: dict[str, tuple[str, dict[str, str]]] = {
    "sft": ("optimiser step", {"sft/train_loss": "training loss"}),
    "reward": ("optimiser step", {"reward/train_loss": "training loss"}),
    "ppo": ("PPO update", {
        "ppo/proxy_reward": "proxy reward", "ppo/gold": "gold score", "ppo/kl": "KL, nats per response",
        "ppo/kl_per_token": "KL, nats per token", "ppo/beta": "β", "ppo/entropy": "entropy, nats per token",
        "ppo/response_tokens": "response, tokens", 
        "ppo/clip_fraction_above": "tokens clipped above 1",
        "ppo/dual_clip_fraction": "tokens at the dual clip", "ppo/ptx_loss": "SFT loss mixed in, nats per token",
        "direct/loss": "loss", "direct/accuracy": "pairs ordered right",
        "direct/chosen_log_ratio": "chosen against SFT, nats",
        "direct/rejected_log_ratio": "rejected against SFT, nats",
        "direct/watched_score": "held-out score", "direct/watched_kl": "held-out KL, nats per response",
    }),
}  # fmt: skip
"""Maps a stage to the name of its steps, and to the curves in its table with their labels."""


def table(x: str, named: Mapping[str, str], curves: Mapping[str, Curve]) -> Table:
    """Return those curves in `named` that exist, by step; `x` is the heading of the steps' column."""
    present = [name for name in named if curves.get(name)]
    values = [dict(curves[name]) for name in present]
    steps = sorted({step for curve in values for step in curve})
    return Table(
        [x, *(named[name] for name in present)], [[step, *(curve.get(step) for curve in values)] for step in steps]
    )


@functools.cache
def _templates() -> Environment:
    """Return the pages' templates, with the filters that all use."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {
        "number": number, "duration": duration, "moment": moment, "value": shown, "cut": cut, "bound": bound,
        "rows": lambda table: thin(table.rows, ROWS), "breakable": breakable, "picture": picture, "code": code_name,
        "brief": brief, "lineage_picture": lambda graph: Markup(in_html(graph)),
        "marked": marked, "line": line, "cost": cost, "by_another": by_another,
        "numeric": lambda names: [f"#{name}" for name in names],
    }  # fmt: skip
    return made


def brief(stage: StageFacts) -> list[tuple[str, str]]:
    """Return the names and labels of a stage's main metrics."""
    # Metrics per source are shown in the section on data.
    names = [name for name in brief_metrics(stage.name, stage.metrics) if OF_SOURCE not in name]
    return [(name, name.partition("/")[2].replace("_", " ")) for name in names]


def duration(seconds: float) -> str:
    """Return a duration as text: `4.2 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(text: str) -> str:
    """Return an ISO time to the second, in UTC; any other text unchanged."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text


def bound(rule: str) -> str:
    """Return a gate's rule with ≤ and ≥."""
    return rule.replace("<=", "≤").replace(">=", "≥")


def breakable(name: str) -> Markup:
    """Return a name with permitted line breaks after each `.`, `_` and `/`."""
    return Markup(re.sub(r"([._/])", r"\1<wbr>", str(escape(name))))


def marked(text: str) -> Markup:
    """Return a sentence with its parts in backquotes as code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def shown(value: object) -> str:
    """Return an option's value as text."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def cut(text: object) -> str:
    """Return a text, shortened to `LONGEST` characters with the number of those left out."""
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} … ({more:,} more characters)"


def picture(svg: bytes) -> str:
    """Return a chart as an image's data URL: scripts in it do not run, and its ids can't clash with the page's."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
