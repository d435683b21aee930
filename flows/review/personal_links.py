"""Enter batches and raters in the database, and make their personal links. Only the sha256 of a link is stored."""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Engine, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from components.base.errors import UserError
from flows.review.database.connect import writing
from flows.review.database.tables import batch, item, rater, slot
from flows.review.review_batches import BatchSource, JudgedPair

MOST_RATERS = 999
_NAME = 100
_NOT_STORED = re.compile("[\0\ud800-\udfff]")


class PersonalLink(NamedTuple):
    """A link that was just made. Its token is not stored anywhere."""

    name: str
    number: int
    """The number in `rater_1.csv`; 0 is the administrator."""
    token: str

    def url(self, address: str) -> str:
        """Return the link's URL for a page at `address`."""
        return f"{address.rstrip('/')}/r/{self.token}"


def token_hash(token: str) -> str:
    """Return what is stored of a token: its sha256. Tokens are 256 random bits, so they need no salt."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def enter_batch(
    engine: Engine, source: BatchSource, check_overlap: bool = False, create: bool = True
) -> tuple[int, PersonalLink | None]:
    """Return the batch's number in the database, and the administrator's link if the batch is new there.

    Args:
        check_overlap: whether the user asked for `source.overlap`; if not, the database's overlap is kept.
        create: whether a batch that the database does not have is made there.

    Raises:
        UserError: the database has a batch of that name with different pairs or, if `check_overlap`, a different
            overlap; or it has no such batch, and `create` is not set.
    """
    with engine.connect() as connection:
        row = connection.execute(select(batch).where(batch.c.name == source.name)).one_or_none()
    if row is None:
        if not create:
            raise UserError(f"{source.name}: no page has been served from this database. `tether people page` does.")
        try:
            return _make_batch(engine, source)
        except IntegrityError:  # another process was first
            return enter_batch(engine, source, check_overlap)
    if row.digest != source.digest:
        raise UserError(
            f"{source.name}: its pairs changed after the page was first served, so the answers would not match. "
            "Restore the pairs, or serve them under another name (copy the folder)."
        )
    if check_overlap and row.overlap != source.overlap:
        raise UserError(
            f"{source.name}: the page asks for {row.overlap} answers per item, but --overlap is "
            f"{source.overlap}. Leave --overlap out, or give {row.overlap}."
        )
    return row.id, None


def _make_batch(engine: Engine, source: BatchSource) -> tuple[int, PersonalLink]:
    link = PersonalLink("administrator", 0, secrets.token_urlsafe(32))
    with writing(engine) as connection:
        number = connection.scalar(
            insert(batch)
            .values(
                name=source.name, kind=source.kind, digest=source.digest, **storable(guidelines=source.guidelines),
                ratings=json.dumps(source.ratings), criteria=json.dumps(source.criteria), overlap=source.overlap,
                secret=secrets.token_hex(32), admin_hash=token_hash(link.token), created=time.time(),
            )
            .returning(batch.c.id)
        )  # fmt: skip
        connection.execute(
            insert(item),
            [
                {"batch": number, "place": place, "name": name, **storable(prompt=prompt, a=a, b=b)}
                for place, (name, prompt, a, b) in enumerate(source.pairs, 1)
            ],
        )
        places = connection.execute(select(item.c.id, item.c.place).where(item.c.batch == number)).all()
        numbers = {place: i for i, place in places}
        for place, earlier in repeated_places(source.pairs).items():
            connection.execute(update(item).where(item.c.id == numbers[place]).values(repeats=numbers[earlier]))
        copies = range(1, source.overlap + 1)
        connection.execute(
            insert(slot),
            [{"batch": number, "item": i, "place": place, "copy": copy} for i, place in places for copy in copies],
        )
    assert number is not None
    return number, link


def storable(**texts: str) -> dict[str, str]:
    """Return texts in a form that every database accepts: NUL (refused by PostgreSQL) and lone surrogates are replaced
    by what the page shows for them."""
    return {name: _NOT_STORED.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text) for name, text in texts.items()}


def repeated_places(pairs: Sequence[JudgedPair]) -> dict[int, int]:
    """Return the places (from 1) of pairs that repeat an earlier pair with swapped sides, each with the earlier pair's
    place."""
    seen: dict[tuple[str, str, str], int] = {}
    earlier_places: dict[int, int] = {}
    for place, (_, prompt, a, b) in enumerate(pairs, 1):
        if (earlier := seen.get((prompt, b, a))) is not None and a != b:
            earlier_places[place] = earlier
        seen.setdefault((prompt, a, b), place)
    return earlier_places


def raters_of(engine: Engine, number: int) -> list[tuple[int, str]]:
    """Return number and name of each person who may judge a batch."""
    with engine.connect() as connection:
        query = select(rater.c.number, rater.c.name).where(rater.c.batch == number).order_by(rater.c.number)
        return [(row.number, row.name) for row in connection.execute(query)]


def add_raters(engine: Engine, number: int, names: Sequence[str]) -> list[PersonalLink]:
    """Let more people judge a batch, and return a link for each.

    Raises:
        UserError: a name is empty, too long, or already used.
    """
    with writing(engine) as connection:
        last = connection.scalar(select(func.max(rater.c.number)).where(rater.c.batch == number)) or 0
        taken = set(connection.scalars(select(rater.c.name).where(rater.c.batch == number)))
        links = []
        for n, name in enumerate((" ".join(name.split()) for name in names), last + 1):
            if not name or len(name) > _NAME or not name.isprintable():
                raise UserError(f"{name[:40]!r} is not a valid name. Use 1 to {_NAME} printable characters.")
            if name in taken:
                raise UserError(f"{name} is already a rater. Use another name, or --renew {name!r} for a new link.")
            if n > MOST_RATERS:
                raise UserError(f"a batch has at most {MOST_RATERS} raters.")
            taken.add(name)
            links.append(PersonalLink(name, n, secrets.token_urlsafe(32)))
        if links:
            connection.execute(
                insert(rater),
                [
                    {"batch": number, "number": link.number, "name": link.name, "token_hash": token_hash(link.token),
                     "created": time.time()}
                    for link in links
                ],
            )  # fmt: skip
    return links


def renew_link(engine: Engine, number: int, name: str) -> PersonalLink:
    """Return a new link for a rater or the `administrator`. The old link stops working.

    Raises:
        UserError: there is no such rater.
    """
    token = secrets.token_urlsafe(32)
    with writing(engine) as connection:
        if name == "administrator":
            connection.execute(update(batch).where(batch.c.id == number).values(admin_hash=token_hash(token)))
            return PersonalLink(name, 0, token)
        rater_number = connection.scalar(
            update(rater)
            .where(rater.c.batch == number, rater.c.name == name)
            .values(token_hash=token_hash(token))
            .returning(rater.c.number)
        )
    if rater_number is None:
        raise UserError(f"{name} is not a rater of this batch. Add them with --add.")
    return PersonalLink(name, rater_number, token)
