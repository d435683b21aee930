"""An imported run says what its records bear out, is marked as imported, and no run promotes what rests on it."""

import json
import shutil
import tarfile
from collections.abc import Callable
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.base.errors import UserError
from components.base.hashing import canonical_json, digest_json
from components.store.archive import read_archive
from components.store.records import record_text
from components.store.store import ArtifactStore
from flows.models.promotion import promoted
from flows.reports.runs import listed, print_runs
from flows.reports.terminal import markdown, print_run
from tasks.retention.archive import export_run, import_run
from tasks.retention.needs import needs
from tasks.runs.status import StatusFile, list_runs, load_status, own_runs
from tasks.tracking.carrier import left_behind, sync

CONFIG = {"data": {"preferences": None}, "seed": 0, "gates": {"ppo": {"kl": 8.0, "distinct": None}}}
METRICS = {"sft": {"sft/loss": 0.5}, "ppo": {"ppo/kl_high": 2.0, "ppo/kl": 1.5}}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """What another home exported: sft and ppo, with a gate."""
    home = tmp_path / "other"
    store = ArtifactStore(home)
    status = StatusFile.start(home / "runs" / "r1", "r1", "tiny", ["sft", "ppo", "human_eval"])
    (status.folder / "config.yaml").write_text(json.dumps(CONFIG))
    (status.folder / "metrics").mkdir()
    (status.folder / "metrics" / "ppo.jsonl").write_text('{"step": 1, "time": 5, "metrics": {"ppo/kl": NaN}}\n')
    inputs = {"data": "d" * 64}
    for stage, metrics in METRICS.items():
        (home / "out").mkdir()
        (home / "out" / "value").write_text(stage)
        parts = {"stage": stage, "job": {}, "inputs": inputs, "source": {}, "libraries": {}}
        about = {"stage": stage, "inputs": inputs, "parts": parts, "run": "r1", "metrics": metrics}
        record = store.publish(digest_json(parts), home / "out", None, about)
        (home / "out").rmdir()
        inputs = {"sft": record.digest}
        gates = [] if stage == "sft" else [KL]
        status.update(stage, state="passed", key=record.key, digest=record.digest, metrics=metrics, gates=gates)
    status.finish()
    return export_run(store, "r1", tmp_path / "run.tar")[1]


KL: dict[str, Any] = {
    "name": "ppo.kl", "metric": "ppo/kl_high", "value": 2.0, "op": "<=", "threshold": 8.0, "passed": True,
}  # fmt: skip


def edited(archive: Path, member: str, change: Callable[[bytes], bytes]) -> Path:
    """The archive with another member of that name, or with one more."""
    target = archive.with_name("edited.tar")
    with tarfile.open(archive) as old, tarfile.open(target, "w") as new:
        members = {info.name: old.extractfile(info).read() for info in old}  # type: ignore[union-attr]
        for name, data in (members | {member: change(members.get(member, b""))}).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            new.addfile(info, BytesIO(data))
    return target


def document(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | fields).encode()


def stage(name: str, **fields: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        found = json.loads(data)
        found["stages"] = [each | (fields if each["name"] == name else {}) for each in found["stages"]]
        return json.dumps(found).encode()

    return change


def refused(archive: Path, home: Path, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as error:
        import_run(ArtifactStore(home), archive)
    assert error.value.exit_code == 2 and str(archive) in str(error.value)
    assert not home.exists()


def test_an_imported_run_is_marked_and_shows_what_it_showed(archive: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    import_run(ArtifactStore(home), archive)
    here, there = load_status(home, "r1"), load_status(tmp_path / "other", "r1")
    assert here.imported and not there.imported
    console = Console(file=StringIO(), width=160)
    print_run(console, here, simulated=False)
    print_runs(console, listed(home), 20, 1, home)
    assert console.file.getvalue().count("imported") == 2  # type: ignore[attr-defined]
    assert "This run was imported" in markdown(here, simulated=False)
    shown, was = here.as_json()["stages"], there.as_json()["stages"]
    assert [{**each, "gates": []} for each in shown] == [{**each, "gates": []} for each in was]  # type: ignore[union-attr, attr-defined]
    (kl,) = [gate for gate in here.stage("ppo").gates if gate.threshold is not None]
    assert (kl.name, kl.value, kl.passed, kl.description != "") == ("ppo.kl", 2.0, True, True)
    assert {path.name for path in (home / "runs" / "r1").rglob("*")} == {
        "run.json", "config.yaml", "metrics", "ppo.jsonl",
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"started": 5}, {"started": "5"}, {"started": ""}, {"started": "0001-01-01"}, {"started": "<b>"},
        {"updated": "x"}, {"finished": "tomorrow"}, {"finished": None}, {"process": {"pid": 1}},
        {"process": {"pid": "1"}},
        {"run": "../../x"}, {"run": "a b"}, {"run": "\x1b[2J"}, {"run": 5},
        {"name": "\x1b]0;title\x07"}, {"name": "a\nb"}, {"name": "x" * 1000}, {"user": "\x1b[31m"}, {"profile": "a\nb"},
        {"tags": {"a\nb": "c"}}, {"tags": {"tether.run": "x"}}, {"tags": 5},
        {"origin": {"from": "../x", "stage": "ppo"}}, {"origin": {"from": "r0"}},
        {"origin": {"stage": "x", "from": "r0"}}, {"origin": {"until": "x"}},
        {"stages": []}, {"stages": [{"name": "nonsense"}]}, {"stages": [{"name": "ppo"}, {"name": "sft"}]},
        {"stages": [{"name": "sft"}, {"name": "sft"}]}, {"stages": "sft"},
    ],
)  # fmt: skip
def test_a_run_json_of_other_types_or_texts_is_refused_and_says_where(
    archive: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    refused(edited(archive, "run/run.json", document(**fields)), tmp_path / "home", r"run\.json: ")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ppo", {"state": "running"}), ("ppo", {"state": "wonderful"}), ("ppo", {"state": "gate_failed"}),
        ("human_eval", {"state": "passed"}), ("human_eval", {"gates": [{**KL, "name": "human_eval.items"}]}),
        ("ppo", {"seconds": -1}), ("ppo", {"seconds": float("inf")}), ("ppo", {"began": 1e300}),
        ("ppo", {"metrics": {"ppo/kl_high": 1.0}}), ("ppo", {"key": "../../x"}), ("ppo", {"digest": "x"}),
        ("human_eval", {"key": "a" * 64, "digest": "a" * 64, "state": "passed"}), ("ppo", {"key": None}),
        ("ppo", {"gates": [{**KL, "value": 1.0}]}), ("ppo", {"gates": [{**KL, "threshold": 9.0}]}),
        ("ppo", {"gates": [{**KL, "waived": True, "user": "the boss", "reason": "x"}]}),
        ("ppo", {"gates": [{**KL, "name": "ppo.[/x]"}]}), ("ppo", {"gates": [{**KL, "passed": False}]}),
        ("ppo", {"parts": {"<b>": {"key": "a" * 64}}}), ("ppo", {"parts": {"ppo": {"key": "a", "digest": "b"}}}),
        ("ppo", {"explained": {"<b>": {"outcome": "hit", "run": "r0"}}}), ("ppo", {"explained": {"ppo": 5}}),
    ],
)  # fmt: skip
def test_a_stage_that_claims_what_its_record_does_not_bear_out_is_refused(
    archive: Path, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    refused(edited(archive, "run/run.json", stage(name, **fields)), tmp_path / "home", r"run\.json: ")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"5", b"a: &x [1]\nb: *x", b"a: !!python/object:os.system x", b"\xff", b"a: 2026-01-01", b"a: {",
        b"[" * 5000, b"{a: " * 5000, b"gates: {ppo: {kl: yes}}", b"gates: {nonsense: {}}", b"gates: 5", b"1: 2",
    ],
)  # fmt: skip
def test_a_config_that_tether_does_not_write_is_refused(archive: Path, tmp_path: Path, data: bytes) -> None:
    if data:
        refused(edited(archive, "run/config.yaml", lambda _: data), tmp_path / "home", r"config\.yaml: ")
    with tarfile.open(archive) as old:
        assert "run/config.yaml" in old.getnames()


@pytest.mark.parametrize(
    "data",
    [
        b'{"step": "1", "metrics": {}}\n', b'{"step": 1, "metrics": {"a": "2"}}\n', b'{"step": true, "metrics": {}}\n',
        b'{\r{"step": 1, "metrics": {}}\n', b"{}\n", b"5\n", b"{\n",
        b'{"step": 1, "metrics": {"a": "b"}}\n', b'{"step": -1, "metrics": {}}\n',
        b'{"step": 1, "metrics": {}, "more": 1}\n', b'{"step": 1, "time": "x", "metrics": {}}\n',
        b'{"step": 1, "metrics": {}, "samples": ["x"]}\n', b"[" * 100_000 + b"\n",
    ],
)  # fmt: skip
def test_points_that_tether_does_not_write_are_refused_with_their_row(
    archive: Path, tmp_path: Path, data: bytes
) -> None:
    whole = b'{"step": 0, "metrics": {}}\n'
    changed = edited(archive, "run/metrics/ppo.jsonl", lambda _: whole + data)
    refused(changed, tmp_path / "home", r"metrics/ppo\.jsonl: row 2: ")
    refused(edited(archive, "run/metrics/x.jsonl", lambda _: whole), tmp_path / "home", "not a stage")


def test_the_samples_of_a_stage_that_trained_come_with_its_points(archive: Path, tmp_path: Path) -> None:
    line = b'{"step": 0, "metrics": {}, "samples": [{"prompt": "Late?", "response": "Sorry.", "kl": 0.5}]}\n'
    import_run(ArtifactStore(tmp_path / "home"), edited(archive, "run/metrics/ppo.jsonl", lambda _: line))
    (points,) = (tmp_path / "home" / "runs").glob("*/metrics/ppo.jsonl")
    assert points.read_bytes() == line


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
def test_an_archive_without_a_runs_file_is_refused_and_says_which(archive: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "less.tar"
    with tarfile.open(archive) as old, tarfile.open(target, "w") as new:
        for info in (info for info in old if info.name != f"run/{name}"):
            new.addfile(info, old.extractfile(info))
    refused(target, tmp_path / "home", f"it lacks run/{name}")


def test_what_a_run_json_holds_beside_its_fields_does_not_get_in(archive: Path, tmp_path: Path) -> None:
    more = edited(archive, "run/run.json", document(evil="\x1b[2J", origin={"flow_run": "x"}))
    more = edited(more.rename(tmp_path / "more.tar"), "run/run.json", stage("ppo", mlflow_run="x", evil="y"))
    import_run(ArtifactStore(tmp_path / "home"), more)
    text = (tmp_path / "home" / "runs" / "r1" / "run.json").read_text()
    assert "evil" not in text and '"flow_run"' not in text and '"mlflow_run": null' in text


def test_nothing_of_an_import_is_sent_to_mlflow(archive: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    import_run(ArtifactStore(home), archive)
    assert left_behind(home) == [] and list(sync(home)) == []


def test_an_imported_run_is_not_the_newest_unless_it_is_named_and_pushes_no_run_out(
    archive: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    StatusFile.start(home / "runs" / "mine", "mine", "tiny", ["sft"]).finish()
    path = home / "runs" / "mine" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "2020-01-01T00:00:00+00:00"}))
    import_run(ArtifactStore(home), archive)
    assert load_status(home).run == "mine" and own_runs(home) == ["mine"] and set(list_runs(home)) == {"mine", "r1"}
    (imported,) = [key for key, who in needs(ArtifactStore(home), 1).items() if key == load_status(home, "r1").needs[0]]
    assert imported
    shutil.rmtree(home / "runs" / "mine")
    assert load_status(home).run == "r1", "there is no other"


def test_a_record_that_the_run_does_not_rest_on_is_refused_for_it_would_answer_another_runs_key(
    archive: Path, tmp_path: Path
) -> None:
    read = read_archive(archive)
    for digest, stage_name in ((None, "reward"), (read.records[0].digest, read.records[0].stage)):
        template = next(each for each in read.records if digest in (None, each.digest))
        parts = {"stage": stage_name, "job": {"seed": 7}, "inputs": {}, "source": {}, "libraries": {}}
        files = template.files if digest else {"other": template.files["value"]}
        manifest = canonical_json(files).encode()
        about = {
            "stage": stage_name, "parts": parts, "job": parts["job"], "inputs": {}, "key": digest_json(parts),
            "files": files, "digest": digest_json(files),
        }  # fmt: skip
        text = record_text(template.model_copy(update=about)).encode()
        more = edited(archive, f"records/{digest_json(parts)}/1.json", lambda _, text=text: text)  # type: ignore[misc]
        if digest is None:
            more = edited(more.rename(tmp_path / "more.tar"), f"objects/{digest_json(files)}", lambda _: manifest)  # noqa: B023
        refused(more, tmp_path / "home", "does not rest on the record")


def test_another_run_of_the_same_id_is_not_taken_for_it(archive: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    StatusFile.start(home / "runs" / "r1", "r1", "tiny", ["sft"]).finish()
    before = (home / "runs" / "r1" / "run.json").read_bytes()
    with pytest.raises(UserError, match="another run r1 is here"):
        import_run(ArtifactStore(home), archive)
    assert (home / "runs" / "r1" / "run.json").read_bytes() == before and not (home / "store").exists()


def test_a_folder_in_the_runs_place_is_named(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "runs" / "r1").mkdir(parents=True)
    (tmp_path / "home" / "runs" / "r1" / "notes").write_text("mine")
    with pytest.raises(UserError, match="Move it away"):
        import_run(ArtifactStore(tmp_path / "home"), archive)
    assert not (tmp_path / "home" / "store").exists()


def test_a_model_that_rests_on_an_import_is_promoted_by_a_person_only(
    pipeline: Any, client: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_mlflow: Path
) -> None:
    ctx, _ = pipeline()
    export_run(ArtifactStore(home), ctx.run, tmp_path / "run.tar")
    shutil.rmtree(home)
    shutil.copy(empty_mlflow, tmp_path / "fresh.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'fresh.db'}")  # it keeps the old one open
    import_run(ArtifactStore(home), tmp_path / "run.tar")
    again, results = pipeline()
    assert all(result.cached and result.record.imported for result in results.values())
    mlflow = client()
    assert mlflow.get_registered_model("tether-policy").aliases == {}
    found = mlflow.get_model_version("tether-policy", "1")
    assert found.tags["tether.imported"] == again.run and "**Imported**" in found.description
    _, changed = pipeline(value=2)  # computed here, from imported data and sft
    assert not changed["ppo"].cached and changed["ppo"].imported
    assert mlflow.get_registered_model("tether-policy").aliases == {}
    assert mlflow.get_registered_model("tether-sft").aliases == {}
    (home / "mlflow.db").touch()  # without one there would be no registry to ask
    assert promoted(home, "tether-policy/2", "ada", "looked at it") == "tether-policy/2 is champion now."
    assert mlflow.get_registered_model("tether-policy").aliases == {"champion": 2}
