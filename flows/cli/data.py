"""`tether data`: commands on data files. With `--json` each prints one object on stdout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.base.errors import UserError
from components.base.text import counted
from flows.cli import completion
from flows.cli.command import Json, command, echo
from flows.cli.config import overrides_of
from flows.cli.replaced import Commands
from flows.environment import tether_home

if TYPE_CHECKING:
    from components.data.rows import Row
    from components.labelling.config import CandidatesJob

data = typer.Typer(cls=Commands, help="Check data files, and make candidates to label.", no_args_is_help=True)
probes = typer.Typer(cls=Commands, help="Check files of probes.", no_args_is_help=True)
data.add_typer(probes, name="probes")

NAMED = 5
"""The largest number of quarantined rows that the terminal names; the rest are counted."""


@command(data, "check")
def check(
    file: Annotated[str, typer.Argument(help="Pairs, votes, rankings, demonstrations or prompts.")],
    profile: Annotated[
        str | None,
        typer.Option(metavar="PROFILE", help="Check with this profile's tokenizer, lengths and options.",
                     autocompletion=completion.profiles),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="For example data.checks.no_markers.severity=error."),
    ] = None,
    demonstrations: Annotated[str | None, typer.Option(metavar="FILE", help="Demonstrations to check with it.")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="The prompts PPO will use.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write quarantined rows, rows for review and Data Docs here.")
    ] = None,
    draft_suite: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draft a suite of expectations from this good file instead: edit it, then "
                     "name it as data.suite."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check a data file against the data contract. Exit code 3 if it fails."""
    if draft_suite is not None:
        from flows.data.data_check import draft_suite as draft

        unused = {
            "--profile": profile, "--demonstrations": demonstrations, "--prompts": prompts, "--out": out,
            "--json": as_json or None,
        }  # fmt: skip
        if names := [name for name, value in unused.items() if value is not None]:
            raise UserError(f"--draft-suite: leave out {', '.join(names)}. Only --set applies to a draft.")
        draft(tether_home(), file, overrides_of(set_), draft_suite)
        echo(f"Written to {draft_suite}. Edit it, then give it with --set data.suite={draft_suite}.")
        return
    from flows.data.data_check import FAILED, check_file, print_check

    others = {"demonstrations": demonstrations, "prompts": prompts}
    report = check_file(tether_home(), file, others, profile, overrides_of(set_), out)
    if as_json:
        echo(json.dumps(report))
    else:
        print_check(report, out)
    if not report["passed"]:
        raise typer.Exit(FAILED)


@command(data, "candidates")
def candidates(
    prompts: Annotated[str, typer.Argument(help="A file (or hub name) of prompts or preference pairs.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; it must not exist yet.")],
    model: Annotated[
        list[str], typer.Option(metavar="DIR|RUN:STAGE", help="A model to sample: its folder, or a run's sft or ppo.")
    ],
    temperature: Annotated[
        list[float] | None, typer.Option(metavar="T", help="A temperature to sample at (default: 0.7 and 1).")
    ] = None,
    per_prompt: Annotated[int | None, typer.Option(metavar="K", help="Responses per prompt (default: 4).")] = None,
    max_prompts: Annotated[int | None, typer.Option(metavar="N", help="Use at most this many prompts.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(metavar="N", help="Cap on a response (default: 64).")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Longer prompts lose their oldest turns (default: 256).")
    ] = None,
    pairs: Annotated[int | None, typer.Option(metavar="N", help="Pairs to label per prompt (default: 1).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Sample responses from models and pair them for labelling."""
    from rich.console import Console

    from flows.data.candidates import make_candidates
    from tasks.execution.stage_progress import StageProgress

    generation = {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens}
    options = {"temperatures": temperature, "per_prompt": per_prompt, "max_prompts": max_prompts, "pairs": pairs}
    job = _candidates_job(seed, generation, options)
    console = Console(stderr=True)
    with StageProgress(console, "candidates") as progress:
        summary, read = make_candidates(
            tether_home(), job, prompts, model, out,
            lambda done, total: progress.show({"step": done, "metrics": {}, "total": total}),
            lambda: echo("another process is computing this result; waiting for it", err=True),
        )  # fmt: skip
    _name_quarantined(read.quarantined)
    if as_json:
        echo(json.dumps({**summary, **read.as_json(), "out": str(out)}))
    else:
        _print_candidates(summary, out)


@command(data, "label")
def label(
    file: Annotated[str, typer.Argument(help="Pairs in any format of preferences, labelled or not (or a hub name).")],
    judge: Annotated[
        str,
        typer.Option(metavar="FOLDER|RUN:STAGE|URL", help="A language model, or an endpoint: http://HOST:PORT/v1."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder to write; it may hold answers of the same judge.")
    ],
    rubric: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What makes a response better (default: built in).")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name at the endpoint.")] = None,
    max_pairs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use at most this many pairs (see --seed).")
    ] = None,
    vote: Annotated[
        str, typer.Option(metavar="mean|agree", help="mean of both orders, or only pairs on which they agree.")
    ] = "mean",
    alone: Annotated[bool, typer.Option("--alone", help="Leave out the votes that the pairs already have.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Cap on an endpoint's answer in tokens (default: 16).")
    ] = None,
    patience: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long to retry an endpoint (default: 300).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of --max-pairs.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For example data.columns.a=first_answer.")
    ] = None,
    as_json: Json = False,
) -> None:  # long: an argument for each option
    """Ask a model which response of each pair is better.

    It sees each pair in both orders. An endpoint's key is read from the environment variable TETHER_JUDGE_TOKEN. The
    votes go to DIR/votes.jsonl, which data.preferences reads, and statistics of the judge to DIR/report.json. A pair
    that the judge answered in an earlier call for DIR is not asked again. Both files have the pairs of this call alone.
    """
    from rich.console import Console

    from flows.data.model_labels import VOTES, LabelOptions, label_file, report_text
    from tasks.execution.stage_progress import StageProgress

    if vote not in ("mean", "agree"):
        raise UserError(f"--vote {vote}: give mean or agree.")
    endpoint = {"max_tokens": max_tokens, "patience": patience}
    options = LabelOptions(
        model, rubric, "mean" if vote == "mean" else "agree", max_pairs, seed, alone,
        {name: value for name, value in endpoint.items() if value is not None},
    )  # fmt: skip
    with StageProgress(Console(stderr=True), "label") as progress:
        report = label_file(
            tether_home(), file, judge, out, overrides_of(set_), options,
            lambda done, total: progress.show({"step": done, "metrics": {}, "total": total}),
            lambda: echo("another process is labelling into the same folder; waiting for it", err=True),
        )  # fmt: skip
    if as_json:
        echo(json.dumps({**report, "out": str(out)}))
    else:
        if report["quarantined"]:
            echo(f"{counted(report['quarantined'], 'row')} can't be judged: see quarantine.jsonl.")
        if report["other_pairs"]:
            echo(
                f"{counted(report['other_pairs'], 'pair')} of earlier calls are not among the pairs of this one, and "
                f"not in {VOTES} anymore. Their answers are kept: the earlier command writes their votes again."
            )
        echo(report_text(report))
        echo(f"Give {out / VOTES} as data.preferences; the votes are marked as a model's.")


@command(probes, "check")
def check_probes(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Probes in JSON Lines, or names of those that Tether has.")
    ],
    as_json: Json = False,
) -> None:
    """Say what is wrong with files of probes, and count their prompts."""
    from flows.data.probe_check import check_text, probe_check

    checks = [probe_check(file) for file in files]
    if as_json:
        echo(json.dumps({"files": checks}))
    else:
        for check in checks:
            echo(check_text(check))
    if wrong := [check["file"] for check in checks if check["problems"]]:
        problems = sum(len(check["problems"]) for check in checks)
        raise UserError(f"{counted(problems, 'problem')} in {', '.join(wrong)}. Correct the lines named on stdout.")


def _candidates_job(seed: int, generation: Mapping[str, object], options: Mapping[str, object]) -> "CandidatesJob":
    """Return the job, resolved for this machine; an option that is None keeps its default."""
    from components.labelling.config import CandidatesJob
    from components.models.runtime import Runtime
    from flows.config.config_errors import validated

    values = {
        "seed": seed,
        "runtime": Runtime().resolve(),
        "generation": {name: value for name, value in generation.items() if value is not None},
        "candidates": {name: value for name, value in options.items() if value is not None},
    }
    return validated(CandidatesJob, values, "tether data candidates")


def _name_quarantined(rows: "list[Row]") -> None:
    for row in rows[:NAMED]:
        echo(f"row {row.number} is left out: {'; '.join(problem.text for problem in row.problems)}", err=True)
    if len(rows) > NAMED:
        echo(f"and {len(rows) - NAMED} more: quarantine.jsonl lists them all", err=True)


def _print_candidates(summary: Mapping[str, Any], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from tasks.execution.stage_progress import cell

    table = Table(pad_edge=False, box=None)
    table.add_column("model", overflow="fold")
    for name in ("temperature", "responses", "ended"):
        table.add_column(name, justify="right")
    for arm in summary["sampled"]:
        numbers = (f"{arm['temperature']:g}", str(arm["responses"]), f"{arm['ended'] / max(arm['responses'], 1):.0%}")
        table.add_row(cell(arm["model"]), *numbers)
    Console().print(table)
    echo(
        f"{counted(summary['prompts'], 'prompt')} of {counted(summary['rows'], 'row')} "
        f"({summary['quarantined']} left out), {counted(summary['candidates'], 'candidate')} "
        f"({summary['duplicates']} identical to another), {counted(summary['pairs'], 'pair')}."
    )
    echo(
        f"Write a, b, tie or both_bad into `label` of {out / 'pairs.csv'} (or pairs.jsonl; if several people label, "
        "add a column `annotator` and put their rows below each other), then give that file as "
        "data.preferences. key.jsonl and candidates.jsonl reveal the sides: do not show them to labellers."
    )
