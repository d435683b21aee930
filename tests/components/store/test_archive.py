"""An export holds records with their objects; an archive is checked completely before anything of it is used."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from components.base.errors import TetherError, UserError
from components.base.hashing import digest_json
from components.store.archive import admit, read_archive, write_archive
from components.store.graph import Graph
from components.store.records import record_text
from components.store.store import ArtifactStore, Record
from tests.waiting import PATIENCE

PARTS = {"stage": "sft", "job": {}, "inputs": {}, "source": {"a": "1"}, "libraries": {}}
KEY = digest_json(PARTS)
SCRIPT = {"data": '"><script>alert(1)</script>'}
SCRIPTED = {**PARTS, "inputs": SCRIPT}
RUN_FILES = {"run/run.json": b"{}", "run/config.yaml": b"seed: 0\n", "run/metrics/sft.jsonl": b"{}\n"}
"""What earlier versions wrote beside the records."""


def publish(store: ArtifactStore, text: str = "weights", key: str = KEY) -> Record:
    out = store.home / "out"
    (out / "model").mkdir(parents=True)
    (out / "model" / "weights.safetensors").write_text(text)
    (store.home / "more").mkdir()
    (store.home / "more" / "plot.png").write_text("plot")
    about = {"stage": "sft", "parts": PARTS, "metrics": {"sft/loss": float("nan")}}
    record = store.publish(key, out, store.home / "more", about)
    (out / "model").rmdir()
    out.rmdir()
    (store.home / "more").rmdir()
    return record


@pytest.fixture
def one(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "one")


@pytest.fixture
def archive(one, tmp_path) -> Path:
    write_archive(tmp_path / "run.tar", one, [publish(one)])
    return tmp_path / "run.tar"


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def forge(path: Path, *entries: tuple[tarfile.TarInfo | str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in entries:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_what_is_exported_is_taken_up_whole_and_twice_is_harmless(one, archive, tmp_path):
    two = ArtifactStore(tmp_path / "two")
    read = read_archive(archive)
    assert not (tmp_path / "two").exists(), "reading writes nothing"
    assert len(admit(read, two)) == 1
    found = two.lookup(KEY)
    assert found.imported and record_text(found.model_copy(update={"imported": ""})) == record_text(one.lookup(KEY))
    assert (two.path(found) / "model" / "weights.safetensors").read_text() == "weights"
    assert two.attachment(found, "plot.png").read_text() == "plot"
    assert admit(read_archive(archive), two) == []
    assert two.attempts(KEY) == ["1.sft.json"]


def test_the_same_run_gives_the_same_bytes_from_whichever_home_and_attempt(one, archive, tmp_path):
    two = ArtifactStore(tmp_path / "two")
    publish(two, "other weights")
    admit(read_archive(archive), two)
    here, imported = two.published(KEY)
    assert (here.attempt, imported.attempt) == (1, 2)
    assert two.lookup(KEY).digest == here.digest, "what was computed here wins"
    assert two.lookup(KEY, imported.digest).digest == imported.digest != here.digest
    write_archive(tmp_path / "again.tar", two, [imported])
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()


def test_the_run_files_of_an_earlier_version_are_left_out(archive, tmp_path):
    forge(tmp_path / "old.tar", *{**RUN_FILES, **members(archive)}.items())
    old, new = read_archive(tmp_path / "old.tar"), read_archive(archive)
    assert [each.key for each in old.records] == [KEY] and old.objects.keys() == new.objects.keys()
    two = ArtifactStore(tmp_path / "two")
    assert [each.key for each in admit(old, two)] == [KEY]
    assert sorted(path.name for path in two.home.iterdir()) == ["store"]


def test_an_archive_without_records_is_refused(tmp_path):
    for entries in ({}, RUN_FILES):
        with pytest.raises(UserError, match="it has no record"):
            read_archive(forge(tmp_path / "x.tar", *entries.items()))


def test_taking_up_mends_a_damaged_object(archive, tmp_path):
    two = ArtifactStore(tmp_path / "two")
    admit(read_archive(archive), two)
    sha = two.lookup(KEY).files["model/weights.safetensors"]
    (two.objects / sha).chmod(0o644)
    (two.objects / sha).write_text("flipped")
    assert not isinstance(two.lookup(KEY), Record)
    assert admit(read_archive(archive), two) == []
    assert isinstance(two.lookup(KEY), Record)


def test_a_damaged_store_is_not_exported_and_leaves_no_file(one, tmp_path):
    record = publish(one)
    (one.objects / record.digest).unlink()
    with pytest.raises(TetherError, match="missing"):
        write_archive(tmp_path / "run.tar", one, [record])
    assert not list(tmp_path.glob("*run.tar*"))


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "run/../../x", "objects/../../x", "run\\x", "C:x", "run/a\nb", "", "x" * 300, "elsewhere/x",
     "objects/x", "records/x/1.json", f"records/{KEY}/0.json", "run/a/b/c", "store/objects/x", ".lock",
     "run/done/sft.json", "run/mlflow.json", "run/tracking.jsonl", "run/tracking.json", "run/report.html",
     "run/report.md", "run/sheet.csv", "run/cards/tether-policy.md", "run/metrics/../run.json", "run/metrics/x.json",
     f"records/{KEY}/2.json", f"records/{'z' * 64}/1.json", "run/mlflow.lock", "run/x.html"],
)  # fmt: skip
def test_a_member_that_no_export_holds_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"refused|can't be read"):
        read_archive(forge(tmp_path / "x.tar", (name, b"x")))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
     tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE],
)  # fmt: skip
def test_links_devices_folders_and_sparse_files_are_refused(tmp_path, kind):
    info = tarfile.TarInfo("run/run.json")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(UserError, match=r"refused|can't be read"):
        read_archive(forge(tmp_path / "x.tar", (info, b"")))


def test_a_name_in_an_extended_header_is_checked_like_any_other(tmp_path):
    info = tarfile.TarInfo("run/run.json")
    info.pax_headers = {"path": "../../outside"}
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(UserError, match="refused"):
        read_archive(tmp_path / "x.tar")


def test_a_member_that_is_there_twice_is_refused(archive, tmp_path):
    entries = list(members(archive).items())
    with pytest.raises(UserError, match="more than once"):
        read_archive(forge(tmp_path / "x.tar", *entries, entries[0]))


def test_a_damaged_object_an_edited_record_and_a_missing_object_are_refused(archive, tmp_path):
    whole = members(archive)
    for name in whole:
        changed = {**whole, name: whole[name][:-1] + bytes([whole[name][-1] ^ 1])}
        with pytest.raises(UserError, match="refused"):
            read_archive(forge(tmp_path / "x.tar", *changed.items()))
        lacking = {other: data for other, data in whole.items() if other != name}
        with pytest.raises(UserError, match="refused"):
            read_archive(forge(tmp_path / "x.tar", *lacking.items()))


def test_an_object_that_no_record_names_is_refused(archive, tmp_path):
    sha = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of b"x"
    with pytest.raises(UserError, match="no record names"):
        read_archive(forge(tmp_path / "x.tar", *members(archive).items(), (f"objects/{sha}", b"x")))


def test_a_record_whose_names_leave_its_folder_is_refused_though_its_sums_hold(one, archive, tmp_path):
    sha = publish(one, key="b" * 64).files["model/weights.safetensors"]
    files = {"../../x": sha}
    record = Record(stage="sft", key=KEY, digest=digest_json(files), files=files, attempt=1)
    entries = {**members(archive), f"records/{KEY}/1.json": record_text(record).encode()}
    with pytest.raises(UserError, match=r"\.\."):
        read_archive(forge(tmp_path / "x.tar", *entries.items()))


@pytest.mark.parametrize("data", [b"", b"no tar", b"\x1f\x8b" + b"0" * 600, b"0" * 2000])
def test_what_is_no_tar_is_refused(tmp_path, data):
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(UserError):
        read_archive(tmp_path / "x.tar")


def test_a_truncated_archive_is_refused_at_whatever_length(archive, tmp_path):
    data = archive.read_bytes()
    end = len(data.rstrip(b"\0"))
    for size in range(0, end, max(1, end // 40)):
        (tmp_path / "x.tar").write_bytes(data[:size])
        with pytest.raises(UserError):
            read_archive(tmp_path / "x.tar")


def test_a_compressed_archive_is_refused_before_it_can_grow(archive, tmp_path):
    import gzip

    (tmp_path / "x.tar").write_bytes(gzip.compress(archive.read_bytes()))
    with pytest.raises(UserError, match="can't be read"):
        read_archive(tmp_path / "x.tar")


# -- what would hang or crash a reader ---------------------------------------------------------------------------------


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.timeout(PATIENCE * 20)
@pytest.mark.parametrize("size", [1 << 40, 1 << 62, -(1 << 20), 512])
@pytest.mark.parametrize(
    "kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_header_may_claim_any_size_and_is_not_believed(tmp_path, kind, size):
    (tmp_path / "x.tar").write_bytes(header("run/run.json", size, kind) * 2)
    with pytest.raises(UserError, match=r"refused|can't be read"):
        read_archive(tmp_path / "x.tar")


@pytest.mark.timeout(PATIENCE * 20)
def test_thousands_of_extended_headers_are_not_followed(archive, tmp_path):
    record = b"30 mtime=1.000000000000000000\n".ljust(512, b"\0")
    chain = (header("x", 30, tarfile.XHDTYPE) + record) * 5000
    (tmp_path / "x.tar").write_bytes(chain + archive.read_bytes())
    with pytest.raises(UserError, match="not a regular file"):
        read_archive(tmp_path / "x.tar")


def test_a_file_larger_than_any_of_its_kind_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "x.tar").open("wb") as file:
        file.write(header(f"records/{KEY}/1.json", 1 << 30))
        file.truncate(2 << 30)  # takes no room on the disk
    with pytest.raises(UserError, match="more than the"):
        read_archive(tmp_path / "x.tar")


@pytest.mark.timeout(PATIENCE * 20)
def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    for path in (tmp_path / "x.tar", Path("/dev/zero"), Path("/dev/stdin"), tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match="can't be read"):
            read_archive(path)


@pytest.mark.parametrize("more", [b"x", bytes(5000) + b"x", bytes(1 << 20)])
def test_what_follows_the_end_is_refused(archive, tmp_path, more):
    (tmp_path / "x.tar").write_bytes(archive.read_bytes() + more)
    with pytest.raises(UserError, match="data after its end"):
        read_archive(tmp_path / "x.tar")


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"record": {"job": {"a": ' + "[" * 300 + "]" * 300 + "}}}"])
def test_a_deep_record_is_refused(tmp_path, deep):
    with pytest.raises(UserError, match="refused"):
        read_archive(forge(tmp_path / "x.tar", (f"records/{KEY}/1.json", deep.encode())))


# -- records that hold, and lie ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"parts": {**PARTS, "source": {"a": "2"}}}, "not the digest of its parts"),
        ({"parts": {}}, "not the digest of its parts"),
        ({"stage": "ppo"}, "stage is not what its key"),
        ({"job": {"seed": 1}}, "job is not what its key"),
        ({"inputs": {"data": "a" * 64}}, "inputs is not what its key"),
        ({"run": "../../x"}, "not a run's id"),
        ({"run": "<b>"}, "run, attempt or imported"),
        ({"run": "x\x1b[2J"}, "run, attempt or imported"),
        ({"seconds": float("inf")}, "it took inf seconds"),
        ({"seconds": -1.0}, "it took -1.0 seconds"),
        ({"imported": "2026-01-01"}, "run, attempt or imported"),
        ({"inputs": SCRIPT, "parts": SCRIPTED, "key": digest_json(SCRIPTED)}, "is not a sha256"),
    ],
)
def test_a_record_that_its_key_does_not_bear_out_is_refused(one, archive, tmp_path, change, problem):
    record = one.published(KEY)[0].model_copy(update=change)
    entries = {**members(archive), f"records/{KEY}/1.json": record_text(record).encode()}
    if "key" in change:
        entries[f"records/{record.key}/1.json"] = entries.pop(f"records/{KEY}/1.json")
    with pytest.raises(UserError, match=problem):
        read_archive(forge(tmp_path / "x.tar", *entries.items()))


def test_records_that_name_each_other_in_a_circle_are_walked_once(archive, tmp_path):
    record = read_archive(archive).records[0]
    one, other = ({"digest": digest * 64, "inputs": {"x": made_of * 64}} for digest, made_of in ("ab", "ba"))
    graph = Graph([record.model_copy(update=one), record.model_copy(update=other)])
    assert {node.digest[0] for node in graph.upstream(["a" * 64])} == {"a", "b"}
    assert {node.digest[0] for node in graph.downstream(["a" * 64])} == {"a", "b"}


def test_what_was_computed_here_comes_before_an_imported_result_however_new_that_says_it_is(one, archive, tmp_path):
    two = ArtifactStore(tmp_path / "two")
    ours = publish(two)
    forged = one.published(KEY)[0].model_copy(update={"metrics": {"sft/loss": 0.0}, "started": "9999-01-01"})
    entries = {**members(archive), f"records/{KEY}/1.json": record_text(forged).encode()}
    (new,) = admit(read_archive(forge(tmp_path / "x.tar", *entries.items())), two)
    assert new.imported and new.attempt == 2
    assert two.lookup(KEY).metrics.keys() == ours.metrics.keys() and not two.lookup(KEY).imported
    assert [bool(each.imported) for each in two.published(KEY)] == [False, True]
    assert [bool(each.imported) for each in Graph.of(two).node(ours.digest).records] == [False, True]
    assert Graph.of(two).rests_on_import([ours.digest]) is False
    assert admit(read_archive(tmp_path / "x.tar"), two) == []


def test_what_is_read_into_memory_is_bounded_whatever_the_size_of_the_objects(archive, monkeypatch):
    beside = sum(len(data) for name, data in members(archive).items() if not name.startswith("objects/"))
    monkeypatch.setattr("components.store.archive.MOST", beside)
    read_archive(archive)
    monkeypatch.setattr("components.store.archive.MOST", beside - 1)
    with pytest.raises(TetherError, match="beside its objects"):
        read_archive(archive)
