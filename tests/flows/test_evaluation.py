"""The evaluation in a run: what it changes in other runs, its keys, what is refused at the start, a whole run."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM, BertModel, T5Config, T5ForConditionalGeneration

from components.base.errors import UserError
from components.base.hashing import canonical_json
from components.base.jsonl import read_rows, write_rows
from components.base.settings import keyed_values
from components.evaluation import harness
from components.evaluation.task_files import read_task_files
from components.store.store import ArtifactStore, Record
from flows.config.profiles import Override, apply_overrides, parse_override
from flows.config.run_config import RunConfig, check_config, load_config, to_values
from flows.data.evaluation_inputs import evaluation_inputs
from flows.launch.begin import Launch, new_run, rerun
from flows.launch.request import Request
from flows.rlhf import pipeline
from tasks.execution.context import Reporting
from tasks.execution.keying import key_of
from tasks.execution.runner import run_stage
from tasks.result import Input
from tasks.runs.status import StageStatus, load_status
from tasks.stages import ALWAYS, STAGES
from tests.components.evaluation.local_tasks import write_task
from tests.components.labelling.feedback.test_judges import said, write_judge
from tests.components.rewards.scorer import Scorer

SMALL = ["data.generator.demonstrations=150", "data.generator.pairs=200", "sft.epochs=1", "sft.evaluate=16",
         "ppo.updates=1", "ppo.evaluate=16", "ppo.evaluate_every=1", "gates.policy.evaluated=null",
         "reward.scale_responses=16"]  # fmt: skip
SIDES = ("sft", "policy")


def given(*options: str) -> list[Override]:
    return [parse_override(option) for option in options]


def config(*options: str) -> RunConfig:
    return load_config("tiny", given(*options)).resolved()


def probe(folder: Path) -> Path:
    """A team's own probe of two prompts."""
    header = {"probe": "codes", "rule": "patterns", "violation": "names a code", "violates": ["code"]}
    rows = [{"id": name, "category": "any", "prompt": f"What is the code of {name}?"} for name in ("one", "two")]
    write_rows(folder / "codes.jsonl", [header, *rows])
    return folder / "codes.jsonl"


def key(stage: str, options: RunConfig, inputs: dict[str, Input]) -> str:
    return key_of(STAGES[stage], options.stage_job(STAGES[stage]), inputs)[0]


@pytest.mark.parametrize("name", [name for name in STAGES if "." not in name and name in ALWAYS])
def test_an_evaluation_changes_no_key_of_another_stage(name: str, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text('{"name": "none"}')
    inputs = {"data": Input(path=tmp_path, digest="d" * 64)}
    evaluated = config("evaluation.tasks=[a.yaml]", "evaluation.probes=[harmful]", "evaluation.margin=0.2")
    assert key(name, config(), inputs) == key(name, evaluated, inputs)


def test_sfts_results_have_a_key_of_tasks_harness_and_sft_alone(tmp_path: Path) -> None:
    yaml = write_task(tmp_path / "a")
    inputs = {"model": Input(path=tmp_path, digest="d" * 64)}

    def of(yaml: Path, *options: str) -> str:
        files = {name: Input.of(path) for name, path in read_task_files(yaml).items()}
        return key("evaluation.sft_tasks", config(f"evaluation.tasks=[{yaml}]", *options), inputs | files)

    first = of(yaml)
    unread = ("seed=5", "policy_seed=6", "ppo.kl.target=2", "evaluation.margin=0.3", "evaluation.margins={sums: 0.1}",
              "evaluation.probes=[harmful]", "evaluation.sampling=sampled")  # fmt: skip
    assert {of(yaml, option) for option in unread} == {first}
    assert of(write_task(tmp_path / "b")) == first, "files count by content"
    read = ("evaluation.limit=5", "evaluation.batch_size=3", "evaluation.chat_template=true",
            "evaluation.clusters={sums: text}")  # fmt: skip
    others = {of(yaml, option) for option in read}
    others |= {of(write_task(tmp_path / "c", seed=1)), of(write_task(tmp_path / "d", "t"))}
    (tmp_path / "b" / "sums.yaml").write_text(yaml.read_text().replace("version: 2.0", "version: 3.0"))
    others.add(of(tmp_path / "b" / "sums.yaml"))
    assert len(others - {first}) == len(read) + 3


def test_the_harness_version_is_in_the_key() -> None:
    assert "lm-eval" in STAGES["evaluation.sft_tasks"].libraries
    assert STAGES["evaluation.policy_tasks"].libraries == STAGES["evaluation.sft_tasks"].libraries


@pytest.mark.parametrize("option", ["seed=2", "generation.temperature=0.7"])
def test_seed_and_temperature_change_sampled_responses_alone(option: str, tmp_path: Path) -> None:
    inputs = {"model": Input(path=tmp_path, digest="d" * 64)}
    for sampling, count in (("greedy", 1), ("sampled", 2)):
        options = ([f"evaluation.sampling={sampling}"], [f"evaluation.sampling={sampling}", option])
        assert len({key("evaluation.sft_probes", config(*each), inputs) for each in options}) == count
    longer = config("generation.max_new_tokens=9"), config()
    assert len({key("evaluation.sft_probes", each, inputs) for each in longer}) == 2


@pytest.mark.parametrize(
    ("option", "left"),
    [
        ("margins.sums=null", {"codes": 0.2}), ("margins=null", {}), ("margins.codes=0.3", {"sums": 0.1, "codes": 0.3}),
        ("clusters.sums=null", {}), ("clusters={more: x}", {"sums": "text", "more": "x"}),
    ],
)  # fmt: skip
def test_a_rerun_can_remove_an_entry_of_a_mapping(option: str, left: dict[str, Any]) -> None:
    """As `tether rerun` changes the config that a run has stored."""
    stored = to_values(config("evaluation.margins={sums: 0.1, codes: 0.2}", "evaluation.clusters={sums: text}"))
    changed = check_config(apply_overrides(stored, given(f"evaluation.{option}")), "run r1")
    assert getattr(changed.evaluation, option.split(".")[0].partition("=")[0]) == left
    with pytest.raises(UserError, match=r"evaluation\.margins"):
        config("evaluation.margins=0.1")


def test_a_judge_is_in_the_key_of_responses_to_probes_alone_and_only_if_it_is_set(tmp_path: Path) -> None:
    inputs = {"model": Input(path=tmp_path, digest="d" * 64)}
    endpoint = "evaluation.judge_endpoint={{url: 'http://127.0.0.1:1/v1', model: {0}, patience: {1}}}".format
    judges: Any = ([endpoint("big", 1)], [endpoint("big", 2)], [endpoint("small", 1)], ["evaluation.judge=a"], [])
    for stage in ("evaluation.sft_probes", "evaluation.policy_probes"):
        keys = [key(stage, config(*options), inputs) for options in judges]
        assert keys[0] == keys[1] and len({*keys}) == 3 and keys[3] == keys[4], "a folder's input has its digest"
        values = keyed_values(config().stage_job(STAGES[stage]))["evaluation"]
        assert values == {"batch_size": 16, "sampling": "greedy"}
    for unjudged in (STAGES["evaluation.sft_tasks"], STAGES["evaluation"]):
        assert len({canonical_json(keyed_values(config(*options).stage_job(unjudged))) for options in judges}) == 1


def judge_of(home: Path, *options: str) -> dict[str, Input]:
    return evaluation_inputs(config("evaluation.probes=[harmful]", *options), home, {})["probe"]


def test_a_judge_in_a_folder_or_of_a_run_is_an_input(make_home: Any, tmp_path: Path) -> None:
    write_judge(tmp_path / "judge")
    found = judge_of(tmp_path, f"evaluation.judge={tmp_path / 'judge'}")
    assert found["judge"] == Input.of(tmp_path / "judge") and list(found) == ["probes/harmful", "judge"]
    record = type("Recorded", (), {"inputs": {name: source.digest for name, source in found.items()}})
    taken: dict[str, Any] = {"evaluation.policy_probes": record}
    again = evaluation_inputs(config("evaluation.probes=[gone]", "evaluation.judge=gone"), tmp_path, taken)["probe"]
    assert {name: source.digest for name, source in again.items()} == record.inputs, "a reused one may be deleted"  # type: ignore[attr-defined]
    home = make_home()
    with pytest.raises(UserError, match=r"evaluation\.judge .*:sft: its tokenizer has no single token for A and for B"):
        judge_of(home.path, f"evaluation.judge={home.run}:sft")


def not_a_judge(folder: Path, kind: str) -> None:
    """Write a judge of which the model or the tokenizer alone is replaced by one that can't judge."""
    _, tokenizer = write_judge(folder)
    if kind == "no template":
        tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        return
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config, model = {
        "BertModel": (BertConfig, BertModel), "BertForMaskedLM": (BertConfig, BertForMaskedLM),
        "T5ForConditionalGeneration": (T5Config, T5ForConditionalGeneration),
    }[kind]  # fmt: skip
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "generation_config.json").unlink()
    model(config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *((kind, f"holds a {kind}, which writes no text. Name a language model")
          for kind in ("BertModel", "BertForMaskedLM", "T5ForConditionalGeneration")),
        ("no template", "has no chat template"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_judge_is_refused_before_a_run_begins(kind: str, message: str, tmp_path: Path) -> None:
    not_a_judge(tmp_path / "judge", kind)
    options = "evaluation.probes=[harmful]", f"evaluation.judge={tmp_path / 'judge'}"
    with pytest.raises(UserError, match=rf"evaluation\.judge.*{message}") as refused:
        new_run(tmp_path / "home", "tiny", config(*options))
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
    assert not (tmp_path / "home" / "runs").exists()


def test_an_endpoint_is_asked_before_a_run_begins(tmp_path: Path) -> None:
    with Scorer() as endpoint:
        endpoint.answer = lambda body: said("A")
        options = [f"evaluation.judge_endpoint.url={endpoint.url}", "evaluation.judge_endpoint.model=big"]
        assert list(judge_of(tmp_path, *options)) == ["probes/harmful"] and len(endpoint.asked) == 1
        endpoint.answer = lambda body: (404, {"error": "no model big"})
        with pytest.raises(UserError, match=r"evaluation\.judge_endpoint http.*it refuses .404.*no model big"):
            judge_of(tmp_path, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["evaluation.judge={0}/gone"], r"evaluation\.judge {0}/gone: there is no such folder"),
        (["evaluation.judge={0}"], r"evaluation\.judge {0}: {0} holds no model: its config\.json can't be read"),
        (
            ["evaluation.judge_endpoint={{url: 'http://127.0.0.1:9/v1', model: big, patience: 0}}"],
            r"evaluation\.judge_endpoint http://127\.0\.0\.1:9/v1: the endpoint could not be reached for 0 s",
        ),
    ],
)
def test_a_judge_that_cannot_be_used_is_refused_before_a_run_begins(
    options: list[str], message: str, tmp_path: Path
) -> None:
    named = [option.format(tmp_path) for option in options]
    with pytest.raises(UserError, match=message.format(tmp_path)) as refused:
        new_run(tmp_path / "home", "tiny", config("evaluation.probes=[harmful]", *named))
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
    assert not (tmp_path / "home" / "runs").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("{judge: a, judge_endpoint: {url: 'http://a/v1', model: m}}", "set either judge or judge_endpoint"),
        ("{judge_endpoint: {url: 'http://a/v1'}}", r"evaluation\.judge_endpoint\.model"),
        ("{judge_endpoint: {url: 'http://me:hunter2@a/v1', model: m}}", "holds a password or another secret"),
    ],
)
def test_an_invalid_judge_is_refused_with_its_option(option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(f"evaluation={option}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["evaluation.tasks=[{0}/gone.yaml]"], r"evaluation\.tasks: .*gone\.yaml can't be read"),
        (["evaluation.tasks=[{0}/hub.yaml]"], r"draws its data from a hub \(dataset_path: allenai/arc"),
        (["evaluation.tasks=[{0}/sums.yaml,{0}/sums.yaml]"], "two are called sums"),
        (["evaluation.tasks=[{0}/sums.yaml]", "evaluation.margins={{sum: 0.1}}"], r"evaluation\.margins\.sum: no such"),
        (["evaluation.probes=[{0}/codes.jsonl]", "evaluation.clusters={{codes: x}}"], r"evaluation\.clusters\.codes"),
        (["evaluation.probes=[{0}/sums.yaml]"], "sums.yaml, line 1"),
        (["evaluation.tasks=[{0}/sums.yaml]", "evaluation.clusters={{sums: x}}"], "a document has no field x"),
        (
            ["evaluation.tasks=[{0}/sums.yaml]", "gates.evaluation.task_drop=0", "evaluation.margins={{sums: 0.6}}"],
            # with four equal pairs Wilson's upper end is t^2 / (4 + t^2), t(0.975, 3) = 3.1824
            r"sums has 4 independent documents, too few for its margin of 0\.6: .* the interval ends at 0\.717, and "
            r"evaluation\.task_drop fails",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_run_begins(
    options: list[str], message: str, tmp_path: Path
) -> None:
    yaml = write_task(tmp_path, count=4)
    (tmp_path / "hub.yaml").write_text(yaml.read_text().replace("dataset_path: json", "dataset_path: allenai/arc"))
    probe(tmp_path)
    with pytest.raises(UserError, match=message):
        new_run(tmp_path / "home", "tiny", config(*(option.format(tmp_path) for option in options)))
    assert not (tmp_path / "home" / "runs").exists()


def test_a_missing_harness_is_refused_before_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write_task(tmp_path, count=4)
    monkeypatch.setattr(harness, "HARNESS", "0.0.1")
    with pytest.raises(UserError, match=r"results are comparable only from 0\.0\.1"):
        new_run(tmp_path / "home", "tiny", config(f"evaluation.tasks=[{yaml}]"))
    new_run(tmp_path / "home", "tiny", config(f"evaluation.tasks=[{yaml}]"), request=Request(until="ppo"))


@pytest.mark.parametrize("request_", [Request(until="evaluation"), Request(refresh=["evaluation"])])
def test_a_run_without_tasks_and_probes_has_no_evaluation_to_ask_for(request_: Request, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation: a run has this stage only with evaluation\.tasks or evaluation"):
        new_run(tmp_path, "tiny", config(), request=request_)


def compute(launch: Launch) -> dict[str, StageStatus]:
    """Run it in this process, without Prefect and MLflow; its stages by name."""
    launch.ctx.reporting = Reporting(track=False)
    with launch.ctx as ctx:
        pipeline(launch.config, launch.sources, partial(run_stage, ctx=ctx), ctx.status.document.until)
    return {stage.name: stage for stage in load_status(ctx.home, ctx.run).stages}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.whole), pytest.param(2, marks=pytest.mark.ranks)])
def test_a_run_evaluates_both_models_and_another_policy_reuses_sfts_results(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yamls = [write_task(tmp_path, name, count=12, seed=place) for place, name in enumerate(("sums", "more"))]
    home, named = tmp_path / "home", f"evaluation.tasks=[{','.join(map(str, yamls))}]"
    options = [*SMALL, named, f"evaluation.probes=[{probe(tmp_path)}]", "evaluation.margin=1"]
    evaluated = config(*options, f"runtime.ranks={ranks}")
    evaluate, killed = harness.evaluate, list[str]()

    def killed_once(model: Any, name: str, *arguments: Any) -> Any:
        if name == "sums" and not killed:
            killed.append(name)
            raise KeyboardInterrupt
        return evaluate(model, name, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(harness, "evaluate", killed_once)
        compute(new_run(home, "tiny", evaluated, request=Request(until="evaluation")))
    assert killed and load_status(home).stage("evaluation").state == "interrupted"

    first = compute(new_run(home, "tiny", evaluated, request=Request(until="evaluation")))
    assert list(first) == ["validate", "sft", "reward", "ppo", "evaluation", "human_eval"]
    assert first["ppo"].state == "cached" and first["evaluation"].state == "passed"
    gates = {gate.name: gate for gate in first["evaluation"].gates}
    assert gates["evaluation.task_drop"].threshold is not None and gates["evaluation.other_probes"].passed
    assert gates["evaluation.harmful"].threshold is None, "not measured"
    parts = first["evaluation"].parts
    assert list(parts) == [f"evaluation.{side}_{kind}" for kind in ("tasks", "probes") for side in SIDES]

    artifacts = {name: ArtifactStore(home).path(str(part.digest)) for name, part in parts.items()}
    for name, part in parts.items():
        record = ArtifactStore(home).lookup(str(part.key))
        assert isinstance(record, Record)
        inputs = {of: Input(path=tmp_path, digest=digest) for of, digest in record.inputs.items()}
        assert key(name, config(*options), inputs) == part.key, "one process would take these results"
    [one, two] = read_rows(artifacts["evaluation.sft_probes"] / "responses.jsonl")
    assert {*one} == {"probe", "id", "category", "prompt", "response", "violation", "rule"}
    assert one["prompt"] == [{"role": "user", "content": "What is the code of one?"}] and two["id"] == "two"
    assert one["violation"] == ("code" in one["response"]), "the probe's pattern"
    scores = json.loads((artifacts["evaluation.policy_tasks"] / "tasks.json").read_text())
    assert [score["task"] for score in scores["tasks"]] == ["more", "sums"]

    until, refresh = "evaluation", ["evaluation"]
    undisturbed = compute(new_run(home, "tiny", evaluated, request=Request(until=until, refresh=refresh)))["evaluation"]
    assert not undisturbed.cached and undisturbed.digest == first["evaluation"].digest
    assert [part.digest for part in undisturbed.parts.values()] == [part.digest for part in parts.values()]

    again = compute(rerun(home, "ppo", None, given("policy_seed=9"), request=Request(until="evaluation")))
    assert again["ppo"].digest != first["ppo"].digest
    for kind in ("tasks", "probes"):
        same, other = (again["evaluation"].parts[f"evaluation.{side}_{kind}"] for side in SIDES)
        assert same.key == parts[f"evaluation.sft_{kind}"].key and other.key != parts[f"evaluation.policy_{kind}"].key
        assert again["evaluation"].explained[f"evaluation.sft_{kind}"].outcome == "hit"


def test_a_reused_evaluation_needs_no_files(tmp_path: Path) -> None:
    record = type("Recorded", (), {"inputs": {"model": "m", "tasks/sums": "a" * 64, "tasks/sums/1": "b" * 64}})
    taken = {"evaluation.policy_tasks": record}
    inputs = evaluation_inputs(config("evaluation.tasks=[gone.yaml]"), tmp_path, taken)["task"]  # type: ignore[arg-type]
    assert {name: source.digest[0] for name, source in inputs.items()} == {"tasks/sums": "a", "tasks/sums/1": "b"}
