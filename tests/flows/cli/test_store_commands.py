"""`tether store` through the real command, on runs of toy artifacts, and what keeps them."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.base.process import describe_process, this_process
from components.store.graph import Graph
from components.store.retention import collect
from components.store.store import ArtifactStore, Record
from tasks.retention.requirements import registered, requirements
from tasks.retention.run_archive import export_run, import_results
from tasks.runs.status import StatusFile
from tests.stored_run import toy_run


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path / "home"


def found(home: Path, records: dict[str, Record]) -> list[str]:
    """The stages of a run that the store still has."""
    return [stage for stage, record in records.items() if ArtifactStore(home).lookup(record.key) == record]


# -- the command -----------------------------------------------------------------------------------------------------


def test_ls_verify_gc_and_pins_say_what_they_do(tether, home):
    old, new = toy_run(home, "r1", "one", started="2026-01-01"), toy_run(home, "r2", "two", started="2026-01-02")
    listed = json.loads(tether("store", "ls", "--json", home=home).stdout)
    assert listed["store"] == str(home / "store")
    assert {(row["stage"], row["run"], *row["kept_by"]) for row in listed["artifacts"]} == {
        ("sft", "r1", "run r1"), ("ppo", "r1", "run r1"), ("sft", "r2", "run r2"), ("ppo", "r2", "run r2"),
    }  # fmt: skip
    row = next(row for row in listed["artifacts"] if row["key"] == old["ppo"].key)
    objects = ArtifactStore(home).objects
    assert row["size"] == sum((objects / sha).stat().st_size for sha in old["ppo"].objects.values())

    assert "pinned" in tether("store", "pin", "r1", home=home).stdout
    kept = tether("store", "gc", "--keep-runs", "1", home=home)
    assert kept.returncode == 0 and "Freed 0 bytes" in kept.stdout
    assert tether("store", "pin", "r1", "--remove", home=home).returncode == 0
    again = tether("store", "pin", "r1", "--remove", home=home)
    assert again.returncode == 2 and "not pinned" in again.stderr
    would = json.loads(tether("store", "gc", "--keep-runs", "1", "--dry-run", "--json", home=home).stdout)
    assert found(home, old) == ["sft", "ppo"]
    went = json.loads(tether("store", "gc", "--keep-runs", "1", "--json", home=home).stdout)
    assert went == would | {"dry_run": False} and went["bytes"] > 0
    assert (found(home, old), found(home, new)) == ([], ["sft", "ppo"])
    assert json.loads((home / "runs" / "r1" / "run.json").read_text())["run"] == "r1"

    whole = tether("store", "verify", home=home)
    assert whole.returncode == 0 and "0 damaged, 0 missing, 0 orphaned" in whole.stdout
    path = objects / new["sft"].files["value"]
    path.chmod(0o644)
    path.write_text("flipped")
    (objects / new["ppo"].files["value"]).unlink()
    broken = tether("store", "verify", home=home)
    assert broken.returncode == 1 and path.name in broken.stdout
    report = json.loads(tether("store", "verify", "--json", home=home).stdout)
    assert [each["name"] for each in report["damaged"]] == [f"objects/{path.name}"]
    assert [each["name"] for each in report["missing"]] == [f"objects/{new['ppo'].files['value']}"]


def test_results_of_a_run_are_reused_in_another_home(tether, home, tmp_path):
    records = toy_run(home, "r1", "one")
    done = tether("store", "export", "r1", "--to", "run.tar", home=home)
    assert done.returncode == 0, done.stderr
    assert tether("store", "export", "r1", "--to", "run.tar", home=home).returncode == 2
    other = tmp_path / "elsewhere" / "home"
    other.mkdir(parents=True)
    for new in (2, 0):
        imported = tether("store", "import", str(tmp_path / "run.tar"), home=other)
        assert imported.returncode == 0 and f"2 records ({new} new) and 5 objects" in imported.stdout, imported.stderr
        assert "`tether run PROFILE` reuses them" in imported.stdout and "earlier version" not in imported.stdout
    assert sorted(path.name for path in other.iterdir()) == ["store"], "run.json and config.yaml are made by a run here"
    store = ArtifactStore(other)
    assert all(store.lookup(record.key).imported for record in records.values())
    assert (store.path(records["ppo"]) / "value").read_text() == "ppo one"
    assert sorted(each.run for each in Graph.of(store).node(records["ppo"].digest).records) == ["r1"]

    status = StatusFile.start(other / "runs" / "r2", "r2", "tiny", ["sft", "ppo"])  # a run that reuses them
    for stage, record in records.items():
        status.update(stage, state="cached", key=record.key, digest=record.digest)
    status.finish()
    assert export_run(store, "r2", tmp_path / "again.tar").read_bytes() == (tmp_path / "run.tar").read_bytes()


def test_an_archive_of_an_earlier_version_gives_its_results(tether, home, tmp_path):
    records = toy_run(home, "r1", "one")
    export_run(ArtifactStore(home), "r1", tmp_path / "new.tar")
    gnu = tarfile.GNU_FORMAT
    with tarfile.open(tmp_path / "new.tar") as new, tarfile.open(tmp_path / "old.tar", "w", format=gnu) as old:
        for name in ("config.yaml", "run.json", "metrics/ppo.jsonl"):
            old.add(home / "runs" / "r1" / name, f"run/{name}")
        for member in new:
            old.addfile(member, new.extractfile(member))
    imported = tether("store", "import", str(tmp_path / "old.tar"), home=tmp_path / "other")
    assert imported.returncode == 0, imported.stderr
    assert not (tmp_path / "other" / "runs").exists()
    assert all(ArtifactStore(tmp_path / "other").lookup(record.key).imported for record in records.values())


def test_an_edited_export_changes_nothing(tether, home, tmp_path):
    toy_run(home, "r1", "one")
    export_run(ArtifactStore(home), "r1", tmp_path / "run.tar")
    data = (tmp_path / "run.tar").read_bytes()
    (tmp_path / "run.tar").write_bytes(data.replace(b"ppo one", b"ppo two"))
    other = tmp_path / "other"
    refused = tether("store", "import", str(tmp_path / "run.tar"), home=other)
    assert refused.returncode == 2 and "refused" in refused.stderr
    assert not (other / "store").exists() and not (other / "runs").exists()


# -- what keeps ------------------------------------------------------------------------------------------------------


def test_runs_at_work_or_waiting_for_labels_are_kept_however_old_and_a_dead_one_is_not(home):
    at_work = toy_run(home, "r1", "at work", "running", "2026-01-01")
    waiting = toy_run(home, "r2", "waiting", "awaiting_labels", "2026-01-02")
    dead = toy_run(home, "r3", "dead", "running", "2026-01-03")
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    path = home / "runs" / "r3" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"process": describe_process(process.pid)}))
    process.wait()
    assert json.loads((home / "runs" / "r1" / "run.json").read_text())["process"] == this_process()
    store = ArtifactStore(home)
    with store.lock(dead["ppo"].key):  # a worker goes on where the run that ordered it has died
        collect(store, lambda: requirements(store, keep_runs=0))
    assert [found(home, each) for each in (at_work, waiting, dead)] == [["sft", "ppo"]] * 3
    collect(store, lambda: requirements(store, keep_runs=0))
    assert [found(home, each) for each in (at_work, waiting, dead)] == [["sft", "ppo"]] * 2 + [[]]


def test_the_newest_runs_are_kept_and_what_they_were_made_from(home):
    runs = [toy_run(home, f"r{n}", str(n), started=f"2026-01-0{n + 1}") for n in range(3)]
    store = ArtifactStore(home)
    collect(store, lambda: requirements(store, keep_runs=2))
    assert [found(home, each) for each in runs] == [[], ["sft", "ppo"], ["sft", "ppo"]]


def test_a_run_that_cannot_be_read_stops_the_collector(home):
    records = toy_run(home, "r1", "one")
    (home / "runs" / "r1" / "run.json").write_text("{")
    store = ArtifactStore(home)
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        collect(store, lambda: requirements(store, keep_runs=0))
    assert found(home, records) == ["sft", "ppo"]


@pytest.fixture
def mlflow_client(home, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from tasks.tracking.mlflow_client import connect

    home.mkdir()
    return connect(home)


def test_every_version_of_a_registered_model_is_kept_with_its_inputs(home, mlflow_client):
    records = toy_run(home, "r1", "one")
    by_key, other = toy_run(home, "r2", "two"), toy_run(home, "r3", "three")
    mlflow_client.create_registered_model("tether-policy")
    for tags in (
        {"lineage.digest": records["ppo"].digest, "lineage.sft_digest": records["sft"].digest},
        {"tether.key": by_key["ppo"].key},
    ):
        mlflow_client.create_model_version("tether-policy", "file:///nowhere", tags=tags)
    assert registered(home) == {
        "tether-policy version 1": [records["ppo"].digest, records["sft"].digest],
        "tether-policy version 2": [by_key["ppo"].key],
    }
    store = ArtifactStore(home)
    collect(store, lambda: requirements(store, keep_runs=0))
    assert [found(home, each) for each in (records, by_key, other)] == [["sft", "ppo"], ["sft", "ppo"], []]


def test_a_registry_that_cannot_be_asked_stops_the_collector(home, monkeypatch):
    records = toy_run(home, "r1", "one")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store = ArtifactStore(home)
    with pytest.raises(UserError, match=r"registry at http.* can't be asked"):
        collect(store, lambda: requirements(store, keep_runs=0))
    assert found(home, records) == ["sft", "ppo"]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    (home / "mlflow.db").write_text("no database")
    with pytest.raises(UserError, match=r"mlflow\.db is damaged"):
        requirements(store, keep_runs=0)


# -- exports ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_is_exported_and_a_running_one_is_not(home, tmp_path):
    records = toy_run(home, "r1", "one", "running")
    store = ArtifactStore(home)
    with pytest.raises(UserError, match="running"):
        export_run(store, "r1", tmp_path / "run.tar")
    path = home / "runs" / "r1" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"process": this_process() | {"started": "0"}}))
    export_run(store, "r1", tmp_path / "run.tar")
    assert import_results(ArtifactStore(tmp_path / "other"), tmp_path / "run.tar").new_records == len(records)


def test_a_run_without_results_is_not_exported(home, tmp_path):
    StatusFile.start(home / "runs" / "r1", "r1", "tiny", ["sft"]).finish()
    with pytest.raises(UserError, match="has no result yet"):
        export_run(ArtifactStore(home), "r1", tmp_path / "run.tar")
    assert not (tmp_path / "run.tar").exists()


def test_an_export_names_the_stage_that_the_store_has_lost(home, tmp_path):
    records = toy_run(home, "r1", "one")
    shutil.rmtree(home / "store" / "records" / records["ppo"].key)
    with pytest.raises(UserError, match="no ppo of it"):
        export_run(ArtifactStore(home), "r1", tmp_path / "run.tar")


def test_doctor_shows_the_store_and_whether_it_can_be_written(home, tmp_path, monkeypatch):
    from flows.doctor import _store

    monkeypatch.delenv("TETHER_STORE", raising=False)
    assert _store(home).level == "ok" and str(home / "store") in _store(home).text
    monkeypatch.setenv("TETHER_STORE", str(tmp_path / "nfs"))
    assert _store(home)[:3] == ("ok", "store", f"{tmp_path / 'nfs'} can be written")
    assert not [path for path in (tmp_path / "nfs").rglob("*") if path.is_file()]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TETHER_STORE", str(tmp_path / "file"))
    assert _store(home).level == "fail"
    monkeypatch.setenv("TETHER_STORE", "nosuch://x")
    assert _store(home).level == "fail" and "TETHER_STORE" in _store(home).text
