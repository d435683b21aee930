"""Plug-ins: entry points of installed distributions, and the code of theirs on which a result depends."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from components.base.errors import UserError
from components.base.hashing import digest_file, digest_json

Group = Literal["tether.rewards", "tether.gates", "tether.readers", "tether.observers"]
GROUPS: tuple[Group, ...] = ("tether.rewards", "tether.gates", "tether.readers", "tether.observers")

_IMPORTED: dict[str, str] = {}
"""Maps a distribution to its `plugin_code` when this process first imported it."""


class Plugin(NamedTuple):
    """One entry point of an installed distribution."""

    group: Group
    name: str
    module: str
    attribute: str
    """The function in the module; may be dotted."""
    distribution: importlib.metadata.Distribution

    @property
    def label(self) -> str:
        """Return the distribution's name and version."""
        return f"{self.distribution.name} {self.distribution.version}"

    @property
    def root(self) -> Path:
        """Return the folder in which the distribution is installed."""
        return Path(str(self.distribution.locate_file("")))

    def load(self, field: str) -> Callable[..., Any]:
        """Import its function. `field` is the option that names it, for the error.

        Raises:
            UserError: it cannot be imported, is not a function, or was edited after this process imported it.
        """
        code = plugin_code(self)
        if _IMPORTED.setdefault(self.distribution.name, code) != code:
            raise UserError(
                f"{field}: the files of {self.label} changed after this process imported them, so what would run is "
                "not what is installed. Start the process again."
            )
        try:
            function: Any = importlib.import_module(self.module)
            for part in self.attribute.split("."):
                function = getattr(function, part)
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{field}: the plug-in {self.name} ({self.label}) can't be imported: {type(error).__name__}: {error}. "
                "Correct or reinstall that distribution."
            ) from error
        if not callable(function):
            raise UserError(f"{field}: the plug-in {self.name} ({self.label}) is not a function. Correct its package.")
        return function


def installed_plugins(group: Group) -> dict[str, Plugin]:
    """Return the plug-ins of a group by name, sorted, without importing them.

    Raises:
        UserError: two distributions offer the same name.
    """
    plugins: dict[str, Plugin] = {}
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        if entry.dist is None:
            continue
        plugin = Plugin(group, entry.name, entry.module, entry.attr, entry.dist)
        other = plugins.setdefault(entry.name, plugin)
        if (other.label, *other[2:4]) != (plugin.label, *plugin[2:4]):
            raise UserError(
                f"{group}: {other.label} and {plugin.label} both offer a plug-in called {entry.name}. Uninstall one."
            )
    return plugins


def find_plugin(group: Group, name: str, field: str, code: str = "auto") -> Plugin:
    """Return the installed plug-in of this name. `field` is the option that names it, for the error.

    Raises:
        UserError: none is installed, or its `plugin_code` is not `code`, that of when the run began (`auto`: any).
    """
    installed = installed_plugins(group)
    if name not in installed:
        there = f"installed are {', '.join(installed)}" if installed else "none is installed"
        raise UserError(
            f"{field}: there is no plug-in {name} of the group {group}; {there}. Install the distribution that offers "
            "it into Tether's environment (`tether doctor` lists the plug-ins)."
        )
    plugin = installed[name]
    if not plugin.attribute:
        raise UserError(
            f"{field}: the entry point {name} of {plugin.label} names the module {plugin.module} and no function. "
            "Write it as module:function."
        )
    if code != "auto" and (now := plugin_code(plugin)) != code:
        raise UserError(
            f"{field}: the plug-in {name} was {_short(code)} when the run began, and is {_short(now)} here. "
            "Install the same distribution on every machine that computes, or run again."
        )
    return plugin


def plugin_code(plugin: Plugin) -> str:
    """Return name and version of the plug-in's distribution and the sha256 of its files: `NAME VERSION sha256`.

    The files are those in its RECORD, and all below the top-level package of its module, which the RECORD of an
    editable installation does not list. Metadata (`*.dist-info`), bytecode, and the distribution's dependencies do not
    count.

    Raises:
        UserError: its module does not exist.
    """
    files: dict[str, Path] = {}
    for file in plugin.distribution.files or ():
        path = Path(str(plugin.distribution.locate_file(file)))
        if path.is_file() and not file.parts[0].endswith((".dist-info", ".egg-info")):
            files[file.as_posix()] = path
    top = plugin.module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise UserError(
            f"{plugin.group}: the module {plugin.module} of {plugin.label} is not there. Reinstall that distribution."
        )
    for folder in map(Path, spec.submodule_search_locations or ()):
        files |= {f"{top}/{path.relative_to(folder).as_posix()}": path for path in folder.rglob("*") if path.is_file()}
    if not spec.submodule_search_locations and spec.origin:
        files[Path(spec.origin).name] = Path(spec.origin)
    sources = {n: path for n, path in files.items() if "__pycache__" not in path.parts and path.suffix != ".pyc"}
    code = {name: digest_file(path) for name, path in sources.items()}
    return f"{plugin.label} {digest_json(code)}"


def _short(code: str) -> str:
    return " ".join([*code.split()[:-1], code.split()[-1][:12]])
