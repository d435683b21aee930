"""A hit is only ever the whole of what was published."""

import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from components.base.errors import TetherError, UserError
from components.base.hashing import digest_file, digest_json
from components.keys.fingerprint import ROOT
from components.store.folder import FolderPlace
from components.store.store import ArtifactStore, Miss, Record, digest_folder
from tests.forks import CONTEXT, Forked
from tests.waiting import PATIENCE

KEY = "k" * 64


def fill(work):
    (work / "artifact" / "model").mkdir(parents=True)
    (work / "attachments").mkdir()
    (work / "artifact" / "model" / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (work / "artifact" / "metrics.json").write_text('{"a": 1}')
    (work / "attachments" / "plot.png").write_bytes(b"png")


def publish(home, **fields):
    store = ArtifactStore(home)
    work = store.work_folder(KEY)
    shutil.rmtree(work, ignore_errors=True)
    fill(work)
    record = {"stage": "toy", "metrics": {"toy/loss": 0.5}, "inputs": {"data": "d"}, **fields}
    return store.publish(KEY, work / "artifact", work / "attachments", record)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_what_was_published_is_found_and_readable(tmp_path):
    record = publish(tmp_path)
    store = ArtifactStore(tmp_path)
    found = store.lookup(KEY)
    assert found == record
    assert found.metrics == {"toy/loss": 0.5}
    folder = store.path(found)
    assert (folder / "model" / "weights.bin").read_bytes() == bytes(range(256)) * 40
    assert store.path(record.digest) == folder
    assert store.attachment(found, "plot.png").read_bytes() == b"png"


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSPC])
def test_a_work_folder_on_another_disk_is_copied_and_another_error_is_none_of_it(tmp_path, monkeypatch, number):
    replace = os.replace

    def on_another_disk(source, target):
        if os.path.basename(os.path.dirname(target)) == "objects" and os.path.dirname(source) != os.path.dirname(
            target
        ):
            raise OSError(number, os.strerror(number), source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", on_another_disk)
    if number == errno.ENOSPC:
        with pytest.raises(UserError, match="No space left"):
            publish(tmp_path)
        return
    record = publish(tmp_path)
    store = ArtifactStore(tmp_path)
    assert (store.path(store.lookup(KEY)) / "model" / "weights.bin").read_bytes() == bytes(range(256)) * 40
    left = [path for path in store.work_folder(KEY).rglob("*") if path.is_file()]
    assert record.files and not left, "moved, not copied"


def test_the_digest_is_that_of_the_plain_folder_and_leaves_attachments_out(tmp_path):
    fill(tmp_path / "plain")
    expected = digest_folder(tmp_path / "plain" / "artifact")
    assert publish(tmp_path / "home").digest == expected


def record_file(home):
    return home / "store" / "records" / KEY / "1.toy.json"


def rewrite(path, text):
    path.chmod(0o644)
    path.write_text(text)


def edit(home, files):
    rewrite(record_file(home), record_file(home).read_text().replace("0.5", "0.6"))


DAMAGE = {
    "weights": (lambda home, files: flip(home / "store" / "objects" / files["model/weights.bin"]), "damaged: model/w"),
    "metrics": (lambda home, files: flip(home / "store" / "objects" / files["metrics.json"]), "damaged: metrics.json"),
    "missing": (lambda home, files: (home / "store" / "objects" / files["metrics.json"]).unlink(), "missing: metrics"),
    "edited": (edit, "damaged"),
    "empty": (lambda home, _: rewrite(record_file(home), ""), "record"),
    "no record": (lambda home, _: rewrite(record_file(home), '{"record": {}, "sha256": ""}'), "record"),
    "a list": (lambda home, _: rewrite(record_file(home), "[1]"), "record"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_or_missing_is_a_miss_that_says_so(tmp_path, damage, reason):
    damage(tmp_path, publish(tmp_path).files)
    found = ArtifactStore(tmp_path).lookup(KEY)
    assert isinstance(found, Miss) and reason in found.reason


def test_a_byte_flipped_after_this_process_looked_is_still_seen(tmp_path):
    record = publish(tmp_path)
    store = ArtifactStore(tmp_path)
    assert isinstance(store.lookup(KEY), Record)
    flip(store.objects / record.files["metrics.json"])
    assert isinstance(store.lookup(KEY), Miss)


def test_a_record_under_another_key_is_a_miss(tmp_path):
    publish(tmp_path)
    other = "o" * 64
    shutil.copytree(record_file(tmp_path).parent, tmp_path / "store" / "records" / other)
    assert isinstance(ArtifactStore(tmp_path).lookup(other), Miss)


def test_publishing_again_mends_a_damaged_object_under_a_new_attempt(tmp_path):
    record = publish(tmp_path)
    flip(tmp_path / "store" / "objects" / record.files["model/weights.bin"])
    again = publish(tmp_path)
    assert (again.attempt, again.digest) == (2, record.digest)
    assert ArtifactStore(tmp_path).lookup(KEY) == again


def test_a_damaged_newest_attempt_falls_back_to_an_older_whole_one(tmp_path):
    first = publish(tmp_path)
    publish(tmp_path)
    rewrite(record_file(tmp_path).with_name("2.toy.json"), "{")
    assert ArtifactStore(tmp_path).lookup(KEY) == first


def test_a_lost_attachment_is_said_and_is_still_a_hit(tmp_path, caplog):
    record = publish(tmp_path)
    (tmp_path / "store" / "objects" / record.attachments["plot.png"]).unlink()
    store = ArtifactStore(tmp_path)
    assert isinstance(store.lookup(KEY), Record)
    assert "plot.png" in caplog.text
    assert store.attachment(record, "plot.png") is None


def test_files_are_read_only_and_every_object_is_named_by_its_content(tmp_path):
    publish(tmp_path)
    objects = list((tmp_path / "store" / "objects").iterdir())
    assert len(objects) == 4 and all(digest_file(path) == path.name for path in objects)
    assert not any(path.stat().st_mode & 0o222 for path in (*objects, record_file(tmp_path)))


def test_a_lost_or_broken_view_is_made_again(tmp_path):
    record = publish(tmp_path)
    store = ArtifactStore(tmp_path)
    (store.path(record) / "metrics.json").unlink()
    assert (store.path(record) / "metrics.json").read_text() == '{"a": 1}'
    shutil.rmtree(store.views)
    assert (store.path(record) / "model" / "weights.bin").is_file()


def _view_often(home, record, barrier):
    store = ArtifactStore(home)
    for _ in range(100):
        barrier.wait()
        assert (store.path(record) / "metrics.json").read_text() == '{"a": 1}'


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("spoil", [shutil.rmtree, lambda folder: (folder / "stray").touch()], ids=["lost", "broken"])
def test_processes_that_make_one_view_at_once_never_move_it_away_from_each_other(tmp_path, spoil):
    record = publish(tmp_path)
    folder = ArtifactStore(tmp_path).path(record)
    barrier = CONTEXT.Barrier(3, action=lambda: spoil(folder), timeout=PATIENCE * 60)
    workers = [Forked(target=_view_often, args=(tmp_path, record, barrier)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


def test_views_survive_moving_the_home(tmp_path):
    record = publish(tmp_path / "old")
    ArtifactStore(tmp_path / "old").path(record)
    (tmp_path / "old").rename(tmp_path / "new")
    assert (tmp_path / "new" / "store" / "views" / record.digest / "metrics.json").read_text() == '{"a": 1}'


def test_the_path_of_an_unknown_or_incomplete_artifact_is_an_error(tmp_path):
    record = publish(tmp_path)
    store = ArtifactStore(tmp_path)
    with pytest.raises(TetherError):
        store.path("f" * 64)
    (store.objects / record.files["metrics.json"]).unlink()
    with pytest.raises(TetherError, match=r"metrics\.json"):
        store.path(record)


def test_nan_metrics_come_back_as_nan(tmp_path):
    publish(tmp_path, metrics={"toy/loss": math.nan, "toy/top": math.inf})
    found = ArtifactStore(tmp_path).lookup(KEY)
    assert math.isnan(found.metrics["toy/loss"])
    assert found.metrics["toy/top"] == math.inf


def test_an_empty_artifact_and_a_symbolic_link_are_refused(tmp_path):
    store = ArtifactStore(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(TetherError, match="no file"):
        store.publish(KEY, tmp_path / "out", None, {"stage": "toy"})
    (tmp_path / "out" / "link").symlink_to("/etc/passwd")
    with pytest.raises(TetherError, match="symbolic link"):
        store.publish(KEY, tmp_path / "out", None, {"stage": "toy"})
    assert isinstance(store.lookup(KEY), Miss)


def _publish_killed_at(home, call):
    """Publish in a process that is killed by SIGKILL just before its nth file-system step."""
    count = 0

    def counted(real):
        def step(*args, **kwargs):
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return step

    os.replace, os.fsync, os.link = counted(os.replace), counted(os.fsync), counted(os.link)
    publish(home)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_instant_of_publishing_leaves_no_hit_or_a_whole_one(tmp_path):
    killed, step = 0, 0
    while True:
        step += 1
        home = tmp_path / str(step)
        process = Forked(target=_publish_killed_at, args=(home, step))
        process.start()
        process.join()
        found = ArtifactStore(home).lookup(KEY)
        if process.exitcode == 0:
            assert isinstance(found, Record)
            break
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        if isinstance(found, Record):
            assert found == ArtifactStore(home).lookup(KEY)
            assert (ArtifactStore(home).path(found) / "metrics.json").read_text() == '{"a": 1}'
        # Whatever was left behind, the next attempt succeeds.
        assert isinstance(publish(home), Record)
        assert isinstance(ArtifactStore(home).lookup(KEY), Record)
    assert killed > 8


def test_no_record_is_written_before_every_object_is_in_place(tmp_path, monkeypatch):
    real, steps = {"replace": os.replace, "link": os.link}, []

    def checked(name):
        def step(source, target):
            steps.append(name)
            if name == "link":  # the record's
                assert len([path for path in (tmp_path / "store" / "objects").iterdir() if path.suffix != ".tmp"]) == 4
            else:
                assert not list((tmp_path / "store").glob("records/*/*.json"))
            real[name](source, target)

        return step

    for name in real:
        monkeypatch.setattr(os, name, checked(name))
    publish(tmp_path)
    assert steps[-1] == "link" and steps.count("link") == 1


def test_a_second_process_waits_for_the_key_and_a_killed_holder_frees_it(tmp_path):
    code = (
        "import sys, time, pathlib; from components.store.store import ArtifactStore\n"
        "with ArtifactStore(pathlib.Path(sys.argv[1])).lock('k'):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    waited = []

    def on_wait():
        waited.append(time.monotonic())
        holder.kill()

    with ArtifactStore(tmp_path).lock("k", on_wait):
        assert waited
    holder.wait()
    holder.stdout.close()
    with ArtifactStore(tmp_path).lock("k", lambda: pytest.fail("the lock outlived its holder")):
        pass


def committed(store, number, stage):
    """A record that is written, of a key of its own."""
    record = Record(stage=stage, key=f"{number:064d}", digest=digest_json({}), files={}, started=f"{number:06d}")
    written = store.commit(record)
    path = store.local.root / "records" / record.key / store.attempts(record.key)[0]
    os.utime(path, (number, number))
    return written, path


def test_a_stages_newest_records_are_found_by_their_files_names(tmp_path, monkeypatch):
    store, reads, listings = ArtifactStore(tmp_path), [], []
    for number in range(60):
        committed(store, number, ("sft", "ppo", "human_eval")[number % 3])
    monkeypatch.setattr(store.local, "read", lambda name: reads.append(name) or FolderPlace.read(store.local, name))
    monkeypatch.setattr(store.local, "entries", lambda f: listings.append(f) or FolderPlace.entries(store.local, f))
    assert [int(record.key) for record in store.published_by("ppo", 4)] == [58, 55, 52, 49]
    assert len(reads) == 4 and listings == ["records"]
    assert len(store.published_by("ppo", 99)) == 20 and len(reads) == 4 + 20
    assert store.published_by("reward") == [] and len(reads) == 24


def test_an_artifact_that_is_asked_for_by_its_digest_is_found_behind_newer_ones(tmp_path):
    first = publish(tmp_path)
    store = ArtifactStore(tmp_path)
    work = store.work_folder("other")
    fill(work)
    (work / "artifact" / "metrics.json").write_text('{"a": 2}')
    second = store.publish(KEY, work / "artifact", None, {"stage": "toy"})
    assert (store.lookup(KEY, first.digest), store.lookup(KEY, second.digest)) == (first, second)
    assert store.lookup(KEY) == second and isinstance(store.lookup(KEY, "d" * 64), Miss)
