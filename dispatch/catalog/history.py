"""The finished runs of what is removed: they are kept, and let go of it in batches (R-S3).

The foreign keys would do the same in one statement, which for a long history takes longer than
any statement may. All batches are of the removal's own transaction, which happens as a whole or
not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from db import statements
from db.models import Job, JobRun
from dispatch.lifecycle import JobRunStatus

BATCH = 5_000
"""How many runs one statement changes: about half a second's work."""

_SQL = statements.load("catalog")


def active_runs(
    session: Session, job_ids: Collection[UUID], *, lock: bool = False
) -> Sequence[Any]:
    """The runs of these jobs that have not ended, by their ids.

    With ``lock`` one that is about to end is waited for. Lock runs before their jobs.
    """
    # In the words of the two indexes on what waits and on what is held.
    query = (
        select(JobRun.id, JobRun.job_name, JobRun.status, JobRun.created_at)
        .where(
            or_(
                and_(JobRun.job_id.in_(job_ids), JobRun.status == str(JobRunStatus.PENDING)),
                and_(
                    JobRun.job_id.in_(job_ids),
                    JobRun.started_at.is_not(None),
                    JobRun.finished_at.is_(None),
                ),
            )
        )
        .order_by(JobRun.id)
    )
    return session.execute(query.with_for_update() if lock else query).all()


def let_go_of_job(session: Session, job: Job) -> None:
    """Take its finished runs from a job that is not locked yet, as runs are locked first."""
    asked = {"name": job.name, "job_id": str(job.id), "reached": "infinity", "batch": BATCH}
    runs = BATCH
    while runs == BATCH:
        found = statements.row(session, _SQL["let_go_of_job"], asked)
        assert found is not None
        runs, asked["reached"] = found["runs"], found["reached"]


def let_go_of_schedule(session: Session, schedule_id: UUID) -> None:
    """Take its finished runs from a schedule."""
    asked = {"schedule_id": str(schedule_id), "batch": BATCH}
    runs = BATCH
    while runs == BATCH:
        found = statements.row(session, _SQL["let_go_of_schedule"], asked)
        assert found is not None
        runs = found["runs"]
