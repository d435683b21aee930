"""What a person reads on MLflow's pages: notes in Markdown, from the facts of a run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tasks import gate_report
from tasks.journal import Done

MAIN_NUMBERS = {
    "validate": ("data/pairs", "data/quarantined"),
    "sft": ("sft/loss", "sft/perplexity"),
    "reward": ("reward/accuracy", "reward/ece"),
    "ppo": ("ppo/proxy_reward", "ppo/kl"),
    "human_eval": ("human_eval/win_rate", "human_eval/items"),
}
"""Of each stage, in the table of a run."""


class Row(NamedTuple):
    """A line of a table: what went in, or came out."""

    how: str
    name: str
    digest: str
    link: str = ""

    @property
    def cells(self) -> str:
        """As Markdown."""
        return f"| {self.how} | {f'[{self.name}]({self.link})' if self.link else self.name} | `{self.digest[:16]}` |"


def stage_note(done: Done, computed_in: str, rows: Sequence[Row]) -> str:
    """Of a stage's run, and of its model.

    Args:
        done: the stage.
        computed_in: a link to the run that computed it; empty where this MLflow doesn't have it.
        rows: what went in and came out.
    """
    run = f"[{done.run}]({computed_in})" if computed_in else f"`{done.run}`, which is not in this MLflow"
    cached = "From the cache. " if done.cached and done.run != done.by else ""
    lines = [f"{cached}Stage **{done.shown}**, computed in run {run}. {code(done.code)}", ""]
    lines += ["| | what | digest |", "|---|---|---|", *(row.cells for row in rows)]
    if done.shown == "validate":
        lines += ["", *quarantine_lines(done)]
    if judged := [verdict for verdict in done.verdicts if verdict.threshold is not None]:
        lines += ["", "**Gates**", "", gate_report.markdown(judged)]
    return "\n".join(lines)


def code(version: Mapping[str, Any]) -> str:
    """Which code ran, in a sentence."""
    if not version.get("commit"):
        return "Code of unknown commit."
    return f"Code: commit `{version['commit'][:12]}`{' with changes' if version.get('dirty') else ''}."


def quarantined(done: Done) -> dict[str, int]:
    """Rows that each check of the contract kept out, as `source.check`; empty for a stage that isn't validate."""
    return {f"{check['source']}.{check['name']}": check["rows"] for check in _keeping_out(done)}


def quarantine_lines(done: Done) -> Iterable[str]:
    """The same for people."""
    kept_out = done.metrics.get("data/quarantined", 0)
    yield f"Kept out: {kept_out:.0f} rows (`attachments/quarantine.jsonl` names them; one may fail several checks)."
    for check in _keeping_out(done):
        yield f"- {check['rows']} of {check['source']}: `{check['name']}`, else: {check['description']}"


def _keeping_out(done: Done) -> list[dict[str, Any]]:
    report = done.path / "report.json"
    if done.shown != "validate" or not report.is_file():
        return []
    checks = json.loads(report.read_text(encoding="utf-8"))
    return [check for check in checks if check["rows"] and check["severity"] in ("error", "quarantine")]


def run_note(
    tags: Mapping[str, str], metrics: Mapping[str, float], stages: Iterable[Mapping[str, Any]], links: Mapping[str, str]
) -> str:
    """Of a whole run.

    Args:
        tags: of its MLflow run.
        metrics: of all its stages.
        stages: `{name, state, digest}` in order.
        links: stage to its run's page.
    """
    lines = ["| stage | state | artifact | numbers |", "|---|---|---|---|"]
    for stage in stages:
        name = f"[{stage['name']}]({links[stage['name']]})" if stage["name"] in links else stage["name"]
        numbers = (
            f"{metric.partition('/')[2]} {metrics[metric]:.4g}"
            for metric in MAIN_NUMBERS.get(stage["name"], ())
            if metric in metrics
        )
        lines.append(f"| {name} | {stage['state']} | `{(stage['digest'] or '')[:16]}` | {', '.join(numbers)} |")
    lines += [""] + [
        f"- Gate `{gate}` was waived by {waiver['user']}: {waiver['reason']}"
        for gate, waiver in json.loads(tags.get("tether.waivers", "{}")).items()
    ]
    return "\n".join(lines).strip()
