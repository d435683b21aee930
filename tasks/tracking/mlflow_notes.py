"""Write the notes on MLflow's pages, in Markdown, from the facts of a run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from components.base.text import markdown as words
from components.base.text import markdown_code as span
from components.gates import gate_text
from components.gates.table import GATES, brief_metrics
from components.keys.code_version import CodeVersion
from components.store.records import Environment
from tasks.runs.journal import Done
from tasks.runs.status import RunStatus


class NoteRow(NamedTuple):
    """A row of a table of inputs and outputs."""

    how: str
    name: str
    digest: str
    link: str = ""

    @property
    def cells(self) -> str:
        name = words(self.name)
        return f"| {self.how} | {f'[{name}]({self.link})' if self.link else name} | {span(self.digest[:16])} |"


LONGEST = 8000
"""The largest number of characters of a note: MLflow cuts longer ones, with a warning."""
PICTURE = "lineage.svg"
"""The artifact with the picture of a run's or a stage's lineage."""


def picture(run: str) -> str:
    """Return the picture of an MLflow run as Markdown; its address is relative to MLflow's root."""
    return f"![Lineage; the tables say the same](get-artifact?path={PICTURE}&run_uuid={run})"


def link_line(links: Mapping[str, str]) -> list[str]:
    """Return the links that have an address as one paragraph; empty if none has."""
    parts = [f"[{words(text)}]({url})" for text, url in links.items() if url]
    return [" · ".join(parts), ""] if parts else []


def stage_note(
    done: Done, computed_in: str, rows: Sequence[NoteRow], links: Mapping[str, str], shown_by: str = ""
) -> str:
    """Return the note of a stage's run, which its model gets too.

    Args:
        computed_in: the address of the run that computed it, if MLflow has that run.
        rows: its inputs and its output.
        links: further pages, as texts with addresses; empty addresses are left out.
        shown_by: the MLflow run with the picture of its lineage.
    """
    by = done.record.run
    run = f"[{words(by)}]({computed_in})" if computed_in else f"{span(by)}, which is not in this MLflow"
    cached = "From the cache. " if done.hit else ""
    lines = [f"{cached}Stage **{done.group}**, computed in run {run}. {code(done.record.environment)}", ""]
    lines += link_line(links)
    if brief := brief_metrics(done.group, done.record.metrics):
        numbers = [f"| {words(name)} | {gate_text.number(done.record.metrics[name])} |" for name in brief]
        lines += ["**Numbers**", "", "| metric | value |", "|---|---:|", *numbers, ""]
    if done.group == "validate":
        name, folder = ("data/quarantined", "") if done.ends_group else ("data/judge_quarantined", "judge/")
        kept_out = f"Kept out: {gate_text.number(done.record.metrics.get(name, 0))} rows"
        lines += [f"{kept_out} (`attachments/{folder}quarantine.jsonl` names them; one may fail several checks)."]
        for check in _keeping_out(done):
            rule = f"{span(check['name'])}, else: {words(check['description'])}"
            lines += [f"- {gate_text.number(check['rows'])} of {words(check['source'])}: {rule}"]
        lines += [""]
    lines += ["**Lineage**", "", *([picture(shown_by), ""] if shown_by else [])]
    lines += ["| | what | digest |", "|---|---|---|", *(row.cells for row in rows)]
    if verdicts := [verdict for verdict in done.verdicts if verdict.threshold is not None]:
        # Gates that did not pass come first.
        lines += ["", "**Gates**", "", gate_text.markdown(sorted(verdicts, key=lambda verdict: verdict.passed))]
    return "\n".join(lines)


def code(environment: Environment) -> str:
    """Return a sentence that names the code that ran."""
    version = environment.get("code", CodeVersion())
    if not (commit := version.get("commit")):
        return "Code of unknown commit."
    return f"Code: commit {span(commit[:12])}{' with changes' if version.get('dirty') else ''}."


def quarantined(done: Done) -> dict[str, int]:
    """Return the number of rows that each check of validate quarantined, as `source.check`."""
    return {f"{check['source']}.{check['name']}": check["rows"] for check in _keeping_out(done)}


def _keeping_out(done: Done) -> list[dict[str, Any]]:
    report = done.path / "report.json"
    if not report.is_file():
        return []
    checks = json.loads(report.read_text(encoding="utf-8"))
    return [check for check in checks if check["rows"] and check["severity"] in ("error", "quarantine")]


def run_note(status: RunStatus, links: Mapping[str, str], shown_by: str, report: str) -> str:
    """Return the note of a whole run, the most important first: what is longer than `LONGEST` is left out at the end.

    Args:
        links: further pages, as texts with addresses; empty addresses are left out.
        shown_by: the MLflow run with the picture of the run's lineage.
        report: the text of the run's report.
    """
    lines = [f"**{status.state.replace('_', ' ').capitalize()}.**", "", *link_line(links)]
    verdicts = [verdict for stage in status.stages for verdict in stage.gates]
    if open_ := [verdict for verdict in verdicts if verdict.threshold is not None and not verdict.passed]:
        open_.sort(key=lambda verdict: not verdict.stops)
        lines += ["**Gates that did not pass**", "", gate_text.markdown(open_)]
        gates = [GATES[verdict.name] for verdict in open_ if verdict.stops and verdict.name in GATES]
        lines += [f"- **{words(gate.name)}** {gate.cause} {gate.remedy}" for gate in gates]
        lines += ["", "The report has the command that tries this.", ""] if gates else []
    note = "\n".join([*lines, "**Lineage**", "", picture(shown_by), "", report]).strip()
    if len(note) <= LONGEST:
        return note
    first_lines = note[: LONGEST - 120].rpartition("\n")[0].rstrip()
    more = note[len(first_lines) :].strip().count("\n") + 1
    return f"{first_lines}\n\n{more:,} more lines: {span(f'tether status {status.run}')}, or the report."
