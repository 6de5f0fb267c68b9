"""The child jobs of a run over many tables: stored with a run each, in batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from db import statements
from db.models import Datasource, Job
from dispatch import catalog, enqueue, offers
from dispatch.catalog import jobs
from dispatch.claims import ClaimedRun
from dispatch.context import ChildJob, HandlerFailure, RunContext, RunStopped, Spawned
from dispatch.definitions.jobdefinition import JobDefinition, defaults
from dispatch.enqueue import RunHandle
from dispatch.errors import CatalogBusy, DatabaseUnavailable, JobDisabled, TriggerBusy
from dispatch.execution import Spawn
from dispatch.handlers import REPLICATE
from dispatch.ports import Ports
from dispatch.settled import settled

BATCH = 100
"""How many children one transaction has: it holds the run, whose lease nobody renews meanwhile, and
keeps other changes of jobs waiting, for about a second."""

logger = logging.getLogger("claimcheck.children")
_LEASES = statements.load("leases")
_SQL = statements.load("children")

Done = TypeVar("Done")


def go_on(run_id: UUID) -> str:
    """What is to be said where a run that has children ends in another way than by itself."""
    return (
        "the child runs that it started go on by themselves; see them with: "
        f"celery -A tasks run show {run_id}"
    )


def spawner(ports: Ports) -> Spawn:
    """What a coordinator gives its runs to have children with."""
    return partial(spawn, ports)


def spawn(
    ports: Ports, claimed: ClaimedRun, context: RunContext, children: Sequence[ChildJob]
) -> Spawned:
    """Store or update each child job and enqueue a run of each, then offer those.

    The children read and write the datasources of the claim, and keep a switch or pause that was
    set on them. A disabled child gets no run; one with an active run is left to it (R-T6). In
    batches, each in a transaction that may be repeated: within a lineage a child gets one run,
    until somebody retries it by hand (R-R7, R-R8).

    Only while the claim is held: raises RunStopped where it is fenced or the run is to stop, and
    HandlerFailure where a child's name is taken, which starts none, where the catalog stays busy,
    or where the control database gives no answer.
    """
    gone = _settled(claimed, lambda: _gone(claimed, children))
    active: list[str] = []
    for start in range(0, len(children), BATCH):
        context.progress(0, phase=f"starting child runs: {start:,} of {len(children):,}")
        batch = children[start : start + BATCH]
        handles = _settled(claimed, partial(_start, claimed, context, batch))
        offers.publish(ports, [handle.offer for handle in handles if handle.offerable])
        active += [handle.job for handle in handles if not handle.created]
    return Spawned(active, gone)


def _settled(claimed: ClaimedRun, once: Callable[[], Done]) -> Done:
    """What ``once`` returns; where its commit got no answer it is repeated (R-R7)."""
    what = f"child jobs and runs of run {claimed.id}"
    try:
        return settled(once, what, refuse=lambda error: None)[0]
    except (CatalogBusy, DatabaseUnavailable, TriggerBusy) as error:
        raise HandlerFailure(str(error)) from None


def _gone(claimed: ClaimedRun, children: Sequence[ChildJob]) -> list[str]:
    """The enabled child jobs that are not among ``children``. Raises HandlerFailure."""
    names = {child.name for child in children}
    with catalog.reading() as session:
        _refuse_taken(session, claimed, names)
        _, *family = catalog.with_children(session, session.get_one(Job, claimed.job_id))
        return [found.name for found in family if found.enabled and found.name not in names]


def _refuse_taken(session: Session, claimed: ClaimedRun, names: Collection[str]) -> None:
    taken = select(Job.name).where(
        Job.name.in_(names), Job.parent_job_id.is_distinct_from(claimed.job_id)
    )
    for name in session.scalars(taken.order_by(Job.name).limit(1)):
        raise HandlerFailure(
            f"the name {name!r} of a child job is taken by a job of its own; rename that one",
            permanent=True,
        )


def _start(
    claimed: ClaimedRun, context: RunContext, children: Sequence[ChildJob]
) -> list[RunHandle]:
    with catalog.editing() as session:
        status = _lock_run(session, claimed)
        asked = {"run_id": str(claimed.id), "names": [child.name for child in children]}
        found = statements.row(session, _SQL["have_runs"], asked)
        assert found is not None
        if found["has_any"]:
            context.sink_indeterminate(go_on(claimed.id))
        if status == "CANCEL_REQUESTED":
            raise RunStopped("cancelled")
        handles = [
            handle
            for job in _store(session, claimed, children)
            if job.id not in found["job_ids"]
            and (handle := _enqueue(session, claimed, job)) is not None
        ]
        if any(handle.created for handle in handles):
            # Before the commit, whose answer may be lost.
            context.sink_indeterminate(go_on(claimed.id))
    return handles


def _lock_run(session: Session, claimed: ClaimedRun) -> str:
    """The state of the run, which keeps it until the transaction ends. Raises RunStopped."""
    asked = {"run_id": claimed.id, "token": claimed.token}
    row = statements.row(session, _LEASES["still_held"], asked)
    if row is None:
        raise RunStopped("fenced")
    return str(row["status"])


def _store(session: Session, claimed: ClaimedRun, children: Sequence[ChildJob]) -> list[Job]:
    names = [child.name for child in children]
    _refuse_taken(session, claimed, names)
    known = {found.name: found for found in session.scalars(select(Job).where(Job.name.in_(names)))}
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
            before.parent_job_id = claimed.job_id
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
