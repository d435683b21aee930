"""Compute a stage's key from everything on which its result depends: config, inputs, source code and libraries.

The source is parsed into syntax trees but never imported, so that a cached rerun need not import torch.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping
from importlib.util import resolve_name
from pathlib import Path

from pydantic import JsonValue

from components.base import errors
from components.base.errors import TetherError
from components.base.hashing import digest_json
from components.base.settings import Settings, keyed_values
from components.keys.changes import TASK_OPTIONS, KeyParts

ROOT = Path(__file__).resolve().parents[2]
"""The folder with Tether's packages."""

PACKAGES = ("components", "data_contracts", "tasks", "flows")

LEFT_OUT = {
    "components.base.errors": "A stage that raises publishes nothing.",
    "components.base.observe": "It is the type of a callback, and one that ignores all: nothing is computed with it.",
    "components.base.process": "It names temporary files, and tells whether the process that left one still runs.",
    "components.base.redaction": "It changes messages alone.",
    "components.gates.remedies": "It is advice on gates and alarms.",
    "components.gates.self_checks": "A check that fails raises, and the results of those that hold are attachments.",
    "components.human_eval.sheet_checks": "It judges what was written, and writes no byte of it.",
    "components.training.training_checks": "It judges what trains, and changes none of it.",
    "components.reward.evaluation.model_checks": "It judges what was written, and writes no byte of it.",
    "components.training.stopping": "A loop that a signal stops continues from its checkpoint to the same bytes.",
    "data_contracts.label_direction": "It judges what was written, and writes no byte of it.",
}
"""Maps a module that is in no key, because it cannot change an artifact's bytes, to the reason."""

TASKS = {"support-desk": ("components.data.support_desk.desk", "components.data.support_desk.grammar")}
"""The modules of each built-in task. They do not run on other data, so they enter a key as one digest, and only if the
task is the data source. Whether it is, is decided by other modules, which are in every key."""

_ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TetherError)}


def stage_key(
    stage: str,
    job: Settings,
    input_digests: Mapping[str, str],
    module: str,
    libraries: Iterable[str],
    root: Path = ROOT,
    task: str | None = None,
) -> tuple[str, KeyParts]:
    """Return the key (sha256, hex) of running `stage`, and the parts from which it is computed.

    Args:
        job: the stage's config, with seed and resolved runtime; fields made by `unkeyed` are left out.
        module: the stage's module, at which the source fingerprint starts.
        libraries: distributions whose installed versions are a part.
        task: the built-in task of the data; None for other data.
    """
    parts: KeyParts = {
        "stage": stage,
        "job": _without_task(keyed_values(job)) if task is None else keyed_values(job),
        "inputs": dict(input_digests),
        **code_parts(module, root, task),
        "libraries": {name: _version(name) for name in libraries},
    }
    return digest_json(parts), parts


def _without_task(job: dict[str, JsonValue]) -> dict[str, JsonValue]:
    group, name = TASK_OPTIONS
    inner = job.get(group)
    return job if not isinstance(inner, dict) else job | {group: {k: v for k, v in inner.items() if k != name}}


def code_parts(module: str, root: Path = ROOT, task: str | None = None) -> KeyParts:
    """Return the code that `module` runs, as `{source, task}`: digests of Tether's modules and of the built-in task.

    Comments, layout, docstrings and other bare strings do not count, nor do the texts of Tether's own errors. Imports
    inside functions are followed. Modules named only in a string are not, nor are `TASKS` other than `task`.

    Raises:
        TetherError: there is no such module below `root`.
    """
    digests: dict[str, str] = {}
    tasks = {submodule: name for name, modules in TASKS.items() for submodule in modules}
    seen, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        if name in seen or name in LEFT_OUT or tasks.get(name, task) != task:
            continue  # its imports are not followed either
        seen.add(name)
        path = module_file(name, root)
        if path is None:
            if name == module:
                raise TetherError(f"there is no module {module} below {root}")
            continue
        info = path.stat()
        digests[name], imports = _read(path, name, info.st_mtime_ns, info.st_size)
        waiting.extend(imports)
    source = {name: digest for name, digest in sorted(digests.items()) if digest != _NO_CODE and name not in tasks}
    of_task = {name: digest for name, digest in digests.items() if name in tasks}
    return {"source": source, "task": {task: digest_json(of_task)} if task and of_task else {}}


@functools.lru_cache(maxsize=1024)
def _read(path: Path, name: str, mtime_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    """Return the digest of a file's tree and Tether's modules that it may import; cached until the file changes."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    ours = {name for name in imports_of(tree, package) if name.split(".")[0] in PACKAGES}
    # Importing a.b.c runs the __init__ of a and of a.b.
    parents = {".".join(full.split(".")[:depth]) for full in {*ours, name} for depth in range(1, full.count(".") + 1)}
    return hashlib.sha256(_dump(tree).encode()).hexdigest(), tuple(sorted(ours | parents))


_NO_CODE = hashlib.sha256(b"Module()").hexdigest()
"""The digest of a file with nothing but a docstring, as most `__init__.py`."""


def imports_of(tree: ast.Module, package: str) -> set[str]:
    """Return the names that may be modules: those that a module of `package` imports, and those that it imports from
    them."""
    imports: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # above the top-level package
                base = resolve_name("." * node.level + (node.module or ""), package)
                # `from components.ppo import loop` may name a module or something in the package: try both.
                imports.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return imports


def module_file(name: str, root: Path) -> Path | None:
    """Return the source file of a module below `root`; None if there is none."""
    path = root.joinpath(*name.split("."))
    candidates = (path / "__init__.py", path.with_name(path.name + ".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _dump(node: object) -> str:
    """Return a tree as text, without empty fields, of which Python 3.12 has more than 3.11."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", None) in _ERRORS:
        node = ast.Raise(node.exc.func, node.cause)  # such an error ends the stage without a result, whatever its text
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
        return "[" + ", ".join(_dump(child) for child in node if not _is_bare_string(child)) + "]"
    return repr(node)


def _is_bare_string(node: object) -> bool:
    """Return whether a node is a docstring or the description under a field: a string statement without effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise TetherError(f"{library} is not installed; run `make demo` or `tether doctor`") from None
