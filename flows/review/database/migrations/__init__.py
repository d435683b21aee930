"""Alembic's environment; `connect.open_database` runs it."""
