"""What a killed writer, a full disk or a user's own change leaves in a store is no result, and bars none."""

import os
import time
from pathlib import Path

import pytest

from components.base.errors import TetherError
from components.base.files import temporary_beside
from components.base.hashing import canonical_json
from components.store.place import LARGEST_READ
from components.store.retention import YOUNG_SECONDS, collect, read_pins, remove_finished_work, write_pin
from components.store.store import ArtifactStore, Miss, Record
from components.store.verify import verify

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


def test_a_record_too_large_to_be_one_is_not_read(store: ArtifactStore) -> None:
    publish(store)
    path = store.local.root / "records" / KEY / "1.toy.json"
    path.chmod(0o644)
    os.truncate(path, LARGEST_READ + 1)
    assert isinstance(store.lookup(KEY), Miss)


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
