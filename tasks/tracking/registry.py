"""Read MLflow's registered models: which artifact a version is, its aliases, and who promoted it."""

import re
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from tasks.tracking.mlflow_client import (
    VARIABLE,
    check_database,
    connect,
    database_file,
    in_short,
    load_mlflow,
    tracking_uri,
)
from tasks.tracking.model_versions import state_lines

_SPELLING = re.compile(r"[^@/'\"]+(@[\w.-]+|/\d+)?")


class Version(NamedTuple):
    """A version of a registered model."""

    name: str
    version: str
    aliases: tuple[str, ...]
    tags: dict[str, str]

    @property
    def digest(self) -> str:
        """Return the artifact's digest; empty if Tether did not make the version."""
        return self.tags.get("lineage.digest", "")

    @property
    def spellings(self) -> set[str]:
        """Return the names that people may use for it. The model's name alone means the newest version."""
        return {self.name, f"{self.name}/{self.version}", *(f"{self.name}@{alias}" for alias in self.aliases)}

    @property
    def promoted(self) -> dict[str, str] | None:
        """Return who made it champion, when (UTC), in which run and with which judges; None if nobody did."""
        tags = {name: f"tether.promoted_{name}" for name in ("by", "at", "run", "judges")}
        promotion = {name: self.tags[tag] for name, tag in tags.items() if tag in self.tags}
        return promotion or None

    @property
    def life(self) -> list[str]:
        """Return its history, one line each: terms as champion, demotion, human evaluation, waivers."""
        return list(state_lines(self.tags))


def versions(home: Path) -> list[Version]:
    """Return every version in MLflow's registry; empty if nothing was ever tracked in `home`.

    Raises:
        UserError: there is a registry, but it can't be asked.
    """
    file = database_file(home)
    if file is not None and not file.is_file():
        return []
    check_database(home)
    try:
        connect(home)
        mlflow = load_mlflow()
        aliases = {model.name: model.aliases for model in mlflow.search_registered_models()}
        registered = mlflow.search_model_versions()
    except Exception as error:  # of MLflow, SQLAlchemy or requests: in any case the answer is unknown
        raise UserError(
            f"MLflow's registry at {tracking_uri(home)} can't be asked ({in_short(error)}), so Tether does not "
            f"know which artifacts registered models need. Start it, or set {VARIABLE} to its address."
        ) from error
    return [
        Version(
            name=version.name,
            version=str(version.version),
            aliases=tuple(
                sorted(name for name, at in aliases.get(version.name, {}).items() if str(at) == str(version.version))
            ),
            tags=dict(version.tags),
        )
        for version in registered
    ]


def find_version(home: Path, name: str) -> Version | None:
    """Return the version that `tether-policy` (newest), `tether-policy@champion` or `tether-policy/3` names, or None.
    Raises as `versions` does."""
    if not _SPELLING.fullmatch(name):
        return None
    matches = (version for version in versions(home) if name in version.spellings)
    return max(matches, key=lambda version: int(version.version), default=None)
