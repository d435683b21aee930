"""Read MLflow's registered models: which artifact a version is, its aliases, and who promoted it."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import UserError
from tasks.tracking.client import VARIABLE, check_database, connect, database_file, in_short, load_mlflow, tracking_uri
from tasks.tracking.promotion import state_lines

FEW = 30
"""The largest number of artifacts queried one by one. A query takes about 15 ms; reading 1,000 versions takes 1 s."""

_SPELLING = re.compile(r"(?P<name>[^@/'\"]+)(?:@(?P<alias>[\w.-]+)|/(?P<version>\d+))?")


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
        found = {name: self.tags[tag] for name, tag in tags.items() if tag in self.tags}
        return found or None

    @property
    def life(self) -> list[str]:
        """Return its history, one line each: terms as champion, demotion, human evaluation, waivers."""
        return list(state_lines(self.tags))


def versions(home: Path) -> list[Version]:
    """Return every version in MLflow's registry; empty if nothing was ever tracked in `home`.

    Raises:
        UserError: there is a registry, but it can't be asked.
    """
    return _asked(home, lambda client: load_mlflow().search_model_versions())


def versions_of(home: Path, digests: Iterable[str]) -> list[Version]:
    """Return the versions of these artifacts. Raises as `versions` does."""
    wanted = set(digests)
    if len(wanted) > FEW:
        return [each for each in versions(home) if each.digest in wanted]
    queries = [f"tags.`lineage.digest`='{digest}'" for digest in sorted(wanted)]
    return _asked(home, lambda client: [each for query in queries for each in client.search_model_versions(query)])


def find_version(home: Path, asked: str) -> Version | None:
    """Return the version that `tether-policy` (newest), `tether-policy@champion` or `tether-policy/3` names, or None.
    Raises as `versions` does."""
    found = _SPELLING.fullmatch(asked)
    if found is None:
        return None
    name, alias, version = found.group("name", "alias", "version")
    by_name = f"name='{name}'"

    def look(client: Any) -> list[Any]:
        if version:
            return list(client.search_model_versions(f"{by_name} and version_number={version}"))
        if alias:
            models = client.search_registered_models(by_name)
            at = [model.aliases[alias] for model in models if alias in model.aliases]
            return [client.get_model_version(name, each) for each in at]
        return list(client.search_model_versions(by_name, max_results=1, order_by=["version_number DESC"]))

    return next(iter(_asked(home, look)), None)


def _asked(home: Path, ask: Callable[[Any], list[Any]]) -> list[Version]:
    """Return the versions that `ask` finds, with their aliases. Raises as `versions` does."""
    file = database_file(home)
    if file is not None and not file.is_file():
        return []
    check_database(home)
    try:
        client = connect(home)
        aliases = {model.name: model.aliases for model in load_mlflow().search_registered_models()}
        found = ask(client)
    except Exception as error:  # of MLflow, SQLAlchemy or requests: in any case the answer is unknown
        raise UserError(
            f"MLflow's registry at {tracking_uri(home)} can't be asked ({in_short(error)}), so Tether does not "
            f"know which artifacts registered models need. Start it, or set {VARIABLE} to its address."
        ) from error
    return [
        Version(
            name=each.name,
            version=str(each.version),
            aliases=tuple(
                sorted(name for name, at in aliases.get(each.name, {}).items() if str(at) == str(each.version))
            ),
            tags=dict(each.tags),
        )
        for each in found
    ]
