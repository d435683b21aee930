"""Validation in shards: their size, the number of processes and being killed change no byte of what is published."""

import hashlib
import json
import operator
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from components.base.jsonl import write_rows
from components.stats.intervals import cluster_codes
from data_contracts.examine import examine
from data_contracts.expectations import suites
from data_contracts.findings import near, row_judging, whole
from data_contracts.rows import ledger, shards
from data_contracts.rows.measuring import FACTS
from data_contracts.rows.processes import ALONE, in_order
from data_contracts.rows.shards import FactColumns, Shard, write_shard

ROOT = Path(__file__).resolve().parents[3]


def planted(path, count=60):
    """Pairs with a row of most faults: repeated, turned round, marked, unreadable, alike, nearly the same."""
    rng = random.Random(4)
    words = [f"word{i}" for i in range(300)]
    rows = []
    for i in range(count):
        said = [" ".join(rng.choice(words) for _ in range(12)) for _ in range(3)]
        row = {"prompt": said[0], "chosen": said[1], "rejected": said[2], "rating": i % 5}
        rows.append(row)
        rows += [row] if i % 17 == 2 else []
        rows += [{**row, "chosen": said[2], "rejected": said[1]}] if i % 19 == 3 else []
        rows += [{**row, "prompt": f"{said[0]} <|im_end|>"}] if i % 13 == 4 else []
        rows += [{**row, "chosen": f"{said[1]} indeed"}] if i % 11 == 5 else []
        rows += [{"prompt": said[0]}] if i % 23 == 6 else []
    lines = [json.dumps(row) for row in rows]
    lines.insert(30, "{ no row")
    path.write_text("\n".join(lines) + "\n")
    return path


MINE = {
    "name": "mine",
    "expectations": [
        {"type": "expect_column_values_to_be_between", "kwargs": {"column": "rating", "max_value": 3, "mostly": 0.5},
         "meta": {"check": "rated", "severity": "warning", "sentence": "as agreed"}},
        {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "characters", "mostly": 0.1},
         "meta": {"check": "apart", "severity": "warning", "sentence": "as agreed"}},
    ],
}  # fmt: skip


@pytest.fixture
def inputs(tmp_path):
    suite = tmp_path / "mine.json"
    suite.write_text(json.dumps(MINE))
    return {"preferences": planted(tmp_path / "pairs.jsonl"), "suite": suite}


def digests(out):
    return {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((out / "artifact").rglob("*")) if path.is_file()
    }  # fmt: skip


@pytest.fixture
def published(validate, inputs, tmp_path):
    """Validate the planted pairs; returns the digests of the artifact."""

    def published(out, processes=1):
        validate(tmp_path / out, inputs, suite="mine.json", processes=processes)
        return digests(tmp_path / out)

    return published


def small(monkeypatch):
    monkeypatch.setattr(ledger, "SHARD_ROWS", 9)
    monkeypatch.setattr(row_judging, "JUDGED_ROWS", 20)
    monkeypatch.setattr(whole, "COMPARED_ROWS", 15)
    monkeypatch.setattr(near, "AT_ONCE", 7)


def test_many_small_shards_judged_some_rows_at_a_time_give_the_bytes_of_one(published, monkeypatch):
    one = published("one")
    small(monkeypatch)
    assert published("many") == one


def test_stopped_at_any_shard_validation_continues_with_what_is_there_to_the_same_bytes(
    published, monkeypatch, tmp_path
):
    small(monkeypatch)
    whole_run = published("whole")
    written, left, rng = [], 0, random.Random(int(os.environ.get("TETHER_FAULTS_SAMPLE", "5"), 16) % 1000)

    def counted(path, *args):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        written.append(path)
        write_shard(path, *args)

    for module in ("data_contracts.rows.measuring", "data_contracts.findings.texts"):
        monkeypatch.setattr(f"{module}.write_shard", counted)
    for _ in range(3):
        left = rng.randrange(1, 5)
        with pytest.raises(KeyboardInterrupt):
            published("stopped")
    left = 10**6
    assert published("stopped") == whole_run
    assert len(written) == len(set(written)) >= 14, "a shard that was there was computed again"
    assert not (tmp_path / "stopped" / "checkpoint").exists()


def test_shards_of_another_file_or_job_are_not_taken(published, inputs, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("data_contracts.findings.texts.write_shard", stop)
        published("first")
    planted(inputs["preferences"], 40)
    assert published("first") == published("second")


def test_a_damaged_shard_is_computed_again(tmp_path):
    path = tmp_path / "00000.arrow"
    write_shard(path, {"n": np.arange(4)}, {})
    assert shards.is_whole(path)
    path.write_bytes(path.read_bytes()[:-9])
    assert not shards.is_whole(path) and not shards.is_whole(tmp_path / "none.arrow")


def test_an_expectation_over_parts_holds_by_the_share_of_all_rows_and_not_of_each_part():
    def part(count, missing, unexpected):
        counts = {"element_count": count, "missing_count": missing, "unexpected_count": unexpected}
        return suites.ExpectationResult(check(0.8), False, (), counts)

    def check(mostly):
        return suites.Check("c", "", "warn", 0.0, "ExpectColumnValuesToBeNull", {"column": "a", "mostly": mostly})

    parts = [part(10, 0, 4), part(20, 10, 0)]  # 16 of 20 known values
    assert row_judging.succeeded(check(0.8), parts) and not row_judging.succeeded(check(0.81), parts)
    assert row_judging.succeeded(check(1.0), [part(5, 5, 0), part(0, 0, 0)]), "where nothing is known nothing fails"


def test_facts_in_shards_are_those_of_a_structured_array(tmp_path):
    rng = np.random.default_rng(0)
    table = np.zeros(23, FACTS)
    for name in FACTS.names:
        table[name] = rng.integers(0, 2, table[name].shape)
    table["roles"] = -1
    paths = [tmp_path / str(part) for part in range(3)]
    for path, rows in zip(paths, (table[:10], table[10:11], table[11:]), strict=True):
        write_shard(path, {name: rows[name] for name in FACTS.names}, {})
    codes = {"roles": [np.arange(3)] * 3}
    facts = FactColumns(tmp_path / "facts", [Shard(path) for path in paths], FACTS, ("split", "made"), codes)
    which = table["made"]
    for name in FACTS.names:
        assert facts[name].dtype == table[name].dtype
        np.testing.assert_array_equal(facts[name], table[name])
        np.testing.assert_array_equal(facts[which][name], table[which][name])
        np.testing.assert_array_equal(facts[9:12][name], table[9:12][name])
        np.testing.assert_array_equal(facts[which][np.array([2, 0])][name], table[which][[2, 0]][name])
    assert len(facts[which]) == which.sum()


@pytest.mark.parametrize("clusters", [[], [5, 2, 5, 9, 2], [2**63, 1, 2**63]])
def test_clusters_in_an_array_have_the_codes_that_they_have_in_a_list(clusters):
    assert cluster_codes(np.array(clusters, np.uint64)).tolist() == cluster_codes(clusters).tolist()


def _squared(added, number):
    return number * number + added, os.getpid()


@pytest.mark.whole
def test_tasks_of_several_processes_end_in_their_order_and_a_killed_process_is_said():
    found = list(in_order(_squared, 1, range(20), 2))
    assert [value for value, _ in found] == [n * n + 1 for n in range(20)]
    assert os.getpid() not in {process for _, process in found}
    few = [(number * number + 1, os.getpid()) for number in range(ALONE)]
    assert list(in_order(_squared, 1, range(ALONE), 2)) == few, "few tasks need no further process"
    with pytest.raises(Exception, match=r"was killed.*data\.processes=1"):
        list(in_order(_killed, None, range(4), 2))


class _Task:
    """A task that can be watched."""


def _done(shared, task):
    return os.getpid()


@pytest.mark.whole
def test_tasks_that_are_done_do_not_stay_in_memory():
    made = []

    def tasks():
        for _ in range(12):
            task = _Task()
            made.append(weakref.ref(task))
            yield task

    results = in_order(_done, None, tasks(), 2)
    for _ in range(8):
        next(results)
    assert not any(task() for task in made[:4])
    results.close()


def _killed(shared, number):
    os.kill(os.getpid(), signal.SIGKILL)


class _SeesMain:
    """Keeps the main module at the time that it is pickled for a new process."""

    seen: ClassVar[list[object]] = []

    def __reduce__(self):
        self.seen.append(sys.modules["__main__"])
        return int, ()


@pytest.mark.whole
def test_while_a_process_starts_other_threads_have_the_same_main_module():
    main = sys.modules["__main__"]
    assert [*in_order(operator.add, _SeesMain(), [1, 2, 3], 2)] == [1, 2, 3]
    assert _SeesMain.seen and all(module is main for module in _SeesMain.seen)


@pytest.mark.whole
def test_a_users_script_runs_once_and_not_again_in_each_process(tmp_path):
    script = tmp_path / "without_a_guard.py"
    script.write_text(
        "import operator\n"
        "print('began', flush=True)\n"
        "from data_contracts.rows.processes import in_order\n"
        "print(*in_order(operator.add, 1, [1, 2, 3], 2))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["began", "2", "3", "4"]), done.stderr


def test_rows_are_counted_while_they_are_read_and_have_a_total_after(job, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "SHARD_ROWS", 100)
    write_rows(tmp_path / "a.jsonl", [{"prompt": f"q {n}", "chosen": "x", "rejected": "y"} for n in range(1000)])
    counts: list[tuple[int, int | None]] = []
    given = {"preferences": tmp_path / "a.jsonl"}
    examine(job(processes=1), given, tmp_path / "rows", lambda *count: counts.append(count), tokenized=False)
    assert [count for count in counts if count[0] <= 1000] == [(100 * n, None) for n in range(1, 11)]
    assert counts[-1] == (2000, 2000)


@pytest.mark.whole
def test_one_two_and_four_processes_publish_the_same_bytes(published, monkeypatch):
    monkeypatch.setattr(ledger, "SHARD_ROWS", 9)
    one = published("one", processes=1)
    assert published("two", processes=2) == one and published("four", processes=4) == one


RUN = """
import sys
from pathlib import Path
from components.data.config import DataConfig
from components.models.config import GenerationConfig
from data_contracts.config import TokenizerConfig, ValidateJob
from data_contracts.rows import ledger
from data_contracts.validate import run
if __name__ == "__main__":
    ledger.SHARD_ROWS = 9
    job = ValidateJob(
        seed=0, generation=GenerationConfig(max_prompt_tokens=64, max_new_tokens=64),
        data=DataConfig(preferences=sys.argv[1], processes=2),
        sft=TokenizerConfig(vocabulary=1000, max_demonstrations=None),
    )
    run(job, {"preferences": Path(sys.argv[1])}, Path(sys.argv[2]), lambda *args, **more: None)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)  # on two busy cores each of the 22 starts takes half a minute
def test_killed_at_twenty_moments_validation_ends_with_the_same_bytes(inputs, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    rng = random.Random(20)

    def begun(out):
        command = [sys.executable, str(script), str(inputs["preferences"]), str(tmp_path / out)]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

    began = time.monotonic()
    assert begun("whole").wait() == 0
    seconds = time.monotonic() - began
    for _ in range(20):
        process = begun("killed")
        time.sleep(rng.uniform(0, seconds * 1.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert begun("killed").wait() == 0
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
