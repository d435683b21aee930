"""Find the source files of a reward function: its module and the modules that it imports."""

import ast
from pathlib import Path

from components.base.errors import UserError
from components.base.hashing import digest_file, digest_json
from components.base.paths import user_path
from components.keys.fingerprint import imports_of, module_file
from components.rewards.config import FunctionReward


def root_of(config: FunctionReward) -> Path:
    """Return the folder from which the function's module is imported. Raises UserError if it does not exist."""
    root = user_path(config.root, f"{config.where}: root").resolve()
    if not root.is_dir():
        raise UserError(f"{config.where}: there is no folder {root}. Set root to the module's folder.")
    return root


def code_files(config: FunctionReward) -> list[Path]:
    """Return the source files of the function's module and of every module that it imports from its root, transitively.

    Imports inside functions count; a module that is named only in a string is not found.

    Raises:
        UserError: the module does not exist, a file is not valid Python, or the module lacks the function.
    """
    root, (module, name) = root_of(config), config.target
    first = module_file(module, root)
    if first is None:
        raise UserError(
            f"{config.where}: there is no module {module} in {root}. Check the name, or set root to the "
            f"folder that {module.replace('.', '/')}.py is in."
        )
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        dotted = waiting.pop()
        path = None if dotted in files or not dotted else module_file(dotted, root)
        if path is None:
            continue
        files[dotted] = path
        parent = dotted.rpartition(".")[0]
        package = dotted if path.name == "__init__.py" else parent
        waiting += [*imports_of(_tree(path, config), package), parent]
    if not _binds(_tree(first, config), name):
        raise UserError(f"{config.where}: {first} has no function {name}. Check the name.")
    return sorted(files.values())


def code_digest(config: FunctionReward) -> str:
    """Return a sha256 over the names, relative to the root, and the bytes of `code_files`."""
    root = root_of(config)
    return digest_json({path.relative_to(root).as_posix(): digest_file(path) for path in code_files(config)})


def _tree(path: Path, config: FunctionReward) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{config.where}: {path} is not valid Python: {error}. Correct it.") from None


def _binds(module: ast.Module, name: str) -> bool:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False
