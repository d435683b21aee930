"""Names that could leave their folder are refused, and an edited record or manifest no longer verifies."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.base.errors import TetherError
from components.base.hashing import canonical_json, digest_json
from components.store.records import check_names, parse_manifest, parse_record, record_text
from components.store.store import ArtifactStore, Miss, Record

KEY, SHA = "a" * 64, "0123456789abcdef" * 4
FILES = {"model/weights.safetensors": SHA, "metrics.json": "f" * 64}
RECORD = Record(
    stage="toy", key=KEY, digest=digest_json(FILES), files=FILES, inputs={"data": SHA}, metrics={"toy/loss": 0.1 + 0.2},
    job={"text": "naïve", "nested": {"a": [1, 2.5, None, True]}}, run="r", attempt=1,
)  # fmt: skip
BAD = [
    "", "/etc/passwd", "..", "../x", "a/../b", "a/..", "./a", "a/.", "a//b", "a/", "a\\b", "..\\x", "C:/x", "c:x",
    "a\0b", "a\nb", "x" * 256, "/".join(["ab"] * 400), "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_could_leave_its_folder_is_refused_wherever_it_is_read(name):
    with pytest.raises(TetherError):
        check_names([name])
    if name != "\ud800":  # no bytes can say it
        with pytest.raises(TetherError):
            parse_manifest(canonical_json({name: SHA}).encode())
        for field in ("files", "attachments"):
            files = {"ok": SHA} if field == "attachments" else {name: SHA}
            forged = RECORD.model_copy(update={"files": files, "digest": digest_json(files), field: {name: SHA}})
            assert isinstance(parse_record(record_text(forged), KEY), Miss)


@pytest.mark.parametrize(
    "name", ["a", "model/weights-00001-of-2.safetensors", "..a", "a..b", "Ünïcode/ファイル", "a b"]
)
def test_plain_names_pass(name):
    check_names([name])


def test_a_name_that_is_both_a_file_and_a_folder_is_refused():
    with pytest.raises(TetherError, match="folder"):
        check_names(["model", "model/a/b"])


@given(st.text(max_size=40))
def test_whatever_passes_stays_in_its_folder(name):
    try:
        check_names([name])
    except TetherError:
        return
    base = "/base/folder"
    assert os.path.normpath(f"{base}/{name}") == f"{base}/{name}"


@pytest.mark.parametrize("sha", ["../../../etc/passwd", "", "F" * 64, "a" * 63, 5, None])
def test_what_is_no_sha256_is_refused_where_an_objects_name_belongs(sha):
    with pytest.raises(TetherError, match="sha256"):
        parse_manifest(json.dumps({"name": sha}).encode())


@pytest.mark.parametrize("data", [b"", b"[1]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_manifest_is_an_error_that_says_so(data):
    with pytest.raises(TetherError, match="does not parse"):
        parse_manifest(data)


def test_a_forged_manifest_under_its_own_sha256_makes_no_link_outside_its_view(tmp_path):
    store = ArtifactStore(tmp_path)
    store.objects.mkdir(parents=True)
    text = canonical_json({"../../../outside": SHA})
    digest = digest_json({"../../../outside": SHA})
    (store.objects / digest).write_text(text)
    (store.objects / SHA).write_text("x")
    with pytest.raises(TetherError):
        store.path(digest)
    assert [path.name for path in tmp_path.iterdir()] == ["store"] and not store.views.exists()
    with pytest.raises(TetherError):
        store.path("../objects")


def test_what_is_put_into_a_view_by_hand_is_not_read_as_the_artifacts(tmp_path):
    store = ArtifactStore(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "value").write_text("1")
    record = store.publish(KEY, tmp_path / "out", None, {"stage": "toy"})
    view = store.path(record)
    (view / "pytorch_model.bin").write_bytes(b"planted")
    (view / "value").unlink()
    (view / "value").write_text("2")
    assert [path.name for path in store.path(record).iterdir()] == ["value"]
    assert (store.path(record) / "value").read_text() == "1"


TEXT = record_text(RECORD)


def test_what_is_written_is_read_back_however_it_is_laid_out():
    assert parse_record(TEXT, KEY) == parse_record(json.dumps(json.loads(TEXT)), KEY) == RECORD


@given(st.integers(0, len(TEXT) - 1), st.integers(0, 200), st.text(max_size=5))
def test_an_edited_record_no_longer_verifies_or_says_the_same(position, size, more):
    """Characters are put in, changed or left out; as where one white space became another."""
    found = parse_record(TEXT[:position] + more + TEXT[position + size :], KEY)
    assert isinstance(found, Miss) or found == RECORD


values = st.one_of(st.text(max_size=5), st.integers(), st.floats(), st.none(), st.lists(st.integers(), max_size=2))


@given(st.sampled_from(sorted(Record.model_fields)), values)
def test_a_field_set_by_hand_no_longer_verifies(name, value):
    document = json.loads(TEXT)
    before = document["record"].get(name)  # `imported` stands in the record of an import only
    document["record"][name] = value
    if repr(value) != repr(before):
        assert isinstance(parse_record(json.dumps(document, indent=1), KEY), Miss)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_are_taken_for_a_record_or_bring_the_reader_down(data):
    assert isinstance(parse_record(data.decode("utf-8", "replace"), KEY), Miss)


MANIFEST = canonical_json(FILES).encode()


@given(st.integers(0, len(MANIFEST) - 1), st.integers(1, 255))
def test_an_edited_manifest_no_longer_verifies(tmp_path_factory, position, flip):
    store = ArtifactStore(Path(tmp_path_factory.mktemp("home")))
    store.objects.mkdir(parents=True)
    edited = bytearray(MANIFEST)
    edited[position] ^= flip
    (store.objects / digest_json(FILES)).write_bytes(edited)
    with pytest.raises(TetherError, match="damaged"):
        store.contents.manifest(digest_json(FILES))
