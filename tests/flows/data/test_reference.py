"""Which data `data.reference` means."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.store.store import ArtifactStore
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config, to_values
from flows.config.yaml import dump
from flows.data import reference
from flows.data.reference import find_reference
from flows.launch.begin import Launch, new_run, rerun
from flows.launch.request import Request
from flows.sources import find_sources
from tasks.runs.status import StatusFile
from tasks.stages import ALWAYS
from tasks.tracking.registry import Version
from tests.stored_run import publish


def asking(named: str, project: str = "tether") -> RunConfig:
    given = [f"data.reference={named}", f"project={project}", "data.preferences=p.jsonl"]
    return load_config("tiny", [parse_override(each) for each in given])


def earlier(home: Path, run: str, state: str = "passed", preferences: str = "a", project: str = "tether") -> str:
    """A run whose validate ended in `state`; returns the digest of its data."""
    inputs = {"preferences": preferences * 64}
    record = publish(home, "validate", run, key=f"{run:0>16}", files={"report.json": run}, inputs=inputs)
    status = StatusFile.start(home / "runs" / run, run, "tiny", ALWAYS)
    status.update("validate", key=record.key, digest=record.digest, state=state)
    status.finish()
    (home / "runs" / run / "config.yaml").write_text(dump(to_values(asking("last", project))))
    return record.digest


def found(home: Path, named: str, preferences: str = "n", **more: Any) -> str | None:
    inputs = find_reference(asking(named, **more), home, [preferences * 64])
    assert inputs.keys() <= {"reference"} and all(given.stored for given in inputs.values())
    return inputs["reference"].digest if inputs else None


def test_last_is_the_newest_accepted_data_of_the_project_with_other_preferences(tmp_path: Path) -> None:
    assert found(tmp_path, "last") is None, "the first run of a home has none"
    old = earlier(tmp_path, "20260101-000000-aaaa", preferences="a")
    waived = earlier(tmp_path, "20260102-000000-aaaa", "waived", preferences="b")
    earlier(tmp_path, "20260103-000000-aaaa", "gate_failed", preferences="c")
    earlier(tmp_path, "20260104-000000-aaaa", project="another", preferences="d")
    newest = earlier(tmp_path, "20260105-000000-aaaa", preferences="n")
    assert found(tmp_path, "last") == waived, "its own data, earlier, are no reference: the key would change each time"
    assert found(tmp_path, "last", "x") == newest and found(tmp_path, "last", "b") == newest
    assert found(tmp_path, "20260101-000000-aaaa") == old


def test_runs_of_the_same_preferences_are_passed_over_without_reading_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each start of a run would hash the data of every run before it."""
    old = earlier(tmp_path, "20260101-000000-aaaa", preferences="a")
    for day in (2, 3):
        earlier(tmp_path, f"2026010{day}-000000-aaaa", preferences="n")
    looked, lookup = list[str | None](), ArtifactStore.lookup

    def counted(store: ArtifactStore, key: str, digest: str | None = None) -> Any:
        looked.append(digest)
        return lookup(store, key, digest)

    monkeypatch.setattr(ArtifactStore, "lookup", counted)
    assert found(tmp_path, "last") == old and looked == [old]


def test_a_model_means_the_data_of_the_run_that_computed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = earlier(tmp_path, "20260101-000000-aaaa")
    tags = {"tether.run": "20260101-000000-aaaa"}
    monkeypatch.setattr(
        reference, "find_version", lambda home, asked: Version("tether-policy", "3", ("champion",), tags)
    )
    assert found(tmp_path, "tether-policy@champion") == old
    tags["tether.run"] = "gone"
    with pytest.raises(UserError, match=r"data\.reference = tether-policy@champion: its run gone is not in this home"):
        found(tmp_path, "tether-policy@champion")


def test_data_that_were_not_accepted_are_not_there_or_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.reference = nothing: there is no such run or registered model"):
        found(tmp_path, "nothing")
    earlier(tmp_path, "20260101-000000-aaaa", "gate_failed")
    with pytest.raises(UserError, match=r"were not accepted \(validate: gate_failed\)"):
        found(tmp_path, "20260101-000000-aaaa")
    digest = earlier(tmp_path, "20260102-000000-aaaa")
    stored = (ArtifactStore(tmp_path).path(digest) / "report.json").resolve()
    stored.chmod(0o644)
    stored.write_text("damaged")
    with pytest.raises(UserError, match=r"can't be read from the store: .*tether rerun validate --from 20260102"):
        found(tmp_path, "20260102-000000-aaaa")


def test_a_run_takes_the_reference_as_an_input_and_a_rerun_of_later_stages_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"prompt": "how deep is it", "chosen": "very deep", "rejected": "no"}\n'
    (tmp_path / "p.jsonl").write_text(row)
    home = tmp_path / "home"
    digest = earlier(home, "20260101-000000-aaaa")
    config = asking("last").resolved()
    data = find_sources(config, home).data
    assert data["reference"].digest == digest and data["reference"].stored
    inputs = {name: given.digest for name, given in data.items()}
    taken = publish(home, "validate", key="f" * 16, files={"report.json": "again"}, inputs=inputs)
    earlier(home, "20260102-000000-aaaa", preferences="z")
    assert find_sources(config, home, taken={"validate": taken}).data["reference"].digest == digest
    assert find_sources(config, home).data["reference"].digest != digest


def digest_of(begun: Launch) -> str | None:
    """What a run that began, and ended before its first stage, is compared with."""
    begun.ctx.reporting = replace(begun.ctx.reporting, at_end=None)  # no report
    begun.ctx.finish()
    data = begun.sources.data
    return data["reference"].digest if "reference" in data else None


def test_a_name_is_resolved_once_for_a_run_its_retry_its_rerun_and_the_same_command_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that are accepted meanwhile gave all of them another key: what was computed was computed again."""
    monkeypatch.chdir(tmp_path)
    row = '{{"prompt": "how deep is it", "chosen": "{}", "rejected": "no"}}\n'
    (tmp_path / "p.jsonl").write_text(row.format("very deep"))
    home, config = tmp_path / "home", asking("last").resolved()
    (tmp_path / "first").mkdir()
    alone = new_run(tmp_path / "first", "tiny", config)
    assert digest_of(alone) is None
    earlier(tmp_path / "first", "20260101-000000-aaaa")
    assert digest_of(new_run(tmp_path / "first", "tiny", config)) is None, "there was none at first"

    first, other = earlier(home, "20260101-000000-aaaa"), asking("last", "another").resolved()
    begun = new_run(home, "tiny", config, request=Request(flow_run="f1"))
    assert digest_of(begun) == first
    second = earlier(home, "20260102-000000-aaaa", preferences="b")
    again = new_run(home, "tiny", config, request=Request(flow_run="f1"))
    assert again.ctx.run == begun.ctx.run and digest_of(again) == first
    assert digest_of(new_run(home, "tiny", config)) == first
    assert digest_of(rerun(home, "validate", begun.ctx.run)) == first
    assert digest_of(new_run(home, "tiny", other)) is None, "another project has resolved nothing yet"
    (tmp_path / "p.jsonl").write_text(row.format("other preferences"))
    assert digest_of(rerun(home, "validate", begun.ctx.run)) == second
    (tmp_path / "p.jsonl").write_text(row.format("very deep"))
    for file in ArtifactStore(home).path(first).iterdir():
        file.resolve().unlink()
    assert digest_of(new_run(home, "tiny", config)) == second, "what is gone can't be compared with"


def test_an_alias_that_moves_is_resolved_again_by_a_new_run_but_not_by_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "how deep is it", "chosen": "very deep", "rejected": "no"}\n')
    home, champion = tmp_path / "home", "tether-policy@champion"
    old, new = (earlier(home, f"2026010{day}-000000-aaaa", preferences=str(day)) for day in (1, 2))
    tags = {"tether.run": "20260101-000000-aaaa"}
    monkeypatch.setattr(reference, "find_version", lambda *_: Version("tether-policy", "3", ("champion",), tags))
    config = asking(champion).resolved()
    begun = new_run(home, "tiny", config, request=Request(flow_run="f1"))
    assert digest_of(begun) == old
    tags["tether.run"] = "20260102-000000-aaaa"
    assert digest_of(new_run(home, "tiny", config, request=Request(flow_run="f1"))) == old
    assert digest_of(rerun(home, "validate", begun.ctx.run)) == old
    assert digest_of(new_run(home, "tiny", config)) == new
