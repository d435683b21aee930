"""Find the files of the tasks and probes on which a run is evaluated, and refuse what can't be evaluated."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from components.base.errors import UserError
from components.base.paths import user_path
from components.data.inputs import kind_of
from components.evaluation import harness
from components.evaluation.probe_prompts import probe_path, read_probe
from components.evaluation.probe_results import PROBES
from components.evaluation.task_files import OPTION, TASKS, read_task_files
from components.store.store import Record
from flows.config.run_config import RunConfig
from tasks.allowed import refuse_path
from tasks.result import Input


def task_inputs(config: RunConfig, taken: Mapping[str, Record]) -> dict[str, Input]:
    """Return the files of the tasks that `evaluation.tasks` names, or as the reused stage of `taken` read them.

    The harness builds each task, so that nothing is trained before a task that can't be evaluated is refused.

    Raises:
        UserError: the harness is missing or of another version, a task is unknown or broken, or draws its data from a
            hub; or `evaluation.margins` or `evaluation.clusters` name another task.
    """
    return _recorded(taken, "evaluation.policy_tasks", TASKS) or (_tasks(config) if config.evaluation.tasks else {})


def probe_inputs(config: RunConfig, taken: Mapping[str, Record]) -> dict[str, Input]:
    """Return the files of the probes that `evaluation.probes` names, or as the reused stage of `taken` read them.

    Raises:
        UserError: a file is missing or damaged, or two have one name.
    """
    return _recorded(taken, "evaluation.policy_probes", PROBES) or _probes(config)


def refuse_unknown_names(config: RunConfig, inputs: Iterable[str]) -> None:
    """Raise UserError if `evaluation.margins` or `evaluation.clusters` name what is not among the inputs."""
    names = [name.split("/") for name in inputs]
    tasks = [parts[1] for parts in names if parts[0] == TASKS and len(parts) == 2]
    probes = [parts[1] for parts in names if parts[0] == PROBES]
    for option, values, there in (
        ("margins", config.evaluation.margins, [*tasks, *probes]), ("clusters", config.evaluation.clusters, tasks),
    ):  # fmt: skip
        for name in values:
            if name not in there:
                raise UserError(
                    f"evaluation.{option}.{name}: no such name; the run has {', '.join(there) or 'none'}. Correct it."
                )


def _recorded(taken: Mapping[str, Record], stage: str, kind: str) -> dict[str, Input]:
    record = taken.get(stage)
    inputs = {} if record is None else record.inputs
    return {name: Input(digest=digest, path=Path(name)) for name, digest in inputs.items() if kind_of(name) == kind}


def _tasks(config: RunConfig) -> dict[str, Input]:
    harness.check_harness()
    files: dict[str, Path] = {}
    for named in config.evaluation.tasks:
        path = user_path(named, OPTION)
        if path.suffix in (".yaml", ".yml") or path.exists():
            tasks = [read_task_files(path.absolute())]
            for file in (*tasks[0].data, *tasks[0].code):
                refuse_path(OPTION, str(file), None)
        else:
            tasks = harness.own_tasks(named)
        for task in tasks:
            _once(files, task.inputs, OPTION, task.name)
    harness.load_tasks(files)
    return {name: Input.named(path) for name, path in files.items()}


def _probes(config: RunConfig) -> dict[str, Input]:
    files: dict[str, Path] = {}
    for named in config.evaluation.probes:
        path = probe_path(named, "evaluation.probes")
        name = read_probe(path).name
        _once(files, {f"{PROBES}/{name}": path}, "evaluation.probes", name)
    return {name: Input.of(path) for name, path in files.items()}


def _once(files: dict[str, Path], more: Mapping[str, Path], option: str, name: str) -> None:
    if files.keys() & more.keys():
        raise UserError(f"{option}: two are called {name}. Name each once, and give each a name of its own.")
    files |= more
