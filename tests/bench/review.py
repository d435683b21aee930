"""Fifty people judge at once on `tether review serve`, with SQLite and with PostgreSQL.

    python -m tests.bench.review
    python -m tests.bench.review --people 10 --pairs 10 --think 0.5

Each person opens their link, asks for a pair, thinks (an exponential time with the mean `--think`), answers by the form
that the page gave, and sends every fifth answer twice, as after a connection that broke; before each answer the page's
style sheet is fetched too, which is the static file that answers are compared with. Then what the database counts is
compared with what was meant. Prints times, and the server's CPU seconds over all its requests. Exit code 1 where an
answer is lost, doubled or another, or where the 95th percentile of answers is above 200 ms and above three times the
static file's.
"""

import argparse
import asyncio
import html
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil

from components.base.jsonl import write_rows
from flows.review.database.connect import open_database
from flows.review.links import raters_of
from flows.review.summary import counted_answers
from tests.flows.review.postgresql import new_database, postgresql_server
from tests.servers import clean_environment

ROOT = Path(__file__).resolve().parents[2]
MOST_MS, MOST_TIMES = 200.0, 3.0
TWICE = 5
"""Every so manieth answer is sent again."""
ONLY = 1
"""The batch's number in a new database."""
ANSWERS = ("a", "b", "tie", "both_bad")
_OTHER = {"a": "b", "b": "a"}
_TICKET = re.compile(r'name="ticket" value="([^"]+)"')
_FIRST = re.compile(r"(left|right) (\d+)<")
_STYLE = re.compile(r'href="(/static/[^"]+\.css)[^"]*"')

Counted = tuple[str, str]
"""A person and an item."""


class Measured(NamedTuple):
    """What one database gave."""

    answers: np.ndarray
    """Milliseconds of each POST of an answer."""
    pages: np.ndarray
    static: np.ndarray
    cpu_ms: float
    """Of the server, a request."""
    seconds: float
    wrong: list[str]


def differences(meant: Mapping[Counted, str], counted: Sequence[tuple[Counted, str]]) -> list[str]:
    """What is wrong with the answers that count, beside those that were meant."""
    times = Counter(who for who, _ in counted)
    found = dict(counted)
    return [
        *(f"{who} of {item} is lost" for who, item in meant.keys() - found.keys()),
        *(f"{who} of {item} counts {times[who, item]} times" for who, item in times if times[who, item] > 1),
        *(f"{who} of {item} was never given" for who, item in found.keys() - meant.keys()),
        *(f"{key[0]} of {key[1]} is {found[key]}, not {meant[key]}" for key in meant.keys() & found.keys()
          if meant[key] != found[key]),
    ]  # fmt: skip


class Person:
    """Somebody with a link, and how long the page took to answer them."""

    def __init__(self, name: str, link: str, think: float) -> None:
        self.name, self.think, self.chance = name, think, random.Random(name)
        self.client = httpx.AsyncClient(base_url=link.partition("/r/")[0], timeout=60)
        self.path = "/r/" + link.partition("/r/")[2]
        self.meant: dict[Counted, str] = {}
        self.times: dict[str, list[float]] = {"answer": [], "page": [], "static": []}
        self.requests = 0

    async def timed(self, kind: str, method: str, path: str, **more: Any) -> httpx.Response:
        began = time.perf_counter()
        answer = await self.client.request(method, path, **more)
        self.times[kind].append(1000 * (time.perf_counter() - began))
        self.requests += 1
        assert answer.status_code < 400, f"{path}: {answer.status_code}"
        return answer

    async def judge(self) -> None:
        """Answer every pair that the page asks for."""
        async with self.client:
            await asyncio.sleep(self.chance.random() * self.think)
            await self.timed("page", "GET", self.path)
            origin = {"Origin": str(self.client.base_url).rstrip("/")}
            while True:
                page = (await self.timed("page", "GET", "/")).text
                ticket, style = _TICKET.search(page), _STYLE.search(page)
                if ticket is None:
                    return
                assert style is not None
                await asyncio.sleep(self.chance.expovariate(1 / self.think))
                await self.timed("static", "GET", style[1])
                side, number = _FIRST.search(page).groups()  # type: ignore[union-attr]
                value = self.chance.choice(ANSWERS)
                self.meant[self.name, number] = value if side == "left" else _OTHER.get(value, value)
                form = {"ticket": html.unescape(ticket[1]), "answer": value}
                for _ in range(2 if len(self.meant) % TWICE == 0 else 1):
                    await self.timed("answer", "POST", "/vote", data=form, headers=origin)


@contextmanager
def serving(folder: Path, home: Path, people: int, database: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """The server's process, and each person's link."""
    raters = [word for n in range(people) for word in ("--rater", f"person {n}")]
    command = [sys.executable, "-m", "flows.cli", "review", "serve", str(folder), "--overlap", str(people), *raters]
    environment = {**clean_environment(), "TETHER_HOME": str(home), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "--port", "0", "--database", database], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        links: dict[str, str] = {}
        while len(links) < people + 1:
            line = process.stdout.readline()
            assert line, "the server did not start"
            name, _, link = line.strip().partition(": ")
            if "/r/" in link:
                links[name] = link
        yield psutil.Process(process.pid), {name: link for name, link in links.items() if name.startswith("person ")}
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def measure(folder: Path, home: Path, people: int, pairs: int, think: float, database: str) -> Measured:
    """Let `people` judge all `pairs` of `folder` at once; `database` is a URL or a file."""

    async def all_judge(crowd: Sequence[Person]) -> None:
        await asyncio.gather(*(person.judge() for person in crowd))

    with serving(folder, home, people, database) as (server, links):
        crowd = [Person(name, link, think) for name, link in links.items()]
        before, began = sum(server.cpu_times()[:2]), time.monotonic()
        asyncio.run(all_judge(crowd))
        seconds, cpu = time.monotonic() - began, sum(server.cpu_times()[:2]) - before
    engine = open_database(database if "://" in database else Path(database))
    names = dict(raters_of(engine, ONLY))
    with engine.connect() as connection:
        counted = [((names[each.rater], each.item), each.answer) for each in counted_answers(connection, ONLY)]
    engine.dispose()
    meant = {key: value for person in crowd for key, value in person.meant.items()}
    times = {kind: np.array([t for person in crowd for t in person.times[kind]]) for kind in crowd[0].times}
    requests = sum(person.requests for person in crowd)
    wrong = differences(meant, counted)
    if len(meant) != people * pairs:
        wrong.append(f"{len(meant)} answers were asked for, not {people * pairs}")
    return Measured(times["answer"], times["page"], times["static"], 1000 * cpu / requests, seconds, wrong)


def main() -> None:
    """Measure both databases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=20, help="each of which everybody judges (default: 20)")
    parser.add_argument("--think", type=float, default=2.0, help="seconds before an answer, on average (default: 2)")
    asked = parser.parse_args()
    wrong = []
    print(f"{asked.people} people, {asked.pairs} pairs, {asked.think:g} s a pair; load {os.getloadavg()[0]:.1f}")
    print("| database | answers | p50 ms | p95 ms | pages p95 | static file p95 | CPU ms a request | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as place, postgresql_server() as server:
        for name in ("SQLite", "PostgreSQL"):
            folder = Path(place) / name / "batch"
            rows = [{"id": str(n), "prompt": f"question {n}", "a": f"left {n}", "b": f"right {n}"}
                    for n in range(1, asked.pairs + 1)]  # fmt: skip
            write_rows(folder / "pairs.jsonl", rows)
            database = new_database(server, "review") if name == "PostgreSQL" else str(folder.parent / "review.db")
            found = measure(folder, folder.parent / "home", asked.people, asked.pairs, asked.think, database)
            p50, p95 = np.percentile(found.answers, [50, 95])
            pages, static = np.percentile(found.pages, 95), np.percentile(found.static, 95)
            print(f"| {name} | {found.answers.size} | {p50:.0f} | {p95:.0f} | {pages:.0f} | {static:.0f} | "
                  f"{found.cpu_ms:.1f} | {found.seconds:.0f} |", flush=True)  # fmt: skip
            wrong += [f"{name}: {each}" for each in found.wrong]
            if p95 > max(MOST_MS, MOST_TIMES * static):
                wrong.append(f"{name}: the 95th percentile of answers is {p95:.0f} ms")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
