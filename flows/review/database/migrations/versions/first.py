"""Create the first tables."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _required(kind: type[sa.types.TypeEngine[Any]], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "batch",
        sa.Column("id", sa.Integer, nullable=False),
        *_required(sa.Text, "name", "kind", "digest", "guidelines", "ratings", "criteria"),
        sa.Column("overlap", sa.Integer, nullable=False),
        *_required(sa.Text, "secret", "admin_hash"),
        sa.Column("address", sa.Text, nullable=False, server_default=""),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("completed", sa.Float),
        sa.Column("handed_on", sa.Float),
        sa.PrimaryKeyConstraint("id", name="pk_batch"),
        sa.UniqueConstraint("name", name="uq_batch_name"),
        sa.UniqueConstraint("admin_hash", name="uq_batch_admin_hash"),
    )
    op.create_table(
        "item",
        *_required(sa.Integer, "id", "batch", "place"),
        *_required(sa.Text, "name", "prompt", "a", "b"),
        sa.Column("repeats", sa.Integer),
        sa.PrimaryKeyConstraint("id", name="pk_item"),
        sa.ForeignKeyConstraint(["batch"], ["batch.id"], name="fk_item_batch"),
        sa.ForeignKeyConstraint(["repeats"], ["item.id"], name="fk_item_repeats"),
        sa.UniqueConstraint("batch", "name", name="uq_item_batch_name"),
        sa.UniqueConstraint("batch", "place", name="uq_item_batch_place"),
    )
    op.create_table(
        "rater",
        *_required(sa.Integer, "id", "batch", "number"),
        *_required(sa.Text, "name", "token_hash"),
        sa.Column("created", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rater"),
        sa.ForeignKeyConstraint(["batch"], ["batch.id"], name="fk_rater_batch"),
        sa.UniqueConstraint("batch", "number", name="uq_rater_batch_number"),
        sa.UniqueConstraint("batch", "name", name="uq_rater_batch_name"),
        sa.UniqueConstraint("token_hash", name="uq_rater_token_hash"),
    )
    op.create_table(
        "vote",
        *_required(sa.Integer, "id", "item", "rater"),
        sa.Column("nonce", sa.Text, nullable=False),
        sa.Column("answer", sa.Text),
        *_required(sa.Text, "shown", "criteria", "flags", "comment"),
        sa.Column("seconds", sa.Float),
        sa.Column("late", sa.Boolean, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_vote"),
        sa.ForeignKeyConstraint(["item"], ["item.id"], name="fk_vote_item"),
        sa.ForeignKeyConstraint(["rater"], ["rater.id"], name="fk_vote_rater"),
        sa.UniqueConstraint("nonce", name="uq_vote_nonce"),
        sa.CheckConstraint("shown IN ('ab', 'ba')", name="shown"),
    )
    op.create_index("ix_vote_rater_item", "vote", ["rater", "item"])
    op.create_table(
        "slot",
        *_required(sa.Integer, "id", "batch", "item", "place", "copy"),
        sa.Column("rater", sa.Integer),
        sa.Column("claimed", sa.Float),
        sa.Column("vote", sa.Integer),
        sa.PrimaryKeyConstraint("id", name="pk_slot"),
        sa.ForeignKeyConstraint(["batch"], ["batch.id"], name="fk_slot_batch"),
        sa.ForeignKeyConstraint(["item"], ["item.id"], name="fk_slot_item"),
        sa.ForeignKeyConstraint(["rater"], ["rater.id"], name="fk_slot_rater"),
        sa.ForeignKeyConstraint(["vote"], ["vote.id"], name="fk_slot_vote"),
        sa.UniqueConstraint("item", "copy", name="uq_slot_item_copy"),
        sa.UniqueConstraint("item", "rater", name="uq_slot_item_rater"),
    )
    op.create_index("ix_slot_batch_place", "slot", ["batch", "place"])
    op.create_index("ix_slot_rater", "slot", ["rater"])


def downgrade() -> None:
    """Drop the tables."""
    for name in ("slot", "vote", "rater", "item", "batch"):
        op.drop_table(name)
