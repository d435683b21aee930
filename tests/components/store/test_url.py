"""A store behind s3://: moto's server over HTTP stands in for S3, asked through s3fs."""

import shutil
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from components.base.errors import Unreachable, UserError
from components.base.hashing import digest_file
from components.store.retention import collect
from components.store.store import ArtifactStore, Miss, Record
from components.store.url import UrlPlace
from components.store.verify import verify
from tests.waiting import PATIENCE

KEY = "a" * 64


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path) -> str:
    """The URL of a fresh folder in a bucket; the credentials are the test's, whatever this machine has."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    if not fs.exists("team"):
        fs.mkdir("team")
    return f"s3://team/{uuid.uuid4().hex}"


@pytest.fixture(params=["s3", "folder", "memory"])
def shared(request, tmp_path, monkeypatch) -> str:
    """`TETHER_STORE` in each of its kinds."""
    if request.param == "s3":
        value = request.getfixturevalue("bucket")
    else:
        value = str(tmp_path / "nfs") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    monkeypatch.setenv("TETHER_STORE", value)
    return value


def publish(home: Path, text: str = "weights", key: str = KEY, **fields) -> Record:
    store = ArtifactStore(home)
    work = store.work_folder(uuid.uuid4().hex)
    (work / "artifact" / "model").mkdir(parents=True)
    (work / "attachments").mkdir()
    (work / "artifact" / "model" / "weights.bin").write_text(text)
    (work / "attachments" / "plot.png").write_bytes(b"png")
    record = store.publish(key, work / "artifact", work / "attachments", {"stage": "toy"} | fields)
    shutil.rmtree(work)
    return record


def test_a_stages_records_are_found_wherever_the_store_is_with_one_request_each(shared, tmp_path, monkeypatch):
    wanted = [publish(tmp_path / "one", key=f"{n:064d}", stage="ppo", started=f"{n}") for n in range(3)]
    publish(tmp_path / "one", key="b" * 64, stage="sft")
    store, reads = ArtifactStore(tmp_path / "two"), []
    read = store.shared.read
    monkeypatch.setattr(store.shared, "read", lambda name: reads.append(name) or read(name))
    assert store.published_by("ppo") == wanted[::-1]
    assert len(reads) == 3


def file_at(store: ArtifactStore, sha: str) -> str:
    return f"{store.shared.where}/objects/{sha}"


def overwrite(url: str, data: bytes) -> None:
    if "://" in url:
        fs, path = fsspec.core.url_to_fs(url)
        fs.pipe_file(path, data)
    else:
        Path(url).chmod(0o644)
        Path(url).write_bytes(data)


def test_what_one_computer_publishes_another_reads_verified_through_its_own_objects(shared, tmp_path):
    record = publish(tmp_path / "one")
    other = ArtifactStore(tmp_path / "two")
    found = other.lookup(KEY)
    assert found == record
    weights = other.path(found) / "model" / "weights.bin"
    assert weights.read_text() == "weights"
    assert weights.resolve() == (other.objects / record.files["model/weights.bin"]).resolve()
    assert digest_file(other.attachment(found, "plot.png")) == record.attachments["plot.png"]
    assert not (tmp_path / "two" / "store" / "records").exists()
    assert verify(other).damaged == verify(other).missing == []


def test_the_store_elsewhere_is_no_part_of_a_digest(shared, tmp_path, monkeypatch):
    there = publish(tmp_path / "one")
    monkeypatch.delenv("TETHER_STORE")
    assert publish(tmp_path / "two").digest == there.digest


@pytest.mark.parametrize("data", [b"WEIGHTS", b"weight"])
def test_a_damaged_remote_object_is_a_miss_that_says_so_and_computing_again_repairs_it(shared, tmp_path, data):
    record = publish(tmp_path / "one")
    store = ArtifactStore(tmp_path / "two")
    overwrite(file_at(store, record.files["model/weights.bin"]), data)
    found = store.lookup(KEY)
    assert isinstance(found, Miss)
    assert "damaged in TETHER_STORE" in found.reason and "weights.bin" in found.reason
    assert not (store.objects / record.files["model/weights.bin"]).exists()
    assert [each.name for each in verify(store).damaged] == [f"objects/{record.files['model/weights.bin']}"]
    work = store.work_folder("w")
    (work / "model").mkdir(parents=True)
    (work / "model" / "weights.bin").write_text("weights")
    again = store.publish(KEY, work, None, {"stage": "toy"})
    assert (again.attempt, again.digest) == (2, record.digest)
    assert ArtifactStore(tmp_path / "three").lookup(KEY) == again


def test_a_missing_remote_object_is_a_miss_that_says_so_also_where_a_copy_is_and_is_written_again(shared, tmp_path):
    record = publish(tmp_path / "one")
    store = ArtifactStore(tmp_path / "one")
    store.shared.remove(f"objects/{record.digest}")
    found = store.lookup(KEY)
    assert isinstance(found, Miss) and "missing in TETHER_STORE" in found.reason
    assert [each.name for each in verify(store).missing] == [f"objects/{record.digest}"]
    assert ArtifactStore(tmp_path / "two").lookup(KEY) == Miss(found.reason)
    assert ArtifactStore(tmp_path / "two").lookup(KEY) != publish(tmp_path / "one")
    assert isinstance(ArtifactStore(tmp_path / "two").lookup(KEY), Record)


def test_objects_that_are_there_are_not_written_again(shared, tmp_path, monkeypatch):
    publish(tmp_path / "one")
    put = []
    store = ArtifactStore(tmp_path / "two")
    monkeypatch.setattr(type(store.shared), "put", lambda self, name, source: put.append(name))
    publish(tmp_path / "two", key="b" * 64)
    assert put == []


def test_computers_that_publish_one_attempt_at_once_keep_each_others_record(shared, tmp_path, monkeypatch):
    real, meet = type(ArtifactStore(tmp_path).shared).create, threading.Barrier(2, timeout=PATIENCE * 30)
    first = threading.local()

    def create(self, name, data):
        if name.startswith("records/") and not hasattr(first, "met"):
            first.met = True
            meet.wait()  # both have seen that there is no record yet
        return real(self, name, data)

    monkeypatch.setattr(type(ArtifactStore(tmp_path).shared), "create", create)
    threads = [threading.Thread(target=publish, args=(tmp_path / n,), kwargs={"run": n}) for n in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = ArtifactStore(tmp_path / "three")
    assert sorted(record.run for record in store.published(KEY)) == ["one", "two"]
    assert sorted(record.attempt for record in store.published(KEY)) == ([1, 2] if store.shared.exclusive else [1, 1])


def test_a_record_is_written_after_every_object_it_names(shared, tmp_path, monkeypatch):
    store = ArtifactStore(tmp_path / "one")
    real, seen = type(store.shared).create, []

    def create(self, name, data):
        if name.startswith("records/"):
            seen.append({entry.name for entry in self.entries("objects")})
        return real(self, name, data)

    monkeypatch.setattr(type(store.shared), "create", create)
    record = publish(tmp_path / "one")
    assert seen == [set(record.objects.values())]


def test_collecting_here_leaves_the_shared_store_alone_and_collecting_there_empties_it(shared, tmp_path, monkeypatch):
    publish(tmp_path / "one")
    store = ArtifactStore(tmp_path / "one")
    assert {each.kind for each in collect(store, dict)} == {"object"}  # the copies here
    assert isinstance(store.lookup(KEY), Record)
    gone = collect(store, lambda: {KEY: {"run r"}}, shared=True)
    assert [each for each in gone if each.where == store.shared.where] == []
    assert isinstance(store.lookup(KEY), Record)
    collect(store, dict, shared=True)
    assert store.shared.entries("records") == []
    assert (store.shared.entries("objects") == []) == store.shared.has_locks, "a publisher may be about to name them"
    monkeypatch.setattr("components.store.retention.UNLOCKED_SECONDS", -60.0)
    collect(store, dict, shared=True)
    assert store.shared.entries("objects") == []
    assert store.lookup(KEY) == Miss("no record")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "credentials"),
        ({"TETHER_STORE": "s3://no-such-bucket-here/team"}, "bucket"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "connect"),
        ({"TETHER_STORE": "nosuch://x"}, "not known"),
        ({"TETHER_STORE": "some/folder"}, "absolute"),
    ],
)
def test_what_is_wrong_with_the_store_is_one_sentence_that_names_the_variable(
    bucket, tmp_path, monkeypatch, change, said
):
    monkeypatch.setenv("TETHER_STORE", bucket)
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    fresh = fsspec.filesystem("s3").clear_instance_cache  # else the connection with the credentials is taken again
    fresh()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with pytest.raises(UserError, match="TETHER_STORE") as error:
        ArtifactStore(tmp_path).lookup(KEY)
    assert said in str(error.value).lower()
    with pytest.raises(UserError, match="TETHER_STORE"):
        publish(tmp_path)
    fresh()


def test_a_file_in_the_place_of_the_store_is_said_and_no_record_is_left(tmp_path, monkeypatch):
    store = ArtifactStore(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "objects").write_text("in the way")
    with pytest.raises(UserError, match=r"objects: Not a directory\. A file is where a folder must be"):
        publish(tmp_path)
    assert store.lookup(KEY) == Miss("no record")


def test_a_look_into_a_local_store_writes_nothing_and_imports_no_fsspec(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys, pathlib; from components.store.store import ArtifactStore\n"
        "home = pathlib.Path(sys.argv[1]); ArtifactStore(home).lookup('a' * 64); assert not list(home.iterdir())\n"
        "assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[3])


def test_a_file_too_large_to_be_a_record_is_not_taken_into_memory(shared, tmp_path, monkeypatch):
    record = publish(tmp_path / "one")
    store = ArtifactStore(tmp_path / "two")
    name, size, _ = store.shared.entries(f"records/{KEY}")[0]
    name = f"records/{KEY}/{name}"
    for module in ("url", "folder"):
        monkeypatch.setattr(f"components.store.{module}.LARGEST_READ", size)
    assert store.lookup(KEY).digest == record.digest
    for module in ("url", "folder"):
        monkeypatch.setattr(f"components.store.{module}.LARGEST_READ", size - 1)
    with pytest.raises(OSError, match=f"more than {size - 1} bytes"):
        store.shared.read(name)
    store.shared.put("records/empty", write(tmp_path / "empty"))
    assert store.shared.read("records/empty") == b""


def write(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def test_a_damaged_copy_here_is_named_and_a_local_store_is_read_once(shared, tmp_path, monkeypatch):
    publish(tmp_path / "one")
    store = ArtifactStore(tmp_path / "two")
    found = store.lookup(KEY)
    copy = store.objects / found.files["model/weights.bin"]
    copy.chmod(0o644)
    copy.write_text("WEIGHTS")
    (flaw,) = verify(store).damaged
    assert flaw.name == f"objects/{copy.name}"
    monkeypatch.delenv("TETHER_STORE")
    publish(tmp_path / "alone")
    report = verify(ArtifactStore(tmp_path / "alone"))
    assert (report.records, report.objects, report.damaged) == (1, 3, []), "weights, plot and manifest, each once"


def test_a_server_that_refuses_a_second_write_without_naming_the_condition_is_understood(bucket, monkeypatch):
    """SeaweedFS' 412; s3fs makes an OSError of it that could be anything, and a record of the store was not written."""
    from botocore.exceptions import ClientError

    place = UrlPlace(bucket)
    refusal = OSError(22, "At least one of the pre-conditions you specified did not hold")
    refusal.__cause__ = ClientError({"Error": {"Code": "PreconditionFailed"}}, "PutObject")

    def refuse(*_, **__):
        raise refusal

    monkeypatch.setattr(place._fs, "pipe_file", refuse)
    assert place.create("records/x", b"1") is False
    refusal.__cause__ = ClientError({"Error": {"Code": "InvalidArgument"}}, "PutObject")
    with pytest.raises(UserError, match="can't write there"):
        place.create("records/x", b"1")


def test_a_server_that_is_away_behind_a_proxy_is_unreachable_and_so_tried_again(bucket, monkeypatch):
    """A 502 of Caddy's ended the run as a mistake, where no answer at all is waited for."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(502)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_PUT = do_GET
        log_message = lambda *_: None  # noqa: E731

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        fsspec.filesystem("s3").clear_instance_cache()
        place = UrlPlace(bucket)
        for ask in (lambda: place.entries("records"), lambda: place.size("x"), lambda: place.create("x", b"1")):
            with pytest.raises(Unreachable, match="502"):
                ask()
        proxy.shutdown()
    fsspec.filesystem("s3").clear_instance_cache()
