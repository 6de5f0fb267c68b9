"""Guard the data key of a snapshot: it may be wrapped anew, and never be taken away (R-S2, R-X3).

Without it what the attempt read and wrote cannot be told any more.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """create function job_run_guard_rewrap() returns trigger
           language plpgsql as $$
           begin
             if jsonb_typeof(new.source_snapshot->'wrapped_key')
                  is distinct from jsonb_typeof(old.source_snapshot->'wrapped_key')
                or jsonb_typeof(new.source_snapshot->'key_version')
                  is distinct from jsonb_typeof(old.source_snapshot->'key_version')
                or jsonb_typeof(new.sink_snapshot->'wrapped_key')
                  is distinct from jsonb_typeof(old.sink_snapshot->'wrapped_key')
                or jsonb_typeof(new.sink_snapshot->'key_version')
                  is distinct from jsonb_typeof(old.sink_snapshot->'key_version') then
               raise exception 'job_run %: a snapshot''s data key is rewrapped, never removed',
                 old.id using errcode = 'check_violation', constraint = 'job_run_snapshot';
             end if;
             return new;
           end $$"""
    )
    op.execute(
        """create trigger job_run_guard_rewrap before update of source_snapshot, sink_snapshot
           on job_run for each row when (old.job_snapshot is not null)
           execute function job_run_guard_rewrap()"""
    )


def downgrade() -> None:
    op.execute("drop trigger job_run_guard_rewrap on job_run")
    op.execute("drop function job_run_guard_rewrap()")
