"""Alembic's entry: migrates the connection that ``db.migrations`` hands over."""

from alembic import context
from db.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("Run migrations with `celery -A tasks db upgrade`.")

context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
