"""The manual retry of a FAILED run (R-R8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from db import session, statements
from db.failures import sqlstate
from dispatch import lineage, offers, parameters
from dispatch.enqueue import RunHandle, raise_refusal
from dispatch.errors import NotRetryable, OverlapRefused, UnknownRun
from dispatch.ports import Ports
from dispatch.settled import settled

LOCK_SECONDS = 1.0
PATIENCE_SECONDS = 5.0

_SQL = statements.load("retry")


def retry_run(
    connection: Connection, run_id: UUID | str, *, actor: str, new_run_id: UUID | None = None
) -> RunHandle:
    """Replace the lineage's last attempt, which must be FAILED, by one that is due at once.

    ``run_id`` is the id of any attempt, or an alias. Works in the caller's transaction, which
    should bound its waits for locks; publish the handle's offer after the commit. Repeating it
    under one ``new_run_id`` creates one attempt (R-R7). An attempt of a disabled job waits (R-T8).

    Raises UnknownRun, NotRetryable (which says how the run stands), OverlapRefused (which names the
    active run) and the driver's errors.
    """
    asked = parameters.run_id(run_id, "run_id")
    created = new_run_id or uuid4()
    assert asked is not None
    last = lineage.lock_last_attempt(connection, asked)
    if last is None:
        raise UnknownRun(f"no run has the id {asked}. List them with: celery -A tasks run list")
    if last["id"] == created:
        return _handle(last)
    if last["status"] != "FAILED":
        raise NotRetryable(
            f"run {last['id']} is {last['status']}; only a FAILED run is retried. "
            f"Start a new one with: celery -A tasks run trigger {last['job_name']}"
        )
    if last["job_id"] is None:
        raise NotRetryable(f"run {last['id']}: its job {last['job_name']!r} was removed")
    new: dict[str, Any] = {
        "run_id": str(created),
        "previous_run_id": str(last["id"]),
        "actor": parameters.name(actor, "actor"),
        "offered": True,
    }
    try:
        # A savepoint, so that a refusal leaves the caller's transaction usable.
        with connection.begin_nested():
            is_created = statements.row(connection, _SQL["retry"], new) is not None
    except DBAPIError as error:
        if sqlstate(error) != "23505":
            raise
        is_created = False
    if is_created:
        return _handle({**last, "id": created})
    active = statements.row(connection, _SQL["active_run_of"], {"job_id": str(last["job_id"])})
    found = "meanwhile" if active is None else f"as run {active['id']} ({active['status']})"
    raise OverlapRefused(
        f"job {last['job_name']!r} allows one active run and has it {found}: "
        "wait for that run or cancel it, then retry"
        + ("" if active is None else f": celery -A tasks run cancel {active['id']}")
    )


def retry(ports: Ports, run_id: UUID | str, *, actor: str) -> RunHandle:
    """`retry_run` in a transaction of its own, then the offer. A lost commit is settled (R-R7).

    Raises what `retry_run` does; TriggerBusy after a second behind another transaction;
    DatabaseUnavailable where the control database is away, so that it may be stored.
    """
    created = uuid4()

    def once() -> RunHandle:
        with session.transaction(
            lock_seconds=LOCK_SECONDS, patience=PATIENCE_SECONDS
        ) as connection:
            return retry_run(connection, run_id, actor=actor, new_run_id=created)

    handle, _ = settled(
        once,
        f"the retry of run {run_id}",
        refuse=lambda error: raise_refusal(error, f"run {run_id}"),
        advice=f". See it with: celery -A tasks run show {run_id}",
        tells=(UnknownRun,),
    )
    offers.publish(ports, [handle.offer])
    return handle


def _handle(row: Mapping[str, Any]) -> RunHandle:
    return RunHandle(
        run_id=row["id"],
        requested_id=row["id"],
        created=True,
        job=row["job_name"],
        queue=row["queue"],
        priority=row["priority"],
        offerable=True,
    )
