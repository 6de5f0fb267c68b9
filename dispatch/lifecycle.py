"""The states of a run and the transitions between them (R-S1, R-S2).

The database enforces the same table with its guard trigger; a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum


class JobRunStatus(StrEnum):
    """The seven states of one attempt."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    CANCEL_REQUESTED = "CANCEL_REQUESTED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    RETRY_SCHEDULED = "RETRY_SCHEDULED"

    @property
    def is_active(self) -> bool:
        """Whether it counts for overlap: waiting (also in backoff) or held (R-T6)."""
        return self in ACTIVE

    @property
    def is_finished(self) -> bool:
        """Whether this attempt has ended; a manual retry may still replace a FAILED one."""
        return self not in ACTIVE


ACTIVE = frozenset({JobRunStatus.PENDING, JobRunStatus.RUNNING, JobRunStatus.CANCEL_REQUESTED})

TRANSITIONS: frozenset[tuple[JobRunStatus, JobRunStatus]] = frozenset(
    {
        (JobRunStatus.PENDING, JobRunStatus.RUNNING),
        (JobRunStatus.PENDING, JobRunStatus.CANCELLED),
        (JobRunStatus.RUNNING, JobRunStatus.SUCCEEDED),
        (JobRunStatus.RUNNING, JobRunStatus.FAILED),
        (JobRunStatus.RUNNING, JobRunStatus.CANCEL_REQUESTED),
        (JobRunStatus.RUNNING, JobRunStatus.RETRY_SCHEDULED),
        (JobRunStatus.CANCEL_REQUESTED, JobRunStatus.CANCELLED),
        (JobRunStatus.FAILED, JobRunStatus.RETRY_SCHEDULED),
    }
)
