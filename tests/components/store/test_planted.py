"""Who can write into a store's folder can damage it, but what they put there is neither believed nor waited for."""

import json
import os
import time
from pathlib import Path

import pytest

from components.base.errors import TetherError
from components.base.files import temporary_beside
from components.base.hashing import canonical_json
from components.base.process import this_process
from components.store.leases import holder, leased
from components.store.place import LARGEST_READ
from components.store.records import record_text
from components.store.retention import YOUNG_SECONDS, collect, read_pins, remove_finished_work, write_pin
from components.store.store import ArtifactStore, Miss, Record
from components.store.verify import verify
from tests.waiting import PATIENCE

KEY = "a" * 64


def publish(store: ArtifactStore, text: str = "1", key: str = KEY) -> Record:
    out = store.home / "out" / text
    out.mkdir(parents=True, exist_ok=True)
    (out / "value").write_text(text)
    return store.publish(key, out, None, {"stage": "toy"})


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "home")


@pytest.fixture(params=["local", "shared"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the store's records: its own, or one that `TETHER_STORE` names."""
    if request.param == "shared":
        monkeypatch.setenv("TETHER_STORE", str(tmp_path / "shared"))
        return tmp_path / "shared"
    return tmp_path / "home" / "store"


# -- views -----------------------------------------------------------------------------------------------------------


def elsewhere(folder: Path, record: Record) -> Path:
    """A folder as deep as a view whose links have the view's own text and lead to other bytes."""
    view = folder / "views" / record.digest
    view.mkdir(parents=True)
    (folder / "objects").mkdir()
    for name, sha in record.files.items():
        (folder / "objects" / sha).write_text("forged")
        (view / name).symlink_to(f"../../objects/{sha}")
    return view


def test_a_view_that_is_a_link_to_another_folder_is_made_anew(store: ArtifactStore, tmp_path: Path) -> None:
    record = publish(store)
    view = store.path(record)
    forged = elsewhere(tmp_path / "forged", record)
    view.rename(tmp_path / "away")
    view.symlink_to(forged)
    assert (store.path(record) / "value").read_text() == "1"
    assert not view.is_symlink() and (forged / "value").read_text() == "forged", "what it led to is left alone"


def test_views_in_a_folder_elsewhere_are_not_read(store: ArtifactStore, tmp_path: Path) -> None:
    record = publish(store)
    store.path(record)
    elsewhere(tmp_path / "forged", record)
    store.views.rename(tmp_path / "away")
    store.views.symlink_to(tmp_path / "forged" / "views")
    with pytest.raises(TetherError, match="leads to"):
        store.path(record)


def test_a_store_behind_a_link_of_the_users_works(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "store").symlink_to(tmp_path / "disk")
    store = ArtifactStore(tmp_path / "home")
    assert (store.path(publish(store)) / "value").read_text() == "1"


def test_an_artifact_that_is_asked_for_by_its_digest_is_read_through(store: ArtifactStore) -> None:
    record = publish(store)
    path = store.objects / record.files["value"]
    path.chmod(0o644)
    path.write_text("2")
    with pytest.raises(TetherError, match=r"value of artifact .* is damaged"):
        ArtifactStore(store.home).path(record.digest)


# -- what is no file --------------------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def link_to_a_copy(path: Path) -> None:
    path.rename(path.with_name("copy"))
    path.symlink_to("copy")


def full_folder(path: Path) -> None:
    path.unlink()
    (path / "below").mkdir(parents=True)


@pytest.mark.timeout(PATIENCE * 20)
@pytest.mark.parametrize("plant", [fifo, link_to_zeros, link_to_a_copy, full_folder])
@pytest.mark.parametrize("which", ["value", "(manifest)"])
def test_an_object_that_is_no_file_is_a_miss_and_computing_again_mends_it(
    store: ArtifactStore, plant: object, which: str
) -> None:
    record = publish(store)
    plant(store.objects / record.objects[which])  # type: ignore[operator]
    again = ArtifactStore(store.home)
    assert isinstance(again.lookup(KEY), Miss)
    report = verify(again)
    assert report.damaged or report.missing or plant is link_to_a_copy
    publish(again)
    assert isinstance(again.lookup(KEY), Record) and (again.path(record.digest) / "value").read_text() == "1"


@pytest.mark.timeout(PATIENCE * 20)
@pytest.mark.parametrize("plant", [fifo, link_to_zeros])
def test_an_object_of_a_shared_store_that_is_no_file_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: object
) -> None:
    monkeypatch.setenv("TETHER_STORE", str(tmp_path / "shared"))
    record = publish(ArtifactStore(tmp_path / "one"))
    plant(tmp_path / "shared" / "objects" / record.files["value"])  # type: ignore[operator]
    other = ArtifactStore(tmp_path / "two")
    assert isinstance(other.lookup(KEY), Miss)
    assert [each.name for each in verify(other).damaged] == [f"objects/{record.files['value']}"]
    publish(other)
    assert isinstance(ArtifactStore(tmp_path / "three").lookup(KEY), Record)


@pytest.mark.timeout(PATIENCE * 20)
@pytest.mark.parametrize("plant", [fifo, link_to_zeros])
def test_a_record_that_is_no_file_is_no_record(folder: Path, store: ArtifactStore, plant: object) -> None:
    publish(store)
    plant(folder / "records" / KEY / "1.toy.json")  # type: ignore[operator]
    assert isinstance(store.lookup(KEY), Miss)
    assert [each.name for each in verify(store).damaged] == [f"records/{KEY}/1.toy.json"]
    assert publish(store, "2").attempt == 2
    assert store.lookup(KEY).attempt == 2  # type: ignore[union-attr]


def test_a_record_too_large_to_be_one_is_not_read(store: ArtifactStore) -> None:
    publish(store)
    path = store.local.root / "records" / KEY / "1.toy.json"
    path.chmod(0o644)
    os.truncate(path, LARGEST_READ + 1)
    assert isinstance(store.lookup(KEY), Miss)


@pytest.mark.timeout(PATIENCE * 20)
@pytest.mark.parametrize("name", [".lock", ".views.lock"])
def test_a_lock_that_is_a_fifo_holds_nobody_up(store: ArtifactStore, name: str) -> None:
    store.local.root.mkdir(parents=True)
    os.mkfifo(store.local.root / name)
    record = publish(store)
    assert (store.path(record) / "value").read_text() == "1"
    collect(store, lambda: {KEY: {"run r"}})


@pytest.mark.timeout(PATIENCE * 20)
@pytest.mark.parametrize("holder_says", [None, "", "[]", "[" * 100_000, "{}", "no pid"])
def test_a_lease_that_says_nothing_of_its_holder_is_taken_over_like_one_whose_heart_stands_still(
    tmp_path: Path, holder_says: str | None
) -> None:
    held = tmp_path / "k.leases" / "000000001.held"
    held.parent.mkdir()
    if holder_says is None:
        os.mkfifo(held)
    else:
        here = {name: value for name, value in this_process().items() if name != "pid"}
        held.write_text(json.dumps(here) if holder_says == "no pid" else holder_says)
    assert holder(held.parent) is not None
    with leased(held.parent, ttl=0.2, beat=0.1, poll=0.02) as lease:
        assert lease.number == 2 and not lease.is_lost()


# -- attempts and temporaries ----------------------------------------------------------------------------------------


def plant(folder: Path, record: Record, attempt: int) -> Path:
    """A record of an attempt that nobody made, whose sums hold."""
    path = folder / "records" / record.key / f"{attempt}.{record.stage}.json"
    path.write_text(record_text(record.model_copy(update={"attempt": attempt})))
    return path


@pytest.mark.parametrize("attempt", [999_999_999, 999_999_998, 100_000])
def test_a_planted_attempt_is_not_believed_and_bars_no_later_one(
    folder: Path, store: ArtifactStore, attempt: int
) -> None:
    record = publish(store)
    path = plant(folder, record.model_copy(update={"metrics": {"toy/loss": 0.0}}), attempt)
    assert store.lookup(KEY) == record and store.published(KEY) == [record] == store.published_by("toy")
    for number in (2, 3, 4):
        assert publish(store, str(number)).attempt == number
        assert store.lookup(KEY).attempt == number  # type: ignore[union-attr]
    assert [each.name for each in verify(store).damaged] == [f"records/{KEY}/{path.name}"]
    collect(store, lambda: {KEY: {"run r"}}, shared=store.shared is not None)
    assert not path.exists() and len(store.attempts(KEY)) == 4


@pytest.mark.parametrize("name", ["2.toy.json", "7.json"])
def test_a_copy_of_a_record_under_a_later_attempts_name_is_no_record(store: ArtifactStore, name: str) -> None:
    record = publish(store)
    folder = store.local.root / "records" / KEY
    (folder / name).write_text(record_text(record.model_copy(update={"attempt": 1})))
    assert store.lookup(KEY) == record and store.published(KEY) == [record]


@pytest.mark.parametrize("run", ["../../x", "a/b", "..", ".hidden"])
def test_a_record_whose_run_is_a_path_is_not_believed(store: ArtifactStore, run: str) -> None:
    record = publish(store)
    path = store.local.root / "records" / KEY / "2.toy.json"
    path.write_text(record_text(record.model_copy(update={"attempt": 2, "run": run})))
    assert store.lookup(KEY) == record


def test_what_killed_writers_left_in_a_store_is_no_record_and_goes_when_it_is_old(
    folder: Path, store: ArtifactStore
) -> None:
    record = publish(store)
    write_pin(store.place, "r1", [KEY])
    left = [
        temporary_beside(folder / "records" / KEY / "2.toy.json"),
        temporary_beside(folder / "records" / ("b" * 64) / "1.toy.json"),
        temporary_beside(folder / "pins" / "r2.json"),
        temporary_beside(folder / "objects" / record.digest),
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text(canonical_json({}))
    assert store.lookup(KEY) == record and list(read_pins(store.place)) == ["r1"]
    assert verify(store).damaged == []
    shared = store.shared is not None
    collect(store, lambda: {KEY: {"run r"}}, shared=shared)
    assert all(path.exists() for path in left), "whoever writes may be at it"
    for path in left:
        os.utime(path, (time.time() - 2 * YOUNG_SECONDS,) * 2)
    collect(store, lambda: {KEY: {"run r"}}, shared=shared)
    assert not any(path.exists() for path in left)
    assert store.lookup(KEY) == record and list(read_pins(store.place)) == ["r1"]


def test_a_checkpoint_stays_where_a_writer_was_killed_before_it_had_a_record(store: ArtifactStore) -> None:
    work = store.work_folder(KEY)
    (work / "000000001" / "checkpoint").mkdir(parents=True)
    (work / "000000001" / "checkpoint" / "step").write_text("7")
    records = store.local.root / "records" / KEY
    records.mkdir(parents=True)
    temporary_beside(records / "1.toy.json").write_text("{")
    remove_finished_work(store)
    assert (work / "000000001" / "checkpoint" / "step").read_text() == "7"
