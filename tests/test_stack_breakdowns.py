"""What may die in a `tether stack` and what may be changed: `make test-stack`, minutes long."""

import os
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.stack import prepare
from flows.stack.checks import Refused, ask_all, request, s3_files
from flows.stack.secrets import ROLES, access_key, next_passwords, read_passwords
from flows.stack.state import runs
from tasks.runs.status import load_status
from tests.certificates import make_certificate
from tests.stack import PLANTED, Running, leaks, listens, other_addresses, started
from tests.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

LONG = 150
"""Updates of PPO, where a run has to last until parts were killed."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with started() as running:
        running.deploy()
        yield running


def computes(running: Running, run: str) -> None:
    """Wait until a run is at its PPO."""
    until("the run is Running", lambda: running.prefect(f"flow_runs/{run}")["state_type"] == "RUNNING", 120)
    until("it computes PPO", lambda: _state(running, "ppo") == "running", 240)


def _state(running: Running, stage: str) -> str:
    try:
        return load_status(running.home).stage(stage).state
    except Exception:  # it has no run yet, or writes it
        return ""


def kill(running: Running, part: str) -> None:
    """Kill a part, and wait until it is there again and answers; nothing else may have been started."""
    before = running.pids()
    os.kill(before[part], signal.SIGKILL)
    until(f"{part} was started again", lambda: running.has_risen(part, before[part]), 120)
    until("all answer", running.all_answer, 240)
    after = running.pids()
    assert {name for name in before if after[name] != before[name]} == {part}


def test_a_run_goes_on_and_ends_once_while_each_server_is_killed_and_rises_alone(running: Running) -> None:
    run = running.begin(updates=LONG)
    computes(running, run)
    for part in ("postgres", "s3", "prefect", "mlflow", "tls"):
        kill(running, part)
    flow = running.ended(run, 600)
    assert flow["state_name"] == "Completed" and flow["run_count"] == 1, flow["state"]["message"]
    assert load_status(running.home).state in ("passed", "waived")
    logs = {path.name: path.read_bytes() for path in running.stack.logs.iterdir()}
    assert b'"status":502' in logs["tls.log"] and b"Authorization" in logs["tls.log"], "of calls that met no server"
    assert [name for name, text in logs.items() if leaks(text)] == []


def test_a_run_goes_on_while_its_worker_is_killed_and_rises(running: Running) -> None:
    run = running.begin(updates=LONG + 1)
    computes(running, run)
    kill(running, "worker-cpu")
    flow = running.ended(run, 600)
    assert flow["state_name"] == "Completed", flow["state"]["message"]


def test_a_run_whose_process_is_killed_goes_on_by_itself_from_its_checkpoint(running: Running) -> None:
    run = running.begin(updates=LONG + 2, retry_seconds=1)
    computes(running, run)
    first = load_status(running.home).run
    [process] = _processes_of(run)
    os.kill(process, signal.SIGKILL)
    flow = running.ended(run, 600)
    assert flow["state_name"] == "Completed", flow["state"]["message"]
    assert load_status(running.home).run == first
    assert "continues from its checkpoint: retry 1" in _log(running, "keeper")


def test_a_run_waits_for_an_s3_server_that_is_away_for_a_minute(running: Running) -> None:
    """The store is on it. While it is away, Caddy answers 502; the run ended then, as by a mistake of the user's."""
    # Each stage writes within the minute; its retries wait 120 s, for on a loaded machine a server answers 30 s late.
    run = running.begin(updates=5, seed=7, retry_seconds=40)
    until("the run is Running", lambda: running.prefect(f"flow_runs/{run}")["state_type"] == "RUNNING", 120)
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        part = running.state().parts["s3"].process
        if runs(part):
            os.kill(part["pid"], signal.SIGKILL)
        time.sleep(0.1)
    flow = running.ended(run, 600)
    assert flow["state_name"] == "Completed", flow["state"]["message"]
    until("all answer", running.all_answer, 240)


def test_a_second_up_starts_only_what_is_missing(running: Running) -> None:
    """The keeper was killed, and with it nothing watches the parts any more."""
    before, keeper = running.pids(), running.state().keeper["pid"]
    os.kill(keeper, signal.SIGKILL)
    os.kill(before["tls"], signal.SIGKILL)
    status = running.command("status")
    assert status.returncode == 1 and b"tls: has ended; `tether stack up` starts it" in status.stderr
    assert b"Traceback" not in status.stderr
    refused = running.command("rotate")
    assert refused.returncode == 2 and b"postgres" in refused.stderr, "the parts run without a keeper"
    assert running.command("up").returncode == 0
    after = running.pids()
    assert {name for name in before if after[name] != before[name]} == {"tls"}
    assert running.state().keeper["pid"] != keeper


def test_a_log_is_emptied_when_it_is_full_and_the_part_writes_on(running: Running) -> None:
    path = running.stack.logs / "tls.log"
    with path.open("ab") as file:
        file.truncate(int(running.stack.config.log_megabytes * 1_000_000) + 1)
    until("the log was emptied", lambda: path.stat().st_size < 1_000_000, 30)
    assert path.with_suffix(".log.1").stat().st_size > running.stack.config.log_megabytes * 1_000_000
    size, port = path.stat().st_size, running.stack.config.ports.prefect_server
    before = running.pids()["prefect"]
    os.kill(before, signal.SIGKILL)  # Caddy says of a server that is away that it is
    until("Prefect is away", lambda: not listens("127.0.0.1", port), 20)
    with pytest.raises(Exception, match="502"):
        running.prefect("health")
    until("Caddy has said so", lambda: path.stat().st_size > size, 20)
    assert b"\0" not in path.read_bytes()
    until("all answer", running.all_answer, 240)


def test_passwords_are_changed_and_the_old_ones_are_void(running: Running) -> None:
    stack = running.stack
    refused = running.command("rotate")
    assert refused.returncode == 2 and b"`tether stack down` first" in refused.stderr
    assert running.command("down").returncode == 0
    assert running.command("rotate").returncode == 0
    new = running.passwords
    assert new.keys() == PLANTED.keys() and not set(new.values()) & set(PLANTED.values())
    up = running.command("up")
    assert up.returncode == 0, up.stderr.decode()
    old = {each.part: each.verdict for each in ask_all(stack, PLANTED)}
    assert {part for part, verdict in old.items() if verdict == "refused"} == {
        "postgres", "s3", "prefect", "mlflow", "worker-cpu",
    }  # fmt: skip
    for role in ROLES:  # each of them, of which the check above names the first
        assert _logs_in(running, role, new[role]) and not _logs_in(running, role, PLANTED[role])
    assert _logs_in(running, "postgres", new["postgres"]) and not _logs_in(running, "postgres", PLANTED["postgres"])
    users = f"{stack.url('mlflow')}/api/2.0/mlflow/users/get?username=admin"
    assert request(stack, users, "admin", new["mlflow_admin"])["user"]["is_admin"]
    with pytest.raises(Refused):
        request(stack, users, "admin", PLANTED["mlflow_admin"])
    with pytest.raises(PermissionError):
        s3_files(stack, "mlflow", PLANTED["s3_mlflow"]).ls("mlflow")
    assert s3_files(stack, "mlflow", new["s3_mlflow"]).ls("mlflow") and access_key("mlflow") not in new.values()
    flow = running.ended(running.begin(updates=5))
    assert flow["state_name"] == "Completed", "a worker has the new ones, and finds what was stored"


def test_a_change_of_passwords_that_was_killed_half_way_is_ended_by_up(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL's roles have their new ones then, and MLflow's users the old."""
    assert running.command("down").returncode == 0
    before, execute = running.passwords, prepare._execute

    def die(stack: object, cluster: Path, database: str, statements: object) -> None:
        if database == "mlflow_auth":
            raise KeyboardInterrupt
        execute(stack, cluster, database, statements)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_execute", die)
        with pytest.raises(KeyboardInterrupt):
            prepare.rotate(running.stack)
    assert read_passwords(running.stack) == before
    wanted = next_passwords(running.stack)
    up = running.command("up")
    assert up.returncode == 0, up.stderr.decode()
    assert running.passwords == wanted and running.all_answer()


def test_it_listens_on_every_address_with_a_certificate_of_its_own_where_the_config_says_so(
    running: Running, tmp_path: Path
) -> None:
    [address] = other_addresses() or pytest.skip("this machine has no other address")
    authority, certificate, key = make_certificate(tmp_path, "localhost")
    before = running.command("status")
    assert before.returncode == 0 and not listens(address, running.stack.config.ports.prefect)
    running.command("down")
    running.change(listen="0.0.0.0", certificate=str(certificate), key=str(key), authority=str(authority))
    up = running.command("up")
    assert up.returncode == 0, up.stderr.decode()
    ports = running.stack.config.ports
    open_ports = {name for name, port in ports.all().items() if listens(address, port)}
    assert open_ports == {"prefect", "mlflow", "s3"}, "all else stays on loopback"
    shown = ssl.get_server_certificate(("localhost", ports.prefect), ca_certs=str(authority))
    assert shown.strip() in certificate.read_text(), "and no certificate of Caddy's"
    flow = running.ended(running.begin(updates=6))
    assert flow["state_name"] == "Completed", "workers trust the authority"
    running.command("down")
    running.change(listen=address, name=address, certificate=None, key=None, authority=None)
    up = running.command("up")
    assert up.returncode == 0, "a machine without a name: " + up.stderr.decode()
    context = ssl.create_default_context(cafile=str(running.stack.folder / "ca.crt"))
    health = urllib.request.urlopen(f"https://{address}:{ports.prefect}/api/health", context=context)
    assert health.status == 200 and not listens("127.0.0.1", ports.prefect)


def _processes_of(run: str) -> list[int]:
    """The process of a flow run, which its environment names."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            named = f"PREFECT__FLOW_RUN_ID={run}".encode() in path.read_bytes()
            leads = named and b"prefect.engine" in (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if leads:
            found.append(int(path.parent.name))
    return found


def _logs_in(running: Running, role: str, password: str) -> bool:
    done = subprocess.run(
        [str(running.stack.postgres_programs / "psql"), "-h", "127.0.0.1", "-U", role, "-p",
         str(running.stack.config.ports.postgres), "-tAc", "SELECT 1", role],
        env={"PGPASSWORD": password}, capture_output=True,
    )  # fmt: skip
    return done.stdout.strip() == b"1"


def _log(running: Running, part: str) -> str:
    return (running.stack.logs / f"{part}.log").read_text()
