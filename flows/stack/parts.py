"""The parts of a stack: each one's command, environment and config files. Passwords are only in environments and in
files of mode 600; the databases' URLs contain none (libpq and asyncpg read `PGPASSFILE`).
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from flows.deployment.servers import worker_services
from flows.deployment.supervision import Service
from flows.stack.config import LOOPBACK, MLFLOW_POOL, Stack
from flows.stack.secrets import exports

POSTGRES, S3, PREFECT, MLFLOW, TLS = "postgres", "s3", "prefect", "mlflow", "tls"
VOLUME_MB = 1024
"""Size of SeaweedFS's volume files, which grow as they are filled."""


class StackPart(NamedTuple):
    """One supervised process."""

    service: Service
    level: int
    """It is started once all parts of lower levels accept connections, and stopped before them."""
    ports: tuple[tuple[str, int], ...] = ()
    """Addresses and ports that it listens on."""


def stack_parts(stack: Stack, passwords: dict[str, str]) -> list[StackPart]:
    """Return all parts, in the order of their levels."""
    return [_postgres(stack), _s3(stack), _prefect(stack, passwords), _mlflow(stack, passwords), _tls(stack),
            *_workers(stack, passwords)]  # fmt: skip


def part_names(stack: Stack) -> list[str]:
    """Return the parts' names, in the order of their levels."""
    return [POSTGRES, S3, PREFECT, MLFLOW, TLS, *(worker_part(pool) for pool in stack.config.workers)]


def worker_part(pool: str) -> str:
    """Return the name of the part that runs a pool's worker."""
    return f"worker-{pool}"


def worker_name(pool: str) -> str:
    """Return the name of a pool's worker on Prefect's page."""
    return f"{socket.gethostname()}-{pool}"


def write_configs(stack: Stack) -> None:
    """Write the files that MLflow's basic auth and Caddy read; they hold no password."""
    _auth_file(stack).write_text(
        "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
        f"database_uri = {_database(stack, 'mlflow_auth')}\n"
        "auth_cache_ttl_seconds = 60\n"  # otherwise each call computes PBKDF2
    )
    config, ports = stack.config, stack.config.ports
    own = "tls internal" if stack.certificate is None else f'tls "{stack.certificate}" "{stack.key}"'
    # A client that uses an address instead of a name sends no name in the handshake.
    default = f"\tdefault_sni {config.name}\n" if config.name.replace(".", "").isdigit() else ""
    fronts = {"prefect": ports.prefect_server, "mlflow": ports.mlflow_server, "s3": ports.s3_server}
    sites = (f"{stack.url(name)} {{\n\t{own}\n\treverse_proxy {LOOPBACK}:{port}\n}}\n" for name, port in fronts.items())
    _caddy_file(stack).write_text(
        "{\n\tadmin off\n\tpersist_config off\n\tskip_install_trust\n\tauto_https disable_redirects\n"
        f"{default}\tdefault_bind {config.listen}\n"
        "\tservers {\n\t\tprotocols h1 h2\n\t}\n\tlog {\n\t\tlevel WARN\n\t}\n}\n" + "".join(sites)
    )


def postgres_user(stack: Stack) -> str | None:
    """Return the user who runs PostgreSQL if it is not the current one: root must not run it."""
    return stack.config.postgres.user if os.geteuid() == 0 else None


def _auth_file(stack: Stack) -> Path:
    return stack.folder / "mlflow-auth.ini"


def _caddy_file(stack: Stack) -> Path:
    return stack.folder / "Caddyfile"


def _database(stack: Stack, role: str) -> str:
    return f"postgresql+psycopg://{role}@{LOOPBACK}:{stack.config.ports.postgres}/{role}"


def _postgres(stack: Stack) -> StackPart:
    port = stack.config.ports.postgres
    settings = {
        "listen_addresses": LOOPBACK,
        "unix_socket_directories": "",
        "max_connections": str(stack.config.postgres.connections),
    }
    command = [
        str(stack.postgres_programs / "postgres"), "-D", str(stack.database), "-p", str(port),
        *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
    ]  # fmt: skip
    # SIGINT is its fast shutdown; SIGTERM would wait until every client has left.
    service = Service(POSTGRES, f"{LOOPBACK}:{port}", command, bare=True, user=postgres_user(stack), stop=signal.SIGINT)
    return StackPart(service, 0, ((LOOPBACK, port),))


def _s3(stack: Stack) -> StackPart:
    ports = stack.config.ports
    options = {
        "ip": LOOPBACK, "ip.bind": LOOPBACK, "dir": stack.folder / "s3", "master.port": ports.s3_master,
        "master.telemetry": "false", "master.volumeSizeLimitMB": VOLUME_MB, "volume.port": ports.s3_volume,
        "volume.max": 0, "volume.preStopSeconds": 1,
        "filer": "true", "filer.port": ports.s3_filer, "s3": "true", "s3.port": ports.s3_server,
        "s3.config": stack.secrets / "s3.json", "s3.iam": "false", "s3.port.iceberg": 0, "s3.port.lance": 0,
    }  # fmt: skip
    # With 10 s before its volumes stop, it took 30 s to end and was killed; with 1 s it takes 17 s.
    for name in ("master", "volume", "filer", "s3"):
        options[f"{name}.port.grpc"] = getattr(ports, "s3_server" if name == "s3" else f"s3_{name}") + 10_000
    command = [str(stack.program("weed")), "-logtostderr=true", "server"]
    command += [f"-{name}={value}" for name, value in options.items()]
    port = ports.s3_server
    # Without a limit, Go lets the heap grow to twice its live size before it collects garbage.
    environment = {"HOME": str(stack.folder / "s3"), "GOMEMLIMIT": "256MiB"}
    return StackPart(Service(S3, stack.url("s3"), command, None, environment, bare=True), 0, ((LOOPBACK, port),))


def _prefect(stack: Stack, passwords: dict[str, str]) -> StackPart:
    ports, user = stack.config.ports, exports(stack, passwords)["PREFECT_API_AUTH_STRING"]
    environment = {
        "PREFECT_HOME": str(stack.folder / "prefect"),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://prefect@{LOOPBACK}:{ports.postgres}/prefect",
        "PGPASSFILE": str(stack.secrets / "pgpass"),
        "PREFECT_SERVER_API_AUTH_STRING": user,
        "PREFECT_API_AUTH_STRING": user,  # its own services are clients too
        "PREFECT_API_URL": f"http://{LOOPBACK}:{ports.prefect_server}/api",
        "PREFECT_SERVER_UI_API_URL": f"{stack.url('prefect')}/api",  # the address that the page asks in a browser
        "PREFECT_UI_URL": stack.url("prefect"),  # for links in notifications
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # If leases were kept only in memory, slots of a limit that were taken before a restart would stay taken.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK]
    command += ["--port", str(ports.prefect_server)]
    service = Service(PREFECT, stack.url("prefect"), command, f"{stack.url('prefect')}/api/health", environment)
    return StackPart(service, 1, ((LOOPBACK, ports.prefect_server),))


def _mlflow(stack: Stack, passwords: dict[str, str]) -> StackPart:
    ports, config = stack.config.ports, stack.config
    environment = {
        "PYTHONPATH": os.pathsep.join([str(stack.programs), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PGPASSFILE": str(stack.secrets / "pgpass"),
        "MLFLOW_AUTH_CONFIG_PATH": str(_auth_file(stack)),
        "MLFLOW_AUTH_ADMIN_PASSWORD": passwords["mlflow_admin"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": passwords["mlflow_session"],
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # uvicorn kills a process that is busy for 5 s, together with its uploads.
        "MLFLOW_UVICORN_OPTS": "--timeout-worker-healthcheck 120",
        # Each process has a pool for runs, one for models and one for users.
        "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": str(MLFLOW_POOL // 2),
        "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": str(MLFLOW_POOL - MLFLOW_POOL // 2),
        "MLFLOW_S3_ENDPOINT_URL": f"http://{LOOPBACK}:{ports.s3_server}",
        "AWS_SHARED_CREDENTIALS_FILE": str(stack.secrets / "aws"),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    hosts = [f"{config.name}:{ports.mlflow}", f"{LOOPBACK}:{ports.mlflow_server}"]
    command = [
        sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--backend-store-uri",
        _database(stack, "mlflow"), "--artifacts-destination", "s3://mlflow/artifacts", "--host", LOOPBACK,
        "--port", str(ports.mlflow_server), "--workers", str(config.mlflow_processes),
        "--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", stack.url("mlflow"),
    ]  # fmt: skip
    service = Service(MLFLOW, stack.url("mlflow"), command, f"{stack.url('mlflow')}/health", environment)
    return StackPart(service, 1, ((LOOPBACK, ports.mlflow_server),))


def _tls(stack: Stack) -> StackPart:
    config, ports = stack.config, stack.config.ports
    fronts = (ports.prefect, ports.mlflow, ports.s3)
    folder = str(stack.folder / "tls")
    environment = {"XDG_DATA_HOME": folder, "XDG_CONFIG_HOME": folder, "HOME": folder}
    command = [str(stack.program("caddy")), "run", "--config", str(_caddy_file(stack)), "--adapter", "caddyfile"]
    address = f"{config.listen}:{', '.join(map(str, fronts))}"
    service = Service(TLS, address, command, None, environment, bare=True)
    return StackPart(service, 1, tuple((config.listen, port) for port in fronts))


def _workers(stack: Stack, passwords: dict[str, str]) -> list[StackPart]:
    found = []
    for pool, service in zip(stack.config.workers, worker_services(stack.config.workers), strict=True):
        found.append(
            StackPart(
                service._replace(
                    name=worker_part(pool),
                    command=[*(service.command or []), "--name", worker_name(pool)],
                    environment={**exports(stack, passwords), **service.environment},
                ),
                2,
            )
        )
    return found
