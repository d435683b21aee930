"""PostgreSQL, S3, Prefect, MLflow and TLS for tests: the services of infra/compose.yaml as processes on loopback.

`python -m tests.services up --detach`, in a folder in which `sh infra/secrets.sh .tether/secrets` was called, does what
`docker compose up --detach` does, without containers: ports are free ones, volumes are folders in `volumes`.
"""

import base64
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.postgresql import PostgresqlCluster
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]
INFRA, PROGRAMS = ROOT / "infra", ROOT / ".tether" / "programs"
PORTS = ("5432", "4200", "5000", "8333", "9420", "9421", "9423", "master", "volume", "filer")
"""Those of the file, and SeaweedFS's own, whose defaults other tests' servers would have too."""


def free_ports(count: int) -> list[int]:
    """Free ports whose double (10000 more), SeaweedFS's for gRPC, is free too."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 10_000))
            found.add(port)
    return list(found)


class Services:
    """The services of compose.yaml in a folder; another process that names the folder goes on with them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._pids = folder, folder / "pids.json"
        self._started: list[subprocess.Popen[bytes]] = []
        if not all((PROGRAMS / "bin" / name).exists() for name in ("weed", "caddy")):
            pytest.skip("`sh infra/test-servers.sh .venv/bin/python .tether/programs` installs what this needs")
        for name in ("run", "logs", "backups"):
            (folder / name).mkdir(exist_ok=True)
        if not (folder / "ports.json").exists():
            (folder / "ports.json").write_text(json.dumps(dict(zip(PORTS, free_ports(len(PORTS)), strict=True))))
            shutil.copytree(INFRA / "image", folder / "bin")
            for path in (folder / "bin").iterdir():
                path.chmod(0o755)
        self.ports: dict[str, int] = json.loads((folder / "ports.json").read_text())
        self.secrets, self.home = folder / ".tether/secrets", folder / "volumes/home"
        self.authority = folder / "volumes/tls/caddy/pki/authorities/local/root.crt"
        self.file = yaml.safe_load(self._here((INFRA / "compose.yaml").read_text()))

    def _here(self, text: str) -> str:
        """The text of a file with the addresses of this machine."""
        text = re.sub(r"\$\{TETHER_NAME:-localhost\}", "localhost", text).replace("0.0.0.0", "127.0.0.1")
        text = re.sub(rf"\b({'|'.join(PORTS[:7])})\b", lambda port: str(self.ports[port[1]]), text)
        return re.sub(r"\b(postgres|prefect|mlflow|s3):(?=\d)", "127.0.0.1:", text)

    def secret(self, name: str) -> str:
        """A password."""
        return (self.secrets / name).read_text()

    def passwords(self) -> set[bytes]:
        """All passwords, and Prefect's login as a header has it."""
        names = [path.name for path in self.secrets.iterdir() if not path.name.startswith(("pgpass", "s3.json"))]
        found = {self.secret(name).encode() for name in names}
        return found | {base64.b64encode(self.secret("prefect-login").encode())}

    def pids(self) -> dict[str, int]:
        """The processes of the services that were started."""
        found: dict[str, int] = json.loads(self._pids.read_text()) if self._pids.exists() else {}
        return found

    def _places(self, service: dict[str, Any]) -> dict[str, str]:
        """Where what is mounted into a container is here."""
        found = {"/run/secrets": str(self.secrets)}
        for volume in service.get("volumes", ()):
            source, target = volume.removesuffix(":ro").rsplit(":", 1)
            path = self.folder / ("backups" if source.startswith("$") else f"volumes/{source}")
            if source.startswith("./"):  # a file, which names addresses too
                path = self.folder / "run" / Path(source).name
                text = self._here((INFRA / source).read_text())
                path.write_text(text.replace("\tadmin off", "\tadmin off\n\tdefault_bind 127.0.0.1"))
            elif target != "/var/lib/postgresql/data":
                path.mkdir(parents=True, exist_ok=True)
            found[target] = str(path)
        return found

    def environment(self, name: str) -> dict[str, str]:
        """What a command in a service's container has, and where the folder of its secrets is."""
        service, places = self.file["services"][name], self._places(self.file["services"][name])
        temporary, secrets = self.folder / "run" / name, self.folder / "run" / f"{name}.secrets"
        for folder in (temporary, secrets):
            folder.mkdir(mode=0o700, exist_ok=True)
        for each in service.get("secrets", ()):
            if isinstance(each, dict):
                shutil.copyfile(self.secrets / each["source"], secrets / each["target"])
        path = (self.folder / "bin", Path(sys.executable).parent, PROGRAMS / "bin", os.environ["PATH"])
        found = {
            "PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": f"{ROOT}{os.pathsep}{PROGRAMS}", "LC_ALL": "C.UTF-8",
            "SECRETS": str(secrets), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200",
            "TETHER_HOME": str(self.home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1",
            "XDG_DATA_HOME": places.get("/var/lib/servers", ""), "PREFECT_HOME": f"{temporary}/prefect",
            **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"), str(temporary)),
        }  # fmt: skip
        return found | {key: self._moved(str(value), places) for key, value in service.get("environment", {}).items()}

    @staticmethod
    def _moved(text: str, places: dict[str, str]) -> str:
        for target, path in places.items():
            text = re.sub(rf"(?<![\w/]){re.escape(target)}(?![\w-])", path, text)
        return text

    def command(self, name: str, *words: str) -> list[str]:
        """A service's command, or with `words` its entry point with them."""
        service = self.file["services"][name]
        command = [*service.get("entrypoint", []), *(words or service["command"])]
        if name == "s3":
            command += [f"-{part}.port={self.ports[part]}" for part in ("master", "volume", "filer")]
        places = self._places(service)
        return [self._moved(word, places) for word in command]

    def up(self, *names: str) -> None:
        """Start services, after those that they need; all without a profile if none is named."""
        for name in names or [name for name, each in self.file["services"].items() if "profiles" not in each]:
            service = self.file["services"][name]
            if name in self.pids() or (self.folder / "run" / f"{name}.done").exists():
                continue
            for need, how in service.get("depends_on", {}).items():
                self.up(need)
                if how["condition"] == "service_healthy":
                    self.until_healthy(need)
            if service.get("restart") == "on-failure":  # it makes something, and ends
                done = self.run(name)
                assert done.returncode == 0, done.stdout + done.stderr
                (self.folder / "run" / f"{name}.done").touch()
                continue
            with (self.folder / "logs" / f"{name}.log").open("ab") as log:
                process = self._postgres(service, log) if name == "postgres" else subprocess.Popen(
                    self.command(name), env=self.environment(name), cwd=self.folder, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            self._started.append(process)
            self._pids.write_text(json.dumps(self.pids() | {name: process.pid}))

    def _postgres(self, service: dict[str, Any], log: Any) -> subprocess.Popen[bytes]:
        """What PostgreSQL's image does."""
        folder, port = self.folder / "volumes/databases", self.ports["5432"]
        is_new, options = not (folder / "data").exists(), service["environment"]["POSTGRES_INITDB_ARGS"].split()
        how = ("-U", "postgres", "--auth-local=trust", "--auth-host=scram-sha-256", *options)
        cluster = PostgresqlCluster(folder, *how)
        if is_new:
            cluster.make_databases(port, self.secrets)
        return cluster.server(port, *service["command"][1:], log=log)

    def until_healthy(self, name: str) -> None:
        """Wait until a service is healthy; fail with its log at once if its process ends."""

        def ended() -> str:
            return (self.folder / "logs" / f"{name}.log").read_text()[-4000:] if _has_ended(self.pids()[name]) else ""

        until(f"{name} is healthy", lambda: self.is_healthy(name), 240, failed=ended, every=1)

    def is_healthy(self, name: str) -> bool:
        """What the service's own health check says."""
        words, port = self.file["services"][name]["healthcheck"]["test"][1:], {"PGPORT": str(self.ports["5432"])}
        return subprocess.run(words, env=self.environment(name) | port, capture_output=True).returncode == 0

    def run(self, name: str, *words: str, inside: bool = False) -> "subprocess.CompletedProcess[str]":
        """Run a service with other words (`docker compose run`), or a command beside it (`exec`)."""
        began, command = time.monotonic(), list(words) if inside else self.command(name, *words)
        done = subprocess.run(command, env=self.environment(name), cwd=self.folder, capture_output=True, text=True)
        print(f"{time.monotonic() - began:6.1f} s  {name} {' '.join(words[:3])}", file=sys.stderr)
        return done

    def client(self) -> dict[str, str]:
        """The variables of another machine, which reaches the servers by TLS."""
        service, port = self.file["services"]["tether"], self.ports
        found = service["environment"] | {each["target"]: self.secret(each["source"]) for each in service["secrets"]}
        found["PREFECT_API_URL"] = f"https://localhost:{port['9420']}/api"
        found["MLFLOW_TRACKING_URI"] = f"https://localhost:{port['9421']}"
        found["AWS_ENDPOINT_URL"] = f"https://localhost:{port['9423']}"
        return found | dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"), str(self.authority))

    def down(self, number: int | None = None) -> None:
        """End the services by their own process ids, the last one first; with `number` all by that signal."""
        for name, pid in reversed(self.pids().items()):
            stop = signal.Signals[self.file["services"][name].get("stop_signal", "SIGTERM")]
            with suppress(ProcessLookupError):
                os.kill(pid, number or stop)
            until(f"{name} has ended", lambda pid=pid: _has_ended(pid), 60)  # type: ignore[misc]
        self._pids.unlink(missing_ok=True)
        while self._started:
            self._started.pop().wait()


def _has_ended(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextmanager
def new_services() -> Iterator[Services]:
    """Services with passwords of their own, none of them started. With TETHER_KEEP_SERVICES=1 the folder stays."""
    folder = Path(tempfile.mkdtemp(prefix="tether-services-"))
    folder.chmod(0o755)  # PostgreSQL is another user's, where root runs the tests
    try:
        services = Services(folder)
        subprocess.run(["sh", str(INFRA / "secrets.sh"), str(services.secrets)], check=True)
        try:
            yield services
        finally:
            services.down(signal.SIGINT)
    finally:
        if os.environ.get("TETHER_KEEP_SERVICES") != "1":
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Do what `docker compose` does with these words, in this folder."""
    services = Services(Path.cwd())
    verb, *words = (word for word in sys.argv[1:] if word not in ("--rm", "--detach"))
    if verb in ("up", "down"):
        getattr(services, verb)(*words)
        return
    done = services.run(words[0], *words[1:], inside=verb == "exec")
    print(done.stdout, end="", flush=True)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
