"""Waivers as a command, or a caller from Python, asks for them."""

from collections.abc import Sequence

from components.base.errors import UserError, refuse_credentials
from components.gates.judging import Waiver
from tasks.runs.journal import current_user


def asked_waivers(gates: Sequence[str], because: str, dashes: str = "") -> list[Waiver]:
    """Return a waiver for each gate, with its reason, by the current user.

    Args:
        dashes: what the names of the options begin with in a message: `--` for a command, nothing from Python.

    Raises:
        UserError: gates without a reason, a reason without gates, or a reason that holds a secret.
    """
    if gates and not because.strip():
        raise UserError(f"{dashes}waive {gates[0]}: say why, with {dashes}because TEXT.")
    if because and not gates:
        raise UserError(f"{dashes}because: name the gate it is about, with {dashes}waive GATE.")
    refuse_credentials(f"{dashes}because", because)
    return [Waiver(gate=gate, user=current_user(), reason=because.strip()) for gate in gates]
