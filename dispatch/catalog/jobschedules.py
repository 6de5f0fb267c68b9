"""The schedules of a job as they are stored: added, changed, switched and removed (R-D2).

Whatever changes a schedule first settles what was due before the change, under the definition
that it was due by: what is on time fires, what was missed does not. Then it looks for the next
fire time after the change. So an edit within a second of a due time neither skips nor doubles, and
never releases one from before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.models import Job, JobSchedule
from dispatch import audit, catalog, schedules
from dispatch.catalog import history
from dispatch.catalog.changes import Change, Difference, audited, differences
from dispatch.definitions.documents import DefinitionError, Report
from dispatch.definitions.scheduledefinition import ScheduleDefinition, parse_schedule
from dispatch.durations import format_duration
from dispatch.errors import NameTaken
from dispatch.firetimes import FireTimes
from dispatch.schedules import ScheduleReconciler


def fire_times(stored: JobSchedule) -> FireTimes:
    """The fire times of a stored schedule. Raises a ValueError that says what is wrong with it."""
    columns = ("cron", "timezone", "every_seconds", "anchor_at")
    return schedules.fire_times({name: getattr(stored, name) for name in columns})


def of_job(session: Session, job_id: UUID) -> list[JobSchedule]:
    """A job's schedules by name."""
    query = select(JobSchedule).where(JobSchedule.job_id == job_id).order_by(JobSchedule.name)
    return list(session.scalars(query))


def by_job(session: Session) -> dict[UUID, list[JobSchedule]]:
    """All schedules by their job's id, each list by name."""
    found: dict[UUID, list[JobSchedule]] = {}
    for stored in session.scalars(select(JobSchedule).order_by(JobSchedule.name)):
        found.setdefault(stored.job_id, []).append(stored)
    return found


def lock_all(session: Session, job_ids: Collection[UUID]) -> None:
    """Lock the schedules of these jobs, before the jobs themselves are locked."""
    query = select(JobSchedule.id).where(JobSchedule.job_id.in_(job_ids))
    catalog.lock(session, JobSchedule, session.scalars(query).all())


def plan(
    stored: Sequence[JobSchedule], job: str, wanted: Sequence[ScheduleDefinition] | None
) -> list[Change]:
    """What making a job's schedules exactly these would change; None leaves them alone."""
    if wanted is None:
        return []
    before = {found.name: found for found in stored}
    names = {found.name for found in wanted}
    changes = []
    for definition in wanted:
        change = _difference(job, before.get(definition.name), definition)
        if change is not None:
            changes.append(change)
    for name, found in before.items():
        if name not in names:
            changes.append(
                Change("remove", "schedule", f"{job}/{name}", differences(_stored(found), {}))
            )
    return changes


def replace_all(
    session: Session, job: Job, wanted: Sequence[ScheduleDefinition] | None, actor: str
) -> list[Change]:
    """Make a job's schedules exactly these, and return what that changed; they are locked.

    What is equal to what is stored stays as it is, with its next fire.
    """
    stored = of_job(session, job.id)
    changes = plan(stored, job.name, wanted)
    by_name = {found.name: found for found in stored}
    definitions = {found.name: found for found in wanted or ()}
    for change in changes:
        name = change.name.removeprefix(f"{job.name}/")
        if change.action == "remove":
            _remove(session, job, by_name[name], change, actor)
        else:
            _store(session, job, by_name.get(name), definitions[name], change, actor)
    return changes


def add(session: Session, job_name: str, raw: Mapping[str, Any], *, actor: str) -> Change:
    """Add a schedule to a job; ``raw`` has the keys of the definition file.

    Without a name it gets the next free ``JOB-N``. Raises UnknownJob, NameTaken, and
    DefinitionError with every mistake.
    """
    job = catalog.job(session, job_name)
    taken = {found.name for found in of_job(session, job.id)}
    number = len(taken) + 1
    while f"{job.name}-{number}" in taken:
        number += 1
    report = Report()
    wanted = parse_schedule(dict(raw), f"{job.name}-{number}", (), report)
    if report.problems or wanted is None:
        raise DefinitionError(report.problems)
    if wanted.name in taken:
        raise NameTaken(f"the job {job.name!r} has a schedule named {wanted.name!r} already")
    change = _difference(job.name, None, wanted)
    assert change is not None
    _store(session, job, None, wanted, change, actor)
    return change


def set_enabled(session: Session, name: str, enabled: bool, *, actor: str) -> Change | None:
    """Let a schedule fire from its next fire time on, or not at all; None where it is so already.

    Raises UnknownSchedule.
    """
    job, stored = catalog.schedule(session, name)
    catalog.lock(session, JobSchedule, [stored.id])
    if stored.enabled == enabled:
        return None
    moment = _settle_until_now(session, stored)
    stored.enabled = enabled
    _restart(stored, moment)
    stored.updated_at = func.clock_timestamp()
    session.flush()
    verb = "enable" if enabled else "disable"
    audit.record(
        session,
        actor=actor,
        action=f"schedule.{verb}",
        subject=f"{job.name}/{stored.name}",
        outcome=f"{verb}d",
    )
    catalog.notify_deadlines(session, job.name)
    return Change(
        "edit",
        "schedule",
        f"{job.name}/{stored.name}",
        (Difference("enabled", not enabled, enabled),),
    )


def remove(session: Session, name: str, *, actor: str) -> Change:
    """Remove a schedule; the runs that it created stay. Raises UnknownSchedule."""
    job, stored = catalog.schedule(session, name)
    catalog.lock(session, JobSchedule, [stored.id])
    change = Change(
        "remove", "schedule", f"{job.name}/{stored.name}", differences(_stored(stored), {})
    )
    _remove(session, job, stored, change, actor)
    return change


def _difference(job: str, stored: JobSchedule | None, wanted: ScheduleDefinition) -> Change | None:
    name = f"{job}/{wanted.name}"
    after = _wanted(wanted)
    if stored is None:
        return Change("add", "schedule", name, differences({}, after))
    before = _stored(stored)
    if wanted.enabled is None:
        del before["enabled"]
    found = differences(before, after)
    return Change("edit", "schedule", name, found) if found else None


def _store(
    session: Session,
    job: Job,
    stored: JobSchedule | None,
    wanted: ScheduleDefinition,
    change: Change,
    actor: str,
) -> None:
    if stored is None:
        moment = catalog.now(session)
        stored = JobSchedule(
            id=uuid4(), job_id=job.id, name=wanted.name, anchor_at=moment, enabled=True
        )
        moves = True
        session.add(stored)
    else:
        moment = _settle_until_now(session, stored)
        # A changed policy for misses is no change of the times.
        moves = any(found.key not in ("misfire",) for found in change.differences)
    stored.cron = wanted.cron
    stored.timezone = wanted.timezone
    stored.every_seconds = wanted.every_seconds
    stored.misfire = wanted.misfire
    if wanted.enabled is not None:
        stored.enabled = wanted.enabled
    if moves:
        _restart(stored, moment)
    stored.updated_at = func.clock_timestamp()
    session.flush()
    audit.record(
        session,
        actor=actor,
        action=f"schedule.{change.action}",
        subject=change.name,
        outcome="added" if change.action == "add" else "changed",
        detail=audited(change.differences),
    )
    catalog.notify_deadlines(session, job.name)


def _remove(session: Session, job: Job, stored: JobSchedule, change: Change, actor: str) -> None:
    _settle_until_now(session, stored)
    history.let_go_of_schedule(session, stored.id)
    session.delete(stored)
    session.flush()
    audit.record(
        session, actor=actor, action="schedule.remove", subject=change.name, outcome="removed"
    )
    catalog.notify_deadlines(session, job.name)


def _settle_until_now(session: Session, stored: JobSchedule) -> datetime:
    """Settle all that is due until the moment of the change, which is returned (R-D2)."""
    moment = ScheduleReconciler().settle_before_change(session, stored.id)
    session.refresh(stored)
    return moment


def _restart(stored: JobSchedule, moment: datetime) -> None:
    """Find the next fire time after ``moment``; a disabled schedule has none."""
    stored.next_fire_at = fire_times(stored).next_after(moment) if stored.enabled else None
    stored.failures = 0
    stored.retry_at = None


def _wanted(wanted: ScheduleDefinition) -> dict[str, Any]:
    found: dict[str, Any] = {"misfire": wanted.misfire}
    if wanted.every_seconds is not None:
        found["every"] = format_duration(wanted.every_seconds)
    else:
        found["cron"] = wanted.cron
        found["timezone"] = wanted.timezone
    if wanted.enabled is not None:
        found["enabled"] = wanted.enabled
    return found


def _stored(stored: JobSchedule) -> dict[str, Any]:
    return _wanted(
        ScheduleDefinition(
            name=stored.name,
            cron=stored.cron,
            timezone=stored.timezone,
            every_seconds=stored.every_seconds,
            misfire=stored.misfire,
            enabled=stored.enabled,
        )
    )


def as_json(stored: JobSchedule) -> dict[str, Any]:
    """A schedule as commands show it; ``every`` is a duration such as ``15m``."""
    every = stored.every_seconds
    return {
        "id": stored.id,
        "name": stored.name,
        "cron": stored.cron,
        "timezone": stored.timezone,
        "every": None if every is None else format_duration(every),
        "misfire": stored.misfire,
        "enabled": stored.enabled,
        "next_fire_at": stored.next_fire_at,
        "last_fire_at": stored.last_fire_at,
        "failures": stored.failures,
        "retry_at": stored.retry_at,
        "created_at": stored.created_at,
        "updated_at": stored.updated_at,
    }
