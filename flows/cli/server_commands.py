"""`tether deploy`, `serve`, `ui` and `doctor`: commands on servers, workers and this machine."""

import os
from typing import Annotated

import typer

from components.base.errors import UserError
from flows.cli import completion
from flows.cli.command import command, echo
from flows.cli.config import Set, config_of
from flows.environment import tether_home

server_commands = typer.Typer()


@command(server_commands, "deploy")
def deploy(
    profile: Annotated[
        str,
        typer.Argument(help="The pipeline's defaults: a profile or a .yaml file.", autocompletion=completion.profiles),
    ] = "demo",
    set_: Set = None,
    cron: Annotated[str | None, typer.Option(metavar="CRON", help="When it runs by itself, e.g. '0 3 * * 1'.")] = None,
    timezone: Annotated[str, typer.Option(metavar="ZONE", help="The time zone of --cron.")] = "UTC",
    active: Annotated[
        bool | None,
        typer.Option("--active/--paused", help="Start or pause it (default: unchanged; a new schedule is paused)."),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(metavar="POOL", help="Another pool that may compute stages.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE", help="The queue of its runs, e.g. high (default: unchanged; initially `default`)."
        ),
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="TETHER_ALERT_URL",
            help="A chat webhook for alerts on failed gates, crashes, labels and full disks.",
        ),
    ] = None,
) -> None:
    """Register pipeline, stages and scoring with a Prefect server."""
    config = config_of(profile, set_)
    if active is not None and cron is None:
        option = "--active" if active else "--paused"
        raise UserError(f"{option} needs a schedule. Give it with --cron, for example --cron '0 3 * * 1'.")
    _need_server()
    from flows.config.profiles import profile_name
    from flows.deployment import alerts
    from flows.deployment.register import deploy as register
    from flows.deployment.register import describe
    from flows.deployment.schedules import Schedule

    if alert is not None:
        alerts.check_address(alert)  # before anything is registered
    schedule = None if cron is None else Schedule(cron, timezone, active)
    done, lines = register(tether_home(), profile_name(profile), config, schedule, pool or [], queue)
    if alert is not None:
        alerts.alert(alert)
        lines.append("Alerts: the server sends them to the address of --alert.")
    echo("\n".join(describe(done) + lines))


@command(server_commands, "doctor", any_home=True)
def doctor(
    profile: Annotated[
        str | None,
        typer.Argument(
            help="A profile or a .yaml file whose vLLM server is checked (default: that of TETHER_VLLM_URL).",
            autocompletion=completion.profiles,
        ),
    ] = None,
    set_: Set = None,
) -> None:
    """Check that this machine can run Tether.

    It checks torch, GPU, disk, store, versions, servers and deployments."""
    from flows.doctor import diagnose, print_findings

    if profile is None and set_:
        raise UserError("doctor --set changes a profile. Name it, as in `tether doctor gpu --set ...`.")
    findings = diagnose(tether_home(), None if profile is None else config_of(profile, set_))
    answers = any(finding.what == "Prefect" and finding.level == "ok" for finding in findings)
    if answers and os.environ.get("PREFECT_API_URL"):
        from flows.deployment import stale

        findings += stale.findings()
    if code := print_findings(findings):
        raise typer.Exit(code)


@command(server_commands, "ui")
def ui() -> None:
    """Serve the pages of MLflow and Prefect until Ctrl-C."""
    from flows.deployment.local_servers import serve_pages

    serve_pages(tether_home(), echo)


@command(server_commands, "serve")
def serve(
    pool: Annotated[list[str] | None, typer.Option(metavar="POOL", help="Work pools (default: cpu and gpu).")] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Runs at once per pool (default: 2 pipelines in cpu, 1 in others)."),
    ] = None,
    print_: Annotated[bool, typer.Option("--print", hidden=True)] = False,  # the last release's units pass it
) -> None:
    """Run workers for Prefect's pools until Ctrl-C.

    Runs of these pools that crashed continue from their checkpoints."""
    from flows.config.run_config import CPU_POOL, GPU_POOL
    from flows.deployment.local_servers import CPU_RUNS, serve_pools, worker_environment
    from tasks.execution import logs

    worker_environment()
    _need_server()
    say = logs.logger.info if logs.as_json() else echo
    limits = {name: limit or (CPU_RUNS if name == CPU_POOL else 1) for name in pool or [CPU_POOL, GPU_POOL]}
    serve_pools(tether_home(), limits, say)


def _need_server() -> None:
    from tasks.prefect_flow.server import check_server

    if not os.environ.get("PREFECT_API_URL"):
        raise UserError("Set PREFECT_API_URL to the Prefect server's API, for example http://127.0.0.1:4200/api.")
    check_server()
