"""The files of a task of lm-evaluation-harness: its YAML, those that it includes, its functions' and its data's."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from components.base.errors import UserError
from components.base.paths import read_regular, user_path
from components.keys.fingerprint import module_file
from components.rewards.code import code_files
from components.rewards.config import FunctionReward

OPTION = "evaluation.tasks"
TASKS = "tasks"
"""Inputs with a task's files: `tasks/NAME` is its YAML, `tasks/NAME/1` and so on its other files."""
BUILDERS = ("json", "csv", "parquet", "arrow", "text")
"""Values of `dataset_path` with which `datasets` reads local files."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")


class _TaskFunction(FunctionReward):
    """A function of a task, whose module and the modules that it imports stand beside the YAML."""

    @property
    def where(self) -> str:
        return f"{OPTION}: {self.source}"


def named_inputs(name: str, yaml: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Return a task's files by the names of the stage's inputs."""
    return {f"{TASKS}/{name}": yaml} | {f"{TASKS}/{name}/{number}": file for number, file in enumerate(files, 1)}


def read_task_files(path: Path, allow: Callable[[Path], object] = lambda file: None) -> dict[str, Path]:
    """Return the files of the task that a YAML file describes, by the names of the stage's inputs: the YAML, its data
    files in the order in which it names them (or the folder of a dataset on disk), the YAML files that it includes, and
    the Python files of its functions and of what these import beside them.

    Args:
        allow: called with each file before it is read; raises UserError where it may not be.

    Paths of data are relative to the current directory, as the harness reads them, or else to the YAML's folder.

    Raises:
        UserError: the file is not a task's YAML, or a file that it names is missing or is not on this machine.
    """
    code: list[Path] = []
    config = _merged(path, code, allow)
    name = config.get("task")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{OPTION}: {path} does not describe one task: its `task` is {name!r}. Write a name of at most 64 letters, "
            "digits, -, . and _ that begins with a letter or digit, and name each task of a group by its own file."
        )
    try:
        data = list(_data(config, path))
    except RecursionError as error:
        raise UserError(f"{OPTION}: {path}: data_files holds itself. Write the files' names there.") from error
    for file in (*data, *code):
        allow(file)
    return named_inputs(name, path, (*data, *code))


def _merged(path: Path, code: list[Path], allow: Callable[[Path], object]) -> dict[str, Any]:
    """Return a YAML's values over those that it includes, and add all other files that it needs to `code`."""

    class Loader(yaml.SafeLoader):
        pass

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        if _FUNCTION.fullmatch(node.value) is None:
            raise yaml.YAMLError(f"!function {node.value} names no function: write !function MODULE.FUNCTION")
        module, _, name = node.value.rpartition(".")
        if module_file(module, path.parent) is None:
            raise UserError(
                f"{OPTION}: {path} names the function {node.value}, and beside it there is no module {module}. Correct "
                "the name, or copy the module there."
            )
        called = _TaskFunction(source=f"function:{module}:{name}", root=str(path.parent))
        code.extend(file for file in code_files(called) if file not in code)
        return f"!function {node.value}"

    Loader.add_constructor("!function", function)
    try:
        values = yaml.load(read_regular(path).decode("utf-8"), Loader)  # a SafeLoader
    except OSError as error:
        raise UserError(f"{OPTION}: {path} can't be read: {error.strerror}. Correct the name.") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{OPTION}: {path} can't be read as YAML: {reason}. Correct it there.") from error
    if not isinstance(values, dict):
        raise UserError(f"{OPTION}: {path} holds no task: write `task`, `dataset_path` and so on, each in a line.")
    included: dict[str, Any] = {}
    names = values.pop("include", [])
    for name in names if isinstance(names, list) else [names]:
        file = path.parent / str(name)
        if file in code or file == path:
            raise UserError(f"{OPTION}: {path} includes {name} a second time. Include each file once.")
        allow(file)
        code.append(file)
        included |= _merged(file, code, allow)
    return included | values


def _data(config: Mapping[str, Any], path: Path) -> Iterator[Path]:
    """Yield the data files that a task's YAML names. Raises UserError if its data are not files here."""
    kwargs = config.get("dataset_kwargs") or {}
    named = kwargs.get("data_files") if isinstance(kwargs, dict) else None
    source = config.get("dataset_path")
    if named is None and isinstance(source, str) and (folder := _local(source, path)).is_dir():
        yield folder
        return
    if config.get("custom_dataset"):
        raise UserError(
            f"{OPTION}: {path} has a custom_dataset, whose files a key can't name. Name them as data_files."
        )
    if source not in BUILDERS or not named or "data_dir" in kwargs:
        raise UserError(
            f"{OPTION}: {path} draws its data from a hub (dataset_path: {source}), and a run reads no data that could "
            "change. Save them as a file, and write dataset_path: json and dataset_kwargs: {data_files: {test: FILE}}."
        )
    texts: list[str] = []
    renamed(named, texts.append)
    for text in texts:
        if "://" in text or any(letter in text for letter in "*?["):
            raise UserError(f"{OPTION}: {path} names the data file {text}. Name single files on this machine.")
        if not (file := _local(text, path)).is_file():
            raise UserError(f"{OPTION}: {path} names the data file {text}, and there is none. Correct the name.")
        yield file


def renamed(data_files: object, rename: Callable[[str], object]) -> object:
    """Return a value of `data_files` (a file's name, a list of names, or either by split) with `rename` called for each
    name, in the order in which they stand."""
    if isinstance(data_files, dict):
        return {split: renamed(value, rename) for split, value in data_files.items()}
    return [renamed(value, rename) for value in data_files] if isinstance(data_files, list) else rename(str(data_files))


def _local(text: str, path: Path) -> Path:
    """Return the path of a file that the YAML `path` names."""
    file = user_path(text, f"{OPTION} ({path})")
    return (file if file.exists() or file.is_absolute() else path.parent / file).absolute()
