"""`infra/stack.yaml`: what is started and where. Every value stands in that file; there are no defaults here."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from components.base.errors import UserError
from components.base.paths import user_path
from components.base.settings import Settings
from flows.config.errors import explain
from flows.config.yaml import read_mapping

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / "infra" / "stack.yaml"
LOOPBACK = "127.0.0.1"
MLFLOW_POOL = 6
"""Connections that one of MLflow's pools opens at most; it keeps half of them."""

Port = Annotated[int, Field(ge=1, le=55535)]
"""SeaweedFS adds 10000 for a second one."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$")]
Pool = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class Ports(Settings):
    """TCP ports, one each."""

    prefect: Port
    """Of clients, with TLS, as the next two."""
    mlflow: Port
    s3: Port
    postgres: Port
    """From here on on loopback alone."""
    prefect_server: Port
    mlflow_server: Port
    s3_server: Port
    """The S3 API; the next three are SeaweedFS's own."""
    s3_master: Port
    s3_volume: Port
    s3_filer: Port

    @model_validator(mode="after")
    def _differ(self) -> "Ports":
        seen: dict[int, str] = {}
        for name, port in self.all().items():
            if port in seen:
                raise ValueError(f"ports.{name}: {port} is taken by {seen[port]}")
            seen[port] = name
        return self

    def all(self) -> dict[str, int]:
        """Return every port that is listened on, by what listens."""
        own: dict[str, int] = self.model_dump()
        return own | {f"{name} (gRPC)": port + 10_000 for name, port in own.items() if name.startswith("s3_")}


class Postgres(Settings):
    """The database server."""

    programs: str | None
    """Folder of `initdb` and `postgres`; null: the newest of Debian's."""
    user: str
    """Who runs it where we are root."""
    connections: Annotated[int, Field(ge=20, le=1000)]
    """At most so many at once."""


class StackConfig(Settings):
    """The whole file."""

    folder: str | None
    """Where everything is kept; null: `stack` below the home."""
    programs: str
    """Folder of Caddy, SeaweedFS and MLflow's driver, relative to the project's."""
    listen: Annotated[str, Field(pattern=r"^[0-9A-Fa-f.:]+$")]
    """Address that TLS listens on."""
    name: Name
    """What clients call this machine."""
    certificate: str | None
    """A chain of certificates (PEM) for that name; null: Caddy makes an authority of its own."""
    key: str | None
    """Of the certificate."""
    authority: str | None
    """Who signed the certificate (PEM), where machines do not trust it anyway."""
    ports: Ports
    postgres: Postgres
    mlflow_processes: Annotated[int, Field(ge=1, le=64)]
    """That answer MLflow's requests."""
    log_megabytes: Annotated[float, Field(gt=0)]
    """A part's log is emptied above that; what it held last stays beside it."""
    workers: dict[Pool, Annotated[int, Field(ge=1, le=64)]]
    """A worker for each pool, and how many runs it takes at once."""

    @model_validator(mode="after")
    def _both(self) -> "StackConfig":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate, key: give both, or null for both")
        if self.authority is not None and self.certificate is None:
            raise ValueError("authority: there is no certificate that it could have signed; give one, or null")
        return self

    @model_validator(mode="after")
    def _enough_connections(self) -> "StackConfig":
        # Prefect's pool opens 15; MLflow's parent keeps 4, each of its processes has three pools; 3 are PostgreSQL's.
        least = 15 + 4 + 3 * MLFLOW_POOL * self.mlflow_processes + 3
        if self.postgres.connections < least:
            raise ValueError(
                f"postgres.connections: {self.postgres.connections} are too few for Prefect and "
                f"{self.mlflow_processes} processes of MLflow, which open up to {least - 3}; give at least {least}"
            )
        return self


class Stack:
    """A stack on this machine: its config and where its files are."""

    def __init__(self, config: StackConfig, home: Path) -> None:
        self.config, self.home = config, home
        self.folder = user_path(config.folder, "folder").absolute() if config.folder else home / "stack"
        if not re.fullmatch(r"[A-Za-z0-9/_.+@=,~-]+", str(self.folder)):
            raise UserError(
                f"folder = {self.folder}: the servers' own config files cannot hold such a path. Take one of letters, "
                f"digits and / _ . + @ = , ~ - alone."
            )
        self.programs = ROOT / user_path(config.programs, "programs")
        self.logs = self.folder / "logs"
        self.state = self.folder / "stack.json"
        self.lock = self.folder / "stack.lock"
        self.secrets = self.folder / "secrets"
        self.exports = self.folder / "client.env"
        self.database = self.folder / "postgres"
        self.certificate = _path(config.certificate, "certificate")
        self.key = _path(config.key, "key")
        self.authority = _path(config.authority, "authority")

    def url(self, server: str) -> str:
        """Return where clients find one of prefect, mlflow, s3."""
        return f"https://{self.config.name}:{getattr(self.config.ports, server)}"

    @property
    def has_authority(self) -> bool:
        """Return whether clients need `ca.crt`: the certificate is of an authority that they do not trust by
        themselves."""
        return self.certificate is None or self.authority is not None

    @property
    def postgres_programs(self) -> Path:
        """Return the folder of `initdb` and `postgres`.

        Raises:
            UserError: there is none.
        """
        named = self.config.postgres.programs
        folders = [user_path(named, "postgres.programs")] if named else sorted(
            Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: (len(path.parts[-2]), path.parts[-2])
        )  # fmt: skip
        for folder in reversed(folders):
            if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
                return folder
        raise UserError(
            f"PostgreSQL is not installed (looked for initdb and postgres in {named or '/usr/lib/postgresql/*/bin'}). "
            f"Run `make stack`, which installs it, or set postgres.programs in the stack's config."
        )

    def program(self, name: str) -> Path:
        """Return the path of `caddy` or `weed`.

        Raises:
            UserError: it is not there.
        """
        path = self.programs / "bin" / name
        if not os.access(path, os.X_OK):
            raise UserError(f"{path}: no such program. Run `make stack`, which installs it.")
        return path


def _path(text: str | None, name: str) -> Path | None:
    return None if text is None else user_path(text, name).absolute()


def load_stack(path: Path, home: Path) -> Stack:
    """Return the stack that a config file describes.

    Raises:
        UserError: the file cannot be read, or a value is wrong.
    """
    values = read_mapping(path)
    try:
        return Stack(StackConfig.model_validate(values), home)
    except ValidationError as error:
        raise UserError(explain(error, values, StackConfig, str(path))) from error
