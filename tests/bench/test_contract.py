import gzip
import json
import os
import signal
import subprocess
import time

import pytest

from tests.bench import contract


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "pairs.jsonl.gz"
    prompt = "\n\nHuman: what is a river made of\n\nAssistant: water\n\nHuman: and a mountain, what is that made of"
    row = {
        side: f"{prompt}\n\nAssistant: {said}" for side, said in (("chosen", "of stone " * 9), ("rejected", "no " * 9))
    }
    with gzip.open(path, "wt") as out:
        out.write((json.dumps(row) + "\n") * 3)
    return path


def test_the_pairs_of_the_bench_are_whole_transcripts_with_one_prompt_and_differ(source):
    rows = list(contract.pairs(source, 10, 0))
    heads = [{side: text.rpartition("\n\nAssistant:")[0] for side, text in row.items()} for row in rows]
    assert all(head["chosen"] == head["rejected"] for head in heads)
    assert all(head["chosen"].count("\n\nHuman: ") == 2 and "\n\nAssistant: " in head["chosen"] for head in heads)
    assert len({row["chosen"] for row in rows}) == 10
    assert {len(row["chosen"].split(" ")) for row in rows} == {len(rows[0]["chosen"].split(" "))}, "lengths are kept"
    assert rows == list(contract.pairs(source, 10, 0))


def test_the_memory_that_the_bench_prints_is_that_of_the_processes_of_its_session():
    before = contract.session_bytes(os.getsid(0))
    held = bytearray(b"x" * 60_000_000)
    assert contract.session_bytes(os.getsid(0)) - before > 0.9 * len(held)
    assert contract.session_bytes(2**30) == 0


def test_the_processor_time_that_the_bench_prints_holds_processes_that_it_did_not_start():
    started = subprocess.Popen(["sh", "-c", "python3 -c 'while True: pass' & wait"], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while sum(contract.session_seconds(started.pid).values()) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.1)
        found = contract.session_seconds(started.pid)
        assert len(found) == 2 and max(found, key=lambda process: found[process]) != started.pid
        assert sum(found.values()) >= 0.2
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
