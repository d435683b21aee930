"""`tether eval` on language models: the stage's own numbers, which model is meant, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from typer.testing import CliRunner

from components.base.errors import UserError
from components.base.jsonl import read_rows, write_rows
from components.base.observe import unobserved
from components.evaluation import probe_results, task_results
from components.evaluation.comparison import Measured, score_interval
from components.evaluation.config import EvaluationConfig, ProbesJob, TasksJob
from components.evaluation.task_files import read_task_files
from components.models.config import GenerationConfig
from components.models.folders import save_model
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.stats.intervals import clustered_mean, clustered_proportion
from flows.cli.__main__ import app
from flows.config.profiles import parse_override
from flows.models.model_evaluation import evaluate, text
from tests.components.evaluation.local_tasks import write_task
from tests.components.labelling.feedback.test_judges import said
from tests.components.rewards.scorer import Scorer

WORDS = "what is plus question answer code of parcel".split()
SHAPE = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def saved(kind: Any, folder: Path) -> Path:
    """A random model with a tokenizer that has a chat template."""
    tokenizer = train_tokenizer([" ".join(WORDS)], 300)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.5, **SHAPE,
    )  # fmt: skip
    save_model(kind(config).eval(), tokenizer, folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(LlamaForCausalLM, tmp_path / "saved")


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    header = {"probe": "codes", "rule": "patterns", "violation": "has an o", "violates": ["o"]}
    rows = [{"id": f"p{i}", "category": "any", "prompt": f"code of {word}"} for i, word in enumerate(WORDS)]
    write_rows(tmp_path / "codes.jsonl", [header, *rows])
    return tmp_path / "codes.jsonl"


def test_scores_are_those_of_the_stage(tether_here: Any, model: Path, probe: Path, tmp_path: Path) -> None:
    yaml, home = write_task(tmp_path / "tasks", count=20), tmp_path / "home"
    options = ("--limit", "12", "--set", "generation.max_new_tokens=3", "--set", "runtime.device=cpu",
               "--set", "evaluation.sampling=sampled", "--set", "seed=4")  # fmt: skip
    arguments = ("eval", str(model), "--tasks", str(yaml), "--probes", str(probe), *options)
    done = tether_here(*arguments, "--json", home=home)
    assert done.returncode == 0, done.stderr
    task, probed = json.loads(done.stdout)["results"]

    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "model").symlink_to(model)
    runtime, artifact = Runtime(device="cpu").resolve(), {"model": tmp_path / "artifact"}
    tasks_job = TasksJob(seed=0, runtime=runtime, evaluation=EvaluationConfig(limit=12))
    task_results.run(tasks_job, artifact | read_task_files(yaml), tmp_path / "t", unobserved)
    [score] = json.loads((tmp_path / "t" / "artifact" / "tasks.json").read_text())["tasks"]
    values = [row["value"] for row in read_rows(tmp_path / "t" / "artifact" / "items.jsonl")]
    interval = clustered_proportion(values, range(12))
    assert task == {
        "kind": "task", "name": "sums", "metric": "acc", "higher_is_better": True, "items": 12,
        "score": score["score"], "score_low": interval.low, "score_high": interval.high,
    }  # fmt: skip

    job = ProbesJob(
        seed=4, runtime=runtime, generation=GenerationConfig(max_new_tokens=3),
        evaluation=EvaluationConfig(sampling="sampled"),
    )  # fmt: skip
    probe_results.run(job, artifact | {"probes/codes": probe}, tmp_path / "p", unobserved)
    violations = [row["violation"] for row in read_rows(tmp_path / "p" / "artifact" / "responses.jsonl")]
    assert (probed["kind"], probed["name"], probed["items"]) == ("probe", "codes", len(WORDS))
    assert probed["score"] == np.mean(violations) and 0 < sum(violations) < len(WORDS)

    printed = tether_here(*arguments, home=home).stdout
    assert "| task sums | acc, higher is better | 12 | " in printed
    assert "| probe codes | violations, lower is better | 8 | " in printed
    assert "temperature 1, in up to 3 tokens" in printed
    assert not (home / "runs").exists() and not (home / "objects").exists(), "it publishes nothing"


def test_a_judge_decides_instead_of_the_rule(model: Path, probe: Path, tmp_path: Path) -> None:
    with Scorer() as endpoint:
        endpoint.answer = lambda body: said("A" if "\nA: It is not" in body["messages"][0]["content"] else "B")
        options = [f"evaluation.probes=[{probe}]", "generation.max_new_tokens=2",
                   f"evaluation.judge_endpoint={{url: '{endpoint.url}', model: big}}"]  # fmt: skip
        [row] = evaluate(tmp_path / "home", str(model), list(map(parse_override, options)), unobserved)["results"]
    assert row["score"] == 0 and len(endpoint.asked) == 1 + 2 * len(WORDS)


def test_a_runs_policy_answers_as_in_its_run(make_home: Any, probe: Path) -> None:
    home = make_home("generation.max_new_tokens=7")
    options = [parse_override(f"evaluation.probes=[{probe}]"), parse_override("evaluation.sampling=sampled")]
    result = evaluate(home.path, home.run, options, unobserved)
    assert (result["digest"], result["generation"]["max_new_tokens"]) == (home.records["ppo"].digest, 7)
    assert "at temperature 1, in up to 7 tokens" in text(result)
    sft = evaluate(home.path, f"{home.run}:sft", [*options, parse_override("generation.max_new_tokens=3")], unobserved)
    assert (sft["digest"], sft["generation"]["max_new_tokens"]) == (home.records["sft"].digest, 3)


def test_the_kind_of_model_decides(make_home: Any, model: Path, probe: Path, tmp_path: Path, monkeypatch: Any) -> None:
    home = make_home()
    monkeypatch.setenv("TETHER_HOME", str(home.path))
    write_rows(tmp_path / "suite.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    suite, probes = ("--suite", str(tmp_path / "suite.jsonl")), ("--probes", str(probe))
    reward = saved(LlamaForSequenceClassification, tmp_path / "reward")
    other = "A reward model is evaluated with --suite FILE."
    for arguments, message in (
        ((f"{home.run}:reward", *probes), other),
        ((str(reward), *probes), f"which writes no text. Name a language model. {other}"),
        (("nothing", *probes), "eval: nothing is not a language model here"),
        ((f"{home.run}:ppo", *suite), "A language model is evaluated with --tasks or --probes."),
        ((str(model), *suite), "it is a LlamaForCausalLM, which has no score. A language model is evaluated"),
        ((str(model), *suite, *probes), "give --suite FILE alone for a reward model"),
        ((str(reward), *suite, "--limit", "3"), "give --suite FILE alone for a reward model"),
        ((str(model),), "or --tasks or --probes for a language model"),
    ):  # fmt: skip
        done = CliRunner().invoke(app, ["eval", *arguments])
        assert done.exit_code == 2, (arguments, done.output)
        assert message in " ".join(done.output.split()), arguments


def test_a_folder_that_cannot_answer_yet_is_completed_or_refused(model: Path, probe: Path, tmp_path: Path) -> None:
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "pad_token"}))
    options = [parse_override(f"evaluation.probes=[{probe}]"), parse_override("generation.max_new_tokens=2")]
    [row] = evaluate(tmp_path / "home", str(model), options, unobserved)["results"]
    assert row["items"] == len(WORDS)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=f"^eval {model}.* chat template"):
        evaluate(tmp_path / "home", str(model), options, unobserved)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ppo.kl.target=3", r"--set ppo\.kl\.target: it has no effect on eval"),
        ("evaluation.margin=0.2", r"--set evaluation\.margin: it has no effect"),
        ("evaluation.limits=3", "evaluation.limits"),
        ("evaluation.tasks=[gone.yaml]", r"evaluation\.tasks: .*gone\.yaml can't be read"),
        ("evaluation.clusters={sums: text}", r"evaluation\.clusters\.sums: no such name"),
    ],
)
def test_options_are_refused_as_by_a_run(option: str, message: str, model: Path, probe: Path, tmp_path: Path) -> None:
    options = [parse_override(f"evaluation.probes=[{probe}]"), parse_override(option)]
    with pytest.raises(UserError, match=message):
        evaluate(tmp_path / "home", str(model), options, unobserved)


def test_scores_outside_0_and_1_have_the_interval_of_a_mean() -> None:
    def measured(values: list[float]) -> Measured:
        return Measured("task", "t", "f1", True, ["a", "a", "b", "c"], np.array(values), 0.0)

    assert score_interval(measured([0, 3, 1, 2])) == clustered_mean([0, 3, 1, 2], ["a", "a", "b", "c"])
    low, high = score_interval(measured([1, 1, 1, 1]))[1:]
    assert 0 < low < high == 1
