"""`tether store`: list, verify, clean up, export and import. `--json` prints one object."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.base.errors import UserError
from components.base.text import counted, line
from flows.cli import completion
from flows.cli.command import Json, command, echo
from flows.cli.replaced import Commands
from flows.environment import tether_home

if TYPE_CHECKING:
    from components.store.retention import Gone
    from components.store.store import ArtifactStore

store = typer.Typer(
    cls=Commands, help="The artifact store: list, verify, collect garbage, export.", no_args_is_help=True
)

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id.", autocompletion=completion.runs)]
DAMAGED = 1
NAMED = 20
"""The largest number of lines printed of each kind; the rest are counted. `--json` prints all."""


@command(store, "ls")
def list_(as_json: Json = False) -> None:
    """List artifacts and what protects each of them from `gc`."""
    from tasks.retention.requirements import artifacts

    here = _store()
    rows = artifacts(here)
    if as_json:
        echo(json.dumps({"store": here.place.where, "artifacts": [row.as_json() for row in rows]}))
        return
    for row in rows:
        record = row.record
        origin = f"{line(record.run)}  key {record.key[:12]}{', imported' if record.imported else ''}"
        stage, time = line(record.stage), line(record.started[:16])
        echo(f"{stage:<18}{record.digest[:12]}  {_size(row.size):>9}  {time}  {origin}")
        keepers = "(unknown, because a file is damaged)" if row.kept_by is None else ", ".join(row.kept_by)
        echo(f"    kept by {keepers or 'nothing'}")
    echo(f"{counted(len(rows), 'artifact')} in {here.place.where}. Sizes count shared files once for each artifact.")


@command(store, "verify")
def verify(as_json: Json = False) -> None:
    """Read every record, manifest and object. Exit code 1 if something is damaged or missing."""
    from components.store.verify import verify as read_all

    report = read_all(_store())
    if as_json:
        echo(json.dumps(asdict(report)))
    else:
        by_kind = {"damaged": report.damaged, "missing": report.missing, "orphaned": report.orphaned}
        for kind, flaws in by_kind.items():
            _name(f"{kind} {flaw.name}: {flaw.problem}" for flaw in flaws)
        echo(
            f"{counted(report.records, 'record')} and {counted(report.objects, 'object')} ({_size(report.bytes)}) in "
            f"{report.store}: "
            f"{', '.join(f'{len(flaws)} {kind}' for kind, flaws in by_kind.items())}."
        )
        if report.damaged or report.missing:
            echo(
                "A run that needs a damaged or missing file computes it again, which repairs the store; `tether store "
                "gc` "
                "removes artifacts that no run needs."
            )
        elif report.orphaned:
            echo("Orphans are harmless; `tether store gc` removes them when they are an hour old, in a bucket a day.")
    if report.damaged or report.missing:
        raise typer.Exit(DAMAGED)


@command(store, "gc")
def collect(
    keep_runs: Annotated[int, typer.Option(metavar="N", min=0, help="Keep what the newest N runs need.")] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed; remove nothing.")] = False,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Also clean TETHER_STORE, where Tether sees others' pins but not their runs."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove what no run, pin or registered model needs. The folders of runs stay."""
    from components.store.retention import collect as sweep
    from tasks.retention.requirements import requirements

    here = _store()
    if shared and here.shared is None:
        raise UserError("--shared: TETHER_STORE is not set, so there is no shared store. Leave the option out.")
    gone = sweep(here, lambda: requirements(here, keep_runs), shared=shared, dry_run=dry_run)
    freed = sum(entry.size for entry in gone)
    if as_json:
        echo(json.dumps({"dry_run": dry_run, "bytes": freed, "gone": [entry._asdict() for entry in gone]}))
        return
    _name(f"{entry.kind} {entry.name} ({_size(entry.size)})" for entry in gone)
    echo(f"{'Would free' if dry_run else 'Freed'} {freed} bytes ({_size(freed)}): {_counted(gone)}.")


@command(store, "export")
def export(
    run: Run,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="The file to write (default: RUN.tar here).")] = None,
) -> None:
    """Write the results that a run is based on into one file.

    It holds records and their objects, not the run's config or pages. The same run always gives the same bytes."""
    from tasks.retention.run_archive import export_run

    target = export_run(_store(), run, to)
    echo(f"The results of run {run} are in {target} ({_size(target.stat().st_size)}); `tether store import` reads it.")


@command(store, "import")
def import_(file: Annotated[Path, typer.Argument(help="A file that `tether store export` wrote.")]) -> None:
    """Import exported results, so that runs here reuse them.

    Everything is verified before anything is written. A digest does not show who made the file."""
    from components.base.paths import user_path
    from tasks.retention.run_archive import import_results

    done = import_results(_store(), user_path(str(file), "import"))
    echo(
        f"Imported {counted(done.records, 'record')} ({done.new_records} new) and {counted(done.objects, 'object')}. "
        "`tether run PROFILE` reuses them if config, code, libraries and machine are the same."
    )
    echo(
        "Every digest matches. That does not show who made the file: check its signature if it came from elsewhere. No "
        "run promotes a model that is based on it; `tether promote` does."
    )


@command(store, "pin")
def pin(
    run: Run,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin instead.")] = False,
) -> None:
    """Protect everything a run needs from `gc`.

    On a shared store it is protected for everybody. Without its pin `gc` treats it like any other run."""
    from components.store.retention import remove_pin, write_pin
    from tasks.runs.status import load_status

    here = _store()
    if remove:
        if not remove_pin(here.place, run):
            raise UserError(f"run {run} is not pinned in {here.place.where}.")
        echo(f"run {run} is no longer pinned.")
        return
    status = load_status(here.home, run)
    new = write_pin(here.place, status.run, status.results)
    echo(f"run {run} {'is pinned' if new else 'was pinned already'}.")


def _size(size: int) -> str:
    from rich.filesize import decimal  # completion must not wait for rich

    return decimal(size)


def _store() -> "ArtifactStore":
    from components.store.store import ArtifactStore

    return ArtifactStore(tether_home())


def _name(lines: Iterable[str]) -> None:
    lines = list(lines)
    for text in lines[:NAMED]:
        echo(line(text))
    if len(lines) > NAMED:
        echo(f"... and {len(lines) - NAMED} more (--json lists all)")


def _counted(gone: "list[Gone]") -> str:
    kinds = Counter(entry.kind for entry in gone)
    return ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in kinds.items()) or "nothing"
