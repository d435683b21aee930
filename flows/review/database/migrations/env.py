"""Run the migrations on the connection that `open_database` gives."""

from alembic import context

from flows.review.database.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True,
    version_table="review_version",
)  # fmt: skip
with context.begin_transaction():
    context.run_migrations()
