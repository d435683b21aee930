"""What a machine allows runs to read and to import, by TETHER_ALLOWED_FOLDERS."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from components.base.errors import UserError
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from flows.launch.begin import new_run
from tasks.allowed import CODE, FILES, VARIABLE, refuse_outside, refuse_path

NO_PATHS = {
    *("project", "runners.pool", "prices.currency", "prices.hour", "generation.stop", "data.votes", "data.sources"),
    *(f"{group}.{name}" for group in ("runtime", "runners.runtime") for name in ("instruction_set", "gpu", "cuda")),
    *("data.hub.subset", "data.hub.split", "data.hub.revision", "data.columns", "data.judge_columns"),
    *("data.demonstration_columns", "data.prompt_columns", "data.reward_columns", "data.label_values"),
    *("data.score.name", "data.decision.experts", "data.reference", "sft.keep", "sft.template_variables"),
    *("reward.objectives", "reward.lora.targets", "ppo.lora.targets", "policy.lora.targets", "ppo.rewards.name"),
    *("ppo.rewards.code", "ppo.rewards.version", "ppo.rewards.told", "ppo.rewards.column", "ppo.rewards.extract"),
    "ppo.rewards.value",
    *("ppo.rules.drop", "ppo.rules.penalty"),
    *("ppo.rules.patterns", "ppo.rules.function", "ppo.rules.code", "ppo.rollout.url", "ppo.rollout.version"),
    *("ppo.rollout.dtype", "human_eval.instructions", "gates.extra.metric", "gates.extra.code"),
    *("evaluation.clusters", "evaluation.margins", "evaluation.judge_endpoint.url", "evaluation.judge_endpoint.model"),
    "gates.extra.description",
}
"""Options with a text that names no path and no code: runs of the home, columns, patterns, names and addresses."""
INSTALLED = {"data.readers", "data.readers.plugin", "data.readers.code", "gates.extra", "gates.extra.plugin"}
INSTALLED |= {"ppo.observers.plugin", "ppo.observers.code"}
"""Options that name plug-ins: code that the machine's administrator has installed."""


def text_options(annotation: Any, name: str) -> Iterator[str]:
    """The dotted names of the options in a config's class that can hold a text."""
    if annotation is str:
        yield name
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for field, info in annotation.model_fields.items():
            yield from text_options(info.annotation, f"{name}.{field}".removeprefix("."))
    else:
        for each in get_args(annotation):
            yield from text_options(each, name)


def test_every_option_that_can_name_a_path_or_code_is_known() -> None:
    """A new option with a text is put in one of the lists: `FILES` and `CODE` are checked on the machine."""
    there = set(text_options(RunConfig, ""))
    assert there - NO_PATHS - INSTALLED == {*FILES, *CODE}
    assert len(there) > 50


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The only allowed folder, which is also the current one, and another with a file of each kind."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        (folder / "rows.jsonl").write_text('{"prompt": "q", "chosen": "yes", "rejected": "no"}\n')
        (folder / "mine.py").write_text("def score(prompts, responses, rows):\n    return [0.0 for _ in responses]\n")
    monkeypatch.chdir(good)
    monkeypatch.setenv(VARIABLE, f"{good}{os.pathsep}{tmp_path / 'absent'}")
    return good, bad


def config(*changes: str) -> RunConfig:
    base = ["sft.base=lab/tiny"] if any("sft.chat_template" in text for text in changes) else []
    return load_config("tiny", [parse_override(text) for text in (*base, *changes)])


OF_PATHS = {
    "data.preferences": "data.preferences={0}/rows.jsonl",
    "data.judge_preferences": "data.judge_preferences=[{0}/rows.jsonl, {0}/mine.py]",
    "data.demonstrations": "data.demonstrations={0}/rows.jsonl",
    "data.prompts": "data.prompts={0}/rows.jsonl",
    "data.suite": "data.suite={0}/rows.jsonl",
    "data.decontaminate": "data.decontaminate=[{0}/rows.jsonl]",
    "data.deployment_prompts": "data.deployment_prompts={0}/rows.jsonl",
    "sft.base": "sft.base={0}",
    "sft.chat_template": "sft.chat_template={0}/rows.jsonl",
    "reward.suites": "reward.suites.mine={0}/rows.jsonl",
    "reward.refresh.from_run": "reward.refresh={{from_run: {0}}}",
    "ppo.rewards.source": "ppo.rewards=[{{source: 'model:{0}'}}]",
    "ppo.rewards.root": "ppo.rewards=[{{source: 'function:mine:score', root: '{0}'}}]",
    "ppo.rules.file": "ppo.rules={{file: '{0}/rows.jsonl'}}",
    "ppo.rules.root": "ppo.rules={{function: 'mine:score', root: '{0}'}}",
    "human_eval.guidelines": "human_eval.guidelines={0}/rows.jsonl",
    "evaluation.tasks": "evaluation.tasks=[{0}/rows.jsonl]",
    "evaluation.probes": "evaluation.probes=[{0}/rows.jsonl]",
    "evaluation.judge": "evaluation.judge={0}",
    "ppo.rollout.folder": "ppo.rollout.folder={0}/not_yet",
}


def test_every_option_of_the_lists_is_tried() -> None:
    assert OF_PATHS.keys() == {*FILES, *CODE}


@pytest.mark.parametrize("option", OF_PATHS)
def test_a_path_outside_is_refused_before_it_is_read(option: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    good, bad = folders
    (link := good / "link").symlink_to(bad)
    refuse_outside(config(OF_PATHS[option].format(good)), tmp_path / "home")
    for outside in (bad, good / ".." / "bad", link, tmp_path / "bad" / "absent"):
        asked = config(OF_PATHS[option].format(outside))
        with pytest.raises(UserError, match=rf"{option}: .* is outside the folders that {VARIABLE} allows"):
            new_run(tmp_path / "home", "tiny", asked)
    assert not (tmp_path / "home" / "runs").exists()


def test_without_the_variable_every_path_is_allowed(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    refuse_outside(config("sft.base=/usr"), tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(UserError, match=r"sft\.base: /usr is outside .* \(none\)"):
        refuse_outside(config("sft.base=/usr"), tmp_path)


def test_a_models_files_may_not_lead_outside(folders: tuple[Path, Path], tmp_path: Path) -> None:
    good, bad = folders
    (good / "config.json").write_text("{}")
    refuse_path("sft.base", str(good), None)
    (good / "tokenizer.json").symlink_to(bad / "rows.jsonl")
    with pytest.raises(UserError, match=r"tokenizer\.json is outside"):
        refuse_path("sft.base", str(good), None)


def test_the_home_holds_data_and_no_code(folders: tuple[Path, Path], tmp_path: Path) -> None:
    home = tmp_path / "bad"
    refuse_outside(config(f"data.preferences={home}/rows.jsonl"), home)
    with pytest.raises(UserError, match=r"ppo\.rewards\.root"):
        refuse_outside(config(OF_PATHS["ppo.rewards.root"].format(home)), home)


@pytest.mark.parametrize("text", ["lab/tiny@main", "chatml", "{% for m in messages %}/../{{ m }}" * 99, "r1", "a\0b"])
def test_a_text_that_names_no_path_is_left_alone(text: str, folders: tuple[Path, Path]) -> None:
    refuse_path("sft.base", text, None)


def test_patterns_and_installed_plug_ins_need_no_folder(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse_outside(config("ppo.rules={patterns: {promise: we promise}}"), tmp_path)
    refuse_outside(config("ppo.rewards=[{source: 'plugin:short'}, {source: 'verifier:exact', value: x}]"), tmp_path)
    with pytest.raises(UserError, match=r"ppo\.rules\.root: \. is outside"):
        refuse_outside(config("ppo.rules={function: 'mine:score'}"), tmp_path / "home")
