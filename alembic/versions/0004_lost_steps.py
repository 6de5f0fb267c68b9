"""Call a step that its chain lost what it is: lost. Nobody was refused anything (R-X4).

The chain was accepted, and this is the one record of how that step of it ended.
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """update audit_event set outcome = 'lost'
           where action = 'run.trigger' and outcome = 'refused'"""
    )


def downgrade() -> None:
    op.execute(
        """update audit_event set outcome = 'refused'
           where action = 'run.trigger' and outcome = 'lost'"""
    )
