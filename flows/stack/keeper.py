"""The process that keeps a stack's parts running: `python -m flows.stack.keeper CONFIG`. `tether stack up` starts it.

It restarts a part that ends, and stops all parts when it is told to. If the keeper itself is killed, its parts
continue, and the next keeper takes them over.
"""

import fcntl
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from components.base.process import describe_process, this_process
from flows.deployment.servers import WATCH_SECONDS
from flows.deployment.supervision import LOOK_SECONDS, Running, Say, Supervised, end_processes
from flows.environment import prepare_environment, tether_home
from flows.stack.config import LOOPBACK, Stack, load_stack
from flows.stack.logs import bound_logs, log_of
from flows.stack.parts import StackPart, stack_parts
from flows.stack.secrets import USER, read_passwords
from flows.stack.state import Adopted, PartState, StackState, read_state, runs, write_state
from tasks.execution import logs


def keep(stack: Stack, told: threading.Event) -> None:
    """Keep the parts of a stack running until `told` is set, then stop them."""
    wanted = stack_parts(stack, read_passwords(stack))
    before = read_state(stack)
    state = StackState(keeper=this_process(), config=stack.config.model_dump(mode="json"))
    parts: dict[str, Supervised] = {}
    for each in wanted:
        name = each.service.name
        old = before.parts.get(name) if before is not None else None
        if old is not None and runs(old.process):
            parts[name] = Supervised(each.service, log_of(stack, name), Adopted(old.process))
            state.parts[name] = old
    write_state(stack, state)
    threading.Thread(target=_watch, args=(stack, told), daemon=True).start()
    try:
        while not told.is_set():
            _start_ready(stack, wanted, parts, state)
            for part in parts.values():
                part.look(_say)
                _note(stack, state, part)
            bound_logs(stack, _say)
            told.wait(LOOK_SECONDS)
    finally:
        end_in_order([(each, parts[each.service.name].process) for each in wanted if each.service.name in parts], _say)
        stack.state.unlink(missing_ok=True)


def end_in_order(parts: Iterable[tuple[StackPart, Running]], say: Say = lambda _: None) -> None:
    """Stop parts by their process ids, dependent parts first."""

    def end(part: StackPart, process: Running) -> None:
        began = time.monotonic()
        end_processes([process], part.service.stop)
        say(f"{part.service.name} ended after {time.monotonic() - began:.1f} s")

    left = list(parts)
    for level in sorted({part.level for part, _ in left}, reverse=True):
        threads = [threading.Thread(target=end, args=each) for each in left if each[0].level == level]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _watch(stack: Stack, told: threading.Event) -> None:
    """Continue crashed runs and report a full disk, as `tether serve` does. Runs in a thread, because a call may
    hang."""
    from flows.deployment.alerts import DiskWatch
    from flows.deployment.recovery import crash_watch

    passwords = read_passwords(stack)
    url, login = f"http://{LOOPBACK}:{stack.config.ports.prefect_server}/api", f"{USER}:{passwords['prefect_api']}"
    resume, disk = crash_watch(stack.config.workers, _say, url, login), DiskWatch(stack.home, url, login)
    while not told.wait(WATCH_SECONDS):
        resume()
        disk.look()


def _start_ready(stack: Stack, wanted: list[StackPart], parts: dict[str, Supervised], state: StackState) -> None:
    """Start the parts that have become ready to start: those for which all parts of lower levels accept connections."""
    for each in wanted:
        name = each.service.name
        if name not in parts:
            if not all(_listens(below) for below in wanted if below.level < each.level):
                return
            parts[name] = Supervised(each.service, log_of(stack, name))
            _note(stack, state, parts[name])


def _note(stack: Stack, state: StackState, part: Supervised) -> None:
    name, pid = part.service.name, part.process.pid
    old = state.parts.get(name)
    if old is None or old.process.get("pid") != pid:
        state.parts[name] = PartState(process=describe_process(pid), starts=1 if old is None else old.starts + 1)
        write_state(stack, state)


def _listens(part: StackPart) -> bool:
    for address, port in part.ports:
        try:
            socket.create_connection((LOOPBACK if address == "0.0.0.0" else address, port), timeout=1).close()
        except OSError:
            return False
    return True


def _say(text: str) -> None:
    if logs.as_json():
        logs.logger.info("%s", text)
    else:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)


def main() -> None:
    """Keep the stack of the config file in the first argument running."""
    home = tether_home()
    prepare_environment(home)
    stack = load_stack(Path(sys.argv[1]), home)
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told.set())
    with stack.lock.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait for an earlier keeper to finish
        keep(stack, told)


if __name__ == "__main__":
    main()
