"""The tables. They hold no key, author or token: somebody who reads them stays blind and can't vote.

Times are seconds since 1970, UTC.
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

VERSION = "0001"
"""Version of these tables. A change of them raises it, and `connect` then changes older databases."""
review_version = Table("review_version", metadata, Column("version_num", Text, nullable=False))

batch = Table(
    "batch",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),  # a run's id, or the name of a folder or file with its digest
    Column("kind", Text, nullable=False),  # sample, candidates or review
    Column("digest", Text, nullable=False),  # sha256 of what is judged
    Column("guidelines", Text, nullable=False),
    Column("ratings", Text, nullable=False),  # JSON: the possible answers, except `skip`
    Column("criteria", Text, nullable=False),  # JSON: the further questions on each pair
    Column("overlap", Integer, nullable=False),  # answers per item, each from a different person
    Column("secret", Text, nullable=False),  # 256 random bits in hex: swaps sides, and signs forms
    Column("admin_hash", Text, nullable=False, unique=True),  # sha256 of the administrator's token
    Column("address", Text, nullable=False, server_default=""),  # of the page that was last served
    Column("created", Float, nullable=False),
    Column("completed", Float),  # when the last slot was answered
    Column("handed_on", Float),  # when `on_complete` returned
)

item = Table(
    "item",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("batch", ForeignKey("batch.id"), nullable=False),
    Column("place", Integer, nullable=False),  # in the sheet, from 1
    Column("name", Text, nullable=False),
    Column("prompt", Text, nullable=False),
    Column("a", Text, nullable=False),
    Column("b", Text, nullable=False),
    Column("repeats", ForeignKey("item.id")),  # an earlier item with the same texts and swapped sides
    UniqueConstraint("batch", "name"),
    UniqueConstraint("batch", "place"),
)

rater = Table(
    "rater",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("batch", ForeignKey("batch.id"), nullable=False),
    Column("number", Integer, nullable=False),  # as in `rater_1.csv`
    Column("name", Text, nullable=False),
    Column("token_hash", Text, nullable=False, unique=True),  # sha256 of the link's token
    Column("created", Float, nullable=False),
    UniqueConstraint("batch", "number"),
    UniqueConstraint("batch", "name"),
)

slot = Table(
    "slot",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("batch", ForeignKey("batch.id"), nullable=False),
    Column("item", ForeignKey("item.id"), nullable=False),
    Column("place", Integer, nullable=False),  # the item's place
    Column("copy", Integer, nullable=False),  # 1 to the batch's overlap
    Column("rater", ForeignKey("rater.id")),  # who has claimed or answered it; empty if open
    Column("claimed", Float),
    Column("vote", ForeignKey("vote.id")),  # the answer that counts
    UniqueConstraint("item", "copy"),
    UniqueConstraint("item", "rater"),
    Index(None, "batch", "place"),
    Index(None, "rater"),
)

vote = Table(
    "vote",
    metadata,
    # Rows are only added: undoing adds a vote without an answer.
    Column("id", Integer, primary_key=True),
    Column("item", ForeignKey("item.id"), nullable=False),
    Column("rater", ForeignKey("rater.id"), nullable=False),
    Column("nonce", Text, nullable=False, unique=True),
    Column("answer", Text),  # for the sides as shown, or `skip`; empty undoes the rater's earlier answer
    Column("shown", Text, nullable=False),  # ab, or ba if the sides were swapped
    Column("criteria", Text, nullable=False),  # JSON: a, b or tie by criterion, for the sides as shown
    Column("flags", Text, nullable=False),  # JSON
    Column("comment", Text, nullable=False),
    Column("seconds", Float),
    Column("late", Boolean, nullable=False),  # true if the slot had gone to somebody else: the vote does not count
    Column("at", Float, nullable=False),
    CheckConstraint("shown IN ('ab', 'ba')", name="shown"),
    Index(None, "rater", "item"),
)
