"""Mark the first tables. `open_database` creates a new database's tables, by `tables`."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing: every database has these tables."""
