"""A batch on a page in this process, in SQLite, or in a PostgreSQL of its own."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine
from starlette.testclient import TestClient

from flows.review.database.connect import open_database
from flows.review.page.app import make_app
from flows.review.personal_links import PersonalLink, add_raters, enter_batch
from flows.review.rater_votes import GivenAnswer, ReviewRater, Voting
from flows.review.review_batches import BatchSource, JudgedPair
from tests.postgresql import new_database, postgresql_server

ORIGIN = {"Origin": "http://testserver"}
RATINGS = ["a", "b", "tie", "both_bad"]
TICKET = re.compile(r'name="ticket" value="([^"]+)"')


def make_source(items: int = 3, overlap: int = 2, place: Path = Path("nowhere"), **changes: Any) -> BatchSource:
    """A run's sheet: the left reply of item 2 is `left 2`."""
    pairs = [
        JudgedPair(f"q{n:04d}-abcdef01", f"[user]\nquestion {n}", f"left {n}", f"right {n}")
        for n in range(1, items + 1)
    ]
    given: dict[str, Any] = {"name": "run-1", "kind": "sample", "criteria": [], "prompts": {}} | changes
    return BatchSource(
        place=place, pairs=pairs, guidelines="# How\n\nBe fair.", ratings=RATINGS, overlap=overlap, digest="d", **given
    )


def answer(value: str, **more: Any) -> GivenAnswer:
    """An answer without anything beside it."""
    return GivenAnswer(**{"answer": value, "criteria": {}, "flags": [], "comment": "", "seconds": None} | more)


class Site(NamedTuple):
    """A page of one batch, and its links."""

    source: BatchSource
    voting: Voting
    admin: PersonalLink
    links: list[PersonalLink]
    app: Any
    completed: list[str]

    @property
    def raters(self) -> list[ReviewRater]:
        """Those who hold the links."""
        return [found for link in self.links if (found := self.voting.person(link.token)) is not None]

    def judge(self, value: Callable[[str], str], people: int | None = None, **more: Any) -> None:
        """Have people answer until nobody is asked anything; `value` gives the answer by what stands on side A."""
        asked = True
        while asked:
            asked = False
            for person in self.raters[:people]:
                if (pair := self.voting.next_pair(person)) is not None:
                    asked = True
                    self.voting.take(person, pair.ticket, answer(value(pair.first), **more))

    def browser(self, link: PersonalLink | None = None) -> TestClient:
        """A browser that has opened a link."""
        client = TestClient(self.app, headers=ORIGIN)
        if link is not None:
            assert client.get(f"/r/{link.token}", follow_redirects=False).status_code == 303
        return client


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables without rows, to copy."""
    file = tmp_path_factory.mktemp("review") / "empty.db"
    engine = open_database(file)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    engine.dispose()
    return file


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The address of a PostgreSQL server, without a database."""
    with postgresql_server() as address:
        yield address


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def database(request: pytest.FixtureRequest, tmp_path: Path, empty_database: Path) -> Iterator[Engine]:
    """Both kinds of database; PostgreSQL among the tests that start servers."""
    if request.param == "sqlite":
        shutil.copy(empty_database, tmp_path / "review.db")
        engine = open_database(tmp_path / "review.db")
    else:
        engine = open_database(new_database(request.getfixturevalue("postgresql"), tmp_path.name))
    yield engine
    engine.dispose()


@pytest.fixture
def site(tmp_path: Path, empty_database: Path) -> Iterator[Callable[..., Site]]:
    """`site(raters=2, items=3, overlap=2)`: a page in SQLite."""
    engines = []

    def make(raters: int = 2, source: BatchSource | None = None, engine: Engine | None = None, **changes: Any) -> Site:
        source = source or make_source(**changes)
        if engine is None:
            file = tmp_path / f"{len(engines)}.db"
            shutil.copy(empty_database, file)
            engine = open_database(file)
            engines.append(engine)
        return site_on(engine, source, raters)

    yield make
    for engine in engines:
        engine.dispose()


def site_on(engine: Engine, source: BatchSource, raters: int) -> Site:
    """A page of a batch that is new in a database."""
    number, admin = enter_batch(engine, source)
    assert admin is not None
    links = add_raters(engine, number, [f"person {n}" for n in range(1, raters + 1)])
    voting, completed = Voting.open(engine, number), list[str]()
    return Site(source, voting, admin, links, make_app(voting, completed.append), completed)
