"""Twenty runs that are ordered at once from a `tether stack` with two workers, and twenty more.

    python -m tests.bench.stack
    python -m tests.bench.stack --runs 4

Each run computes a PPO and a human evaluation of its own; the two workers take one run each, of which the second is
`tether serve` in another terminal. Prints how they ended, what was computed twice, how many ran at once, the most
connections to PostgreSQL, and each part's memory after either twenty: the proportional set size (PSS) of its process
and of all that descend from it. Exit code 1 where a run is lost or a result computed twice, a third ran beside two,
connections exceed 30, or memory grows.
"""

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from flows.stack.checks import s3_files
from flows.stack.config import LOOPBACK
from flows.stack.secrets import exports
from tasks.runs.status import list_runs
from tests.servers import clean_environment
from tests.stack import ENDED, ROOT, Running, started

WORKERS = 2
MOST_CONNECTIONS = 30
GROWTH = 1.10, 20.0
"""A part's memory after the second twenty is at most so many times that after the first, plus MB."""
LOOK_SECONDS = 2.0
UPDATES = 5


class Batch(NamedTuple):
    """What came of runs that were ordered at once."""

    seconds: float
    ended: dict[str, int]
    """State to the number of runs."""
    tries: int
    """The most times that one of them was started."""
    at_once: int
    connections: int
    memory: dict[str, float]
    """Part to MB, once all had ended."""


def at_once(spans: list[tuple[str, str]]) -> int:
    """Return how many spans (start, end; ISO 8601 of one zone) overlap at most; one may begin as another ends."""
    moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def grown(first: dict[str, float], second: dict[str, float]) -> list[str]:
    """Return the parts whose memory grew by more than `GROWTH` allows."""
    return [part for part, before in first.items() if second[part] > before * GROWTH[0] + GROWTH[1]]


def memory(leaders: dict[str, int]) -> dict[str, float]:
    """Return the PSS in MB of each process (`leaders` maps a name to its id) with all that descend from it."""
    parents, sizes = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = parent
        sizes[int(folder.name)] = next((int(each.split()[1]) for each in lines if each.startswith("Pss:")), 0) / 1000
    found = dict.fromkeys(leaders, 0.0)
    names = {process: name for name, process in leaders.items()}
    for process, megabytes in sizes.items():
        above = process
        while above in parents and above not in names:
            above = parents[above]
        if above in names:
            found[names[above]] += megabytes
    return found


async def _connections(running: Running) -> int:
    import asyncpg

    connection = await asyncpg.connect(
        host=LOOPBACK, port=running.stack.config.ports.postgres, user="postgres", database="postgres", ssl=False,
        password=running.passwords["postgres"],
    )  # fmt: skip
    query = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    try:
        return int(await connection.fetchval(query))
    finally:
        await connection.close()


def batch(running: Running, runs: int, first: int) -> Batch:
    """Order `runs` at once, of which each computes a PPO of its own, numbered from `first`, and wait for all."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            most[0] = max(most[0], asyncio.run(_connections(running)))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    began = time.monotonic()
    ordered = [running.begin(updates=UPDATES + first + number) for number in range(runs)]
    while True:
        flows = [running.prefect(f"flow_runs/{run}") for run in ordered]
        if all(flow["state_type"] in ENDED for flow in flows):
            break
        time.sleep(LOOK_SECONDS)
    seconds = time.monotonic() - began
    over.set()
    watcher.join()
    ended: dict[str, int] = {}
    for flow in flows:
        ended[flow["state_name"]] = ended.get(flow["state_name"], 0) + 1
    spans = [(flow["start_time"], flow["end_time"]) for flow in flows if flow["start_time"]]
    leaders = {**running.pids(), "keeper": int(running.state().keeper["pid"])}
    tries = max(flow["run_count"] for flow in flows)
    time.sleep(10)  # workers notice the end of their last run
    return Batch(seconds, ended, tries, at_once(spans), most[0], memory(leaders))


def computed_twice(running: Running) -> int:
    """Return how many results the store has more than once: a record each time that one was computed."""
    files = s3_files(running.stack, "tether", running.passwords["s3_tether"])
    records = files.glob("tether/store/records/*/*.json")
    assert records, "of all runs"
    return len(records) - len({record.rpartition("/")[0] for record in records})


def measure(runs: int) -> tuple[Batch, Batch, int, int]:
    """Return what came of `runs`, of as many more, the number of runs in the home, and of results computed twice."""
    with started(workers={"cpu": 1}, mlflow_processes=2) as running:
        running.deploy()
        ready = running.begin(updates=UPDATES - 1)  # what the others share
        assert running.ended(ready, 1200)["state_name"] == "Completed"
        environment: dict[str, Any] = {**clean_environment(), **exports(running.stack, running.passwords)}
        with (running.home / "second-worker.log").open("wb") as log:
            second = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", "serve", "--pool", "cpu", "--limit", "1"],
                env={**environment, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            path = "work_pools/cpu/workers/filter"
            while sum(each["status"] == "ONLINE" for each in running.prefect(path, {})) < WORKERS:
                assert second.poll() is None, (running.home / "second-worker.log").read_text()
                time.sleep(1)
            one = batch(running, runs, 0)
            print(one, flush=True)
            two = batch(running, runs, runs)
            return one, two, len(list_runs(running.home)), computed_twice(running)
        finally:
            second.terminate()
            second.wait(60)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="ordered at once, twice (default: 20)")
    options = parser.parse_args()
    one, two, runs, doubles = measure(options.runs)
    for name, each in (("first", one), ("second", two)):
        print(f"{name} {options.runs}: {each.seconds:.0f} s, {each.ended}, started at most {each.tries} times, at most "
              f"{each.at_once} at once, at most {each.connections} connections")  # fmt: skip
    print(f"runs in the home: {runs}; results computed twice: {doubles}")
    print("| part | MB after the first | after the second |\n|---|---|---|")
    for part, megabytes in one.memory.items():
        print(f"| {part} | {megabytes:.0f} | {two.memory[part]:.0f} |")
    wrong = [
        *(f"not all Completed: {each.ended}" for each in (one, two) if each.ended != {"Completed": options.runs}),
        *(f"{each.at_once} at once" for each in (one, two) if each.at_once > WORKERS),
        *(f"one was started {each.tries} times" for each in (one, two) if each.tries > 1),
        *(f"{each.connections} connections" for each in (one, two) if each.connections > MOST_CONNECTIONS),
        *(f"{part} grew" for part in grown(one.memory, two.memory)),
        *([f"{runs} runs in the home"] if runs != 2 * options.runs + 1 else []),
        *([f"{doubles} results were computed twice"] if doubles else []),
    ]
    sys.exit("; ".join(wrong) or None)


if __name__ == "__main__":
    main()
