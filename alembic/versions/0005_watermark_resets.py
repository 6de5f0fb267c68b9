"""Keep when a job's watermark was reset, so that a run from before it does not set it again (R-F3).

A job that has none yet shows no reset otherwise, and its first run may be at work.
"""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("alter table job add column watermark_reset_at timestamptz")


def downgrade() -> None:
    op.execute("alter table job drop column watermark_reset_at")
