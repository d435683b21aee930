"""`tether data check`: find the files, check them and print what was found, or draft a suite from a good file."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from components.base.errors import GateFailed, UserError
from components.base.text import counted, line
from components.data.config import SourceConfig
from components.data.hub import resolve_source
from components.data.inputs import FURTHER, KINDS, SUITE, names_file, refuse_unknown_sources, values_of
from components.data.rows import listed
from data_contracts.config import ValidateJob
from flows.config.profiles import Override
from flows.config.run_config import RunConfig, load_config
from flows.data.data_files import find_files
from flows.data.pretrained import find_base, with_template
from flows.data.reference import find_reference
from tasks.result import Input

if TYPE_CHECKING:
    from data_contracts.check import FileReport
    from data_contracts.rows.reading_report import FileReading

FAILED = GateFailed.exit_code
MOST_MODELS = 10
"""The largest number of models whose strengths the terminal shows, strongest first."""
LOWEST = 5
"""The largest number of annotators that the terminal names, lowest agreement first; `--json` has all."""
DEFAULTS = "demo"
"""The profile whose options apply if none is named. Checks that need a tokenizer are then skipped."""


def check_file(
    home: Path,
    file: str,
    others: Mapping[str, str | None],
    profile: str | None,
    overrides: Sequence[Override],
    out: Path | None,
) -> "FileReport":
    """Check `file` (and `demonstrations`, `prompts` in `others`) as a run of `profile` would, and return the findings.

    Args:
        out: a new folder for quarantined rows and Data Docs; None writes nothing.

    Raises:
        UserError: a file can't be read or is of no kind that a run reads, or `out` exists.
    """
    from rich.console import Console

    from components.base.files import whole_folder
    from data_contracts.check import check
    from data_contracts.rows.reading_report import reading_of
    from tasks.execution.stage_progress import StageProgress

    if out is not None and out.exists():
        raise UserError(f"--out {out}: this folder already exists. Name a new one.")
    config = with_template(load_config(profile or DEFAULTS, overrides))
    path = resolve_source(file, config.data.hub, home / "datasets", "the file")
    reading = reading_of(path, config.data)
    inputs = {reading.kind: path}
    for name, value in others.items():
        if value is not None:
            if name in inputs:
                raise UserError(f"--{name} {value}: {file} also holds {name}. Leave it out.")
            inputs[name] = resolve_source(value, config.data.hub, home / "datasets", f"--{name}")
    written = nullcontext() if out is None else whole_folder(out)
    preferences = [inputs["preferences"]] if config.data.reference and "preferences" in inputs else []
    compared = find_reference(config, home, [Input.of(path).digest for path in preferences])
    for further in (*(find_files(kind, config, home) for kind in FURTHER), compared):
        inputs |= {name: source.path for name, source in further.items()}
    job = _job(config, inputs)
    if profile is not None and config.sft.base is not None:
        inputs["base"] = find_base(config.sft.base, home)
    temporary = tempfile.TemporaryDirectory(prefix="tether-check-")
    with temporary as scratch, StageProgress(Console(stderr=True), "check") as progress, written as folder:
        report = check(
            job, inputs, Path(scratch), folder,
            lambda rows, total: progress.show({"step": rows, "metrics": {}, "total": total}),
            tokenized=profile is not None,
        )  # fmt: skip
    _add_reading(report, reading, file, path, config, inputs.get(SUITE))
    return report


def _job(config: RunConfig, inputs: Mapping[str, Path]) -> ValidateJob:
    """Return the options of validate for the files that are checked."""
    named: dict[str, object] = {name: str(inputs[name]) if name in inputs else None for name in KINDS}
    named["sources"] = own_entry(config, inputs["preferences"]) if "preferences" in inputs else {}
    job = config.job(ValidateJob)
    return job.model_copy(update={"data": job.data.model_copy(update=named)})


def _add_reading(
    report: "FileReport", reading: "FileReading", file: str, path: Path, config: RunConfig, suite: Path | None
) -> None:
    """Add to a report how `file` was read from `path`, without the columns that rewards or the team's suite use."""
    from data_contracts.expectations.own import load_suite
    from data_contracts.rows.measuring import COLUMNS

    used = {*config.data.reward_columns, *(load_suite(suite).columns - COLUMNS.keys() if suite else ())}
    reading = reading._replace(ignored=[column for column in reading.ignored if column not in used])
    report["read"] = [reading.as_json(path)]
    unread = report.get("unread", {})
    report["unread"] = {kind: {n: c for n, c in of.items() if n not in used} for kind, of in unread.items()}
    contradicting = sum(check["rows"] or 0 for check in report["checks"] if check["name"] == "consistent")
    if contradicting and reading.format in ("votes", "two responses"):
        report["read"][0]["hint"] = (
            f"{counted(contradicting, 'row contradicts', 'rows contradict')} others on the same pair. If several "
            "people labelled, name them in a column `annotator`: Tether then reads the rows of a pair as votes on it."
        )
    if reading.mistaken:
        report["passed"] = False
        report["reasons"] = [
            *report.get("reasons", ()),
            f"{file} looks like preferences, but it was read as {reading.format} and no pair was found in it",
        ]


def own_entry(config: RunConfig, path: Path) -> dict[str, SourceConfig]:
    """Return `data.sources` for a check of one file of preferences, by that file's name in a run of several or by
    `preferences`. Entries of the config's other files are left out.

    Raises:
        UserError: an entry is of no file that is known.
    """
    sources = config.data.sources
    entry = next((name for name in sources if name == "preferences" or names_file(name, path.absolute())), None)
    if len(values_of(config.data.preferences)) < 2:
        refuse_unknown_sources((name for name in sources if name != entry), ["preferences"])
    return {} if entry is None else {"preferences": sources[entry]}


def _interval(ends: list[float] | None) -> str:
    return "" if ends is None else f" (95 % interval {ends[0]:.3f} to {ends[1]:.3f})"


def _statistics(report: "FileReport") -> Iterator[str]:
    """Yield what the votes and labels of the file show."""
    if report["majority"] is not None:
        answers = ", ".join(f"{answer} {count}" for answer, count in report["majority"].items())
        yield f"Most frequent answers: {answers}."
    raw = "Raw agreement (the chance that two votes on a row are the same)"
    for title, measure, ends in (
        ("Fleiss' kappa", report["kappa"], report["kappa_interval"]),
        ("Krippendorff's alpha", report["alpha"], report["alpha_interval"]),
        (raw, report["raw_agreement"], report["raw_agreement_interval"]),
    ):
        if measure is not None:
            yield f"{title} {measure:.3f}{_interval(ends)}."
    if annotators := report.get("annotators"):
        compared = [(ends, row) for row in annotators if (ends := row["interval"]) is not None]
        listed = "; ".join(
            f"{row['annotator']} {row['agreement']:.2f}{_interval(ends)} of {row['compared']}"
            for ends, row in sorted(compared, key=lambda entry: entry[0][1])[:LOWEST]
        )
        listed = listed or "no two annotators voted on the same row"
        yield f"{counted(len(annotators), 'annotator')}. Least in agreement with the majority of the others: {listed}."
    if pairs := report.get("pairwise"):
        listed = "; ".join(
            f"{' and '.join(row['annotators'])} {row['agreement']:.2f} on {counted(row['rows'], 'row')}"
            + ("" if row["kappa"] is None else f" (Cohen's kappa {row['kappa']:.2f})")
            for row in pairs[:LOWEST]
        )
        yield f"{counted(len(pairs), 'pair')} of annotators. Those that agree least: {listed}."
    if models := report.get("models"):
        if why := report.get("inseparable"):
            yield f"{len(models)} models are compared; their strengths cannot be estimated: {why}."
        else:
            strongest, more = models[:MOST_MODELS], _more(len(models) - MOST_MODELS)
            ranked = "; ".join(
                f"{row['model']} {row['strength']:+.2f}{_interval(row['interval'])}" for row in strongest
            )
            yield f"Bradley-Terry strengths (logit) of {len(models)} models: {ranked}{more}."
    if languages := report.get("languages"):
        shares = [f"{name} {share:.1%}" for name, share in languages.items()]
        yield f"Languages of a sample: {', '.join(shares[:LOWEST])}{_more(len(shares) - LOWEST)}."
    if noise := report.get("label_noise"):
        agrees = f"a model of words and lengths agrees with {noise['accuracy']:.1%} of held-out pairs"
        if noise["share"] is None:
            yield f"The share of flipped labels can't be estimated: {agrees}, which is too few."
        else:
            yield f"Estimated share of flipped labels: {noise['share']:.1%}{_interval(noise['interval'])}; {agrees}."
    if report["longer_wins"] is not None:
        check = next((check for check in report["checks"] if check["name"] == "length_preference"), None)
        more = "" if check is None else f", of kept pairs in {check['value']:.1%}{_interval(check.get('interval'))}"
        yield f"The longer response wins in {report['longer_wins']:.1%} of decided pairs{more}."


def _more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""


def _read_as(report: "FileReport") -> Iterator[str]:
    for read in report.get("read", ()):
        name = f"{read['source']} ({read['format']})"
        yield f"{read['file']}: read as {name if read['source'] != read['format'] else read['source']}."
        counts = report.get("unread", {}).get(read["source"], {})
        if names := list(dict.fromkeys([*read["ignored"], *counts])):
            some = {  # a name alone is that of a column with something in every row
                name: f" ({counted(n, 'row')})"
                for name, n in counts.items()
                if n != report["rows"] or name not in read["ignored"]
            }
            yield f"Columns that are not used: {listed([name + some.get(name, '') for name in names])}."
        if read["hint"]:
            yield read["hint"]


def _kept_out(report: "FileReport", out: Path | None) -> Iterator[str]:
    """Yield the first quarantined rows with their reasons, and where to find the rest."""
    rows = report.get("kept_out", [])
    several = len({row["file"] for row in rows}) > 1
    for row in rows:
        yield f"{row['file'] + ' ' if several else ''}row {row['row']}: {'; '.join(row['reasons'])}"
    rest = report["quarantined"] - len(rows)
    if rest > 0:
        yield f"and {rest:,} more" + ("." if out else "; `--out FOLDER` writes all of them with their reasons.")


def print_check(report: "FileReport", out: Path | None) -> None:
    """Print the checks that found something as a table, then statistics of the votes, then the verdict."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from data_contracts.check import threshold_text
    from data_contracts.expectations.suites import first_rows
    from tasks.execution.stage_progress import cell
    from tasks.execution.stage_progress import say as say_on

    console = Console()
    say = partial(say_on, console)
    for text in _read_as(report):
        say(line(text))
    table = Table(pad_edge=False, box=None)
    for name in ("", "check", "severity", "value", "threshold", "rows", "which"):
        table.add_column(name, justify="right" if name in ("value", "threshold", "rows") else "left", overflow="fold")
    findings = [check for check in report["checks"] if check["rows"] or not check["passed"]]
    for check in findings:
        bad = Text("FAIL", "red") if check["severity"] == "error" else Text("warn", "yellow")
        value = "" if check["value"] is None else f"{check['value']:.3g}"
        name = check["name"] if check["source"] in ("preferences", "kept") else f"{check['source']}: {check['name']}"
        cells = (name, check["severity"], value, threshold_text(check), str(check["rows"] or ""), first_rows(check))
        table.add_row(Text("ok", "green") if check["passed"] else bad, *map(cell, cells))
    if findings:
        console.print(table)
    for check in findings:
        say(line(f"{check['name']}: {check['description']}"))
    labels = "".join(f"{n} {label} single labels kept, " for label, n in report.get("single_labels", {}).items())
    say(
        f"{counted(len(report['checks']) - len(findings), 'other check')} found nothing. "
        f"{counted(report['rows'], 'row')}, {counted(report['pairs'], 'pair')} kept, {labels}"
        f"{counted(report['quarantined'], 'row')} quarantined{':' if report.get('kept_out') else '.'}"
    )
    if unjudged := report.get("unjudged"):
        say(
            f"{counted(len(unjudged), 'expectation')} of your suite judged no value: {line(listed(unjudged))}. Columns "
            "in tokens need --profile; any other column named there has no value in these rows."
        )
    for text in _kept_out(report, out):
        say(f"  {line(text)}")
    for text in _statistics(report):
        say(line(text))
    if out is not None:
        say(f"Written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    errors = [check for check in report["checks"] if not check["passed"] and check["severity"] == "error"]
    for reason in report.get("reasons", ()):
        say(line(reason.rstrip(".") + "."))
    failed = ", ".join(check["name"] for check in errors)
    if not failed:
        failed = "the reason is given above" if report.get("reasons") else "no row was read that a run could train on"
    say("The contract holds." if report["passed"] else f"The contract fails: {line(failed)}.")
    if any(check["rows"] for check in errors):
        say(
            "Correct or remove these rows, then check again. To allow a larger share of them, pass "
            "--set data.checks.CHECK.threshold=SHARE, here and in the run."
        )


def draft_suite(home: Path, file: str, overrides: Sequence[Override], out: Path) -> None:
    """Draft a suite from `file` and write it to `out` as JSON.

    Raises:
        UserError: the file can't be read or has no valid row, or `out` exists or is in no folder.
    """
    from components.base.files import write_whole
    from data_contracts.findings.drafting import draft

    if out.exists():
        raise UserError(f"--draft-suite {out}: this file already exists. Name a new one.")
    if not out.absolute().parent.is_dir():
        folder = out.absolute().parent
        raise UserError(f"--draft-suite {out}: there is no folder {folder}. Create it, or name another file.")
    data = load_config(DEFAULTS, overrides).data
    path = resolve_source(file, data.hub, home / "datasets", "FILE")
    with tempfile.TemporaryDirectory(prefix="tether-suite-") as scratch:
        write_whole(out, json.dumps(draft(path, data, Path(scratch)), indent=2) + "\n")
