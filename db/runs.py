"""Reading runs: by id or alias, by lineage, the newest first. Never a token nor an envelope (R-C6).

Writing them is not here: each change of a run's state is one statement of its own in ``db/sql``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Executable, Select, func, select, union_all
from sqlalchemy.orm import Session, aliased

from db import statements
from db.models import JobRun, RunAlias, RunLog

Run = Mapping[str, Any]
"""The columns of one attempt, apart from its lease token, envelopes and chain."""

_HIDDEN = frozenset({"lease_token", "source_snapshot", "sink_snapshot", "job_snapshot", "chain"})
_LAST_ATTEMPT = statements.load("lineage")["last_attempt"]
_COLUMNS = tuple(column for column in JobRun.__table__.columns if column.name not in _HIDDEN)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which runs to list; what is not given does not count."""

    job: str | None = None
    statuses: Collection[str] = ()
    queue: str | None = None
    since: datetime | None = None
    latest_only: bool = False
    """Only the last attempt of each lineage."""


class JobRunRepository:
    """Reads runs on the connection that it is given, in that connection's transaction."""

    def __init__(self, connection: Connection | Session) -> None:
        self.connection = connection

    def get(self, run_id: UUID) -> Run | None:
        """The attempt with this id, or the one that an alias of this id stands for (R-T7)."""
        found = self._one(select(*_COLUMNS).where(JobRun.id == run_id))
        if found is None:
            stands_for = select(RunAlias.run_id).where(RunAlias.id == run_id).scalar_subquery()
            found = self._one(select(*_COLUMNS).where(JobRun.id == stands_for))
        return found

    def starting_with(self, digits: str, limit: int) -> list[UUID]:
        """The ids, also aliases, that begin with these hexadecimal digits, in their order."""
        lowest, highest = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
        ids = union_all(
            select(JobRun.id).where(JobRun.id.between(lowest, highest)),
            select(RunAlias.id).where(RunAlias.id.between(lowest, highest)),
        )
        query = select(ids.subquery().c.id).order_by("id").limit(limit)
        return [row["id"] for row in self._all(query)]

    def lineage(self, root_run_id: UUID) -> list[Run]:
        """All attempts of a lineage, each before the one that replaced it."""
        found = self._all(select(*_COLUMNS).where(JobRun.root_run_id == root_run_id))
        after = {run["previous_run_id"]: run for run in found}
        ids = {run["id"] for run in found}
        ordered = []
        for first in (run for run in found if run["previous_run_id"] not in ids):
            following: Run | None = first
            while following is not None:
                ordered.append(following)
                following = after.get(following["id"])
        return ordered

    def last(self, root_run_id: UUID) -> Run | None:
        """The last attempt of a lineage: the one that nothing replaced."""
        found = statements.row(self.connection, _LAST_ATTEMPT, {"run_id": str(root_run_id)})
        return None if found is None else self.get(found["id"])

    def newest(self, wanted: Filter | None = None, limit: int = 50) -> list[Run]:
        """The runs that match, the newest first."""
        query = select(*_COLUMNS).order_by(JobRun.created_at.desc(), JobRun.id).limit(limit)
        return self._all(_filtered(query, wanted or Filter()))

    def children(self, run_ids: Collection[UUID]) -> list[Run]:
        """The last attempt of each run that these attempts enqueued, by job."""
        query = (
            select(*_COLUMNS)
            .where(JobRun.parent_run_id.in_(run_ids))
            .order_by(JobRun.job_name, JobRun.id)
        )
        return self._all(_filtered(query, Filter(latest_only=True)))

    def claimed_inputs(self, run_id: UUID) -> Mapping[str, Any] | None:
        """What an attempt was claimed with: the job's snapshot, each side's key version."""
        return self._one(
            select(
                JobRun.job_snapshot,
                JobRun.source_snapshot["key_version"].astext.label("source_key_version"),
                JobRun.sink_snapshot["key_version"].astext.label("sink_key_version"),
            ).where(JobRun.id == run_id, JobRun.job_snapshot.is_not(None))
        )

    def log(self, run_id: UUID) -> Mapping[str, Any] | None:
        """An attempt's log: ``head``, ``tail``, ``dropped_bytes``, ``updated_at``."""
        return self._one(
            select(RunLog.head, RunLog.tail, RunLog.dropped_bytes, RunLog.updated_at).where(
                RunLog.run_id == run_id
            )
        )

    def counts(self, job_id: UUID) -> dict[str, int]:
        """How many runs of a job wait, run or are being cancelled, by state."""
        query = (
            select(JobRun.status, func.count().label("count"))
            .where(
                JobRun.job_id == job_id,
                JobRun.status.in_(["PENDING", "RUNNING", "CANCEL_REQUESTED"]),
            )
            .group_by(JobRun.status)
        )
        return {row["status"]: row["count"] for row in self._all(query)}

    def _one(self, query: Executable) -> Mapping[str, Any] | None:
        return next(iter(self._all(query)), None)

    def _all(self, query: Executable) -> list[Mapping[str, Any]]:
        return [dict(row) for row in self.connection.execute(query).mappings()]


def _filtered(query: Select[Any], wanted: Filter) -> Select[Any]:
    tests: Sequence[tuple[Any, Any]] = (
        (wanted.job, JobRun.job_name == wanted.job),
        (wanted.queue, JobRun.queue == wanted.queue),
        (wanted.since, JobRun.created_at >= wanted.since if wanted.since else None),
    )
    for value, test in tests:
        if value is not None:
            query = query.where(test)
    if wanted.statuses:
        query = query.where(JobRun.status.in_(list(wanted.statuses)))
    if wanted.latest_only:
        later = aliased(JobRun)
        query = query.where(~select(later.id).where(later.previous_run_id == JobRun.id).exists())
    return query
