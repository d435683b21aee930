"""The options of a requested run, from a command, the Python API or a deployment."""

from collections.abc import Sequence
from dataclasses import dataclass

from components.base.errors import UserError, refuse_credentials
from components.gates.judging import Waiver
from tasks.runs.journal import current_user
from tasks.runs.run_label import UNNAMED, Label


@dataclass(frozen=True)
class Request:
    """The options that every way to begin a run has."""

    waivers: Sequence[Waiver] = ()
    refresh: Sequence[str] = ()
    """Stages to recompute even if a result is stored."""
    until: str | None = None
    """The last stage to run; None runs all of them."""
    label: Label = UNNAMED
    user: str | None = None
    """Who asks for the run, for its record; None is the user of this process."""
    flow_run: str | None = None
    """The Prefect flow run that begins the run; if Prefect retries it, it continues the same run."""


DEFAULTS = Request()


def asked_waivers(gates: Sequence[str], because: str, dashes: str = "", user: str | None = None) -> list[Waiver]:
    """Return a waiver for each gate, with its reason, by `user` (None: the current one).

    Args:
        dashes: the prefix of option names in messages: `--` for a command, empty for Python.

    Raises:
        UserError: there are gates without a reason or a reason without gates, or the reason contains a secret.
    """
    if gates and not because.strip():
        raise UserError(f"{dashes}waive {gates[0]}: give the reason with {dashes}because TEXT.")
    if because and not gates:
        raise UserError(f"{dashes}because: name the waived gate with {dashes}waive GATE.")
    refuse_credentials(f"{dashes}because", because)
    return [Waiver(gate=gate, user=user or current_user(), reason=because.strip()) for gate in gates]
