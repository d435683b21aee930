"""`tether stack`: start missing parts and wait until they answer, show their state, stop them."""

import os
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.base.errors import TetherError, UserError
from components.base.files import write_whole
from components.base.text import line
from flows.deployment.supervision import Say
from flows.stack.checks import Answer, Wrong, ask_all, make_buckets, make_mlflow_user
from flows.stack.config import ROOT, Stack
from flows.stack.keeper import end_in_order
from flows.stack.logs import last_line, log_of
from flows.stack.parts import part_names, stack_parts
from flows.stack.prepare import prepare
from flows.stack.secrets import authorities, read_passwords
from flows.stack.state import Adopted, StackState, read_state, runs
from tasks.allowed import VARIABLE as ALLOWED

UP_SECONDS = 600.0
"""How long all parts together may take to answer; on two cores with a load of 11 the first start took 170 s."""
DOWN_SECONDS = 150.0
"""How long the keeper may take to stop its parts: three levels of 35 s each."""
TRIES = 4
"""A part that was started this often without an answer is given up."""
_OURS = ("PREFECT_", "MLFLOW_", "TETHER_", "AWS_", "PG", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Prefixes of variables that set which servers a terminal uses; the stack's own parts must not inherit them."""


def up(stack: Stack, config: Path, say: Say) -> list[Answer]:
    """Start all parts that are not running, and return once every part answers.

    Raises:
        UserError: something is not installed, a port is in use, or passwords are rejected.
        TetherError: a part does not start; parts that this call started are stopped again.
    """
    state = read_state(stack)
    kept = state is not None and runs(state.keeper)
    if state is not None and state.alive() and state.config != stack.config.model_dump(mode="json"):
        raise UserError(f"{config}: the stack runs with other values. Run `tether stack down`, then `tether stack up`.")
    passwords = prepare(stack, state.alive() if state is not None else ())
    if not kept:
        _start_keeper(stack, config)
    try:
        return _wait(stack, passwords, say)
    except BaseException:
        if not kept:
            say("Stopping what was started.")
            down(stack)
        raise


def _start_keeper(stack: Stack, config: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(_OURS) or name == ALLOWED}
    with (stack.logs / "keeper.log").open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "flows.stack.keeper", str(config.absolute())], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True, env={**environment, "TETHER_HOME": str(stack.home)},
        )  # fmt: skip
    until = time.monotonic() + 60
    while (state := read_state(stack)) is None or state.keeper.get("pid") != keeper.pid:
        if keeper.poll() is not None or time.monotonic() > until:
            raise TetherError(f"the stack's keeper did not start; see {stack.logs / 'keeper.log'}")
        time.sleep(0.2)


def _wait(stack: Stack, passwords: dict[str, str], say: Say) -> list[Answer]:
    """Wait until all parts answer. Buckets and MLflow's user are created here, which needs running servers."""
    until = time.monotonic() + UP_SECONDS
    to_make = [make_buckets, make_mlflow_user]
    said: set[str] = set()
    while True:
        write_authorities(stack)
        for make in list(to_make):
            with suppress(Wrong):
                make(stack, passwords)
                to_make.remove(make)
        answers = ask_all(stack, passwords)
        for answer in answers:
            if answer.verdict == "ok" and answer.part not in said:
                said.add(answer.part)
                say(f"{answer.part} answers: {answer.told}")
        if not to_make and all(answer.verdict == "ok" for answer in answers):
            return answers
        state = read_state(stack)
        if state is None or not runs(state.keeper):
            raise TetherError(f"the stack's keeper has ended; see {stack.logs / 'keeper.log'}")
        if not to_make:
            raise_refused(stack, answers)
        for answer in answers:
            part = state.parts.get(answer.part)
            if answer.verdict != "ok" and part is not None and part.starts >= TRIES and not said & {answer.part}:
                raise TetherError(f"{answer.part} ends each time it is started: {last_line(stack, answer.part)}")
        if time.monotonic() > until:
            wrong = "; ".join(f"{each.part}: {each.told}" for each in answers if each.verdict != "ok")
            raise TetherError(f"not all of the stack answers within {UP_SECONDS:.0f} s: {wrong}; see {stack.logs}")
        time.sleep(2.0)


def raise_refused(stack: Stack, answers: Collection[Answer]) -> None:
    """Raise UserError, in one sentence, if a server rejects a password."""
    refused = [each for each in answers if each.verdict == "refused"]
    if refused:
        raise UserError(
            f"{', '.join(each.part for each in refused)}: {refused[0].told}; the passwords in {stack.secrets} are not "
            f"those of the databases in {stack.folder}: restore the original passwords."
        )


def write_authorities(stack: Stack) -> None:
    """Write the certificate authorities that clients trust: the usual ones and the stack's, once Caddy has created
    it."""
    import certifi

    own = stack.authority or stack.folder / "tls/caddy/pki/authorities/local/root.crt"
    if stack.has_authority and own.exists():
        text = Path(certifi.where()).read_text(encoding="utf-8") + "\n" + own.read_text(encoding="utf-8")
        path = authorities(stack)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text)


def status(stack: Stack) -> tuple[list[Answer], StackState | None]:
    """Return the answers of all parts, and the processes' state; None if nothing was started.

    Raises:
        UserError: the passwords cannot be read.
    """
    state = read_state(stack)
    if state is None:
        return [], None
    answers = []
    for answer in ask_all(stack, read_passwords(stack)):
        part = state.parts.get(answer.part)
        if part is None or not runs(part.process):
            why = "has not been started yet" if part is None else "has ended"
            again = "its keeper starts it" if runs(state.keeper) else "`tether stack up` starts it"
            answer = Answer(answer.part, "away", f"{why}; {again}. See {log_of(stack, answer.part)}")
        answers.append(answer)
    return answers, state


def down(stack: Stack) -> list[str]:
    """Stop the keeper and every part by their process ids, and return the parts that ran. Their data stay.

    Raises:
        TetherError: the keeper does not stop.
    """
    state = read_state(stack)
    if state is None:
        return []
    alive = state.alive()
    ran = [name for name in part_names(stack) if name in alive]
    if runs(state.keeper):
        keeper = Adopted(state.keeper)
        with suppress(ProcessLookupError):
            os.kill(keeper.pid, 15)
        try:
            keeper.wait(DOWN_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TetherError(f"the stack's keeper (process {keeper.pid}) does not stop; see {stack.logs}") from error
    if (left := read_state(stack)) is not None:  # left by a keeper that was killed
        by_name = {part.service.name: part for part in stack_parts(stack, read_passwords(stack))}
        alive = [name for name in left.alive() if name in by_name]
        end_in_order([(by_name[name], Adopted(left.parts[name].process)) for name in alive])
        stack.state.unlink(missing_ok=True)
    return ran


def print_table(console: Console, stack: Stack, answers: Collection[Answer], state: StackState | None) -> None:
    """Print a line for each part: its state, address and process, and what is wrong."""
    table = Table(box=None, pad_edge=False)
    for title in ("part", "state", "address", "process", "answer"):
        table.add_column(title, overflow="fold", no_wrap=title != "answer")
    addresses = {each.service.name: each.service.address for each in stack_parts(stack, read_passwords(stack))}
    for part, verdict, told in answers:
        mine = state.parts.get(part) if state is not None else None
        address = "" if part.startswith("worker-") else addresses[part]
        table.add_row(
            part, Text(verdict, {"ok": "green"}.get(verdict, "red")), address,
            str(mine.process.get("pid", "")) if mine is not None else "",
            Text(line(told) + (f" (started {mine.starts} times)" if mine is not None and mine.starts > 1 else "")),
        )  # fmt: skip
    console.print(table)
