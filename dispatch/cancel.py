"""The intent to cancel, durable before anything is signalled (R-K1, R-R5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from sqlalchemy import Connection

from db import session, statements
from db.failures import sqlstate
from dispatch import lineage, parameters
from dispatch.errors import NotCancellable, TriggerBusy, UnknownRun
from dispatch.lifecycle import JobRunStatus
from dispatch.ports import Ports, RunEvent
from dispatch.settled import settled

LOCK_SECONDS = 2.0
PATIENCE_SECONDS = 5.0
_RACES = 20
_SQL = statements.load("cancel")


@dataclass(frozen=True, slots=True)
class CancelAnswer:
    """What became of a cancel: the state that won, of the lineage's last attempt ``run_id``.

    ``changed`` is False where it had been asked for before. ``event`` is there where the cancel
    alone ended the run, which had not started; whoever changed that tells it.
    """

    run_id: UUID
    requested_id: UUID
    job: str
    status: JobRunStatus
    changed: bool
    cancellation_warning: str | None = None
    event: RunEvent | None = None


def request_cancel(connection: Connection, run_id: UUID | str, *, actor: str) -> CancelAnswer:
    """Record the intent in the caller's transaction, which should bound its waits for locks.

    ``run_id`` is the id of any attempt, or an alias; it stands for the lineage's last attempt.
    Raises UnknownRun; NotCancellable, which says how the run ended; and the driver's errors.
    """
    asked = parameters.run_id(run_id, "run_id")
    assert asked is not None
    who = parameters.name(actor, "actor")
    for _ in range(_RACES):
        last = lineage.last_attempt(connection, asked)
        if last is None:
            raise UnknownRun(f"no run has the id {asked}. List them with: celery -A tasks run list")
        done = statements.row(connection, _SQL["cancel"], {"run_id": last["id"], "actor": who})
        if done is not None:
            status = JobRunStatus(done["status"])
            return CancelAnswer(
                run_id=done["id"],
                requested_id=asked,
                job=done["job"],
                status=status,
                changed=True,
                event=_event(done) if status is JobRunStatus.CANCELLED else None,
            )
        now = lineage.last_attempt(connection, asked)
        if now is None or now["id"] != last["id"]:
            continue  # a retry took its place meanwhile, and that is what has to be cancelled
        status = JobRunStatus(now["status"])
        if status in {JobRunStatus.CANCEL_REQUESTED, JobRunStatus.CANCELLED}:
            return CancelAnswer(
                run_id=now["id"],
                requested_id=asked,
                job=now["job"],
                status=status,
                changed=False,
                cancellation_warning=now["cancellation_warning"],
                event=None if now["started_at"] or not status.is_finished else _event(now),
            )
        if status in {JobRunStatus.SUCCEEDED, JobRunStatus.FAILED}:
            raise NotCancellable(
                f"run {now['id']} has already ended as {status}; there is nothing to cancel. "
                f"See it with: celery -A tasks run show {now['id']}"
            )
    raise TriggerBusy(f"run {asked}: its attempts keep changing; try again")


def cancel(ports: Ports, run_id: UUID | str, *, actor: str) -> CancelAnswer:
    """`request_cancel` in a transaction of its own, then the event.

    It is repeated where its commit got no answer, which changes nothing more (R-R7).

    Raises UnknownRun and NotCancellable; TriggerBusy where another transaction holds the run;
    DatabaseUnavailable where the control database is away, so that it may be stored.
    """

    def once() -> CancelAnswer:
        with session.transaction(
            lock_seconds=LOCK_SECONDS, patience=PATIENCE_SECONDS
        ) as connection:
            return request_cancel(connection, run_id, actor=actor)

    answer, is_repeated = settled(
        once,
        f"the cancel of run {run_id}",
        refuse=lambda error: _raise_busy(error, run_id),
        # How the run stands answers a cancel, whether an earlier attempt landed or not.
        tells=(NotCancellable, UnknownRun),
    )
    if is_repeated:
        # By the attempt whose answer was lost, as far as anybody can tell.
        answer = replace(answer, changed=True)
    if answer.changed and answer.event is not None:
        ports.emit(answer.event)
    return answer


def _raise_busy(error: BaseException, run_id: UUID | str) -> None:
    if sqlstate(error) in {"55P03", "40P01"}:
        raise TriggerBusy(
            f"another open transaction holds run {run_id}; nothing was changed. "
            "Try again when that has ended"
        ) from None


def _event(row: Mapping[str, object]) -> RunEvent:
    previous = row["previous_run_id"]
    return RunEvent(
        kind="cancelled",
        run_id=UUID(str(row["id"])),
        root_run_id=UUID(str(row["root_run_id"])),
        previous_run_id=None if previous is None else UUID(str(previous)),
        job=str(row["job"]),
        attempt=int(str(row["attempt"])),
        queue=str(row["queue"]),
    )
