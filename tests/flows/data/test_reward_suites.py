"""Suites of `reward.suites` as a run begins: read, digested, and what a rerun may change."""

from pathlib import Path

import pytest

from components.base.errors import UserError
from components.base.jsonl import write_rows
from flows.base_run import changed_before
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from flows.deployment.register import with_absolute_paths
from flows.sources import find_sources
from tasks.execution.keying import key_of
from tasks.stages import STAGES


def suite(path: Path, answer: str = "Yes.") -> Path:
    write_rows(path, [{"prompt": f"{n}?", "chosen": answer, "rejected": "No."} for n in range(3)])
    return path


def config(*changes: str) -> RunConfig:
    return load_config("tiny", [parse_override(text) for text in changes]).resolved()


def key(found: RunConfig, home: Path) -> str:
    suites = find_sources(found, home).suites
    return key_of(STAGES["reward"], found.stage_job(STAGES["reward"]), suites)[0]


def test_the_key_has_name_and_bytes_of_a_suite_and_not_its_path(tmp_path: Path) -> None:
    texts = (("a", "Yes."), ("b", "Yes."), ("c", "Oh."))
    one, same, other = (suite(tmp_path / f"{name}.jsonl", text) for name, text in texts)
    keys = [key(config(f"reward.suites.{name}={path}"), tmp_path)
            for name, path in (("mine", one), ("mine", same), ("mine", other), ("yours", one))]  # fmt: skip
    assert keys[0] == keys[1] and len({*keys, key(config(), tmp_path)}) == 4


def test_a_suite_that_cannot_be_read_is_named_before_the_run(tmp_path: Path) -> None:
    path = suite(tmp_path / "a.jsonl")
    path.write_text(path.read_text() + '{"prompt": "4?", "chosen": "Yes."}\n')
    with pytest.raises(UserError, match=r"^reward\.suites\.mine: .*a\.jsonl, row 4: .*rejected"):
        find_sources(config(f"reward.suites.mine={path}"), tmp_path)
    with pytest.raises(UserError, match=r"^reward\.suites\.mine: .*none\.jsonl: there is no such file\."):
        find_sources(config(f"reward.suites.mine={tmp_path / 'none.jsonl'}"), tmp_path)
    with pytest.raises(UserError, match=r"reward\.suites"):
        config(f"reward.suites={{'a b': {path}}}")


@pytest.mark.parametrize("name", ["accuracy", "accuracy_low"])
def test_a_suites_name_cannot_take_the_place_of_the_number_that_the_gate_judges(name: str, tmp_path: Path) -> None:
    path = suite(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=rf"reward/suite_{name} is a metric of all suites"):
        config(f"reward.suites.{name}={path}")


def test_a_rerun_after_reward_refuses_another_suite(tmp_path: Path) -> None:
    one, other = config("reward.suites.mine=a.jsonl"), config("reward.suites.mine=b.jsonl")
    assert changed_before("ppo", one, other) == {"reward.suites.mine": "reward"}
    assert changed_before("ppo", one, config()) == {"reward.suites.mine": "reward"}
    assert changed_before("reward", one, other) == {}


def test_a_deployment_names_a_suite_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite(tmp_path / "a.jsonl")
    found = with_absolute_paths(config("reward.suites.mine=a.jsonl")).reward.suites
    assert found == {"mine": str(tmp_path / "a.jsonl")}
