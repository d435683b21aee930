"""Run lm-evaluation-harness on a model's folder, offline. Importable without the harness and without torch."""

import functools
import importlib
import importlib.metadata
import itertools
import logging
import math
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from components.base.errors import UserError
from components.data.inputs import kind_of
from components.evaluation.config import EvaluationConfig
from components.evaluation.task_files import OPTION, TASKS, named_inputs, renamed
from components.models.runtime import Runtime

HARNESS = "0.4.13"
"""The version whose numbers Tether was compared with: another may score otherwise, under the same task versions."""
_SEEDS = 0, 1234
"""The harness' own seeds: of `random`, and of NumPy, PyTorch and few-shot examples."""


class TaskScore(TypedDict):
    """A model's result on one task, a row of `tasks.json`."""

    task: str
    version: str
    metric: str
    higher_is_better: bool
    items: int
    score: float


class TaskItem(TypedDict):
    """One document of a task, a row of `items.jsonl`."""

    task: str
    document: str
    """The document's number, or the value of its field in `evaluation.clusters`."""
    metric: str
    value: float
    prompt: str
    target: str
    response: str


def check_harness() -> None:
    """Raise UserError unless the harness is installed in the version that Tether was compared with."""
    try:
        version = importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"{OPTION} needs lm-evaluation-harness, which is not installed. Install it with pip install "
            "'tether[evaluate]', or leave the option out."
        ) from None
    if version != HARNESS:
        raise UserError(
            f"{OPTION}: lm-eval {version} is installed, and results are comparable only from {HARNESS}. Install that "
            "with pip install 'tether[evaluate]'."
        )


@contextmanager
def offline() -> Iterator[None]:
    """Forbid the hub within the block: neither data nor a model may change between two runs of one key.

    `datasets` keeps no results of a task's functions, which it would find again after a function changed. Progress bars
    are off too, which would break into the run's own.
    """
    import datasets
    import huggingface_hub.constants
    from tqdm import tqdm

    places: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    with_bars = tqdm.__init__

    def silent(bar: Any, *arguments: Any, **options: Any) -> None:
        with_bars(bar, *arguments, **options | {"disable": True})

    before, caching = [place.HF_HUB_OFFLINE for place in places], datasets.is_caching_enabled()
    variable = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        tqdm.__init__ = silent
        datasets.disable_caching()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the harness and what it imports
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
        tqdm.__init__ = with_bars
        if caching:
            datasets.enable_caching()
        os.environ.pop("HF_HUB_OFFLINE")
        os.environ.update({} if variable is None else {"HF_HUB_OFFLINE": variable})


def own_tasks(name: str) -> list[dict[str, Path]]:
    """Return the files of a task of the harness' own, or of each task of a group, by the names of the stage's inputs.

    Raises:
        UserError: there is no such task, or its data are not in the cache of `datasets`.
    """
    with offline():
        manager = _module("tasks").TaskManager()
        if name not in manager.all_tasks:
            raise UserError(
                f"{OPTION}: there is no file {name}, and lm-eval {HARNESS} has no task of this name. "
                "`lm_eval ls tasks` lists its tasks."
            )
        files = []
        for task, built in _built(manager, name, name).items():
            tables = built.dataset.values() if isinstance(built.dataset, Mapping) else [built.dataset]
            cached = sorted({file["filename"] for table in tables for file in table.cache_files})
            files.append(named_inputs(task, Path(manager.task_index[task].yaml_path), map(Path, cached)))
        return files


def load_tasks(inputs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the harness' tasks by name, from the stage's inputs (`read_task_files`).

    Raises:
        UserError: the harness can't build a task, or it has no score for each document.
    """
    with offline():
        manager_of = functools.cache(_module("tasks").TaskManager)  # that of all defaults takes seconds
        tasks: dict[str, Any] = {}
        package = Path(_module("tasks").__file__).parent
        for key in sorted(key for key in inputs if kind_of(key) == TASKS and key.count("/") == 1):
            name, shipped = key.removeprefix(f"{TASKS}/"), inputs[key].is_relative_to(package)
            spec = name if shipped else _values_of_yaml(name, inputs)
            task = _built(manager_of(include_defaults=shipped), spec, name)[name]
            _check_scores(name, task)
            tasks[name] = task
        return tasks


def _values_of_yaml(name: str, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the values of a user's YAML, with the data at the places of the inputs."""
    path = inputs[f"{TASKS}/{name}"]
    try:
        config = _module("tasks._yaml_loader").load_yaml(path)
    except Exception as error:  # code of the user's own
        raise _unusable(name, error) from error
    kwargs, numbers = config.get("dataset_kwargs") or {}, itertools.count(1)

    def next_file(_: str = "") -> str:
        return str(inputs[f"{TASKS}/{name}/{next(numbers)}"])

    if "data_files" in kwargs:
        return config | {"dataset_kwargs": kwargs | {"data_files": renamed(kwargs["data_files"], next_file)}}
    return config | {"dataset_path": next_file()}


def _built(manager: Any, spec: object, name: str) -> dict[str, Any]:
    try:
        return manager.load([spec])["tasks"]
    except Exception as error:  # anything that a YAML can make the harness, `datasets` or code of its own raise
        raise _unusable(name, error) from error


def _unusable(name: str, error: Exception, what: str = "can't build") -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    if "offline" in reason.lower() or isinstance(error, ConnectionError):
        return UserError(
            f"{OPTION}: {name} draws its data from a hub, and they are not in the cache on this machine. Save them "
            f"as a file and write a YAML that reads it, or fetch them once with `lm_eval --tasks {name} --limit 1`."
        )
    return UserError(f"{OPTION}: the harness {what} the task {name} ({reason}). Correct its YAML.")


def _check_scores(name: str, task: Any) -> None:
    metric = next(iter(task.aggregation()), None)
    if metric is None or task.aggregation()[metric] is not _module("api.metrics").mean:
        raise UserError(
            f"{OPTION}: {name}: its first metric ({metric}) is not a mean over documents, so SFT and the policy can't "
            "be compared document by document. Name one such as acc or exact_match first in its metric_list."
        )


def documents(name: str, task: Any, config: EvaluationConfig) -> list[str]:
    """Return what each value of a task will belong to: the document's number, or its field in `evaluation.clusters`.

    Raises:
        UserError: a document lacks the field, or the harness can't read them.
    """
    field = config.clusters.get(name)
    try:
        docs = list(itertools.islice(task.eval_docs, config.limit))
    except Exception as error:  # code of the user's own, or no split to evaluate on
        raise _unusable(name, error, "can't read the documents of") from error
    if field is not None and any(doc.get(field) is None for doc in docs):
        raise UserError(f"evaluation.clusters.{name}: a document has no field {field}. Name one that all have.")
    return [str(number if field is None else doc[field]) for number, doc in enumerate(docs)]


def model_of(folder: Path, runtime: Runtime, batch_size: int) -> Any:
    """Return the harness' model of a Hugging Face folder, on the runtime's device and in its format."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with offline():
        return _module("models.huggingface").HFLM(
            pretrained=str(folder), device=runtime.device, dtype=runtime.dtype, batch_size=batch_size
        )


def evaluate(model: Any, name: str, task: Any, config: EvaluationConfig) -> tuple[TaskScore, list[TaskItem]]:
    """Return a model's score on a task and its items, as `lm_eval --tasks NAME` computes them, with its seeds.

    The metric is the task's first one, with its first filter.

    Raises:
        UserError: a document has no finite number as its score, or the harness can't evaluate the task.
    """
    import torch

    with offline():
        first, others = _SEEDS
        random.seed(first)
        np.random.seed(others)
        torch.manual_seed(others)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=others)
        try:  # not by simple_evaluate, which also asks git and the machine about themselves, at each task
            results = _module("evaluator").evaluate(
                model, {"tasks": {name: task}, "groups": {}, "group_map": {}}, limit=config.limit, bootstrap_iters=0,
                apply_chat_template=config.chat_template, fewshot_as_multiturn=config.chat_template,
            )  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:  # of the task's functions, or no chat template
            raise _unusable(name, error, "can't evaluate") from error
    metric = next(iter(task.aggregation()))
    samples = results["samples"][name]
    rows = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    belongs, choices = documents(name, task, config), task.OUTPUT_TYPE == "multiple_choice"
    items = [_item(name, metric, row, belongs[row["doc_id"]], choices) for row in rows]
    score: TaskScore = {
        "task": name, "version": str(results["versions"][name]), "metric": metric,
        "higher_is_better": bool(task.higher_is_better().get(metric, True)), "items": len(items),
        "score": float(results["results"][name][f"{metric},{samples[0]['filter']}"]),
    }  # fmt: skip
    return score, items


def _item(name: str, metric: str, sample: Mapping[str, Any], document: str, choices: bool) -> TaskItem:
    value = sample.get(metric)
    if not isinstance(value, bool | int | float | np.number) or not math.isfinite(value):
        raise UserError(
            f"{OPTION}: {name}: the score of document {sample['doc_id']} ({metric}) is {value!r}, not a finite number. "
            "Correct the task's function."
        )
    arguments, response, target = sample["arguments"], sample["filtered_resps"][0], sample["target"]
    if not isinstance(response, str) and isinstance(response, Sequence):  # log-likelihoods: the likeliest continuation
        likelihoods = [answer[0] for answer in sample["filtered_resps"][: len(arguments)]]
        response = arguments[int(np.argmax(likelihoods))][-1]
    if choices and isinstance(target, int) and 0 <= target < len(arguments):
        target = arguments[target][-1]
    return {
        "task": name, "document": document, "metric": metric, "value": float(value),
        "prompt": str(arguments[0][0]), "target": str(target), "response": str(response),
    }  # fmt: skip


def _module(name: str) -> Any:
    return importlib.import_module(f"lm_eval.{name}")
