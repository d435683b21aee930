"""Scores of lm-evaluation-harness through Tether: those of its own command line, and what is refused."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.base.observe import unobserved
from components.evaluation import harness
from components.evaluation.config import EvaluationConfig, TasksJob
from components.evaluation.task_files import read_task_files
from components.evaluation.task_results import run
from components.models.runtime import Runtime
from tests.components.evaluation.local_tasks import write_model, write_task

CPU = Runtime(device="cpu", dtype="float32")


def inputs_of(*yamls: Path) -> dict[str, Path]:
    return {name: path for yaml in yamls for name, path in read_task_files(yaml).items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a tiny model."""
    folder = tmp_path_factory.mktemp("artifact")
    write_model(folder / "model")
    return folder


@pytest.mark.whole
def test_scores_are_those_of_the_harness_own_command_line(model: Path, tmp_path: Path) -> None:
    yaml = write_task(tmp_path / "tasks", count=60)
    job = TasksJob(seed=0, runtime=CPU, evaluation=EvaluationConfig(batch_size=8, limit=50))
    run(job, {"model": model, **inputs_of(yaml)}, tmp_path / "out", unobserved)
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model / 'model'}",
         "--tasks", "sums", "--include_path", str(yaml.parent), "--device", "cpu", "--batch_size", "8", "--limit", "50",
         "--output_path", str(tmp_path / "cli"), "--log_samples"],
        cwd=yaml.parent, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [results] = (tmp_path / "cli").rglob("results_*.json")
    theirs = json.loads(results.read_text())
    ours = json.loads((tmp_path / "out" / "artifact" / "tasks.json").read_text())
    assert ours["harness"] == theirs["lm_eval_version"]
    [score] = ours["tasks"]
    assert score == {"task": "sums", "version": "2.0", "metric": "acc", "higher_is_better": True, "items": 50,
                     "score": theirs["results"]["sums"]["acc,none"]}  # fmt: skip
    [samples] = (tmp_path / "cli").rglob("samples_*.jsonl")
    items = read_rows(tmp_path / "out" / "artifact" / "items.jsonl")
    assert [item["value"] for item in items] == [row["acc"] for row in sorted(read_rows(samples), key=_place)]
    assert 0 < score["score"] < 1 and score["score"] == np.mean([item["value"] for item in items])


def _place(row: dict[str, int]) -> int:
    return row["doc_id"]


def test_an_item_shows_prompt_target_and_the_likeliest_answer(model: Path, tmp_path: Path) -> None:
    yaml = write_task(tmp_path, count=12)
    config = EvaluationConfig(clusters={"sums": "text"})
    task = harness.load_tasks(inputs_of(yaml))["sums"]
    score, items = harness.evaluate(harness.model_of(model / "model", CPU, 4), "sums", task, config)
    rows = read_rows(tmp_path / "sums.jsonl")
    assert score["items"] == len(items) == 12
    for row, item in zip(rows, items, strict=True):
        assert item["prompt"] == f"Question: {row['question']}\nAnswer:"
        assert item["target"] == f" {row['choices'][row['gold']]}"
        assert item["response"].strip() in row["choices"]
        assert item["value"] == float(item["response"] == item["target"]), "acc is 1 where the likeliest is the target"
        assert item["document"] == str(row["text"])


def test_a_finished_task_is_not_evaluated_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yamls = [write_task(tmp_path, name, count=8, seed=place) for place, name in enumerate(("first", "second"))]
    job, inputs = TasksJob(seed=0, runtime=CPU), {"model": model, **inputs_of(*yamls)}
    run(job, inputs, tmp_path / "whole", unobserved)
    evaluate, evaluated = harness.evaluate, list[str]()

    def killed_at_the_second(lm, name, task, config):
        if name == "second" and "second" not in evaluated:
            evaluated.append(name)
            raise KeyboardInterrupt
        evaluated.append(name)
        return evaluate(lm, name, task, config)

    monkeypatch.setattr(harness, "evaluate", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(job, inputs, tmp_path / "killed", unobserved)
    run(job, inputs, tmp_path / "killed", unobserved)
    assert evaluated == ["first", "second", "second"]
    for name in ("tasks.json", "items.jsonl"):
        places = (tmp_path / run_ / "artifact" / name for run_ in ("whole", "killed"))
        assert len({place.read_bytes() for place in places}) == 1


def test_another_model_gives_other_results(model: Path, tmp_path: Path) -> None:
    inputs, values = inputs_of(write_task(tmp_path)), []
    write_model(tmp_path / "other" / "model", seed=1)
    for folder in (model, tmp_path / "other"):
        run(TasksJob(seed=0, runtime=CPU), {"model": folder, **inputs}, tmp_path / folder.name / "out", unobserved)
        values.append([row["value"] for row in read_rows(tmp_path / folder.name / "out" / "artifact" / "items.jsonl")])
    assert values[0] != values[1]


def test_a_harness_that_is_missing_or_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.check_harness()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.9")
    with pytest.raises(UserError, match=r"lm-eval 0\.4\.9 is installed, and results are comparable only from 0\.4\.13"):
        harness.check_harness()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match=r"not installed\. Install it with pip install 'tether\[evaluate\]'"):
        harness.check_harness()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("aggregation: mean", "aggregation: perplexity"), r"its first metric \(acc\) is not a mean over documents"),
        (("test_split: test", "test_split: gone"), r"can't build the task sums \(.*gone"),
        (
            ("doc_to_target: gold", "doc_to_target: !function words.gone"),
            r"beside it there is no module words\. Correct",
        ),
        (("output_type: multiple_choice", "output_type: painting"), r"can't build the task sums \(.*painting"),
    ],
)
def test_a_task_that_the_harness_cannot_score_is_refused(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    yaml = write_task(tmp_path)
    yaml.write_text(yaml.read_text().replace(*change))
    with pytest.raises(UserError, match=message):
        harness.load_tasks(inputs_of(yaml))


def scored(model: Path, yaml: Path) -> list[harness.TaskItem]:
    """The items of the task sums."""
    task = harness.load_tasks(inputs_of(yaml))["sums"]
    return harness.evaluate(harness.model_of(model / "model", CPU, 4), "sums", task, EvaluationConfig())[1]


def test_a_task_whose_function_changed_is_scored_by_the_new_one(model: Path, tmp_path: Path) -> None:
    yaml, code = write_task(tmp_path, count=4), tmp_path / "words.py"
    yaml.write_text(yaml.read_text() + "process_docs: !function words.docs\n")
    targets = []
    for gold in (0, 1):
        code.write_text(f"def docs(data): return data.map(lambda row: dict(row, gold={gold}))\n")
        targets.append([item["target"] for item in scored(model, yaml)])
    assert all(first != second for first, second in zip(*targets, strict=True))


@pytest.mark.parametrize("score", ["float('nan')", "float('inf')", "'yes'"])
def test_a_score_that_is_no_finite_number_is_refused(score: str, model: Path, tmp_path: Path) -> None:
    yaml = write_task(tmp_path, count=4)
    (tmp_path / "words.py").write_text(f"def results(doc, results): return {{'acc': {score}}}\n")
    yaml.write_text(yaml.read_text() + "process_results: !function words.results\n")
    with pytest.raises(UserError, match=r"evaluation\.tasks: .*sums"):
        scored(model, yaml)


def test_the_number_that_a_text_should_have_is_kept_as_it_is(model: Path, tmp_path: Path) -> None:
    yaml = write_task(tmp_path, count=4)
    text = yaml.read_text().replace("output_type: multiple_choice", "output_type: generate_until")
    text = text.replace("metric: acc", "metric: exact_match").replace("doc_to_choice: choices\n", "")
    yaml.write_text(text + "generation_kwargs: {until: ['?'], max_gen_toks: 2}\n")
    assert {item["target"] for item in scored(model, yaml)} <= {"0", "1"}


def test_a_template_that_the_model_does_not_have_is_said(model: Path, tmp_path: Path) -> None:
    task = harness.load_tasks(inputs_of(write_task(tmp_path, count=4)))["sums"]
    with pytest.raises(UserError, match=r"the harness can't evaluate the task sums \(.*chat.template"):
        harness.evaluate(
            harness.model_of(model / "model", CPU, 4), "sums", task, EvaluationConfig(chat_template=True)
        )


@pytest.mark.whole
def test_a_task_of_the_harness_whose_data_are_on_a_hub_is_refused() -> None:
    with pytest.raises(UserError, match="arc_easy draws its data from a hub, and they are not in the cache"):
        harness.own_tasks("arc_easy")
    with pytest.raises(UserError, match=r"there is no file arc_esay, and lm-eval 0\.4\.13 has no task of this name"):
        harness.own_tasks("arc_esay")
    assert os.environ.get("HF_HUB_OFFLINE") is None


def test_documents_without_the_field_of_their_cluster_are_refused(tmp_path: Path) -> None:
    task = harness.load_tasks(inputs_of(write_task(tmp_path, count=4)))["sums"]
    assert harness.documents("sums", task, EvaluationConfig(limit=3)) == ["0", "1", "2"]
    with pytest.raises(UserError, match=r"evaluation\.clusters\.sums: a document has no field passage"):
        harness.documents("sums", task, EvaluationConfig(clusters={"sums": "passage"}))
