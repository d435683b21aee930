"""Decide which rater is asked which pair, and record the answers. Every answer is kept; one per slot counts.

Searching for a slot only reads. Slots are claimed and answered one after the other. The tables' constraints also
prevent two people from having one slot, and one person from having two slots of an item.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, and_, exists, func, insert, or_, select, update

from components.human_eval.sheet import FLAGS, OF_CRITERIA
from flows.review.database.connect import writing
from flows.review.database.tables import batch, item, rater, slot, vote
from flows.review.personal_links import token_hash

CLAIM_S = 30 * 60
"""Seconds after which a slot without an answer may be given to somebody else."""
SKIP = "skip"
"""The answer of a rater who can't judge a pair."""
_RENEW_S = 5 * 60
_OTHER = {"a": "b", "b": "a"}
_FOREIGN = "This form is not one of this page's. Load the page again."
_ALREADY = "You have answered this pair already. To change your answer, use Undo."


class RequestRefused(Exception):
    """A refused request: `status` is the HTTP status, `told` the text for the rater."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.told = status, text


class ReviewRater(NamedTuple):
    """The holder of a personal link."""

    id: int
    number: int
    name: str


class ReviewBatch(NamedTuple):
    """The properties of a batch that the page needs for every request."""

    id: int
    name: str
    kind: str
    guidelines: str
    ratings: list[str]
    criteria: list[dict[str, str]]
    overlap: int
    secret: bytes


class AskedPair(NamedTuple):
    """A pair as it is shown to one rater."""

    place: int
    prompt: str
    first: str
    second: str
    ticket: str
    """Signed proof of which pair this rater was shown and when. Its random part makes the answer count only once."""


class GivenAnswer(NamedTuple):
    """An answer as a rater sent it."""

    answer: str
    criteria: Mapping[str, str]
    flags: Sequence[str]
    comment: str
    seconds: float | None


@dataclass(frozen=True)
class Voting:
    """The questions and answers of one batch."""

    engine: Engine
    batch: ReviewBatch

    @classmethod
    def open(cls, engine: Engine, number: int) -> "Voting":
        """Return the batch `number`."""
        with engine.connect() as connection:
            row = connection.execute(select(batch).where(batch.c.id == number)).one()
        about = ReviewBatch(
            row.id, row.name, row.kind, row.guidelines, json.loads(row.ratings), json.loads(row.criteria), row.overlap,
            bytes.fromhex(row.secret),
        )  # fmt: skip
        return cls(engine, about)

    def person(self, token: str) -> ReviewRater | None:
        """Return the holder of the link with this token, or None. The administrator's number is 0."""
        digest = token_hash(token)
        with self.engine.connect() as connection:
            row = connection.execute(
                select(rater).where(rater.c.batch == self.batch.id, rater.c.token_hash == digest)
            ).one_or_none()
            admin = connection.scalar(select(batch.c.admin_hash).where(batch.c.id == self.batch.id)) or ""
        if row is not None and hmac.compare_digest(row.token_hash, digest):
            return ReviewRater(row.id, row.number, row.name)
        return ReviewRater(0, 0, "administrator") if hmac.compare_digest(admin, digest) else None

    def next_pair(self, person: ReviewRater) -> AskedPair | None:
        """Return the pair that the rater has claimed, or claim the next open one for them; None if there is none for
        them."""
        now = time.time()
        with self.engine.connect() as connection:  # only reads: a rater who reloads the page waits for nobody
            claim = connection.execute(_own_claim(person)).first()
            if claim is not None and claim.claimed > now - _RENEW_S:
                return self._asked(person, claim)
            if claim is None and self._first_open(connection, person, now) is None:
                return None
        with self._alone() as connection:
            row = connection.execute(_own_claim(person)).first() or self._first_open(connection, person, now)
            if row is None:
                return None
            connection.execute(update(slot).where(slot.c.id == row.slot).values(rater=person.id, claimed=now))
            return self._asked(person, row)

    def take(self, person: ReviewRater, ticket: str, answer: GivenAnswer) -> bool:
        """Record an answer and return whether it counts; a late one does not. A repeated ticket changes nothing.

        Raises:
            RequestRefused: the ticket was not given to this rater, or the answer is invalid.
        """
        place, issued, nonce = self._opened(person, ticket)
        self._check(answer)
        now = time.time()
        took = max(0.0, now - issued)
        values = {
            "rater": person.id, "nonce": nonce, "answer": answer.answer,
            "shown": self._sides(person, place), "criteria": json.dumps(answer.criteria),
            "flags": json.dumps(list(answer.flags)), "comment": answer.comment,
            "seconds": took if answer.seconds is None else min(took, answer.seconds), "at": now,
        }  # fmt: skip
        with self._alone() as connection:
            if earlier := self._earlier(connection, nonce):
                return not earlier.late
            item_id = connection.scalars(
                select(item.c.id).where(item.c.batch == self.batch.id, item.c.place == place)
            ).one()
            free = self._slot_for(connection, person, item_id, now)
            number = connection.scalar(
                insert(vote).values(item=item_id, late=free is None, **values).returning(vote.c.id)
            )
            if free is not None:
                passed_on = answer.answer == SKIP and self._others(connection, person, item_id)
                filled: dict[str, Any] = {"rater": person.id, "vote": number}
                empty: dict[str, Any] = {"rater": None, "claimed": None, "vote": None}
                connection.execute(update(slot).where(slot.c.id == free).values(**(empty if passed_on else filled)))
        return free is not None

    def undo(self, person: ReviewRater, nonce: str) -> bool:
        """Take the rater's last answer back and ask for it again. Returns False if there is none, or if it is done
        already.

        Raises:
            RequestRefused: the batch is complete, and its answers have been passed on.
        """
        if not 16 <= len(nonce) <= 64:
            raise RequestRefused(400, _FOREIGN)
        now = time.time()
        with self._alone() as connection:
            if connection.scalar(select(batch.c.completed).where(batch.c.id == self.batch.id)) is not None:
                raise RequestRefused(409, "The batch is complete, so answers can no longer be taken back.")
            if self._earlier(connection, f"undo {nonce}"):
                return False
            last = connection.execute(_standing(person).order_by(vote.c.id.desc()).limit(1)).first()
            if last is None:
                return False
            connection.execute(
                insert(vote).values(
                    item=last.item, rater=person.id, nonce=f"undo {nonce}", answer=None, shown=last.shown,
                    criteria="{}", flags="[]", comment="", seconds=None, late=False, at=now,
                )
            )  # fmt: skip
            connection.execute(update(slot).where(slot.c.vote == last.id).values(vote=None, claimed=now))
            free = self._slot_for(connection, person, last.item, now)
            if free is not None:  # otherwise it was late, or somebody else has the slot now
                connection.execute(update(slot).where(slot.c.id == free).values(rater=person.id, claimed=now))
        return True

    def complete(self) -> bool:
        """Return True once all slots are answered, but only to the first caller."""
        left = exists().where(slot.c.batch == self.batch.id, slot.c.vote.is_(None))
        with self.engine.connect() as connection:
            if connection.scalar(select(left)):
                return False
        with self._alone() as connection:
            marked = update(batch).where(batch.c.id == self.batch.id, batch.c.completed.is_(None), ~left)
            return connection.execute(marked.values(completed=time.time())).rowcount == 1

    def hand_on(self) -> bool:
        """Return whether the batch is complete but was not handed on, because a server died in between."""
        with self.engine.connect() as connection:
            row = connection.execute(
                select(batch.c.completed, batch.c.handed_on).where(batch.c.id == self.batch.id)
            ).one()
        return row.completed is not None and row.handed_on is None

    def handed_on(self) -> None:
        """Record that `on_complete` has returned."""
        with writing(self.engine) as connection:
            connection.execute(update(batch).where(batch.c.id == self.batch.id).values(handed_on=time.time()))

    def mark(self, person: ReviewRater) -> str:
        """Return an id under which a browser keeps the rater's unsent answer. It gives no access."""
        return self._mac(f"mark {person.id} {person.number}")[:16]

    def answered_by(self, person: ReviewRater) -> int:
        """Return the number of pairs that the rater has judged or skipped."""
        with self.engine.connect() as connection:
            counted = select(func.count()).select_from(_standing(person).subquery())
            return connection.scalar(counted) or 0

    @contextmanager
    def _alone(self) -> Iterator[Connection]:
        """Run a transaction during which nobody else claims or answers a slot of this batch."""
        with writing(self.engine) as connection:  # has SQLite's only write lock; PostgreSQL locks the batch's row
            connection.execute(select(batch.c.id).where(batch.c.id == self.batch.id).with_for_update())
            yield connection

    def _first_open(self, connection: Connection, person: ReviewRater, now: float) -> Row[Any] | None:
        """Return the rater's next slot. A repeat of an item that they did not judge comes last, because repeats measure
        whether raters agree with themselves."""
        query = self._open(person, now)
        saw_first = exists().where(vote.c.item == item.c.repeats, vote.c.rater == person.id)
        first = connection.execute(query.where(or_(item.c.repeats.is_(None), saw_first))).first()
        return first if first is not None else connection.execute(query).first()

    def _open(self, person: ReviewRater, now: float) -> Select[Any]:
        """Select slots of items that the rater has not been asked about, if open or claimed too long ago, in the
        sheet's order."""
        theirs = slot.alias("theirs")
        return (
            _shown()
            .where(
                slot.c.batch == self.batch.id,
                slot.c.vote.is_(None),
                _free(now),
                ~exists().where(theirs.c.item == slot.c.item, theirs.c.rater == person.id),
                ~exists(_standing(person, slot.c.item)),
            )
            .order_by(slot.c.place, slot.c.copy)
            .limit(1)
        )

    def _slot_for(self, connection: Connection, person: ReviewRater, item_id: int, now: float) -> int | None:
        """Return the slot for the rater's answer: their own, or otherwise a free one of the item; None if there is
        none.

        Raises:
            RequestRefused: they have already answered the item.
        """
        query = select(slot.c.id, slot.c.vote).where(slot.c.item == item_id, slot.c.rater == person.id)
        if (row := connection.execute(query).first()) is not None:
            if row.vote is not None:
                raise RequestRefused(409, _ALREADY)
            return int(row.id)
        if connection.scalar(select(exists(_standing(person, item_id)))):
            raise RequestRefused(409, _ALREADY)
        free = select(slot.c.id).where(slot.c.item == item_id, slot.c.vote.is_(None), _free(now)).order_by(slot.c.copy)
        return connection.scalar(free.limit(1))

    def _others(self, connection: Connection, person: ReviewRater, item_id: int) -> bool:
        """Return whether somebody else can judge an item that the rater skips: more people were not asked about it than
        it has open slots."""
        others = select(func.count()).where(
            rater.c.batch == self.batch.id,
            rater.c.id != person.id,
            ~exists().where(slot.c.item == item_id, slot.c.rater == rater.c.id),
            ~exists().where(vote.c.item == item_id, vote.c.rater == rater.c.id, vote.c.answer.is_not(None)),
        )
        nobodys = select(func.count()).where(slot.c.item == item_id, slot.c.rater.is_(None))
        return (connection.scalar(others) or 0) > (connection.scalar(nobodys) or 0)

    def _earlier(self, connection: Connection, nonce: str) -> Row[Any] | None:
        return connection.execute(select(vote).where(vote.c.nonce == nonce)).one_or_none()

    def _check(self, answer: GivenAnswer) -> None:
        names = {criterion["name"] for criterion in self.batch.criteria}
        if answer.answer not in (*self.batch.ratings, SKIP):
            raise RequestRefused(400, "This is not one of the answers. Load the page again.")
        answers = set(answer.criteria.values()) <= {*OF_CRITERIA}
        if not set(answer.flags) <= FLAGS.keys() or not set(answer.criteria) <= names or not answers:
            raise RequestRefused(400, _FOREIGN)

    def _asked(self, person: ReviewRater, row: Row[Any]) -> AskedPair:
        sides = (row.a, row.b) if self._sides(person, row.place) == "ab" else (row.b, row.a)
        signed = f"{row.place}.{time.time():.2f}.{secrets.token_hex(16)}"
        return AskedPair(row.place, row.prompt, *sides, f"{signed}~{self._mac(f'ticket {person.id} {signed}')}")

    def _opened(self, person: ReviewRater, ticket: str) -> tuple[int, float, str]:
        """Return the item's place, the time and the random part of a ticket that was given to this rater.

        Raises:
            RequestRefused: the ticket was not given to them.
        """
        signed, _, mac = ticket.partition("~")
        expected = self._mac(f"ticket {person.id} {signed}")
        if not hmac.compare_digest(expected.encode(), mac.encode("utf-8", "replace")):
            raise RequestRefused(403, "This form was not made for you. Load the page again.")
        place, seconds, part, nonce = signed.split(".")
        return int(place), float(f"{seconds}.{part}"), nonce

    def _sides(self, person: ReviewRater, place: int) -> str:
        """Return the order in which a rater sees an item's sides, `ab` or `ba`: a random bit derived from the batch's
        secret."""
        return "ab" if int(self._mac(f"sides {person.id} {place}")[0], 16) % 2 else "ba"

    def _mac(self, text: str) -> str:
        return hmac.new(self.batch.secret, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def unexchanged(answer: str, sides: str) -> str:
    """Return an answer for the sides as in the sheet."""
    return _OTHER.get(answer, answer) if sides == "ba" else answer


def _shown() -> Select[Any]:
    return select(
        slot.c.id.label("slot"), slot.c.claimed, slot.c.place, item.c.prompt, item.c.a, item.c.b
    ).join_from(slot, item, item.c.id == slot.c.item)  # fmt: skip


def _own_claim(person: ReviewRater) -> Select[Any]:
    mine = and_(slot.c.rater == person.id, slot.c.vote.is_(None))
    return _shown().where(mine).order_by(slot.c.claimed.desc(), slot.c.id).limit(1)


def _free(now: float) -> ColumnElement[bool]:
    return or_(slot.c.rater.is_(None), slot.c.claimed < now - CLAIM_S)


def _standing(person: ReviewRater, item_id: Any = None) -> Select[Any]:
    """Select the rater's votes that are not taken back: the last one per item, unless it is an undo."""
    later = vote.alias("later")
    query = select(vote).where(
        vote.c.rater == person.id,
        vote.c.answer.is_not(None),
        ~exists().where(later.c.rater == person.id, later.c.item == vote.c.item, later.c.id > vote.c.id),
    )
    return query if item_id is None else query.where(vote.c.item == item_id)
