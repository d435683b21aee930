"""What a run starts from, data in one file or several and an earlier run's reward model; what of it enters the key."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.store.store import ArtifactStore, Record
from flows.base_run import changed_before
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, check_config, load_config, to_values
from flows.sources import find_sources
from tasks.execution.computing import Work
from tasks.execution.dispatch import _order
from tasks.execution.keying import key_of
from tasks.result import Input
from tasks.runs.status import StatusFile
from tasks.stages import ALWAYS, STAGES
from tests.stored_run import publish


def published(home: Path, name: str) -> str:
    return publish(home, name, key=name * 8, files={"inner/name.txt": name}).digest


def earlier(home: Path, run: str = "r1", **digests: str | None) -> dict[str, str | None]:
    """A run in `home` whose validate and reward stages have results."""
    found = {name: digests.get(name, published(home, name)) for name in ("validate", "reward")}
    status = StatusFile.start(home / "runs" / run, run, "tiny", ALWAYS)
    for name, digest in found.items():
        status.update(name, digest=digest)
    status.finish()
    return found


def refreshing(run: str) -> RunConfig:
    return load_config("tiny", [parse_override(f"reward.refresh.from_run={run}")]).resolved()


def test_the_id_of_the_run_whose_reward_model_is_refreshed_is_in_no_key(tmp_path: Path) -> None:
    digests = earlier(tmp_path / "home")
    found = find_sources(refreshing("r1"), tmp_path / "home").previous
    assert {name: source.digest for name, source in found.items()} == {
        "previous_reward": digests["reward"], "previous_data": digests["validate"]
    }  # fmt: skip
    assert (found["previous_reward"].path / "inner" / "name.txt").read_text() == "reward"
    jobs = [refreshing(named).stage_job(STAGES["reward"]) for named in ("r1", "r2")]
    assert keyed_values(jobs[0]) == keyed_values(jobs[1])
    assert keyed_values(jobs[0])["reward"]["refresh"] == {"replay": 0.25}
    assert find_sources(load_config("tiny"), tmp_path / "home").previous == {}


def test_a_worker_finds_a_stored_artifact_by_its_digest(tmp_path: Path) -> None:
    earlier(tmp_path / "home")
    config = refreshing("r1")
    inputs, store = find_sources(config, tmp_path / "home").previous, ArtifactStore(tmp_path / "home")
    work = Work(STAGES["reward"], config.stage_job(STAGES["reward"]), inputs, "k", {}, "r")
    ordered = _order(work, refresh=False, store=store).inputs
    assert {name: given.stored for name, given in ordered.items()} == dict.fromkeys(inputs, True)


def test_a_run_that_is_not_there_or_has_no_reward_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.refresh\.from_run = r9: there is no run r9 in .*`tether runs` lists"):
        find_sources(refreshing("r9"), tmp_path / "home")
    earlier(tmp_path / "home", reward=None)
    with pytest.raises(UserError, match=r"reward\.refresh\.from_run = r1: that run has no reward model"):
        find_sources(refreshing("r1"), tmp_path / "home")


# -- preferences in one file or several ------------------------------------------------------------------------------


def pairs(path: Path, first: int = 0) -> Path:
    rows = ({"prompt": f"q {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(first, first + 3))
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preferring(*named: object, alone: bool = False) -> RunConfig:
    text = str(named[0]) if alone else f"[{', '.join(map(str, named))}]"
    return load_config("tiny", [parse_override(f"data.preferences={text}")]).resolved()


def key(config: RunConfig, data: dict[str, Input]) -> str:
    return key_of(STAGES["validate"], config.stage_job(STAGES["validate"]), data)[0]


def test_a_list_of_one_is_the_same_as_that_one_path(tmp_path: Path) -> None:
    path = pairs(tmp_path / "p.jsonl")
    one, alone = preferring(path), preferring(path, alone=True)
    assert one.data.preferences == alone.data.preferences == str(path) and to_values(one) == to_values(alone)
    found = find_sources(one, tmp_path).data
    assert found == find_sources(alone, tmp_path).data == {"preferences": Input.of(path)}
    job = one.stage_job(STAGES["validate"])
    assert "preferences" not in keyed_values(job)["data"], "a path is no part of a key"  # type: ignore[operator]


def judged_by(rewards: list[Any] | None, rules: dict[str, str] | None = None) -> RunConfig:
    values: Any = to_values(load_config("tiny"))
    values["ppo"] |= {"rewards": rewards, "rules": rules}
    return RunConfig.model_validate(values)


def test_another_reward_model_or_file_of_rules_is_a_change_before_human_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is in no key, and the rerun would take PPO's result as it is: the change would have no effect."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    one = judged_by([{"source": "model:ours", "name": "judge"}], {"file": "a.yaml"})
    other = judged_by([{"source": "model:theirs", "name": "judge"}], {"file": "b.yaml"})
    assert changed_before("human_eval", one, other) == {"ppo.rewards": "ppo", "ppo.rules.file": "ppo"}
    assert changed_before("ppo", one, other) == {}, "ppo is computed again"
    same = judged_by([{"source": f"model:{tmp_path}/ours", "name": "judge"}], {"file": str(tmp_path / "a.yaml")})
    assert changed_before("human_eval", one, same) == {}, "the same folder and file, written differently"
    pinned, newer = (judged_by([{"source": f"model:org/name@{c * 40}", "name": "judge"}]) for c in "ab")
    assert changed_before("human_eval", pinned, newer) == {"ppo.rewards": "ppo"}
    moved = [judged_by([{"source": "function:m:f", "root": root}]) for root in ("ours", "theirs")]
    assert changed_before("human_eval", *moved) == {"ppo.rewards": "ppo"}


def test_several_files_are_inputs_each_and_their_order_is_in_no_key(tmp_path: Path) -> None:
    a, b = pairs(tmp_path / "a.jsonl"), pairs(tmp_path / "b.jsonl", 3)
    one, other = preferring(a, b), preferring(b, a)
    found = find_sources(one, tmp_path).data
    assert found == {"preferences/a.jsonl": Input.of(a), "preferences/b.jsonl": Input.of(b)}
    assert key(one, found) == key(other, find_sources(other, tmp_path).data)
    assert changed_before("sft", one, other) == {} and changed_before("sft", one, preferring(a)) != {}
    b.write_text(b.read_text().replace("yes 4", "yes indeed"))
    assert key(one, find_sources(one, tmp_path).data) != key(one, found), "the bytes of each are in the key"


def test_the_name_of_one_of_several_files_is_in_the_key_as_it_is_in_the_artifact(tmp_path: Path) -> None:
    a, b = pairs(tmp_path / "a.jsonl"), pairs(tmp_path / "b.jsonl", 3)
    before = key(preferring(a, b), find_sources(preferring(a, b), tmp_path).data)
    c = b.rename(tmp_path / "c.jsonl")
    assert key(preferring(a, c), find_sources(preferring(a, c), tmp_path).data) != before


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("[]", "data.preferences = []: the list is empty"),
        ("[a.jsonl, a.jsonl]", "names a.jsonl twice"),
        ("[a.jsonl, sub/../a.jsonl]", "a.jsonl and sub/../a.jsonl hold the same bytes"),
        ("[a.jsonl, copy.jsonl]", "a.jsonl and copy.jsonl hold the same bytes"),
        ("[a.jsonl, gone.jsonl]", "gone.jsonl. Give the path"),
        ("[a.jsonl, prompts.jsonl]", "prompts.jsonl: its rows are not preference pairs"),
        ("[a.jsonl, sheet.jsonl]", "sheet.jsonl is a rating sheet"),
        ("[a.jsonl, bad.jsonl]", "bad.jsonl has no valid preference pair"),
        ("[a.jsonl, 3]", "must be a path or hub name, or a list of them"),
        ("{a: b}", "must be a path or hub name, or a list of them"),
    ],
)
def test_a_list_that_is_not_of_different_preferences_is_the_users_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs(Path("sub/b.jsonl"), 3)
    shutil.copy(pairs(Path("a.jsonl")), "copy.jsonl")
    Path("prompts.jsonl").write_text('{"prompt": "q"}\n')
    Path("sheet.jsonl").write_text('{"item": 1, "prompt": "q", "response_a": "x", "response_b": "y"}\n')
    Path("bad.jsonl").write_text('{"prompt": "q", "chosen": "", "rejected": "no"}\n')
    with pytest.raises(UserError, match=re.escape(told)):
        find_sources(load_config("tiny", [parse_override(f"data.preferences={named}")]), tmp_path)


@pytest.mark.parametrize("kind", ["preferences", "demonstrations", "prompts", "judge_preferences"])
def test_an_error_in_a_file_of_the_run_names_the_option_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("data.jsonl", ""), ("cut.jsonl", '{"prompt": "q'), ("other.csv", "colour\nred\n")):
        Path(name).write_text(text)
        config = load_config("tiny", [parse_override(f"data.{kind}={name}")])
        with pytest.raises(UserError, match=rf"^data\.{kind}: (No line of )?{name}"):
            find_sources(config, tmp_path)


def test_options_of_a_source_are_in_the_key_and_a_name_that_is_no_source_begins_no_run(tmp_path: Path) -> None:
    a, b = pairs(tmp_path / "a.jsonl"), pairs(tmp_path / "b.jsonl", 3)
    values = to_values(preferring(a, b))

    def asked(**sources: dict[str, float]) -> RunConfig:
        return check_config(values | {"data": values["data"] | {"sources": sources}}, "test")  # type: ignore[operator]

    one, other, twice = asked(), asked(**{"b.jsonl": {"weight": 3}}), asked(**{"b.jsonl": {"weight": 2}})
    keys = {key(each, find_sources(each, tmp_path).data) for each in (one, other, twice)}
    assert len(keys) == 3 and changed_before("reward", other, twice) == {"data.sources.b.jsonl.weight": "validate"}
    assert check_config(to_values(other), "a run's own config") == other
    with pytest.raises(UserError, match=r"names 'c\.jsonl'.*there are a\.jsonl, b\.jsonl"):
        find_sources(asked(**{"c.jsonl": {"weight": 2}}), tmp_path)


def test_a_run_that_goes_on_after_validate_needs_none_of_the_files(tmp_path: Path) -> None:
    record = Record.model_construct(
        run="r1", inputs={"preferences/a": "a" * 64, "preferences/b": "b" * 64, "base": "c"}
    )
    found = find_sources(preferring("a", "b"), tmp_path, taken={"validate": record}).data
    assert {name: (each.digest, str(each.path)) for name, each in found.items()} == {
        "preferences/a": ("a" * 64, "a"), "preferences/b": ("b" * 64, "b")
    }  # fmt: skip


def test_a_sample_that_people_judge_keeps_the_secret_it_was_sealed_with(tmp_path: Path) -> None:
    """Defect 14: a run taken up elsewhere, or of an earlier version, is scored by the sample that raters were shown."""

    def taken(**inputs: str) -> dict[str, Any]:
        return {"human_eval.sample": SimpleNamespace(inputs=inputs), "validate": SimpleNamespace(inputs={}, run="r1")}

    simulated = load_config("tiny")
    people = load_config("tiny", [parse_override("human_eval.judges=people")])
    assert find_sources(simulated, tmp_path).blinding == {} and list(tmp_path.iterdir()) == []
    assert find_sources(people, tmp_path, taken=taken(data="d")).blinding == {}, "an earlier version's had none"
    assert find_sources(people, tmp_path, taken=taken(seal="5" * 64)).blinding["seal"].digest == "5" * 64
    assert list(tmp_path.iterdir()) == []
    own = find_sources(people, tmp_path).blinding["seal"]
    assert own == find_sources(people, tmp_path).blinding["seal"] == Input.of(tmp_path / "human_eval.seal")
    assert own != find_sources(people, tmp_path / "other").blinding["seal"]


def test_a_suite_is_a_file_and_never_asked_of_the_hub(tmp_path: Path) -> None:
    config = load_config("tiny", [parse_override("data.suite=owner/name")]).resolved()
    with pytest.raises(UserError, match=r"data\.suite: there is no file .*owner/name\. Give the path of the file\."):
        find_sources(config, tmp_path)


@pytest.mark.parametrize("option", ["data.preferences", "data.demonstrations", "data.decontaminate", "data.suite",
                                    "sft.base", "reward.suites.mine"])  # fmt: skip
def test_a_folder_that_nobody_reads_is_refused_undigested(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sft.base=/usr/share` was digested for minutes, and refused by the second stage."""

    def digested(path: Path) -> str:
        raise AssertionError(f"{path} was digested")

    monkeypatch.setattr("components.store.store.digest_file", digested)
    (folder := tmp_path / "share").mkdir()
    (folder / "large.jsonl").write_text("{}")
    with pytest.raises(UserError, match=re.escape(option)) as told:
        find_sources(load_config("tiny", [parse_override(f"{option}={folder}")]), tmp_path)
    assert str(folder) in str(told.value)
    with pytest.raises(UserError, match="neither a model"):
        Input.named(folder)


def test_only_the_files_of_a_model_that_are_read_are_digested(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    flat = Input.of(folder).digest
    (folder / ".git").mkdir()
    (folder / ".git" / "large").write_text("history")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "all").symlink_to("/")
    assert Input.of(folder).digest == flat
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    assert Input.of(folder).digest != flat


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "additional_chat_templates/tools.jinja"])
def test_a_pipe_inside_a_model_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / "base").mkdir()
    for each in ("config.json", "model.safetensors"):
        (folder / each).write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"sft\.base: .*{re.escape(name)} is a device, a pipe or a socket"):
        find_sources(load_config("tiny", [parse_override(f"sft.base={folder}")]), tmp_path)


def test_a_pipe_inside_a_saved_dataset_is_refused_by_name(tmp_path: Path) -> None:
    (folder := tmp_path / "saved").mkdir()
    os.mkfifo(folder / "state.json")
    with pytest.raises(UserError, match=r"data\.preferences: .*state\.json is a device, a pipe or a socket"):
        find_sources(load_config("tiny", [parse_override(f"data.preferences={folder}")]), tmp_path)


def test_what_only_later_stages_read_may_be_absent(tmp_path: Path) -> None:
    config = load_config("tiny", [parse_override("reward.suites.mine=absent.jsonl")])
    assert find_sources(config, tmp_path, until="sft").suites == {}
    with pytest.raises(UserError, match="absent"):
        find_sources(config, tmp_path, until="reward")
