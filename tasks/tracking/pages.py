"""What a person reads on MLflow's pages: notes in Markdown, from the facts of a run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from components.base.text import markdown as words
from components.base.text import markdown_code as span
from components.gates import text as gate_text
from components.gates.table import brief_metrics
from components.keys.code_version import CodeVersion
from components.store.records import Environment
from tasks.runs.journal import Done
from tasks.runs.status import RunStatus


class NoteRow(NamedTuple):
    """A line of a table: what went in, or came out."""

    how: str
    name: str
    digest: str
    link: str = ""

    @property
    def cells(self) -> str:
        """As Markdown."""
        name = words(self.name)
        return f"| {self.how} | {f'[{name}]({self.link})' if self.link else name} | {span(self.digest[:16])} |"


def stage_note(done: Done, computed_in: str, rows: Sequence[NoteRow], prefect: str = "") -> str:
    """Of a stage's run, and of its model; `computed_in` links to the run that computed it, if MLflow has that.

    `prefect` is the address of the stage's page on a Prefect server, if it has one.
    """
    by = done.record.run
    run = f"[{words(by)}]({computed_in})" if computed_in else f"{span(by)}, which is not in this MLflow"
    cached = "From the cache. " if done.hit else ""
    lines = [f"{cached}Stage **{done.shown}**, computed in run {run}. {code(done.record.environment)}", ""]
    lines += [f"[This stage in Prefect]({prefect})", ""] if prefect else []
    lines += ["| | what | digest |", "|---|---|---|", *(row.cells for row in rows)]
    if done.shown == "validate":
        kept_out = f"Kept out: {done.record.metrics.get('data/quarantined', 0):.0f} rows"
        lines += ["", f"{kept_out} (`attachments/quarantine.jsonl` names them; one may fail several checks)."]
        for check in _keeping_out(done):
            told = f"{span(check['name'])}, else: {words(check['description'])}"
            lines += [f"- {check['rows']} of {words(check['source'])}: {told}"]
    if judged := [verdict for verdict in done.verdicts if verdict.threshold is not None]:
        lines += ["", "**Gates**", "", gate_text.markdown(judged)]
    return "\n".join(lines)


def code(environment: Environment) -> str:
    """Which code ran, in a sentence."""
    version = environment.get("code", CodeVersion())
    if not (commit := version.get("commit")):
        return "Code of unknown commit."
    return f"Code: commit {span(commit[:12])}{' with changes' if version.get('dirty') else ''}."


def quarantined(done: Done) -> dict[str, int]:
    """Rows that each check of the contract kept out, as `source.check`, for validate."""
    return {f"{check['source']}.{check['name']}": check["rows"] for check in _keeping_out(done)}


def _keeping_out(done: Done) -> list[dict[str, Any]]:
    report = done.path / "report.json"
    if not report.is_file():
        return []
    checks = json.loads(report.read_text(encoding="utf-8"))
    return [check for check in checks if check["rows"] and check["severity"] in ("error", "quarantine")]


def prefect_tag(address: str) -> dict[str, str]:
    """The tag of a run, or of a stage's, that has a page on a Prefect server: its address."""
    return {"tether.prefect": address} if address else {}


def run_note(status: RunStatus, done: Sequence[Done], links: Mapping[str, str], report: str) -> str:
    """Of a whole run; `links` has a stage's page, `report` is where the report is shown, empty where there is none."""
    metrics = {name: value for each in done for name, value in each.record.metrics.items()}
    about = {"Report with its charts": report, "Flow run in Prefect": status.prefect}
    lines = [" · ".join(f"[{text}]({url})" for text, url in about.items() if url), ""]
    lines += [f"The run was asked to end after {words(status.until)}.", ""] if status.until else []
    lines += ["| stage | state | artifact | numbers |", "|---|---|---|---|"]
    for stage in status.stages:
        name = f"[{words(stage.name)}]({links[stage.name]})" if stage.name in links else words(stage.name)
        name += f" ([Prefect]({stage.prefect}))" if stage.prefect else ""
        brief = brief_metrics(stage.name, metrics)
        numbers = [f"{metric.partition('/')[2]} {gate_text.number(metrics[metric])}" for metric in brief]
        lines.append(f"| {name} | {stage.state} | `{(stage.digest or '')[:16]}` | {words(', '.join(numbers))} |")
    waived = {gate: waiver for each in done for gate, waiver in each.waived.items()}
    lines += [""] + [
        f"- Gate {span(gate)} was waived by {words(waiver['user'])}: {words(waiver['reason'])}"
        for gate, waiver in waived.items()
    ]
    return "\n".join(lines).strip()
