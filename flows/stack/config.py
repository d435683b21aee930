"""`infra/stack.yaml`: what to start and where. Every value is set in that file; there are no defaults here."""

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
"""The largest number of connections of one MLflow pool; it keeps half of them open."""

Port = Annotated[int, Field(ge=1, le=55535)]
"""SeaweedFS uses a second port, 10000 above."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$")]
Pool = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class Ports(Settings):
    """TCP ports, each different."""

    prefect: Port
    """For clients, with TLS, as the next two."""
    mlflow: Port
    s3: Port
    postgres: Port
    """This port and those below listen only on loopback."""
    prefect_server: Port
    mlflow_server: Port
    s3_server: Port
    """The S3 API; the next three ports are SeaweedFS's own."""
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
        """Return every port that is listened on, by the name of its server."""
        own: dict[str, int] = self.model_dump()
        return own | {f"{name} (gRPC)": port + 10_000 for name, port in own.items() if name.startswith("s3_")}


class Postgres(Settings):
    """The database server."""

    programs: str | None
    """Folder of `initdb` and `postgres`; null: the newest of Debian's packages."""
    user: str
    """The user who runs it if the stack is started by root."""
    connections: Annotated[int, Field(ge=20, le=1000)]
    """The largest number of connections at once."""


class StackConfig(Settings):
    """The whole config file."""

    folder: str | None
    """The folder for all data; null: `stack` in the home."""
    programs: str
    """Folder of Caddy, SeaweedFS and MLflow's database driver, relative to the project."""
    listen: Annotated[str, Field(pattern=r"^[0-9A-Fa-f.:]+$")]
    """Address on which TLS listens."""
    name: Name
    """The name by which clients reach this machine."""
    certificate: str | None
    """A certificate chain (PEM) for that name; null: Caddy creates its own authority."""
    key: str | None
    """The certificate's key (PEM)."""
    authority: str | None
    """The authority that signed the certificate (PEM), if machines do not trust it anyway."""
    ports: Ports
    postgres: Postgres
    mlflow_processes: Annotated[int, Field(ge=1, le=64)]
    """Number of processes that answer MLflow's requests."""
    log_megabytes: Annotated[float, Field(gt=0)]
    """A part's log is emptied above this size; its last content is kept next to it."""
    workers: dict[Pool, Annotated[int, Field(ge=1, le=64)]]
    """For each pool the number of runs that its worker takes at once."""

    @model_validator(mode="after")
    def _both(self) -> "StackConfig":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate, key: give both, or null for both")
        if self.authority is not None and self.certificate is None:
            raise ValueError("authority: it needs a certificate that it signed; give one, or set it to null")
        return self

    @model_validator(mode="after")
    def _enough_connections(self) -> "StackConfig":
        # Prefect's pool opens 15; MLflow's parent keeps 4, and each of its processes has three pools; PostgreSQL
        # reserves 3.
        least = 15 + 4 + 3 * MLFLOW_POOL * self.mlflow_processes + 3
        if self.postgres.connections < least:
            raise ValueError(
                f"postgres.connections: {self.postgres.connections} are too few for Prefect and "
                f"{self.mlflow_processes} processes of MLflow, which open up to {least - 3}; give at least {least}"
            )
        return self


class Stack:
    """A stack on this machine: its config and the places of its files."""

    def __init__(self, config: StackConfig, home: Path) -> None:
        self.config, self.home = config, home
        self.folder = user_path(config.folder, "folder").absolute() if config.folder else home / "stack"
        if not re.fullmatch(r"[A-Za-z0-9/_.+@=,~-]+", str(self.folder)):
            raise UserError(
                f"folder = {self.folder}: the servers' own config files can't contain such a path. Choose one with "
                f"only letters, digits and / _ . + @ = , ~ -."
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
        """Return the URL of prefect, mlflow or s3 for clients."""
        return f"https://{self.config.name}:{getattr(self.config.ports, server)}"

    @property
    def has_authority(self) -> bool:
        """Return whether clients need `ca.crt`, because they do not trust the certificate's authority by default."""
        return self.certificate is None or self.authority is not None

    @property
    def postgres_programs(self) -> Path:
        """Return the folder of `initdb` and `postgres`.

        Raises:
            UserError: PostgreSQL is not installed.
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
            UserError: the program is not installed.
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
