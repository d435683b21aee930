"""infra/compose.yaml, run by podman-compose: every service but PostgreSQL, whose image only a registry has.

All containers share one network of their own that has loopback alone: no port of this machine is taken, and the file's
ports are used as they stand. PostgreSQL is this machine's, in that network; the file's own script makes its databases.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers.engine import IMAGE, LIMITS, SERVERS, TOOLS, UID, Engine
from tests.postgresql import PostgresqlCluster
from tests.services import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]
COMPOSE = ROOT / "infra" / "compose.yaml"
CONFIG = yaml.safe_load(COMPOSE.read_text())
SERVICES = CONFIG["services"]
NAMES = ("postgres", "s3", "prefect", "mlflow", "tls")


class Project:
    """The compose file's services in a network of their own."""

    def __init__(self, containers: Engine, folder: Path) -> None:
        self.containers, self.folder = containers, folder
        made = containers.podman(
            "run", "--detach", "--name", "network", "--network", "none", *LIMITS,
            "--entrypoint", "sleep", IMAGE, "infinity",
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        self.process = containers.podman("inspect", "--format", "{{.State.Pid}}", "network").stdout.strip()
        (folder / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *NAMES)))
        # Podman's health checks need systemd; the test calls them.
        other = {"network_mode": "container:network", "healthcheck": {"disable": True}}
        (folder / "network.yaml").write_text(yaml.safe_dump({"services": dict.fromkeys(SERVICES, other)}))
        self.secrets = folder / "secrets"
        subprocess.run(["sh", str(ROOT / "infra/secrets.sh"), str(self.secrets)], check=True)
        self.backups = folder / "backups"
        self.backups.mkdir()
        os.chown(self.backups, UID, UID)

    def compose(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """`podman-compose`."""
        began = time.monotonic()
        options = [*LIMITS, "--volume", f"{self.folder / 'hosts'}:/etc/hosts:ro"]
        done = self.containers.command(
            str(TOOLS / "bin/podman-compose"), "--in-pod", "false",
            "--podman-args", " ".join(self.containers.podman_options),
            "--podman-run-args", " ".join(options),
            "--file", str(COMPOSE), "--file", str(self.folder / "network.yaml"),
            "--project-name", "tether", "--profile", "command", *words,
            PYTHONPATH=str(TOOLS), TETHER_IMAGE=IMAGE, TETHER_SERVERS_IMAGE=SERVERS, TETHER_SECRETS=str(self.secrets),
            TETHER_BACKUPS=str(self.backups),
        )  # fmt: skip
        print(f"{time.monotonic() - began:6.1f} s  podman-compose {' '.join(words[:4])}")
        return done

    def up(self, service: str) -> None:
        """Start a service, without those that it depends on."""
        done = self.compose("up", "--detach", "--no-deps", service)
        assert self.state(service) in ("running", "exited"), done.stdout + done.stderr

    def state(self, service: str) -> str:
        """Of a service's container."""
        return self.containers.podman("inspect", "--format", "{{.State.Status}}", f"tether_{service}_1").stdout.strip()

    def inside(self, service: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command in a service's container."""
        return self.containers.podman("exec", f"tether_{service}_1", *words)

    def is_healthy(self, service: str) -> bool:
        """What the service's own health check says."""
        kind, *words = SERVICES[service]["healthcheck"]["test"]
        assert kind == "CMD"
        time.sleep(2)  # each starts an interpreter
        return self.inside(service, *words).returncode == 0

    def log(self, service: str) -> str:
        """What a service has printed."""
        done = self.containers.podman("logs", f"tether_{service}_1")
        return done.stdout + done.stderr

    def on_network(self, *words: str) -> list[str]:
        """A command of this machine's on the network of the containers."""
        return ["nsenter", f"--net=/proc/{self.process}/ns/net", *words]

    def end(self) -> None:
        """Remove every container and volume of the project."""
        for service in SERVICES:
            self.containers.podman("rm", "--force", "--time", "20", f"tether_{service}_1")
        self.containers.podman("rm", "--force", "--time", "0", "network")
        for volume in CONFIG["volumes"]:
            self.containers.podman("volume", "rm", f"tether_{volume}")


@pytest.fixture(scope="module")
def project(containers: Engine) -> Iterator[Project]:
    folder = Path(tempfile.mkdtemp(prefix="tether-compose-"))
    folder.chmod(0o755)
    project = Project(containers, folder)
    try:
        yield project
    finally:
        for service in SERVICES:
            (folder / f"{service}.log").write_text(project.log(service))
        project.end()
        if os.environ.get("TETHER_KEEP_SERVICES") != "1":
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def postgres(project: Project) -> Iterator[Path]:
    """PostgreSQL as its image runs it: a new cluster, the script over a socket, then the server."""
    cluster = PostgresqlCluster(
        project.folder / "postgres", "-U", "postgres", "--auth-local=trust", "--auth-host=scram-sha-256"
    )
    cluster.make_databases(5432, project.secrets)
    server = cluster.server(5432, *SERVICES["postgres"]["command"][1:], prefix=tuple(project.on_network()))
    yield cluster.folder
    server.send_signal(2)
    server.wait()


@pytest.fixture(scope="module")
def servers(project: Project, postgres: Path) -> Project:
    for service in ("s3", "prefect", "mlflow", "tls"):
        project.up(service)
    for service in ("prefect", "mlflow"):
        until(f"{service} is healthy", lambda service=service: project.is_healthy(service), 600)
    project.up("prepare")
    until("the servers are prepared", lambda: project.state("prepare") == "exited", 600)
    assert "MLflow's user tether: done" in project.log("prepare"), project.log("prepare")
    return project


def test_each_role_enters_its_own_database_with_its_password_alone(servers: Project, postgres: Path) -> None:
    def enters(role: str, database: str, password: str) -> bool:
        words = ["psql", "-h", "127.0.0.1", "-U", role, "-d", database, "-Atc", "select 1"]
        done = subprocess.run(
            servers.on_network(*words), env={**os.environ, "PGPASSWORD": password}, capture_output=True
        )
        return done.returncode == 0

    roles = {
        role: (servers.secrets / f"postgres-{role.replace('_', '-')}").read_text()
        for role in ("prefect", "mlflow", "mlflow_auth")
    }
    assert all(enters(role, role, password) for role, password in roles.items())
    assert not any(
        enters(role, other, password)
        for role, password in roles.items()
        for other in (*roles, "postgres", "template1")
        if other != role
    )
    assert not enters("prefect", "prefect", roles["mlflow"])


def test_every_service_is_restricted_as_the_file_says(servers: Project) -> None:
    for service in ("s3", "prefect", "mlflow", "tls"):
        said = servers.inside(
            service, "sh", "-c", "id -u; grep -E 'CapEff|NoNewPrivs' /proc/1/status; echo x > /etc/probe || echo kept"
        ).stdout
        assert said.split() == ["10001", "CapEff:", "0" * 16, "NoNewPrivs:", "1", "kept"], (service, said)


def test_clients_reach_the_servers_by_tls_and_only_with_a_password(servers: Project) -> None:
    volume = servers.containers.podman("volume", "inspect", "--format", "{{.Mountpoint}}", "tether_tls").stdout
    authority = Path(volume.strip()) / "caddy/pki/authorities/local/root.crt"
    until("Caddy has made its authority", authority.exists, 60)
    ask = (
        "import ssl, sys, urllib.request as u, urllib.error as e\n"
        "def ask(url):\n"
        "    try: return u.urlopen(url, context=ssl.create_default_context(cafile=sys.argv[1]), timeout=20).status\n"
        "    except e.HTTPError as error: return error.code\n"
        "print([ask('https://localhost:' + path) for path in sys.argv[2:]])"
    )
    paths = [
        "9420/api/ready",
        "9420/api/admin/version",
        "9421/health",
        "9421/api/2.0/mlflow/experiments/get?experiment_id=0",
        "9423/tether",
    ]
    done = subprocess.run(
        servers.on_network(sys.executable, "-c", ask, str(authority), *paths), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[200, 401, 200, 401, 403]", done.stdout + done.stderr


def test_a_deployed_run_is_computed_by_the_worker_and_kept(servers: Project) -> None:
    done = servers.compose("run", "--rm", "--no-deps", "-T", "tether", "deploy", "tiny", "--set", "runners.ppo=local")
    assert done.returncode == 0 and "rlhf/tiny" in done.stdout, done.stdout + done.stderr
    servers.up("worker-cpu")
    began = time.monotonic()
    ordered = servers.inside("worker-cpu", "with-secrets", "prefect", "deployment", "run", "rlhf/tiny", "--watch")
    print(f"{time.monotonic() - began:6.1f} s  a deployed run")
    assert ordered.returncode == 0, ordered.stdout + ordered.stderr + servers.log("worker-cpu")
    said = servers.inside("worker-cpu", "with-secrets", "tether", "status").stdout
    assert "passed" in said and "human_eval" in said, said
    look = servers.inside("worker-cpu", "with-secrets", "tether", "doctor")
    assert look.returncode == 0, look.stdout + look.stderr
    done = servers.compose("run", "--rm", "--no-deps", "-T", "backup", "backup", "/backups/one")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (servers.backups / "one/servers/databases").iterdir()}
    assert names == {"mlflow.dump", "mlflow_auth.dump", "prefect.dump"}
    began = time.monotonic()
    servers.compose("stop", "worker-cpu")
    code = servers.containers.podman("inspect", "--format", "{{.State.ExitCode}}", "tether_worker-cpu_1").stdout
    assert code.strip() == "0" and time.monotonic() - began < 45, servers.log("worker-cpu")


def test_a_server_without_its_database_is_not_healthy(servers: Project, postgres: Path) -> None:
    """/api/health answers 200 then."""
    pid = int((postgres / "data/postmaster.pid").read_text().split()[0])
    assert servers.is_healthy("prefect")
    os.kill(pid, 2)
    until("Prefect is not healthy any more", lambda: not servers.is_healthy("prefect"), 60)
