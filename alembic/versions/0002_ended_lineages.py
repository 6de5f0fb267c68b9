"""Index the attempts that ended their lineage, by which retention takes it as a whole (R-S3).

In the place of an index on all that finished: the attempts of a lineage that lives on, which may be
very many and the oldest of all, are not looked at any more.
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """create index job_run_ended on job_run (finished_at)
           where finished_at is not null and status <> 'RETRY_SCHEDULED'"""
    )
    op.execute("drop index job_run_finished")


def downgrade() -> None:
    op.execute(
        "create index job_run_finished on job_run (finished_at) where finished_at is not null"
    )
    op.execute("drop index job_run_ended")
