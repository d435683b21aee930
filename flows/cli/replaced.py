"""The groups of commands: the sections of their help, and the old names that answer with what to use."""

from typing import Any

from typer.core import TyperGroup

from components.base.errors import UserError
from flows.cli.command import fail

_SERVERS = "Environment variables name the servers (docs/operations/backup.md)."
REPLACED: dict[str, str] = {
    "backup --config": _SERVERS,
    "card": "`tether export MODEL --card` prints the card.",
    "data suite": "`tether data check FILE --draft-suite OUT` drafts a suite from a good file.",
    "demote": "`tether promote MODEL --remove --reason TEXT` takes a version's aliases away.",
    "deploy --no-alert": "Delete the automations whose names begin with `Tether: ` on Prefect's page Automations.",
    "deploy --no-schedule": "Delete the schedule on the deployment's page.",
    "deploy --server": "Set PREFECT_API_URL to the server's API.",
    "explain": "`tether status RUN --why` says why each stage was computed or reused.",
    "human-eval": "Its commands are in `tether people`.",
    "human-eval export": "`tether people tasks BATCH FILE` writes Label Studio's tasks; a run's folder has sheet.csv.",
    "human-eval import": "Use `tether people answers BATCH --from FILE`.",
    "human-eval plan": "Use `tether people power`.",
    "metrics": "MLflow has each run's metrics, `tether status --json` its stages and gates. "
    "docs/operations/watching.md lists what Prefect and MLflow export to Prometheus.",
    "report": "`tether status RUN --html` writes the run's report.html again.",
    "restore --config": _SERVERS,
    "review": "Its commands are in `tether people`: `page`, `answers` and `status`.",
    "review export": "Use `tether people answers BATCH`.",
    "review links": "Use `tether people page BATCH --links`, with --rater or --renew.",
    "review serve": "Use `tether people page BATCH`.",
    "runs --profile": "`tether runs --json` has each run's profile.",
    "runs --rounds": "The report of a run of `tether iterate` has a table of its rounds: `tether status RUN --html`.",
    "runs --state": "`tether runs --json` has each run's state.",
    "stack": "`docker compose --file infra/compose.yaml up` starts the servers; docs/operations.md says how.",
    "sync --wait": "Run `tether sync` again when MLflow answers.",
    "status --against": "Select the runs in MLflow (`tether ui`) and press Compare, which draws their curves together.",
    "status --all": "The report and `tether status --json` list the gates that are off too.",
    "status --stage": "`tether status RUN --why` has a paragraph for each stage, and --json an object.",
    "store unpin": "Use `tether store pin RUN --remove`.",
}
"""Maps an old command, or an old option of a command, to a sentence on what to use. An old group answers for those of
its commands that are not here."""
SECTIONS: dict[str, tuple[str, ...]] = {
    "Run": ("run", "rerun", "iterate", "sweep"),
    "Look at runs": ("runs", "status", "diff", "lineage", "ui", "sync"),
    "Let people judge": ("people",),
    "Prepare data and a config": ("data", "fetch", "show-config", "plan"),
    "Use a model": ("export", "eval", "reproduce", "promote"),
    "Keep results": ("store", "backup", "restore", "upgrade"),
    "Machines and servers": ("doctor", "deploy", "serve"),
}
"""Maps the title of a section of `tether --help` to its commands."""


class Commands(TyperGroup):
    """A group of commands that knows the old names of its commands and their old options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; what is gone ends with exit code 2 and says what to use."""
        options = [[args[0], word.partition("=")[0]] for word in args[1:] if word.startswith("--")]
        unknown = [args[:2], args[:1]] if self.get_command(ctx, args[0]) is None else []
        for words in [] if ctx.resilient_parsing else [*unknown, *options]:
            old = " ".join([*ctx.command_path.split()[1:], *words])
            if old in REPLACED:
                fail(UserError(f"`tether {old}` is gone. {REPLACED[old]}"))
        return super().resolve_command(ctx, args)


class Sections(Commands):
    """The group of all commands, whose help lists them by what a person wants to do."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section of the help for each of `SECTIONS`, with its commands in that order."""
        for title, names in SECTIONS.items():
            commands = [(name, cmd) for name in names if (cmd := self.get_command(ctx, name)) is not None]
            with formatter.section(title):
                formatter.write_dl([(name, cmd.get_short_help_str(formatter.width)) for name, cmd in commands])
