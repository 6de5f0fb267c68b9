"""One change of jobs and datasources at a time, and the locks it takes.

Edits are rare and wait for each other on one advisory lock; claims never take it. Rows are locked
in one order everywhere: schedules, runs, jobs, datasources, each by ascending id, as a claim and
a fire do, so that no edit deadlocks with them. The lock is the one that a claim's share lock
conflicts with and an insert's foreign key does not (R-C4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db import session as sessions
from db.failures import sqlstate
from db.models import NIL_DATASOURCE, ConcurrencyKey, Datasource, Job, JobSchedule
from dispatch.definitions import Existing
from dispatch.errors import CatalogBusy, UnknownDatasource, UnknownJob, UnknownSchedule
from dispatch.names import unknown

CATALOG_LOCK = 0x63617461
LOCK_SECONDS = 10.0

_Row = TypeVar("_Row", Datasource, Job, JobSchedule)


@contextmanager
def editing(*, lock_seconds: float = LOCK_SECONDS) -> Iterator[Session]:
    """A transaction that may change the catalog; committed where the block ends well.

    Raises CatalogBusy where another change, or a transaction that holds what this one needs,
    was waited for for ``lock_seconds``.
    """
    try:
        with (
            sessions.transaction(lock_seconds=lock_seconds) as connection,
            Session(bind=connection, expire_on_commit=False) as session,
        ):
            session.execute(select(func.pg_advisory_xact_lock(CATALOG_LOCK)))
            yield session
            session.flush()
    except DBAPIError as error:
        if sqlstate(error) in {"55P03", "40P01"}:
            raise CatalogBusy(
                "another change of jobs or datasources, or an open transaction that holds them, "
                f"did not end within {lock_seconds:g} s; nothing was changed. Try again"
            ) from None
        raise


@contextmanager
def reading() -> Iterator[Session]:
    """A transaction that reads the catalog as it is committed at its start."""
    with sessions.transaction(reading=True) as connection, Session(bind=connection) as session:
        yield session


# Looking up


def all_datasources(session: Session) -> list[Datasource]:
    """All datasources by name; the row that stands for none is not among them."""
    return list(
        session.scalars(
            select(Datasource).where(Datasource.id != NIL_DATASOURCE).order_by(Datasource.name)
        )
    )


def datasource_names(session: Session) -> dict[UUID, str]:
    """The name of each datasource by its id."""
    query = select(Datasource.id, Datasource.name).where(Datasource.id != NIL_DATASOURCE)
    return {found.id: found.name for found in session.execute(query)}


def datasource(session: Session, name: str) -> Datasource:
    """Raises UnknownDatasource, with a did-you-mean."""
    found = session.scalars(
        select(Datasource).where(Datasource.name == name, Datasource.id != NIL_DATASOURCE)
    ).one_or_none()
    if found is None:
        raise UnknownDatasource(unknown("datasource", name, datasource_names(session).values()))
    return found


def all_jobs(session: Session) -> list[Job]:
    """All jobs by name."""
    return list(session.scalars(select(Job).order_by(Job.name)))


def job(session: Session, name: str) -> Job:
    """Raises UnknownJob, with a did-you-mean."""
    found = session.scalars(select(Job).where(Job.name == name)).one_or_none()
    if found is None:
        raise UnknownJob(unknown("job", name, session.scalars(select(Job.name)).all()))
    return found


def with_children(session: Session, parent: Job) -> list[Job]:
    """A job and the child jobs that it stored for its tables."""
    children = session.scalars(select(Job).where(Job.parent_job_id == parent.id).order_by(Job.name))
    return [parent, *children]


def schedule(session: Session, name: str) -> tuple[Job, JobSchedule]:
    """A schedule by ``NAME`` or, where several jobs have one of that name, ``JOB/NAME``.

    Raises UnknownSchedule.
    """
    query = select(Job, JobSchedule).join(JobSchedule, JobSchedule.job_id == Job.id)
    pairs = [(owner, found) for owner, found in session.execute(query)]
    hits = [
        (owner, found)
        for owner, found in pairs
        if name in (found.name, f"{owner.name}/{found.name}")
    ]
    if len(hits) == 1:
        return hits[0]
    if hits:
        choices = ", ".join(sorted(f"{owner.name}/{found.name}" for owner, found in hits))
        raise UnknownSchedule(f"several schedules are named {name!r}: say which of {choices}")
    raise UnknownSchedule(unknown("schedule", name, [found.name for _, found in pairs]))


def existing(session: Session) -> Existing:
    """What a definition file is checked against."""
    limits: dict[str, tuple[str, int] | None] = {}
    for found in all_jobs(session):
        stated = found.definition.get("concurrency")
        limits[found.name] = (stated["key"], stated["limit"]) if stated else None
    return Existing(
        datasources={found.name: found.connector for found in all_datasources(session)},
        concurrency=limits,
    )


# Locking and telling


def lock(session: Session, model: type[_Row], ids: Iterable[UUID]) -> None:
    """Lock rows in ascending order of their ids, and read them again as they are now.

    Lock schedules before jobs, and jobs before datasources.
    """
    wanted = set(ids)
    if wanted:
        session.scalars(
            select(model)
            .where(model.id.in_(wanted))
            .order_by(model.id)
            .with_for_update(key_share=True)
            .execution_options(populate_existing=True)
        ).all()


def now(session: Session) -> datetime:
    """The database's time at this moment, not at the transaction's start."""
    moment: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return moment


def notify_work(session: Session, names: Iterable[str]) -> None:
    """Tell that runs of these jobs may have become eligible, at commit (R-D6, R-D7)."""
    for name in sorted(set(names)):
        session.execute(select(func.claimcheck_notify(f"job:{name}", "work")))


def notify_deadlines(session: Session, name: str) -> None:
    """Tell that a stored deadline of this job has changed, at commit (R-D6)."""
    session.execute(select(func.claimcheck_notify(f"job:{name}", "deadlines")))


def jobs_of(session: Session, datasource_id: UUID) -> list[Job]:
    """The jobs that read from or write to a datasource."""
    return list(
        session.scalars(
            select(Job)
            .where((Job.source_id == datasource_id) | (Job.sink_id == datasource_id))
            .order_by(Job.name)
        )
    )


def jobs_under(session: Session, key: str) -> list[Job]:
    """The jobs that share a concurrency key."""
    return list(session.scalars(select(Job).where(Job.concurrency_key == key).order_by(Job.name)))


def drop_unused_keys(session: Session) -> None:
    """Remove concurrency keys that no job names any more."""
    used = select(Job.concurrency_key).where(Job.concurrency_key.is_not(None))
    for found in session.scalars(select(ConcurrencyKey).where(ConcurrencyKey.key.not_in(used))):
        session.delete(found)
    session.flush()
