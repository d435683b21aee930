"""Slots and votes: nobody is asked twice, nothing counts twice, and nothing that was answered is lost."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, func, insert, select
from sqlalchemy.exc import IntegrityError

from flows.review import rater_votes
from flows.review.batch_summary import counted_answers, summary
from flows.review.database.tables import slot, vote
from flows.review.rater_votes import CLAIM_S, SKIP, RequestRefused
from tests.flows.review.conftest import Site, answer, make_source, site_on


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time as the votes see it; `clock.now` may be set."""
    clock = SimpleNamespace(now=1_800_000_000.0)
    monkeypatch.setattr(rater_votes, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def drained(site: Site, value: str = "a") -> None:
    site.judge(lambda _: value)


def counted(site: Site) -> list[tuple[str, int, str]]:
    with site.voting.engine.connect() as connection:
        return [(each.item, each.rater, each.answer) for each in counted_answers(connection, site.voting.batch.id)]


def check_slots(site: Site) -> None:
    """Every answer that counts is its slot's own rater's, on its item; nobody has two slots of an item."""
    with site.voting.engine.connect() as connection:
        rows = connection.execute(
            select(slot.c.item, slot.c.rater, vote.c.item.label("of"), vote.c.rater.label("by")).join_from(
                slot, vote, slot.c.vote == vote.c.id
            )
        ).all()
    assert all(row.item == row.of and row.rater == row.by for row in rows)
    assert len({(row.item, row.rater) for row in rows}) == len(rows)


def test_five_people_answer_every_slot_once_and_the_same_person_no_item_twice(database: Engine) -> None:
    site = site_on(database, make_source(items=6, overlap=3), 5)
    drained(site)
    given = counted(site)
    assert len(given) == 18 and len({(item, rater) for item, rater, _ in given}) == 18
    assert {item for item, _, _ in given} == {pair.name for pair in site.source.pairs}
    assert [site.voting.complete() for _ in range(3)] == [True, False, False], "told once"
    check_slots(site)


def test_many_at_once_share_no_slot(database: Engine) -> None:
    site = site_on(database, make_source(items=8, overlap=2), 6)

    def work(person: Any) -> int:
        done = 0
        while (pair := site.voting.next_pair(person)) is not None:
            assert site.voting.take(person, pair.ticket, answer("b"))
            done += 1
        return done

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, site.raters)) == 16
    assert len(counted(site)) == 16
    check_slots(site)


def test_the_tables_refuse_two_people_in_one_slot_and_one_person_in_two(database: Engine) -> None:
    site = site_on(database, make_source(items=1, overlap=2), 2)
    one, two = site.raters
    assert site.voting.next_pair(one) is not None
    with database.connect() as connection:
        taken = connection.execute(select(slot).where(slot.c.rater == one.id)).one()
    values = {"batch": taken.batch, "item": taken.item, "place": 1}
    for more in ({"copy": taken.copy, "rater": two.id}, {"copy": 3, "rater": one.id}):
        with pytest.raises(IntegrityError), database.begin() as connection:
            connection.execute(insert(slot).values(**values, **more))


def test_a_form_sent_again_counts_once_and_keeps_its_first_answer(database: Engine) -> None:
    site = site_on(database, make_source(items=2), 1)
    (person,) = site.raters
    pair = site.voting.next_pair(person)
    assert pair is not None
    assert [site.voting.take(person, pair.ticket, answer(each)) for each in "abab"] == [True] * 4
    with database.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(vote)) == 1
    item, number, value = counted(site)[0]
    assert (item, number) == ("q0001-abcdef01", 1)
    assert value == ("a" if pair.first == "left 1" else "b"), "as the sheet has the sides"


def test_one_form_sent_at_once_by_many_threads_counts_once(database: Engine) -> None:
    site = site_on(database, make_source(items=2), 1)
    (person,) = site.raters
    pair = site.voting.next_pair(person)
    assert pair is not None
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: site.voting.take(person, pair.ticket, answer("tie")), range(8)))
    with database.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(vote)) == 1


def test_an_undone_answer_stays_in_the_table_counts_no_more_and_its_pair_comes_next(database: Engine) -> None:
    site = site_on(database, make_source(items=3), 1)
    (person,) = site.raters
    first = site.voting.next_pair(person)
    assert first is not None
    site.voting.take(person, first.ticket, answer("a"))
    assert (second := site.voting.next_pair(person)) is not None and second.place == 2
    assert [site.voting.undo(person, "n" * 32) for _ in range(2)] == [True, False], "sent again, it does nothing"
    assert counted(site) == []
    again = site.voting.next_pair(person)
    assert again is not None and again.place == 1
    site.voting.take(person, again.ticket, answer("both_bad"))
    assert [value for _, _, value in counted(site)] == ["both_bad"]
    with database.connect() as connection:
        assert connection.scalars(select(vote.c.answer).order_by(vote.c.id)).all() == ["a", None, "both_bad"]
    assert (last := site.voting.next_pair(person)) is not None and last.place == 2
    assert summary(site.voting).undone == 1


def test_a_slot_left_open_goes_to_somebody_else_and_the_late_answer_is_kept_but_does_not_count(
    site: Callable[..., Site], clock: Any
) -> None:
    page = site(raters=2, items=1, overlap=1)
    slow, quick = page.raters
    late = page.voting.next_pair(slow)
    assert late is not None
    clock.now += CLAIM_S - 1
    assert page.voting.next_pair(quick) is None, "it is still the first one's"
    clock.now += 2
    taken = page.voting.next_pair(quick)
    assert taken is not None
    assert page.voting.take(quick, taken.ticket, answer("tie"))
    assert not page.voting.take(slow, late.ticket, answer("a"))
    assert counted(page) == [("q0001-abcdef01", 2, "tie")]
    assert [each.late for each in summary(page.voting).raters] == [1, 0]


def test_a_late_answer_counts_where_nobody_has_taken_the_slot_or_another_one_is_open(
    site: Callable[..., Site], clock: Any
) -> None:
    page = site(raters=2, items=1, overlap=2)
    slow, quick = page.raters
    late = page.voting.next_pair(slow)
    clock.now += CLAIM_S + 1
    taken = page.voting.next_pair(quick)
    assert late is not None and taken is not None
    assert page.voting.take(slow, late.ticket, answer("a")) and page.voting.take(quick, taken.ticket, answer("a"))
    assert len(counted(page)) == 2


@pytest.mark.parametrize("people", [2, 3])
def test_a_skipped_pair_goes_to_somebody_else_if_there_is_one_and_the_batch_can_always_be_completed(
    site: Callable[..., Site], people: int
) -> None:
    page = site(raters=people, items=1, overlap=2)
    first = page.raters[0]
    pair = page.voting.next_pair(first)
    assert pair is not None and page.voting.take(first, pair.ticket, answer(SKIP))
    assert page.voting.next_pair(first) is None, "they are not asked again"
    drained(page)
    assert page.voting.complete()
    assert (SKIP in [value for _, _, value in counted(page)]) == (people == 2)


def test_an_answer_can_be_changed_by_undo_alone_and_not_once_the_batch_is_complete(site: Callable[..., Site]) -> None:
    page = site(raters=1, items=1, overlap=1)
    (person,) = page.raters
    tickets = [pair.ticket for _ in range(2) if (pair := page.voting.next_pair(person)) is not None]
    page.voting.take(person, tickets[0], answer("a"))
    with pytest.raises(RequestRefused, match="Undo"):
        page.voting.take(person, tickets[1], answer("b"))
    assert page.voting.complete()
    with pytest.raises(RequestRefused, match="complete"):
        page.voting.undo(person, "n" * 32)


def test_a_repeated_pair_goes_to_those_who_judged_it_before(site: Callable[..., Site]) -> None:
    source = make_source(items=8, overlap=2)
    again = [pair._replace(name=f"again {n}", a=pair.b, b=pair.a) for n, pair in enumerate(source.pairs[:3])]
    page = site(raters=4, source=source._replace(pairs=[*source.pairs, *again]))
    drained(page)
    asked: dict[str, set[int]] = {}
    for item, rater, _ in counted(page):
        asked.setdefault(item, set()).add(rater)
    assert [asked[f"again {n}"] for n in range(3)] == [asked[pair.name] for pair in source.pairs[:3]]
    assert page.voting.complete(), "and nothing is left over"


def test_sides_are_exchanged_for_about_half_of_the_pairs_and_alike_each_time(site: Callable[..., Site]) -> None:
    page = site(raters=4, items=40, overlap=4)
    first = [[page.voting._sides(person, place) for place in range(1, 41)] for person in page.raters]
    assert first == [[page.voting._sides(person, place) for place in range(1, 41)] for person in page.raters]
    assert 50 < sum(each == "ab" for row in first for each in row) < 110
    assert len({tuple(row) for row in first}) == 4, "each rater has a draw of their own"


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["ask", "a", "b", SKIP, "undo", "wait"])), max_size=14)
)
def test_whatever_people_do_no_slot_is_shared_and_the_batch_can_be_completed(
    steps: list[tuple[int, str]], site: Callable[..., Site], tmp_path: Path
) -> None:
    page, moment = site(raters=3, items=2, overlap=2), SimpleNamespace(now=1_800_000_000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rater_votes, "time", SimpleNamespace(time=lambda: moment.now))
        people, shown = page.raters, dict[int, str]()
        for n, (who, what) in enumerate(steps):
            if what == "wait":
                moment.now += CLAIM_S + 1
            elif what == "undo":
                page.voting.undo(people[who], f"{n:032d}")
            elif what == "ask":
                pair = page.voting.next_pair(people[who])
                shown |= {who: pair.ticket} if pair is not None else {}
            elif who in shown:
                try:
                    page.voting.take(people[who], shown[who], answer(what))
                except RequestRefused as refused:
                    assert refused.status == 409
            check_slots(page)
        moment.now += CLAIM_S + 1
        drained(page)
        assert page.voting.complete() and len(counted(page)) == 4
        check_slots(page)
