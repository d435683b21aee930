"""Garbage collection takes what nothing needs, and nothing that somebody is about to need."""

import os
import random
import time
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.store import retention
from components.store.retention import (
    WORK_SECONDS,
    YOUNG_SECONDS,
    collect,
    read_pins,
    remove_finished_work,
    remove_pin,
    write_pin,
)
from components.store.store import ArtifactStore, Miss, Record
from components.store.verify import verify
from tests.forks import Forked
from tests.waiting import PATIENCE

A, B, C = "a" * 64, "b" * 64, "c" * 64


def publish(store: ArtifactStore, key: str, text: str, **inputs: str) -> Record:
    out = store.home / f"out-{key[:2]}-{os.getpid()}"
    out.mkdir(parents=True)
    (out / "value").write_text(text)
    (out / "shared").write_text("the same in all")
    record = store.publish(key, out, None, {"stage": "toy", "inputs": inputs})
    out.rmdir()
    return record


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def store(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


def test_what_is_needed_stays_with_everything_it_was_made_from_and_the_rest_goes(store):
    first = publish(store, A, "1")
    second = publish(store, B, "2", data=first.digest)
    other = publish(store, C, "3")
    for record in (first, second, other):
        store.path(record)
    gone = collect(store, lambda: {second.digest: {"model policy version 1"}})  # a digest keeps as a key does
    assert {(each.kind, each.name) for each in gone} == {
        ("record", f"records/{C}/1.toy.json"), ("object", f"objects/{other.digest}"),
        ("object", f"objects/{other.files['value']}"), ("view", other.digest),
    }  # fmt: skip
    assert store.lookup(A) == first and store.lookup(B) == second and store.lookup(C) == Miss("no record")
    assert not (store.local.root / "records" / C).exists()
    report = verify(store)
    assert report.damaged == report.missing == report.orphaned == []


def test_the_empty_folder_of_a_record_whose_removal_was_killed_goes(store):
    record = publish(store, A, "1")
    (store.local.root / "records" / B).mkdir()
    assert collect(store, lambda: {A: {"run r"}}) == []
    assert store.lookup(A) == record and not (store.local.root / "records" / B).exists()


def test_a_dry_run_names_the_same_and_removes_nothing(store):
    publish(store, A, "1")
    (store.work / B).mkdir(parents=True)
    age(store.work / B, 2 * WORK_SECONDS)
    would = collect(store, dict, dry_run=True)
    assert isinstance(store.lookup(A), Record) and (store.work / B).is_dir()
    assert collect(store, dict) == would
    assert {each.kind for each in would} == {"record", "object", "work"}


def test_the_bytes_that_go_are_those_that_the_disk_gets_back(store):
    publish(store, A, "1")
    before = sum(path.stat().st_size for path in store.local.root.rglob("*") if path.is_file())
    gone = collect(store, dict)
    assert sum(each.size for each in gone) == before
    assert not [path for path in store.local.root.rglob("*") if path.is_file() and not path.name.endswith("lock")]


def test_objects_without_a_record_go_when_they_are_an_hour_old_halves_of_files_too(store):
    store.objects.mkdir(parents=True)
    for name, seconds in (
        ("d" * 64, YOUNG_SECONDS + 60),
        ("e" * 64, YOUNG_SECONDS - 60),
        (".x.tmp", 2 * YOUNG_SECONDS),
    ):
        (store.objects / name).write_text("x")
        age(store.objects / name, seconds)
    assert {each.name for each in collect(store, dict)} == {f"objects/{'d' * 64}", "objects/.x.tmp"}
    assert [path.name for path in store.objects.iterdir()] == ["e" * 64]


def test_views_of_what_goes_and_those_left_half_made_go(store):
    kept, needless = publish(store, A, "1"), publish(store, B, "2")
    store.path(kept), store.path(needless)
    half = store.views / f".{kept.digest}.{'0' * 32}"
    half.mkdir()
    gone = collect(store, lambda: {A: {"run r"}})
    assert {each.name for each in gone if each.kind == "view"} == {needless.digest, half.name}
    assert [path.name for path in store.views.iterdir()] == [kept.digest]


def test_a_damaged_record_goes_and_its_objects_stay_with_whoever_else_needs_them(store):
    record = publish(store, A, "1")
    second = publish(store, A, "1")
    path = store.local.root / "records" / A / "1.toy.json"
    path.chmod(0o644)
    path.write_text("{")
    assert [each.name for each in collect(store, lambda: {A: {"run r"}})] == [f"records/{A}/1.toy.json"]
    assert store.lookup(A) == second and record.digest == second.digest


def test_a_work_folder_stays_while_it_is_young_held_or_wanted(store):
    for key in (A, B, C):
        (store.work / key).mkdir(parents=True)
        (store.work / key / "checkpoint").write_text("x" * 10)
        age(store.work / key / "checkpoint", 2 * WORK_SECONDS)
        age(store.work / key, 2 * WORK_SECONDS)
    with store.lock(A):
        assert store.held_keys() == {A}
        gone = collect(store, lambda: {B: {"run r"}})
    assert [(each.kind, each.name, each.size) for each in gone] == [("work", C, 10)]
    assert sorted(path.name for path in store.work.iterdir() if path.suffix != ".lock") == [A, B]
    publish(store, B, "1")
    gone = collect(store, lambda: {A: {"run r"}, B: {"run r"}})
    assert [each.name for each in gone if each.kind == "work"] == [B]


def test_a_record_named_as_before_the_first_release_stops_the_collector(store):
    record = publish(store, A, "1")
    path = store.local.root / "records" / A / "1.toy.json"
    path.rename(path.with_name("1.json"))
    age(store.local.root / "objects" / record.digest, 2 * YOUNG_SECONDS)
    with pytest.raises(UserError, match=rf"records/{A}/1\.json: a version before release 0\.1\.0"):
        collect(store, lambda: {A: {"run r"}})
    assert (store.local.root / "objects" / record.digest).exists()


def test_nothing_is_removed_where_needs_are_not_known(store):
    record = publish(store, A, "1")

    def unknown() -> dict:
        raise UserError("MLflow's registry can't be asked")

    with pytest.raises(UserError):
        collect(store, unknown)
    assert store.lookup(A) == record


def test_pins_are_kept_read_and_undone_and_a_broken_one_stops_the_collector(store):
    assert write_pin(store.local, "r1", [B, A, A])
    assert not write_pin(store.local, "r1", [C])
    assert read_pins(store.local) == {"r1": [A, B]}
    assert not remove_pin(store.local, "r2") and remove_pin(store.local, "r1")
    assert read_pins(store.local) == {}
    (store.local.root / "pins").mkdir(exist_ok=True)
    (store.local.root / "pins" / "r3.json").write_text('{"needs": ["../../x"]}')
    with pytest.raises(UserError, match="r3"):
        read_pins(store.local)


def _publish_often(home: Path, seed: int, rounds: int) -> None:
    """As runs do: write down the key that is wanted, look it up or compute it, read it, forget it."""
    draw, store = random.Random(seed), ArtifactStore(home)
    for _ in range(rounds):
        key = draw.choice("abcd") * 64
        (home / "wanted" / f"{os.getpid()}").write_text(key)
        found = store.lookup(key)
        if isinstance(found, Miss):
            publish(store, key, f"of {key}")
            found = store.lookup(key)
        assert isinstance(found, Record), found
        assert (store.path(found) / "value").read_text() == f"of {key}"
        again = store.lookup(key)  # perhaps the other's record of the same key
        assert isinstance(again, Record) and again.digest == found.digest


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_collecting_beside_processes_that_publish_and_read_takes_nothing_that_they_use(tmp_path):
    store = ArtifactStore(tmp_path)
    (tmp_path / "wanted").mkdir()

    def needs() -> dict:
        return {path.read_text(): {path.name} for path in (tmp_path / "wanted").iterdir() if path.read_text()}

    workers = [Forked(target=_publish_often, args=(tmp_path, seed, 40)) for seed in range(2)]
    for worker in workers:
        worker.start()
    collected = 0
    while any(worker.is_alive() for worker in workers):
        collected += sum(each.kind == "record" for each in collect(store, needs))
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert collected > 0, "the collector never met them"


def test_what_is_raised_last_before_the_record_leaves_none(store):
    def lost() -> None:
        raise KeyboardInterrupt

    (store.home / "out").mkdir()
    (store.home / "out" / "value").write_text("1")
    with pytest.raises(KeyboardInterrupt):
        store.publish(A, store.home / "out", None, {"stage": "toy"}, lost)
    assert store.lookup(A) == Miss("no record")


def test_what_a_process_that_was_killed_after_its_record_left_behind_goes_and_what_is_computed_again_stays(store):
    for key in (A, B, C):
        (store.work / key / "000000001" / "checkpoint").mkdir(parents=True)
        (store.work / key / "points.jsonl").write_text("{}")
    for key in (A, B):
        publish(store, key, "1")
    age(store.work / B / "points.jsonl", -60)  # written a minute after the record
    with store.lock(A):
        remove_finished_work(store)
    assert (store.work / A / "points.jsonl").exists(), "somebody has it"
    remove_finished_work(store)
    assert sorted(path.name for path in store.work.iterdir() if path.suffix != ".lock") == [B, C]


def test_a_work_folder_that_ends_just_as_it_is_looked_at_stops_nobody(store, monkeypatch):
    (store.work / A).mkdir(parents=True)
    for key in (A, C):
        publish(store, key, key[0])
    monkeypatch.setattr(retention, "_work_folders", lambda store: [store.work / C, store.work / A])
    collect(store, lambda: {A: {"run r"}, C: {"run r"}}, dry_run=True)
    remove_finished_work(store)
    assert not (store.work / A).exists()


@pytest.mark.timeout(PATIENCE * 30)
def test_what_much_was_made_from_is_followed_once_and_not_once_for_every_way_there(store):
    digest = {}
    for layer in range(40):
        digest = dict.fromkeys(("a", "b"), publish(store, f"{layer:064d}", str(layer), **digest).digest)
    assert collect(store, lambda: {f"{39:064d}": {"run r"}}) == []


def test_what_is_no_work_folder_is_left_where_it_is(store):
    store.work.mkdir(parents=True)
    (store.work / "notes.txt").write_text("mine")
    (store.work / A).write_text("a file")
    (store.home / "elsewhere").mkdir()
    (store.work / B).symlink_to(store.home / "elsewhere")
    for name in (A, B, C):
        publish(store, name, "1")
    (store.work / C).mkdir()
    remove_finished_work(store)
    assert sorted(path.name for path in store.work.iterdir() if not path.name.endswith(".lock")) == [
        A,
        B,
        "notes.txt",
    ]
    assert (store.home / "elsewhere").is_dir()
