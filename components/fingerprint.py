"""What a stage's result depends on, as one key: its config, inputs, source code and libraries.

The source is read as syntax trees, never imported: a cached rerun must not pay for torch.
"""

import ast
import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.canonical import digest_json
from components.errors import TetherError
from components.settings import Settings, keyed_values

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds our packages."""

PACKAGES = ("components", "data_contracts", "tasks", "flows")


def stage_key(
    stage: str,
    job: Settings,
    input_digests: Mapping[str, str],
    module: str,
    libraries: Iterable[str],
    root: Path = ROOT,
) -> tuple[str, dict[str, Any]]:
    """The key of running `stage` and the parts it is the sha256 of.

    Args:
        stage: the stage's name.
        job: its config; what `unkeyed` marks is left out. Seed and resolved runtime are in here.
        input_digests: input name to digest.
        module: the stage's module, where the source fingerprint starts.
        libraries: distributions whose installed version is a part.
        root: the folder that holds our packages.

    Returns:
        The key (sha256, hex) and `{stage, job, inputs, source, libraries}`, with the source by module.
    """
    parts = {
        "stage": stage,
        "job": keyed_values(job),
        "inputs": dict(input_digests),
        "source": source_modules(module, root),
        "libraries": {name: _version(name) for name in libraries},
    }
    return digest_json(parts), parts


def source_fingerprint(module: str, root: Path = ROOT) -> str:
    """One sha256 (hex) for the code of `module` and all it imports of ours."""
    return digest_json(source_modules(module, root))


def source_modules(module: str, root: Path = ROOT) -> dict[str, str]:
    """Each of our modules that `module` imports (directly or not, itself included) to the sha256 of its syntax tree.

    Comments, layout, docstrings and other bare strings don't count. Imports inside functions do; a module named only
    in a string does not.

    Raises:
        TetherError: there is no such module below `root`.
    """
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = _module_file(name, root)
        if path is None:
            if name == module:
                raise TetherError(f"there is no module {module} below {root}")
            continue
        info = path.stat()
        digest, imports = _read(path, name, info.st_mtime_ns, info.st_size)
        found[name] = digest
        waiting.extend(imports)
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=1024)
def _read(path: Path, name: str, mtime_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    """The digest of one file's tree and the modules of ours that it may import (parsed again only if it changed)."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            imports.add(base)
            # `from components.ppo import loop` may name a module or something in the package: try both.
            imports.update(f"{base}.{alias.name}" for alias in node.names)
    ours = {each for each in imports if each.split(".")[0] in PACKAGES}
    # Importing a.b.c runs the __init__ of a and of a.b.
    parents = {".".join(each.split(".")[:depth]) for each in {*ours, name} for depth in range(1, each.count(".") + 1)}
    text = _dump(tree)
    return hashlib.sha256(text.encode()).hexdigest(), tuple(sorted(ours | parents))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    base = package.split(".")
    base = base[: len(base) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def _module_file(name: str, root: Path) -> Path | None:
    path = root.joinpath(*name.split("."))
    candidates = (path / "__init__.py", path.with_name(path.name + ".py"))
    return next((each for each in candidates if each.is_file()), None)


def _dump(node: object) -> str:
    """A tree as text. Empty fields are left out: Python 3.12 has some that 3.11 hasn't."""
    if isinstance(node, ast.AST):
        fields = []
        for field, value in ast.iter_fields(node):
            if field in ("kind", "type_comment", "ctx", "type_ignores"):
                continue
            text = _dump(value)
            if text not in ("None", "[]"):
                fields.append(f"{field}={text}")
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return "[" + ", ".join(_dump(each) for each in node if not _is_bare_string(each)) + "]"
    return repr(node)


def _is_bare_string(node: object) -> bool:
    """A docstring, or the description under a field: a string that stands alone and does nothing."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise TetherError(f"{library} is not installed; run `make demo` or `tether doctor`") from None
