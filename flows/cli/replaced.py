"""Commands that were taken away or renamed: for one release an old name answers with what to use."""

from typing import Any

from typer.core import TyperGroup

from components.base.errors import UserError
from flows.cli.command import fail

REPLACED: dict[str, str] = {
    "metrics": "MLflow has each run's metrics, `tether status --json` its stages and gates. "
    "docs/operations/watching.md lists what Prefect and MLflow export to Prometheus.",
    "stack": "`docker compose --file infra/compose.yaml up` starts the servers; docs/operations.md says how.",
}
"""Maps an old command, without `tether`, to a sentence on what to use."""


class Commands(TyperGroup):
    """A group of commands that knows the old names of its commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; an old name ends with exit code 2 and says the new one."""
        old = " ".join([*ctx.command_path.split()[1:], *args[:1]])
        if old in REPLACED and self.get_command(ctx, args[0]) is None:
            fail(UserError(f"`tether {old}` is gone. {REPLACED[old]}"))
        return super().resolve_command(ctx, args)
