"""`tether stack` with real servers in a clean folder: PostgreSQL, SeaweedFS, Caddy, Prefect, MLflow, a worker.

What may die, and what takes minutes, is in tests/test_stack_breakdowns.py (`make test-stack`).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from s3fs import S3FileSystem

from components.store.url import UrlPlace
from flows.config.run_config import load_config
from flows.deployment.supervision import Supervised, end_processes
from flows.launch.begin import new_run
from flows.launch.computing import first_to_compute
from flows.models.promotion import demoted, promoted
from flows.stack.checks import Refused, ask_all, request, s3_files
from flows.stack.config import Stack
from flows.stack.logs import log_of
from flows.stack.parts import part_names, stack_parts
from flows.stack.secrets import ROLES, exports, read_passwords
from flows.stack.state import runs
from tasks.runs.journal import current_user
from tasks.runs.status import load_status
from tasks.tracking.carrier import is_left
from tasks.tracking.promotion import champion_terms
from tasks.tracking.registry import versions
from tests.champions import make_champion
from tests.conftest import Tether
from tests.servers import clean_environment
from tests.stack import PLANTED, ROOT, Running, leaks, listens, other_addresses, started
from tests.waiting import until

ACCESS = Path(__file__).parents[1] / "docs" / "operations" / "access.md"

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with started() as running:
        yield running


def test_up_waits_until_every_part_answers_and_says_where_it_is(running: Running) -> None:
    names = part_names(running.stack)
    assert list(running.pids()) == names
    said = running.said.decode()
    assert all(f"{name} answers: " in said for name in names)
    assert running.stack.url("prefect") in said and f". {running.stack.exports}" in said
    status = running.command("status")
    assert status.returncode == 0, status.stderr.decode()


def test_nothing_listens_but_on_loopback(running: Running) -> None:
    ports = running.stack.config.ports.all()
    assert all(listens("127.0.0.1", port) for port in ports.values())
    assert [(address, port) for address in other_addresses() for port in ports.values() if listens(address, port)] == []


def test_no_server_answers_a_question_without_its_password(running: Running) -> None:
    prefect, mlflow = running.stack.url("prefect"), running.stack.url("mlflow")
    for user, password in ((None, ""), ("tether", "wrong")):
        with pytest.raises(Refused):
            request(running.stack, f"{prefect}/api/flow_runs/count", user, password, {})
        with pytest.raises(Refused):
            request(running.stack, f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=1", user, password)
    with pytest.raises(PermissionError):
        s3_files(running.stack, "tether", "wrong").ls("tether")
    with pytest.raises(PermissionError):  # each identity has its own bucket
        s3_files(running.stack, "tether", PLANTED["s3_tether"]).ls("mlflow")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"http://127.0.0.1:{running.stack.config.ports.s3_server}/tether")


def test_the_store_writes_each_file_once_through_tls(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in exports(running.stack, PLANTED).items():
        monkeypatch.setenv(name, value)
    place = UrlPlace(os.environ["TETHER_STORE"])
    assert place.create("probe", b"1") and not place.create("probe", b"2") and place.read("probe") == b"1"


def _page(running: Running) -> "subprocess.CompletedProcess[bytes]":
    """The commands of docs/operations.md in one terminal, on this stack, with the smallest profile."""
    text = (ROOT / "docs" / "operations.md").read_text()
    script = "".join(re.findall(r"```sh\n(.*?)```", text, re.S))
    for said, here in {
        ".tether/stack/client.env": str(running.stack.exports),
        "tether stack status": f"tether stack status --config {running.config}",
        "tether deploy demo": "tether deploy tiny --set runners.ppo=local",  # this stack has no worker for the pool gpu
        "rlhf/demo": "rlhf/tiny",
        "tether backup /var/backups/tether": f"tether backup --config {running.config} {running.home.parent}/backups",
    }.items():
        assert said in script, f"the page no longer says {said}"
        script = script.replace(said, here)
    variables = clean_environment()
    path = f"{Path(sys.executable).parent}:{variables['PATH']}"
    return subprocess.run(
        ["bash", "-c", f"set -e\n{script}"], capture_output=True, cwd=running.home.parent,
        env={**variables, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip


def test_the_pages_commands_deploy_a_run_that_keeps_results_facts_and_states_in_the_stack(running: Running) -> None:
    done = _page(running)
    running.said += done.stdout + done.stderr
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    flows = running.prefect("flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}})
    [flow] = [each for each in flows if each["deployment_id"]]
    assert flow["state_name"] == "Completed" and flow["run_count"] == 1
    assert len(s3_files(running.stack, "tether", PLANTED["s3_tether"]).glob("tether/store/records/*/*.json")) >= 5
    assert len(s3_files(running.stack, "mlflow", PLANTED["s3_mlflow"]).find("mlflow/artifacts")) >= 5
    experiments = [each["experiment_id"] for each in running.mlflow("experiments/search?max_results=9")["experiments"]]

    def finished() -> int:
        found = running.mlflow("runs/search", {"experiment_ids": experiments, "max_results": 100})["runs"]
        return sum(each["info"]["status"] == "FINISHED" for each in found)

    until("MLflow has the pipeline's run and its five stages'", lambda: finished() >= 6, 60)


def test_who_may_only_read_is_refused_a_promotion_and_who_may_has_the_name_on_record(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands of docs/operations/access.md. The policy of the run above is champion."""
    people = {"reader": "liest-nur-4711", "promoter": "darf-mehr-4711"}
    for name, value in exports(running.stack, PLANTED).items():
        monkeypatch.setenv(name, value)

    make_champion(running.home)

    def be(user: str) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", people[user])

    (commands,) = re.findall(r"```sh\n(.*?)```", ACCESS.read_text(), re.S)
    for placeholder, password in {"ADMINS-PASSWORD": PLANTED["mlflow_admin"], "A-LONG-PASSWORD": people["reader"],
                                  "ANOTHER-PASSWORD": people["promoter"]}.items():  # fmt: skip
        commands = commands.replace(placeholder, password)
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", commands], cwd=running.stack.folder, check=True)
    be("promoter")
    assert "is demoted: a trial" in demoted(running.home, "tether-policy/1", current_user(), "a trial")
    refused = running.client("promote", "tether-policy/1", MLFLOW_TRACKING_USERNAME="reader",
                             MLFLOW_TRACKING_PASSWORD=people["reader"], TETHER_HOME=str(running.home))  # fmt: skip
    assert refused.returncode == 2 and refused.stderr.count(b"\n") == 1, refused.stderr.decode()
    assert b"promote tether-policy/1: MLflow does not let the user reader do that (403)." in refused.stderr
    assert promoted(running.home, "tether-policy/1", current_user(), "") == "tether-policy/1 is champion now."
    (found,) = [each for each in versions(running.home) if each.name == "tether-policy"]
    assert found.promoted is not None and found.promoted["by"].endswith(" as promoter")
    first, second = champion_terms(found.tags)
    assert first["ended_by"] == second["by"] == found.promoted["by"]
    assert "reader" not in str(found.tags)


class Saved(NamedTuple):
    """A backup of the stack, and what was asked just before it."""

    folder: Path
    run: str
    told: list[str]
    counts: dict[str, str]
    said: str


@pytest.fixture(scope="module")
def saved(running: Running, tether_here: Tether) -> Saved:
    (run,) = (path.name for path in running.home.glob("runs/*"))
    end = running.home / "runs" / run
    until("the run has told its end", lambda: load_status(running.home, run).state != "running", 120)
    until("MLflow has all of it", lambda: not is_left(end), 120)
    told, counts = _told(running, tether_here, run, {}), _counted(running.stack)
    folder, began = running.home.parent / "backup", time.monotonic()
    variables = exports(running.stack, PLANTED)
    done = tether_here("backup", str(folder), "--config", str(running.config), home=running.home, **variables)
    assert done.returncode == 0, done.stderr
    print(f"{time.monotonic() - began:6.1f} s  tether backup")
    return Saved(folder, run, told, counts, done.stdout + done.stderr)


def test_a_backup_of_the_stack_is_private_and_holds_databases_buckets_and_secrets(saved: Saved) -> None:
    assert "It holds the stack's passwords" in saved.said and not leaks(saved.said.encode())
    assert saved.folder.stat().st_mode & 0o777 == 0o700
    files = {path.relative_to(saved.folder).as_posix(): path for path in saved.folder.rglob("*") if path.is_file()}
    assert {path.stat().st_mode & 0o077 for path in files.values()} <= {0, 0o044} and len(files) > 60
    holders = [name for name, path in files.items() if leaks(path.read_bytes())]
    assert holders == ["stack/secrets/passwords.json"] and files[holders[0]].stat().st_mode & 0o777 == 0o600
    folders = {name.rpartition("/")[0] for name in files}
    assert {"stack/databases", "stack/store/objects", "stack/tls/caddy/pki/authorities/local"} <= folders
    assert any(name.startswith("stack/artifacts/") for name in files)


@pytest.mark.parametrize("name", ["prefect_api", "mlflow_tether", "s3_tether", "prefect"])
def test_a_wrong_password_is_one_sentence_that_names_the_part(running: Running, name: str) -> None:
    path = running.stack.secrets / "passwords.json"
    path.write_text(json.dumps({**PLANTED, name: "another-word-of-mine"}))
    try:
        status = running.command("status")
    finally:
        path.write_text(json.dumps(PLANTED))
    assert status.returncode == 2
    [sentence] = status.stderr.decode().splitlines()
    part = {"s3_tether": "s3", "prefect": "postgres"}.get(name, name.partition("_")[0])
    assert sentence.startswith(f"tether: {part}") and "rejects the " in sentence
    assert b"another-word" not in status.stdout + status.stderr


def test_no_password_is_in_a_command_line_or_in_what_is_printed_and_logged(running: Running) -> None:
    running.command("logs", "--no-follow", "--lines", "100000")
    assert not leaks(running.said)
    logs = list(running.stack.logs.glob("*.log"))
    assert len(logs) == len(part_names(running.stack)) + 1 and all(path.stat().st_size for path in logs[:1])
    assert [str(path) for path in logs if leaks(path.read_bytes())] == []
    commands = {path: _bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    folder = str(running.stack.folder).encode()
    assert any(folder in text for text in commands.values()), "ours are among them"
    assert [str(path) for path, text in commands.items() if leaks(text)] == []


def test_no_password_is_in_a_database_nor_in_the_variables_of_a_job(running: Running) -> None:
    stack, found = running.stack, {}
    for role in ROLES:
        command = [str(stack.postgres_programs / "pg_dump"), "-h", "127.0.0.1", "-p", str(stack.config.ports.postgres)]
        dump = subprocess.run(
            [*command, "-U", role, role], env={"PGPASSFILE": str(stack.secrets / "pgpass")}, capture_output=True
        )
        assert dump.returncode == 0, dump.stderr.decode()
        found[role] = dump.stdout
    assert b"rlhf" in found["prefect"] and b"experiments" in found["mlflow"] and b"admin" in found["mlflow_auth"]
    assert [role for role, text in found.items() if leaks(text)] == []
    variables = running.prefect("deployments/name/rlhf/tiny")["job_variables"]
    assert variables["env"]["TETHER_STORE"] == "s3://tether/store" and not leaks(json.dumps(variables).encode())


def test_no_password_is_in_a_file_beside_those_of_mode_600(running: Running) -> None:
    """Reports, journals and caches of the run, and what PostgreSQL, SeaweedFS and Caddy keep."""
    stack, read = running.stack, 0
    private = {*stack.secrets.iterdir(), stack.exports}
    assert {path.stat().st_mode & 0o777 for path in private} == {
        0o600
    } and stack.secrets.stat().st_mode & 0o777 == 0o700
    holders = []
    for path in (*running.home.rglob("*"), *stack.folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path not in private:
            read += 1
            holders += [str(path)] * leaks(_bytes(path))
    assert holders == [] and read > 100 and list(running.home.glob("runs/*/report.html"))


def test_down_leaves_no_process_and_keeps_the_data(running: Running) -> None:
    state = running.state()
    down = running.command("down")
    assert down.returncode == 0 and b"Stopped postgres, s3, prefect, mlflow, tls, worker-cpu." in down.stdout
    assert not any(runs(each.process) for each in [*state.parts.values()]) and not runs(state.keeper)
    folder = str(running.stack.folder).encode()

    def all_gone() -> bool:  # PostgreSQL's children may take a while
        left = {path.parent.name: _bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
        return not any(folder in text or (b"postgres:" in text and _here(pid, running)) for pid, text in left.items())

    until("no process is left", all_gone, 20)
    assert (running.stack.database / "PG_VERSION").exists()
    status = running.command("status")
    assert status.returncode == 1 and b"No part of the stack" in status.stderr


def test_after_the_stack_is_lost_a_restore_gives_the_same_and_a_rerun_hits(
    running: Running, saved: Saved, tether_here: Tether, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, home = running.stack, running.home
    shutil.rmtree(home)
    shutil.rmtree(stack.folder)
    began = time.monotonic()
    done = tether_here("restore", str(saved.folder), "--config", str(running.config), home=home)
    assert done.returncode == 0, done.stderr
    print(f"{time.monotonic() - began:6.1f} s  tether restore")
    assert not leaks((done.stdout + done.stderr).encode())
    assert read_passwords(stack) == PLANTED and stack.secrets.stat().st_mode & 0o777 == 0o700
    left = {"home", "stack", "stack.yaml", "backup", "backups"}
    assert {path.name for path in home.parent.iterdir()} == left
    again = tether_here("restore", str(saved.folder), "--config", str(running.config), home=home)
    assert again.returncode == 2 and "is not empty" in again.stderr
    ports = stack.config.ports
    direct = {
        "MLFLOW_TRACKING_URI": f"postgresql+psycopg://mlflow@127.0.0.1:{ports.postgres}/mlflow",
        "PGPASSFILE": str(stack.secrets / "pgpass"),
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports.s3_server}",
        "PREFECT_API_URL": "",
    }
    monkeypatch.syspath_prepend(str(stack.programs))
    S3FileSystem.clear_instance_cache()  # of those in this process that ask the TLS server
    parts = [part for part in stack_parts(stack, PLANTED) if part.service.name in ("postgres", "s3")]
    processes = [Supervised(part.service, log_of(stack, part.service.name)).process for part in parts]
    try:
        until("PostgreSQL answers", lambda: ask_all(stack, PLANTED)[0].verdict == "ok", 60)
        until("S3 answers", lambda: len(_listed(stack)) > 5, 60)
        assert _told(running, tether_here, saved.run, direct) == saved.told
        assert _counted(stack) == saved.counts
        for name, value in _variables(stack, direct).items():
            monkeypatch.setenv(name, value)
        launch = new_run(home, "tiny", load_config("tiny").resolved())
        assert first_to_compute(launch.config, launch.sources, launch.ctx) is None
        launch.ctx.discard()
    finally:
        end_processes(processes, signal.SIGKILL)


def _variables(stack: Stack, changes: dict[str, str]) -> dict[str, str]:
    """A terminal's; with changes, of one that asks the servers without TLS: `up` has not written whom to trust yet."""
    given = {**exports(stack, PLANTED), **changes}
    return {name: value for name, value in given.items() if not changes or "CA_BUNDLE" not in name}


def _listed(stack: Stack) -> list[str]:
    try:
        return list(s3_files(stack, "tether", PLANTED["s3_tether"]).find("tether/store/records"))
    except Exception:  # whatever botocore raises of a server that starts
        return []


def _told(running: Running, tether_here: Tether, run: str, changes: dict[str, str]) -> list[str]:
    """What a terminal is told of the run, the registry and the store."""
    variables = _variables(running.stack, changes)
    found = []
    for command in (
        ("runs", "--json"), ("status", run, "--json"), ("lineage", run, "--json"),
        ("lineage", "tether-policy@champion", "--json"), ("store", "ls", "--json"),
    ):  # fmt: skip
        done = tether_here(*command, home=running.home, **variables)
        assert done.returncode == 0, (command, done.stderr)
        found.append(done.stdout)
    return found


def _counted(stack: Stack) -> dict[str, str]:
    """How many rows tables have that no server changes by itself, and a digest of all that is in them."""
    row = "(to_jsonb(t) - array['last_polled', 'updated'])::text"  # a worker that asks for runs writes these two
    query = f"select count(*), md5(string_agg({row}, ',' order by {row})) from {{}} t"
    tables = {
        "prefect": ("flow_run", "deployment", "block_document", "configuration"),
        "mlflow_auth": ("users",),
        "mlflow": ("runs", "metrics", "params", "tags", "model_versions", "registered_model_aliases"),
    }
    found = {}
    for role, names in tables.items():
        for name in names:
            command = [str(stack.postgres_programs / "psql"), "-h", "127.0.0.1", "-p", str(stack.config.ports.postgres)]
            done = subprocess.run(
                [*command, "-U", role, "-d", role, "-Atc", query.format(name)],
                env={"PGPASSFILE": str(stack.secrets / "pgpass")}, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            found[f"{role}.{name}"] = done.stdout
    return found


def _here(pid: str, running: Running) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(running.stack.database)
    except OSError:
        return False


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
