"""Find the files of the tasks and probes on which a run is evaluated, and refuse what can't be evaluated."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from components.base.errors import UserError, about
from components.base.paths import user_path
from components.base.text import counted
from components.evaluation import harness
from components.evaluation.config import ITEM_FIELDS, JUDGE, Kind
from components.evaluation.probe_judge import probe_question
from components.evaluation.probe_prompts import probe_path, read_probe
from components.evaluation.probe_results import PROBES
from components.evaluation.task_files import OPTION, TASKS, read_task_files
from components.labelling.feedback.judges import EndpointJudge, letter_tokens
from components.models.weights import check_weights
from components.store.store import ArtifactStore, Record
from flows.config.run_config import RunConfig
from flows.data.candidates import find_models
from flows.data.reference import stored_input
from tasks.allowed import refuse_path
from tasks.result import Input


def evaluation_inputs(config: RunConfig, home: Path, taken: Mapping[str, Record]) -> dict[Kind, dict[str, Input]]:
    """Return the files of the tasks, and those of the probes with the model of `evaluation.judge`, or as the reused
    stages of `taken` read them.

    The harness builds each task, and a judge behind an endpoint is asked a question, so that nothing is trained before
    a task that can't be evaluated or a judge that can't be used is refused.

    Raises:
        UserError: the harness is missing or of another version; a task is unknown or broken, or draws its data from a
            hub; a probe's file is missing or damaged; two tasks or probes have one name; the judge can't be used; or
            `evaluation.margins` or `evaluation.clusters` name another task or probe.
        Unreachable: the judge does not answer.
    """
    inputs: dict[Kind, dict[str, Input]] = {}
    for kind in ITEM_FIELDS:
        record = taken.get(f"evaluation.policy_{kind}s")
        recorded = {} if record is None else record.inputs
        inputs[kind] = {
            name: Input(digest=digest, path=Path(name)) for name, digest in recorded.items() if name != "model"
        }
    inputs["task"] = inputs["task"] or (_tasks(config) if config.evaluation.tasks else {})
    inputs["probe"] = inputs["probe"] or (_probes(config) | _judge(config, home) if config.evaluation.probes else {})
    _refuse_unknown_names(config, [*inputs["task"], *inputs["probe"]])
    return {kind: files for kind, files in inputs.items() if files}


def _refuse_unknown_names(config: RunConfig, inputs: Iterable[str]) -> None:
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
                    f"evaluation.{option}.{name}: no such name; the run has {', '.join(there) or 'none'}. Correct it, "
                    "or remove it with null."
                )


def _tasks(config: RunConfig) -> dict[str, Input]:
    harness.check_harness()
    files: dict[str, Path] = {}
    for named in config.evaluation.tasks:
        path = user_path(named, OPTION)
        if path.suffix in (".yaml", ".yml") or path.exists():
            tasks = [read_task_files(path.absolute(), lambda file: refuse_path(OPTION, str(file), None))]
        else:
            tasks = harness.own_tasks(named)
        for task in tasks:
            _add(files, task, OPTION)
    built = harness.load_tasks(files)
    _refuse_too_few(config, "task", {name: harness.documents(name, built[name], config.evaluation) for name in built})
    return {name: Input.named(path) for name, path in files.items()}


def _probes(config: RunConfig) -> dict[str, Input]:
    files, prompts = dict[str, Path](), dict[str, list[str]]()
    for named in config.evaluation.probes:
        path = probe_path(named, "evaluation.probes")
        with about("evaluation.probes"):
            probe = read_probe(path)
        _add(files, {f"{PROBES}/{probe.name}": path}, "evaluation.probes")
        prompts[probe.name] = [prompt.id for prompt in probe.prompts]
    _refuse_too_few(config, "probe", prompts)
    return {name: Input.of(path) for name, path in files.items()}


def _judge(config: RunConfig, home: Path) -> dict[str, Input]:
    option = "evaluation.judge"
    if (endpoint := config.evaluation.judge_endpoint) is not None:
        with closing(EndpointJudge(endpoint, f"{option}_endpoint")) as judge:
            judge.answer(probe_question("is a greeting", [{"role": "user", "content": "Hi"}], "Hello!", swapped=False))
    if (name := config.evaluation.judge) is None:
        return {}
    from components.models.tokenizers import load_tokenizer

    (model,) = find_models([name], home, option)
    check_weights(model.folder, option)
    letter_tokens(load_tokenizer(model.folder, option), f"{option} {name}")
    if Path(name).expanduser().is_dir():
        return {JUDGE: Input(digest=model.digest, path=model.folder)}
    store = ArtifactStore(home)
    return {JUDGE: stored_input(store, model.digest, store.path(model.digest))}


def _refuse_too_few(config: RunConfig, kind: Kind, clusters: Mapping[str, Sequence[str]]) -> None:
    """Raise UserError if a policy that answers as SFT does would fail a gate, by its interval's width alone.

    Args:
        clusters: what each document of a task, or prompt of a probe, belongs to.
    """
    import numpy as np

    from components.evaluation.comparison import gate_of, level_of, margin_of, worsening

    thresholds = {rule.name: threshold for rule, threshold in config.gates.rules("evaluation")}
    for name, documents in clusters.items():
        margin, gate = margin_of(config.evaluation, name), f"evaluation.{gate_of(kind, name)}"
        equal = np.zeros(len(documents))
        high = worsening(equal, equal, documents, level_of(kind, len(clusters))).high
        limit = thresholds[gate]
        if isinstance(limit, int | float) and not high - margin <= limit:
            raise UserError(
                f"evaluation.{kind}s: {name} has {counted(len(set(documents)), 'independent document')}, too few for "
                f"its margin of {margin:g}: with equal answers of SFT and policy the interval ends at {high:.3f}, and "
                f"{gate} fails. Add documents, or set evaluation.margins.{name} to more."
            )


def _add(files: dict[str, Path], more: Mapping[str, Path], option: str) -> None:
    for twice in files.keys() & more.keys():
        name = twice.split("/")[1]
        raise UserError(f"{option}: two are called {name}. Name each once, and give each a name of its own.")
    files |= more
