"""docs/operations.md from an empty host to its end, on PostgreSQL, S3 and TLS; backup, loss and restore of these."""

import base64
import json
import os
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from components.base.hashing import digest_json
from components.store.url import UrlPlace
from flows.keeping.manifest import MANIFEST
from flows.models.alias_changes import demoted, promoted
from tasks.runs.journal import current_user
from tasks.runs.status import load_status
from tasks.tracking.mlflow_sync import is_left
from tests.champions import make_champion
from tests.services import ROOT, Services, new_services
from tests.waiting import until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]
DOCS = ROOT / "docs"


def blocks(page: str) -> list[str]:
    """The commands of a page, with the smallest profile, whose PPO no GPU's worker computes."""
    return re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text().replace("demo", "tiny"), re.S)


def docker(services: Services, script: str) -> str:
    """Run a page's commands where `docker compose` is tests/services.py, and return what they print."""
    shim = services.folder / "bin/docker"
    if not shim.exists():
        shim.write_text('#!/bin/sh\nshift\nexec python -m tests.services "$@"\n')
        shim.chmod(0o755)
        (services.folder / "infra").symlink_to(ROOT / "infra")
    environment = services.environment("tether")
    done = subprocess.run(
        ["bash", "-ec", script], cwd=services.folder, capture_output=True, text=True,
        env={name: environment[name] for name in ("PATH", "PYTHONPATH", "LC_ALL")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """What is there after all commands of the page but the last, which ends the services."""
    with new_services() as services:
        (services.folder / "said").write_text(docker(services, "".join(blocks("operations.md")[:-1])))
        yield services
        docker(services, blocks("operations.md")[-1])
        assert services.pids() == {}, "the last command leaves nothing"


@pytest.fixture
def client(services: Services, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of another machine, which reaches the servers by TLS (docs/operations/containers.md)."""
    found = services.client()
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    return found


def ask(client: dict[str, str], path: str, body: dict[str, Any] | None = None, password: str = "") -> Any:
    """What Prefect (`api/...`) or MLflow (`mlflow/...`) answers to the user `tether`."""
    if path.startswith("api/"):
        url, login = client["PREFECT_API_URL"] + path[3:], client["PREFECT_API_AUTH_STRING"]
    else:
        url, login = f"{client['MLFLOW_TRACKING_URI']}/api/2.0/{path}", f"tether:{client['MLFLOW_TRACKING_PASSWORD']}"
    user = base64.b64encode((f"tether:{password}" if password else login).encode()).decode()
    headers = {"Authorization": f"Basic {user}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    trust = ssl.create_default_context(cafile=client["SSL_CERT_FILE"])
    with urllib.request.urlopen(request, context=trust, timeout=60) as answer:
        return json.load(answer)


def test_the_pages_commands_deploy_a_run_that_prefect_mlflow_and_s3_have(
    services: Services, client: dict[str, str]
) -> None:
    said = (services.folder / "said").read_text()
    assert "accepts the credentials" in said and "human_eval" in said and "is up to date" in said
    flows = ask(client, "api/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}})
    [flow] = [each for each in flows if each["deployment_id"]]
    assert flow["state_name"] == "Completed" and flow["run_count"] == 1
    assert len(UrlPlace(client["TETHER_STORE"]).entries("records")) >= 5
    assert (services.folder / "backups/2026-11-23/servers/artifacts").is_dir()
    found = ask(client, "mlflow/experiments/search?max_results=9")["experiments"]
    experiments = [each["experiment_id"] for each in found]

    def finished() -> int:
        body = {"experiment_ids": experiments, "max_results": 100}
        found = ask(client, "mlflow/runs/search", body)["runs"]
        return sum(each["info"]["status"] == "FINISHED" for each in found)

    until("MLflow has the pipeline's run and its five stages'", lambda: finished() >= 6, 60)


def test_no_server_answers_without_its_password(services: Services, client: dict[str, str]) -> None:
    for path in ("api/admin/version", "mlflow/experiments/get?experiment_id=0"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(client, path, password="wrong")
        assert ask(client, path)
    place = UrlPlace(client["TETHER_STORE"])
    assert place.create("probe", b"1") and not place.create("probe", b"2") and place.read("probe") == b"1"
    place.remove("probe")
    for bucket, secret in (("tether", "wrong"), ("mlflow", client["AWS_SECRET_ACCESS_KEY"])):
        with pytest.raises(PermissionError):  # each identity has its own bucket
            S3FileSystem(key="s3-tether", secret=secret, endpoint_url=client["AWS_ENDPOINT_URL"]).ls(bucket)


def test_a_reader_is_refused_a_promotion_and_a_promoter_recorded(
    services: Services, client: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands of docs/operations/access.md."""
    people = {"reader": "liest-nur-4711", "promoter": "darf-mehr-4711"}
    make_champion(services.home)
    [commands] = blocks("operations/access.md")
    given = {"ADMINS-PASSWORD": services.secret("mlflow-admin"), "A-LONG-PASSWORD": people["reader"],
             "ANOTHER-PASSWORD": people["promoter"]}  # fmt: skip
    for placeholder, password in given.items():
        commands = commands.replace(placeholder, password)
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", commands], cwd=services.folder, check=True)
    for user, password in people.items():
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        if user == "reader":
            with pytest.raises(Exception, match=r"MLflow does not let the user reader do that \(403\)"):
                demoted(services.home, "tether-policy/1", current_user(), "a trial")
    assert "is demoted: a trial" in demoted(services.home, "tether-policy/1", current_user(), "a trial")
    assert promoted(services.home, "tether-policy/1", current_user(), "") == "tether-policy/1 is champion now."


def test_no_password_is_in_a_command_line_log_file_or_database(services: Services) -> None:
    forms = services.passwords()

    def holders(paths: Iterator[Path]) -> list[str]:
        found = []
        for path in paths:
            try:
                text = path.read_bytes() if path.is_file() else b""
            except OSError:  # a process that has ended
                continue
            found += [str(path)] * any(form in text for form in forms)
        return found

    assert holders(Path("/proc").glob("[0-9]*/cmdline")) == []
    (services.folder / "run/secret").write_bytes(next(iter(forms)))
    assert holders(services.folder.glob("run/secret")) != []
    for name in ("volumes/home", "volumes/databases", "volumes/prefect", "logs", "backups", "said"):
        assert (services.folder / name).exists()
        assert holders((services.folder / name).rglob("*") if name != "said" else iter([services.folder / name])) == []


TABLES = {
    "prefect": ("flow_run", "deployment", "block_document", "configuration"),
    "mlflow_auth": ("users",),
    "mlflow": ("runs", "metrics", "params", "tags", "model_versions", "registered_model_aliases"),
}
"""Tables that no server changes by itself, by database."""


def counted(services: Services) -> dict[str, str]:
    """How many rows these tables have, and a digest of all that is in them."""
    row = "(to_jsonb(t) - array['last_polled', 'updated'])::text"  # a worker that asks for runs writes these two
    found = {}
    for role, names in TABLES.items():
        password = services.secret(f"postgres-{role.replace('_', '-')}")
        for name in names:
            query = f"select count(*), md5(string_agg({row}, ',' order by {row})) from {name} t"
            where = ["-h", "127.0.0.1", "-p", str(services.ports["5432"]), "-U", role, "-d", role]
            given = {**os.environ, "PGPASSWORD": password}
            done = subprocess.run(["psql", *where, "-Atc", query], env=given, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found[f"{role}.{name}"] = done.stdout
    return found


def told(services: Services) -> list[str]:
    """What a terminal is told of the run, the registry and the store."""
    [run] = [path.name for path in services.home.glob("runs/*")]
    found = []
    for command in ("runs --json", f"lineage {run} --json", "lineage tether-policy/1 --json", "store ls --json"):
        done = services.run("tether", *command.split())
        assert done.returncode == 0, (command, done.stderr)
        found.append(done.stdout)
    return found


def test_after_a_loss_a_restore_gives_the_same_and_a_rerun_hits(services: Services) -> None:
    [run] = services.home.glob("runs/*")
    until("the run has told its end", lambda: load_status(services.home, run.name).state != "running", 120)
    until("MLflow has all of it", lambda: not is_left(run), 120)
    before, counts = told(services), counted(services)
    (services.folder / "counts.json").write_text(json.dumps(counts))
    shutil.rmtree(services.folder / "backups/2026-11-23")
    docker(services, blocks("operations.md")[-3])
    docker(services, blocks("operations.md")[-1])
    for name in ("home", "databases", "s3", "objects", "prefect"):
        shutil.rmtree(services.folder / "volumes" / name, ignore_errors=True)
    first, again, _ = blocks("operations/backup.md")[-1].splitlines()
    docker(services, f"{first}\n{again}")
    assert counted(services) == counts
    refused = services.run("backup", "restore", "/backups/2026-11-23")
    assert refused.returncode == 2 and "is not empty" in refused.stderr
    shutil.move(services.home, services.folder / "volumes/other")
    refused = services.run("backup", "restore", "/backups/2026-11-23")
    assert refused.returncode == 2 and "PREFECT_API_DATABASE_CONNECTION_URL" not in refused.stderr
    assert "the database mlflow_auth (MLFLOW_AUTH_CONFIG_PATH) has tables" in refused.stderr
    services.home.rmdir()
    shutil.move(services.folder / "volumes/other", services.home)
    services.up("prefect", "mlflow", "tls")
    services.until_healthy("mlflow")
    assert told(services) == before
    rerun = services.run("tether", "run", "tiny", "--set", "runners.ppo=local")
    assert rerun.returncode == 0 and "Nothing was computed: every stage was found in the store." in rerun.stdout


def test_a_backup_of_a_tether_stack_is_restored_into_the_services(services: Services) -> None:
    """Format 1, which the last release wrote: the same files in other folders, with the stack's config."""
    counts, old = json.loads((services.folder / "counts.json").read_text()), services.folder / "old"
    shutil.copytree(services.folder / "backups/2026-11-23", old)
    (old / "servers").rename(old / "stack")
    (old / "shared").rename(old / "stack/store")
    body = json.loads((old / MANIFEST).read_text())["backup"]
    text = json.dumps(body["files"]).replace('"shared/', '"stack/store/').replace('"servers/', '"stack/')
    body |= {"schema_version": 1, "files": json.loads(text), "shared": "", "stack": {"folder": None}}
    (old / MANIFEST).write_text(json.dumps({"backup": body, "sha256": digest_json(body)}))
    with new_services() as other:
        old.rename(other.folder / "backups/old")
        other.up("postgres", "s3")
        done = other.run("backup", "restore", "/backups/old")
        assert done.returncode == 0, done.stderr
        assert "stack/secrets/passwords.json" in done.stdout
        assert counted(other) == counts, "as it was when the test above made the backup"
        listed = other.run("tether", "store", "verify")
        assert listed.returncode == 0, listed.stdout + listed.stderr


def test_mlflows_database_is_upgraded_by_the_pages_command(services: Services) -> None:
    text = (DOCS / "operations/upgrade.md").read_text()
    [command] = re.findall(r"^ {4}(docker compose run --rm mlflow .*)$", text, re.M)
    docker(services, command.replace("postgres:5432", f"127.0.0.1:{services.ports['5432']}"))
