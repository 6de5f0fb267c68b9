"""Jobs: stored as defined, switched, paused and removed, each change under audit (R-X4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db import session as sessions
from db.models import ConcurrencyKey, Job
from dispatch import audit, catalog
from dispatch.catalog import history, jobschedules
from dispatch.catalog.changes import Change, Difference, audited, differences
from dispatch.definitions import bind, check_limits, texts
from dispatch.definitions.documents import (
    UNSTORABLE,
    DefinitionError,
    Problem,
    Report,
    is_storable,
)
from dispatch.definitions.jobdefinition import (
    Connectors,
    JobDefinition,
    defaults,
    parse_job,
)
from dispatch.errors import InUse, NameTaken
from dispatch.finalization import WATERMARK_BASIS
from dispatch.handlers import REPLICATE

REMOVE_SECONDS = 600.0
"""How long the last statement of a removal may look for runs, which no full index names by job."""

Switch = Literal["enabled", "paused", "source_enabled", "sink_enabled"]


def stored_definition(stored: Job, names: Mapping[UUID, str]) -> JobDefinition:
    """A stored job in the form that a definition file has after it was read.

    ``names`` are those of all datasources: `catalog.datasource_names`.
    """
    return JobDefinition(
        name=stored.name,
        handler=stored.handler,
        definition=dict(stored.definition),
        overlap=stored.overlap,
        source=names.get(stored.source_id) if stored.source_id else None,
        sink=names.get(stored.sink_id) if stored.sink_id else None,
        enabled=stored.enabled,
        paused=stored.paused,
    )


def difference(
    stored: Job | None, wanted: JobDefinition, names: Mapping[UUID, str]
) -> Change | None:
    """What storing ``wanted`` would change, its schedules aside; None where nothing is."""
    after = _comparable(wanted)
    if stored is None:
        usual = differences({}, _usual(wanted))
        stated = tuple(found for found in differences({}, after) if found not in usual)
        return Change("add", "job", wanted.name, stated)
    before = {
        key: value
        for key, value in _comparable(stored_definition(stored, names)).items()
        if key not in ("enabled", "paused") or key in after
    }
    found = differences(before, after)
    if not found:
        return None
    note = None
    if stored.watermark is not None and _moved(stored, wanted):
        note = "its watermark is reset, so that the next run reads everything again"
    return Change("edit", "job", wanted.name, found, note)


def store(
    session: Session, stored: Job | None, wanted: JobDefinition, change: Change, actor: str
) -> Job:
    """Carry a change out: store, audit, and tell of the work it frees. ``stored`` is locked."""
    ids = {found: id for id, found in catalog.datasource_names(session).items()}
    before = None if stored is None else _gates(session, stored)
    key = _store_limit(session, wanted)
    moved: list[str] = []
    if stored is None:
        stored = Job(id=uuid4(), name=wanted.name)
        session.add(stored)
    elif stored.watermark is not None:
        moved = _moved(stored, wanted)
    stored.handler = wanted.handler
    stored.definition = wanted.definition
    stored.source_id = ids[wanted.source] if wanted.source else None
    stored.sink_id = ids[wanted.sink] if wanted.sink else None
    stored.queue = wanted.definition["queue"]
    stored.priority = wanted.definition["priority"]
    stored.overlap = wanted.overlap
    stored.max_attempts = wanted.definition["retry"]["max_attempts"]
    stored.concurrency_key = key
    if wanted.enabled is not None:
        stored.enabled = wanted.enabled
    if wanted.paused is not None:
        stored.paused = wanted.paused
    stored.updated_at = func.clock_timestamp()
    session.flush()
    audit.record(
        session,
        actor=actor,
        action=f"job.{change.action}",
        subject=wanted.name,
        outcome="added" if change.action == "add" else "changed",
        detail=audited(change.differences),
    )
    if moved:
        forget_watermark(session, stored, actor=actor, because=", ".join(moved))
    if before is not None and _opens(before, _gates(session, stored)):
        freed = catalog.jobs_under(session, key) if key else [stored]
        catalog.notify_work(session, [found.name for found in freed])
    return stored


def add(
    session: Session, connectors: Connectors, name: str, raw: Mapping[str, Any], *, actor: str
) -> list[Change]:
    """Store a new job; ``raw`` has the keys of the definition file, ``schedules`` too.

    Raises NameTaken, and DefinitionError with every mistake.
    """
    if session.scalars(select(Job.id).where(Job.name == name)).one_or_none() is not None:
        raise NameTaken(
            f"a job is named {name!r} already; change it with: celery -A tasks job edit {name}"
        )
    wanted = _checked(session, connectors, name, raw)
    change = difference(None, wanted, {})
    assert change is not None
    stored = store(session, None, wanted, change, actor)
    return [change, *jobschedules.replace_all(session, stored, wanted.schedules, actor)]


def edit(
    session: Session, connectors: Connectors, name: str, raw: Mapping[str, Any], *, actor: str
) -> Change | None:
    """Change what ``raw`` names and keep the rest; a key that is None is removed.

    Nested keys are merged (``{"retry": {"backoff": "5m"}}`` keeps the other keys of retry). None
    where nothing changes. Raises UnknownJob, and DefinitionError with every mistake.
    """
    stored = catalog.job(session, name)
    if stored.parent_job_id is not None:
        parent = session.get_one(Job, stored.parent_job_id).name
        what = f"is written by {parent}, whose next run would undo an edit: edit that job"
        raise DefinitionError([Problem(("jobs", name), what)])
    catalog.lock(session, Job, [stored.id])
    wanted = _checked(session, connectors, name, _merged(as_file(stored), raw))
    change = difference(stored, wanted, catalog.datasource_names(session))
    if change is not None:
        store(session, stored, wanted, change, actor)
        catalog.drop_unused_keys(session)
    return change


def as_file(stored: Job) -> dict[str, Any]:
    """A stored job with the keys of a definition file, its schedules left out."""
    definition = dict(stored.definition)
    for side in ("source", "sink"):
        if isinstance(definition.get(side), Mapping):
            definition[side] = dict(definition[side])
    return definition


def set_switch(
    session: Session, name: str, switch: Switch, value: bool, *, actor: str
) -> Change | None:
    """Set one of a job's switches, and those of its child jobs; None where all are so.

    Off blocks the next claim and leaves a running attempt alone (R-C5); on tells of the work that
    it frees (R-D7). Raises UnknownJob.
    """
    parent = catalog.job(session, name)
    family = catalog.with_children(session, parent)
    catalog.lock(session, Job, [found.id for found in family])
    changed = [found for found in family if getattr(found, switch) != value]
    if not changed:
        return None
    for found in changed:
        setattr(found, switch, value)
        found.updated_at = func.clock_timestamp()
    session.flush()
    verb, outcome = _SWITCHES[switch, value]
    binding = switch.partition("_")[0] if switch.endswith("_enabled") else None
    audit.record(
        session,
        actor=actor,
        action=f"job.{verb}",
        subject=name,
        outcome=outcome,
        detail=None if binding is None else {"binding": binding},
    )
    if value != (switch == "paused"):
        catalog.notify_work(session, [found.name for found in changed])
    return Change("edit", "job", name, (Difference(switch, not value, value),))


_SWITCHES: Mapping[tuple[Switch, bool], tuple[str, str]] = {
    ("enabled", True): ("enable", "enabled"),
    ("enabled", False): ("disable", "disabled"),
    ("source_enabled", True): ("enable", "enabled"),
    ("source_enabled", False): ("disable", "disabled"),
    ("sink_enabled", True): ("enable", "enabled"),
    ("sink_enabled", False): ("disable", "disabled"),
    ("paused", True): ("pause", "paused"),
    ("paused", False): ("resume", "resumed"),
}


def remove(session: Session, name: str, *, actor: str) -> Change:
    """Remove a job with its schedules and child jobs; its finished runs are kept (R-S3).

    Raises UnknownJob, and InUse where one of its runs is active.
    """
    family = catalog.with_children(session, catalog.job(session, name))
    ids = [found.id for found in family]
    jobschedules.lock_all(session, ids)
    # Runs before jobs, as a claim locks them.
    _refuse_active(name, history.active_runs(session, ids, lock=True))
    for found in family:
        history.let_go_of_job(session, found)
    session.execute(select(Job.id).where(Job.id.in_(ids)).order_by(Job.id).with_for_update()).all()
    # One that came before the lock; none comes any more.
    _refuse_active(name, history.active_runs(session, ids))
    with sessions.unhurried(session.connection(), REMOVE_SECONDS):
        # Children first and each by itself: to look for runs that refer to it may take a while.
        for found in reversed(family):
            session.delete(found)
            session.flush()
    catalog.drop_unused_keys(session)
    audit.record(session, actor=actor, action="job.remove", subject=name, outcome="removed")
    catalog.notify_deadlines(session, name)
    return Change("remove", "job", name)


def _refuse_active(name: str, active: Sequence[Any]) -> None:
    if not active:
        return
    first = min(active, key=lambda run: run.created_at)
    more = f" and {len(active) - 1} more" if len(active) > 1 else ""
    raise InUse(
        f"the job {name!r} has an active run: {first.id} of {first.job_name} is {first.status}"
        f"{more}. Wait for its end, or cancel it with: celery -A tasks run cancel {first.id}"
    )


def reset_watermark(session: Session, name: str, *, actor: str) -> Change | None:
    """Forget how far a job and its child jobs have read, so that the next runs read everything
    (R-F3).

    A run that is at work does not set it again. None where there is neither a watermark nor a run
    that could set one. Raises UnknownJob.
    """
    parent = catalog.job(session, name)
    family = catalog.with_children(session, parent)
    catalog.lock(session, Job, [found.id for found in family])
    active = history.active_runs(session, [found.id for found in family])
    at_work = [run for run in active if run.status != "PENDING"]
    working = {run.job_name for run in at_work}
    changed = [found for found in family if found.watermark is not None or found.name in working]
    if not changed:
        return None
    before = parent.watermark
    for found in changed:
        forget_watermark(session, found, actor=actor)
    notes = ["its next run reads everything again"] if parent in changed else []
    if children := [found for found in changed if found is not parent]:
        notes.append(f"the watermark of {len(children)} of its child jobs is reset")
    if at_work:
        notes.append(f"run {at_work[0].id} is at work, and sets no watermark any more")
    differences = () if before is None else (Difference("watermark", before, None),)
    return Change("edit", "job", name, differences, "; ".join(notes) or None)


def forget_watermark(
    session: Session, stored: Job, *, actor: str, because: str | None = None
) -> None:
    """Reset the watermark of a job that is locked, and say in the audit why."""
    detail = {"watermark": stored.watermark}
    if because is not None:
        detail["because"] = because
    stored.watermark = None
    stored.watermark_type = None
    stored.watermark_reset_at = func.clock_timestamp()
    stored.updated_at = func.clock_timestamp()
    audit.record(
        session,
        actor=actor,
        action="job.reset-watermark",
        subject=stored.name,
        outcome="changed",
        detail=detail,
    )


def check_bindings(
    session: Session,
    connectors: Connectors,
    changed: Mapping[str, str],
    report: Report,
    *,
    without: frozenset[str] = frozenset(),
) -> None:
    """Check stored jobs against the new connectors of datasources that they use.

    ``changed`` gives the new connector by datasource; mistakes stand at the datasource. The jobs
    of ``without`` are left out.
    """
    known = {**catalog.existing(session).datasources, **changed}
    names = catalog.datasource_names(session)
    for found in catalog.all_jobs(session):
        if found.name in without:
            continue
        job = stored_definition(found, names)
        touched = [name for name in (job.source, job.sink) if name is not None and name in changed]
        if not touched or job.handler != REPLICATE:
            continue
        inner = Report()
        bind(job, known, connectors, inner)
        for problem in inner.problems:
            report.add(("datasources", touched[0], "connector"), f"the job {job.name}: {problem}")


def _checked(
    session: Session, connectors: Connectors, name: str, raw: Mapping[str, Any]
) -> JobDefinition:
    report = Report()
    for place, text in texts(raw, ()):
        if not is_storable(text):
            report.add(place, UNSTORABLE)
    if report.problems:
        raise DefinitionError(report.problems)
    found = parse_job(name, dict(raw), (), report, connectors)
    if found is not None:
        existing = catalog.existing(session)
        found = bind(found, existing.datasources, connectors, report)
        check_limits({name: found}, existing, report)
    if report.problems or found is None:
        raise DefinitionError(report.problems)
    return found


def _comparable(job: JobDefinition) -> dict[str, Any]:
    found = {"handler": job.handler, **job.definition, "overlap": job.overlap}
    for key, value in (("enabled", job.enabled), ("paused", job.paused)):
        if value is not None:
            found[key] = value
    return found


def _usual(job: JobDefinition) -> dict[str, Any]:
    """What a job is without saying so: left out of what is told of a new one."""
    usual = defaults(job.handler, job.definition.get("mode"))
    return {**usual, "params": {}, "enabled": True, "paused": False}


def _moved(stored: Job, wanted: JobDefinition) -> list[str]:
    """The keys whose change makes the watermark worthless."""
    before, after = stored.definition, wanted.definition
    return [key for key in WATERMARK_BASIS if before.get(key) != after.get(key)]


def _merged(kept: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(kept)
    for key, value in named.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = _merged(found[key], value)
        else:
            found[key] = value
    return found


def _store_limit(session: Session, wanted: JobDefinition) -> str | None:
    if wanted.concurrency is None:
        return None
    key, limit = wanted.concurrency
    found = session.get(ConcurrencyKey, key)
    if found is None:
        session.add(ConcurrencyKey(key=key, max=limit))
        session.flush()
    elif found.max != limit:
        found.max = limit
        session.flush()
    return key


class Gates(NamedTuple):
    """All that may hold a job's waiting runs back, apart from its datasources' own switches."""

    enabled: bool
    paused: bool
    overlap: str
    key: str | None
    limit: int
    bound: tuple[UUID | None, UUID | None]


def _gates(session: Session, stored: Job) -> Gates:
    key = stored.concurrency_key
    limit = session.get(ConcurrencyKey, key) if key else None
    return Gates(
        enabled=stored.enabled,
        paused=stored.paused,
        overlap=stored.overlap,
        key=key,
        limit=limit.max if limit else 0,
        bound=(stored.source_id, stored.sink_id),
    )


def _opens(before: Gates, after: Gates) -> bool:
    """Whether work may have become eligible: telling once too often costs one look."""
    return (
        (after.enabled and not before.enabled)
        or (before.paused and not after.paused)
        or (after.overlap != before.overlap and after.overlap == "allow")
        or (after.key != before.key and before.key is not None)
        or (after.key == before.key and after.limit > before.limit)
        or after.bound != before.bound
    )
