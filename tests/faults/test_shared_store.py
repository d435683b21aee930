"""Two homes on one S3 store, at once, one of them killed again and again: nothing is lost and nothing differs."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from components.store.records import parse_record
from components.store.store import Record
from tests.faults.homes import Home, Moment, tail
from tests.faults.test_kills import kill
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(PATIENCE * 900)]

KILLS: tuple[Moment, ...] = (
    ("validate", "publish", 2), ("sft", "checkpoint", 3), ("reward", "publish", 1), ("ppo", "write", 5),
)  # fmt: skip


@pytest.fixture
def s3() -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket's URL, and the variables with which a process reaches it."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    given = {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "TETHER_STORE": "s3://team/store",
    }  # fmt: skip
    yield address, given
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


def test_two_homes_that_fill_one_s3_store_at_once_find_each_others_results_whole(
    whole: tuple[Home, list[Moment]], s3: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    undisturbed, _ = whole
    address, variables = s3
    fs = fsspec.filesystem("s3", key="test", secret="test", endpoint_url=address, use_listings_cache=False)
    fs.mkdir("team")
    killed, other, third = (
        Home(tmp_path / name / "home", undisturbed.environment | variables) for name in ("killed", "other", "third")
    )
    for home in (killed, other, third):
        home.path.parent.mkdir()
    with ThreadPoolExecutor() as pool:
        whole_run = pool.submit(other.tether)
        codes = [killed.tether(plan=kill(moment, 0)).code for moment in KILLS]
        last = killed.tether()
    assert -9 in codes and set(codes) <= {-9, 0}, codes
    assert last.code == 0, tail(last)
    assert whole_run.result().code == 0, tail(whole_run.result())
    assert killed.digests() == other.digests() == undisturbed.digests()

    done = third.tether()
    assert done.code == 0 and third.digests() == undisturbed.digests(), tail(done)
    assert {stage["cached"] for stage in third.status()["stages"]} == {True}, "a third home computes nothing"
    found: dict[str, set[str]] = {}
    for path in fs.find("team/store"):
        kind, name, *_ = path.removeprefix("team/store/").split("/")
        if kind == "objects":
            assert hashlib.sha256(fs.cat_file(path)).hexdigest() == name
        if kind == "records":
            record = parse_record(fs.cat_file(path).decode(), name)
            assert isinstance(record, Record), f"{path}: {record}"
            found.setdefault(name, set()).add(record.digest)
    assert all(len(digests) == 1 for digests in found.values()), "a key has one result, however often it was computed"
    assert third.tether("store", "verify").code == 0
