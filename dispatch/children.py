"""The child jobs of a run over many tables: stored with a run each, in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from db import statements
from db.models import Datasource, Job
from dispatch import catalog, enqueue, offers
from dispatch.catalog import jobs
from dispatch.claims import ClaimedRun
from dispatch.context import ChildJob, HandlerFailure, RunStopped
from dispatch.definitions.jobdefinition import JobDefinition, defaults
from dispatch.enqueue import RunHandle
from dispatch.errors import CatalogBusy, JobDisabled
from dispatch.execution import Spawn
from dispatch.handlers import REPLICATE
from dispatch.ports import Ports

logger = logging.getLogger("claimcheck.children")
_SQL = statements.load("leases")


def spawner(ports: Ports) -> Spawn:
    """What a coordinator gives its runs to have children with."""
    return partial(spawn, ports)


def spawn(ports: Ports, claimed: ClaimedRun, children: Sequence[ChildJob]) -> list[str]:
    """Store or update each child job and enqueue a run of each, then offer those.

    Returns the names of the job's other enabled children, which get no run any more.

    The children read and write the datasources of the claim, and keep a switch or pause that was
    set on them. A disabled child gets no run; one with an active run is left to it (R-T6). All or
    nothing, and only while the claim is held: raises RunStopped where it is fenced or was asked to
    stop, and HandlerFailure where a child's name is taken or the catalog stays busy.
    """
    try:
        with catalog.editing() as session:
            _require_hold(session, claimed)
            parent = session.get_one(Job, claimed.job_id)
            stored = _store(session, claimed, parent, children)
            handles = [handle for job in stored if (handle := _enqueue(session, claimed, job))]
            _, *family = catalog.with_children(session, parent)
            left = [found.name for found in family if found.enabled and found not in stored]
    except CatalogBusy as error:
        raise HandlerFailure(str(error)) from None
    offers.publish(ports, [handle.offer for handle in handles if handle.offerable])
    return left


def _require_hold(session: Session, claimed: ClaimedRun) -> None:
    asked = {"run_id": claimed.id, "token": claimed.token}
    row = statements.row(session, _SQL["still_held"], asked)
    if row is None:
        raise RunStopped("fenced")
    if row["status"] == "CANCEL_REQUESTED":
        raise RunStopped("cancelled")


def _store(
    session: Session, claimed: ClaimedRun, parent: Job, children: Sequence[ChildJob]
) -> list[Job]:
    names = [child.name for child in children]
    known = {found.name: found for found in session.scalars(select(Job).where(Job.name.in_(names)))}
    for name, found in known.items():
        if found.parent_job_id != parent.id:
            raise HandlerFailure(
                f"the name {name!r} of a child job is taken by a job of its own; rename that one",
                permanent=True,
            )
    catalog.lock(session, Job, [found.id for found in known.values()])
    source = _name(session, claimed.source_datasource_id)
    sink = _name(session, claimed.sink_datasource_id)
    datasources = catalog.datasource_names(session)
    stored = []
    for child in children:
        wanted = _definition(child, source, sink)
        before = known.get(child.name)
        change = jobs.difference(before, wanted, datasources)
        if change is not None:
            before = jobs.store(session, before, wanted, change, f"run {claimed.id}")
            before.parent_job_id = parent.id
        assert before is not None
        stored.append(before)
    session.flush()
    return stored


def _definition(child: ChildJob, source: str | None, sink: str | None) -> JobDefinition:
    usual = defaults(REPLICATE, child.definition.get("mode"))
    overlap = str(child.definition.get("overlap") or usual.pop("overlap"))
    definition = {**usual, **child.definition}
    return JobDefinition(child.name, REPLICATE, definition, overlap, source, sink)


def _name(session: Session, datasource_id: UUID | None) -> str | None:
    return None if datasource_id is None else session.get_one(Datasource, datasource_id).name


def _enqueue(session: Session, claimed: ClaimedRun, job: Job) -> RunHandle | None:
    try:
        return enqueue.enqueue(
            session, job.name, parent_run_id=claimed.id, actor=f"run {claimed.id}"
        )
    except JobDisabled as error:
        logger.warning("run %s: %s", claimed.id, error)
        return None
