"""The hosts that compute a stage together, from variables set by the job that starts them. Importable without torch.

TETHER_RENDEZVOUS   host:port of the first host, where all hosts meet
TETHER_HOSTS        number of hosts (default 1)
TETHER_HOST         number of this host, from 0
"""

import os
from dataclasses import dataclass

from components.base.errors import UserError

RENDEZVOUS, HOSTS, HOST = "TETHER_RENDEZVOUS", "TETHER_HOSTS", "TETHER_HOST"


@dataclass(frozen=True)
class Hosts:
    """This host's place among the hosts of a stage."""

    count: int = 1
    number: int = 0
    rendezvous: str = "127.0.0.1:0"

    def ranks_here(self, ranks: int) -> int:
        """Return the number of ranks to start on this host, of `ranks` in all.

        Raises:
            UserError: `ranks` is not divisible by the number of hosts.
        """
        if ranks % self.count:
            raise UserError(
                f"runtime.ranks is {ranks}, and {HOSTS} is {self.count}, but every host must start the same "
                f"number of ranks. Set runtime.ranks to a multiple of {self.count}."
            )
        return ranks // self.count


def these_hosts() -> Hosts:
    """Read the hosts from the environment; one host if the variables are not set.

    Raises:
        UserError: a variable is missing, or is not a number or an address.
    """
    count, number = _number(HOSTS, 1), _number(HOST, 0)
    rendezvous = os.environ.get(RENDEZVOUS, "")
    if count == 1:
        return Hosts()
    if not 0 <= number < count:
        raise UserError(f"{HOST} is {number}: with {HOSTS}={count} it is a number from 0 to {count - 1}.")
    name, _, port = rendezvous.rpartition(":")
    if not name or not port.isdigit():
        raise UserError(f"{RENDEZVOUS} is {rendezvous!r}: set it to host:port of the first of {count} hosts.")
    return Hosts(count, number, rendezvous)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable) or str(default)
    if not text.isdigit():
        raise UserError(f"{variable} is {text!r}: set it to a number.")
    return int(text)
