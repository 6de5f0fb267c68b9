"""Bringing what is stored to what a definition file says: all of it or nothing, and only once.

What the file does not name is left alone: other jobs and datasources, a switch that an operator
set, the schedules of a job that has no ``schedules`` key. A job that has one gets exactly those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy.orm import Session

from db.envelopes import EnvelopeError
from db.keyring import Keyring
from db.models import Datasource, Job
from dispatch import catalog
from dispatch.catalog import datasources, jobs, jobschedules
from dispatch.catalog.changes import Change
from dispatch.definitions import Definitions
from dispatch.definitions.documents import DefinitionError, Report
from dispatch.definitions.jobdefinition import Connectors
from dispatch.errors import UnreadableKept


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes that a definition file asks for, in the order in which they are made."""

    datasources: tuple[Change, ...] = ()
    jobs: tuple[Change, ...] = ()
    schedules: tuple[Change, ...] = ()
    touched: frozenset[str] = field(default=frozenset())
    """The jobs that themselves or whose schedules change."""

    @property
    def changes(self) -> list[Change]:
        return [*self.datasources, *self.jobs, *self.schedules]


def plan(
    session: Session, definitions: Definitions, keyring: Keyring, connectors: Connectors
) -> Plan:
    """Compare the file with what is stored, and change nothing.

    Raises DefinitionError where a changed datasource would break a stored job.
    """
    stored_datasources = {found.name: found for found in catalog.all_datasources(session)}
    names = {found.id: found.name for found in stored_datasources.values()}
    stored_jobs = {found.name: found for found in catalog.all_jobs(session)}
    _check_stored_jobs(session, definitions, stored_datasources, connectors)
    of_datasources = [
        datasources.difference(session, stored_datasources.get(name), wanted, keyring, connectors)
        for name, wanted in definitions.datasources.items()
    ]
    of_jobs = [
        jobs.difference(stored_jobs.get(name), wanted, names)
        for name, wanted in definitions.jobs.items()
    ]
    of_schedules: list[Change] = []
    stored_schedules = jobschedules.by_job(session)
    touched = {change.name for change in of_jobs if change is not None}
    for name, wanted in definitions.jobs.items():
        stored = stored_jobs.get(name)
        found = jobschedules.plan(
            stored_schedules.get(stored.id, []) if stored else [], name, wanted.schedules
        )
        of_schedules += found
        if found:
            touched.add(name)
    return Plan(
        tuple(change for change in of_datasources if change is not None),
        tuple(change for change in of_jobs if change is not None),
        tuple(of_schedules),
        frozenset(touched),
    )


def apply(
    session: Session,
    definitions: Definitions,
    keyring: Keyring,
    connectors: Connectors,
    *,
    actor: str,
    replace_unreadable: bool = False,
) -> Plan:
    """Make the changes in the caller's transaction of ``catalog.editing``, and return them.

    Repeating it changes nothing, seals nothing anew and writes no audit record. Raises
    DefinitionError as ``plan`` does, and UnreadableKept where it would replace a datasource that
    this keyring cannot open, unless ``replace_unreadable``.
    """
    _lock(session, plan(session, definitions, keyring, connectors))
    # Again under the locks: a fire or a hand-written statement may have come between.
    found = plan(session, definitions, keyring, connectors)
    stored_datasources = {stored.name: stored for stored in catalog.all_datasources(session)}
    if not replace_unreadable:
        _keep_unreadable(found, stored_datasources, keyring)
    for change in found.datasources:
        datasources.store(
            session,
            stored_datasources.get(change.name),
            definitions.datasources[change.name],
            change,
            keyring,
            actor,
        )
    stored_jobs = {stored.name: stored for stored in catalog.all_jobs(session)}
    for change in found.jobs:
        stored_jobs[change.name] = jobs.store(
            session, stored_jobs.get(change.name), definitions.jobs[change.name], change, actor
        )
    for name in sorted(found.touched):
        jobschedules.replace_all(
            session, stored_jobs[name], definitions.jobs[name].schedules, actor
        )
    catalog.drop_unused_keys(session)
    return found


def _keep_unreadable(found: Plan, stored: dict[str, Datasource], keyring: Keyring) -> None:
    """The wrong keyring file is likelier than a lost key, and what is replaced is gone."""
    names = []
    for change in found.datasources:
        if change.name in stored:
            try:
                datasources.open_config(keyring, stored[change.name])
            except EnvelopeError:
                names.append(change.name)
    if names:
        them = "it" if len(names) == 1 else "them"
        raise UnreadableKept(
            f"this keyring cannot open what is stored of {', '.join(names)}; nothing was changed. "
            "Point CLAIMCHECK_KEYRING_FILE at a copy of the file of the host that stored "
            f"{them}, and look at: celery -A tasks keyring status. Where that key is lost, replace "
            f"{them}: celery -A tasks apply FILE --replace-unreadable"
        )


def _lock(session: Session, found: Plan) -> None:
    names = {change.name for change in found.datasources}
    moved = {stored.id for stored in catalog.all_datasources(session) if stored.name in names}
    every = catalog.all_jobs(session)
    touched: list[UUID] = [stored.id for stored in every if stored.name in found.touched]
    # A datasource that points to another place resets the watermarks of its jobs.
    users = [stored.id for stored in every if moved & {stored.source_id, stored.sink_id}]
    jobschedules.lock_all(session, touched)
    catalog.lock(session, Job, [*touched, *users])
    catalog.lock(session, Datasource, moved)


def _check_stored_jobs(
    session: Session,
    definitions: Definitions,
    stored: dict[str, Datasource],
    connectors: Connectors,
) -> None:
    changed = {
        name: wanted.connector
        for name, wanted in definitions.datasources.items()
        if name in stored and stored[name].connector != wanted.connector
    }
    if changed:
        report = Report()
        jobs.check_bindings(
            session, connectors, changed, report, without=frozenset(definitions.jobs)
        )
        if report.problems:
            raise DefinitionError(report.problems)
