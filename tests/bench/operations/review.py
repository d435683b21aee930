"""Fifty people judge at once on `tether people page`, with SQLite and with PostgreSQL.

    python -m tests.bench.operations.review
    python -m tests.bench.operations.review --people 10 --pairs 10 --think 0.5

Each person opens their link, asks for a pair, thinks (an exponential time with the mean `--think`), answers by the form
that the page gave, sends every fifth answer twice, as after a connection that broke, and takes every seventh back and
answers that pair again; before each answer the page's style sheet is fetched too, which is the static file that answers
are compared with. Then what the database counts is compared with what was meant, and every row that it has stored with
what was sent. Prints times, and the server's CPU seconds over all its requests. Exit code 1 where an answer is lost,
doubled or another, where not everybody answered every pair, or where the 95th percentile of answers is above 200 ms and
above three times the static file's.
"""

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
from sqlalchemy import Engine, select

from components.base.jsonl import write_rows
from flows.review.batch_summary import counted_answers
from flows.review.database.connect import open_database
from flows.review.database.tables import item, rater, vote
from flows.review.personal_links import raters_of
from flows.review.rater_votes import unexchanged
from tests.bench.tools import ROOT, argument_parser
from tests.postgresql import new_database, postgresql_server
from tests.servers import clean_environment

MOST_MS, MOST_TIMES = 200.0, 3.0
TWICE = 5
"""Every so manieth answer is sent again."""
BACK = 7
"""Every so manieth answer is taken back, and the pair answered again."""
ONLY = 1
"""The batch's number in a new database."""
ANSWERS = ("a", "b", "tie", "both_bad")
_OTHER = {"a": "b", "b": "a"}
_TICKET = re.compile(r'name="ticket" value="([^"]+)"')
_UNDO = re.compile(r'name="nonce" value="([^"]+)"')
_FIRST = re.compile(r"(left|right) (\d+)<")
_STYLE = re.compile(r'href="(/static/[^"]+\.css)[^"]*"')

Counted = tuple[str, str]
"""A person and an item."""
Stored = Counter[tuple[str, str, str | None]]
"""How often a person gave an item an answer; None takes one back."""


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


def unlike(sent: Stored, stored: Stored) -> list[str]:
    """What is wrong with the rows of votes, beside what was sent; what was sent twice is one row."""
    rows = ((*key, sent[key], stored[key]) for key in sorted(sent | stored, key=str) if sent[key] != stored[key])
    return [
        f"{who}, item {name}, {answer or 'taken back'}: stored {n} times, sent {m}" for who, name, answer, m, n in rows
    ]


def stored_votes(engine: Engine) -> Stored:
    """Every row of votes, sides as the batch has them."""
    query = select(rater.c.name.label("who"), item.c.name, vote.c.answer, vote.c.shown)
    query = query.join_from(vote, rater, rater.c.id == vote.c.rater).join(item, item.c.id == vote.c.item)
    with engine.connect() as connection:
        rows = connection.execute(query).all()
    return Counter((r.who, r.name, None if r.answer is None else unexchanged(r.answer, r.shown)) for r in rows)


class Person:
    """Somebody with a link, and how long the page took to answer them."""

    def __init__(self, name: str, link: str, think: float) -> None:
        self.name, self.think, self.chance = name, think, random.Random(name)
        self.client = httpx.AsyncClient(base_url=link.partition("/r/")[0], timeout=60)
        self.path = "/r/" + link.partition("/r/")[2]
        self.meant: dict[Counted, str] = {}
        self.sent: Stored = Counter()
        self.times: dict[str, list[float]] = {"answer": [], "page": [], "static": [], "undo": []}
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
        given, last = 0, None
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
                if last is not None and given % BACK == 0:
                    undo = _UNDO.search(page)
                    assert undo is not None
                    await self.timed("undo", "POST", "/undo", data={"nonce": undo[1]}, headers=origin)
                    del self.meant[last]
                    self.sent[(*last, None)] += 1
                    given, last = given + 1, None
                    continue
                await asyncio.sleep(self.chance.expovariate(1 / self.think))
                await self.timed("static", "GET", style[1])
                side, number = _FIRST.search(page).groups()  # type: ignore[union-attr]
                value = self.chance.choice(ANSWERS)
                given, last = given + 1, (self.name, number)
                self.meant[last] = value if side == "left" else _OTHER.get(value, value)
                self.sent[(*last, self.meant[last])] += 1
                form = {"ticket": html.unescape(ticket[1]), "answer": value}
                for _ in range(2 if given % TWICE == 0 else 1):
                    await self.timed("answer", "POST", "/vote", data=form, headers=origin)


@contextmanager
def serving(folder: Path, home: Path, people: int, database: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """The server's process, and each person's link."""
    raters = [word for n in range(people) for word in ("--rater", f"person {n}")]
    command = [sys.executable, "-m", "flows.cli", "people", "page", str(folder), "--overlap", str(people), *raters]
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
    stored = stored_votes(engine)
    engine.dispose()
    meant = {key: value for person in crowd for key, value in person.meant.items()}
    times = {kind: np.array([t for person in crowd for t in person.times[kind]]) for kind in crowd[0].times}
    requests = sum(person.requests for person in crowd)
    wrong = [*differences(meant, counted), *unlike(sum((person.sent for person in crowd), Counter()), stored)]
    if len(meant) != people * pairs:
        wrong.append(f"{len(meant)} answers were asked for, not {people * pairs}")
    if not times["undo"].size or times["answer"].size <= sum(stored.values()) - times["undo"].size:
        wrong.append("no answer was taken back, or none was sent twice")
    return Measured(times["answer"], times["page"], times["static"], 1000 * cpu / requests, seconds, wrong)


def main() -> None:
    """Measure both databases and print a table."""
    parser = argument_parser(__doc__)
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
