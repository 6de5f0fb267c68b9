"""How a run comes to be: one durable PENDING row, then an offered wake-up (R-T1, R-T2).

`enqueue` works inside the caller's transaction, `submit` in its own and offers afterwards. Both
run the one statement ``enqueue`` of db/sql/enqueue.sql, which keeps the rules of creation; where
it creates nothing, ``stand_in`` says what stands in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db import session, settings, statements
from db.failures import sqlstate
from db.statements import AnyConnection
from dispatch import offers, parameters
from dispatch.deadlines import sign_of_life
from dispatch.errors import (
    DatabaseUnavailable,
    InvalidParameters,
    JobDisabled,
    TriggerBusy,
    UnknownJob,
)
from dispatch.handlers import REPLICATE
from dispatch.names import unknown
from dispatch.ports import Offer, Ports
from dispatch.settled import settled

MAX_CHAIN_BYTES = 1024 * 1024
PATIENCE_SECONDS = 5.0
"""How long `submit` waits for an answer of the database before it calls the outcome unknown."""
_RACES = 10

_SQL = statements.load("enqueue")


@dataclass(frozen=True, slots=True)
class RunHandle:
    """What a trigger hands back.

    ``created`` is False where the run was stored before, also under the very id that was asked for.
    ``requested_id`` is that id; where another run was handed back it resolves to ``run_id`` as an
    alias (R-T7). ``offerable`` says that a wake-up may be published once the run is committed.
    """

    run_id: UUID
    requested_id: UUID
    created: bool
    job: str
    queue: str
    priority: int
    offerable: bool
    stands_for: str | None = None
    """Where a run was handed back, why: ``active``, ``same_key`` or ``same_id``."""

    @property
    def offer(self) -> Offer:
        return Offer(self.run_id, self.queue, self.priority)


@dataclass(frozen=True, slots=True)
class Trigger:
    """A checked request for a run; making one raises InvalidParameters and touches no database."""

    job: str
    run_id: UUID
    parameters: Mapping[str, Any]
    later_jobs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        job: str,
        params: Mapping[str, Any] | None = None,
        *,
        run_id: UUID | str | None = None,
        countdown: float | timedelta | None = None,
        eta: datetime | None = None,
        priority: int | None = None,
        queue: str | None = None,
        idempotency_key: str | None = None,
        parent_run_id: UUID | str | None = None,
        chain: Sequence[Mapping[str, Any]] | None = None,
        actor: str = "api",
        accept_disabled: bool = False,
        schedule_id: UUID | None = None,
        scheduled_for: datetime | None = None,
    ) -> Trigger:
        if not isinstance(job, str) or not job:
            raise InvalidParameters("name the job to trigger, as a string")
        parameters.check_text(job, "the job's name")
        if chain and idempotency_key is not None:
            raise InvalidParameters(
                "a chain takes no idempotency key: its later steps have ids of their own, which a "
                "repetition would hand out for nothing"
            )
        delay, instant = parameters.start(countdown, eta)
        asked = parameters.run_id(run_id, "run_id")
        parent = parameters.run_id(parent_run_id, "parent_run_id")
        # Plain strings, so that the same parameters fit every driver of a caller's connection.
        found = asked or uuid4()
        return cls(
            job,
            found,
            {
                "job": job,
                "run_id": str(found),
                "params": parameters.params_json(params),
                "countdown": delay,
                "eta": instant,
                "priority": parameters.priority(priority),
                "queue": parameters.name(queue, "queue"),
                "key": parameters.name(idempotency_key, "idempotency_key", parameters.MAX_KEY),
                "key_seconds": settings.settings().idempotency_hours * 3600,
                "parent_run_id": None if parent is None else str(parent),
                "chain": _chain_json(chain) if chain else None,
                "actor": parameters.name(actor, "actor"),
                "id_handed_out": asked is not None,
                "accept_disabled": accept_disabled,
                "parameterless": REPLICATE,
                "by_schedule": schedule_id is not None,
                "schedule_id": None if schedule_id is None else str(schedule_id),
                "scheduled_for": scheduled_for,
                "detail": _detail(schedule_id, scheduled_for, parent),
            },
            tuple(step["job"] for step in chain or ()),
        )


def _detail(
    schedule_id: UUID | None, scheduled_for: datetime | None, parent: UUID | None
) -> str | None:
    """What the audit record tells beside who, what and when."""
    known = {
        "schedule_id": schedule_id,
        "scheduled_for": None if scheduled_for is None else scheduled_for.isoformat(),
        "parent_run_id": parent,
    }
    found = {name: str(value) for name, value in known.items() if value is not None}
    return json.dumps(found) if found else None


_STEP = frozenset({"job", "run_id", "params", "countdown", "priority", "queue"})


def _chain_json(steps: Sequence[Mapping[str, Any]]) -> str:
    """The later steps as ``job_run.chain`` holds them. Raises InvalidParameters."""
    for step in steps:
        if not isinstance(step, Mapping) or not {"job", "run_id"} <= step.keys() <= _STEP:
            raise InvalidParameters("a step of a chain is made by dispatch.chains.stored")
        Trigger.of(**step)
    return parameters.to_json([list(map(dict, steps))], "the chain", MAX_CHAIN_BYTES)


def enqueue(
    connection: AnyConnection, job: str, params: Mapping[str, Any] | None = None, **options: Any
) -> RunHandle:
    """Create a run in the caller's transaction, which stays open; offered after its commit (R-T2).

    ``connection`` is a SQLAlchemy Connection or Session, or a psycopg connection, to the control
    database. Where a psycopg connection is in autocommit mode and outside a transaction, the call
    is a transaction of its own. Options: ``run_id``, ``countdown`` (seconds from now by the
    database's clock) or ``eta``, ``priority`` (0 to 9), ``queue``, ``idempotency_key``,
    ``parent_run_id``, ``chain`` (steps of dispatch.chains), ``actor``.

    Raises UnknownJob, JobDisabled and InvalidParameters, which store nothing and leave the
    transaction usable; TriggerBusy where another open transaction was waited for for a second,
    after which PostgreSQL has aborted the caller's transaction (R-T4). Other errors of the
    driver pass through.
    """
    trigger = Trigger.of(job, params, **options)
    try:
        with _whole(connection):
            refuse_chain(connection, trigger)
            return admit(connection, trigger)
    except (psycopg.Error, DBAPIError) as error:
        raise_refusal(error, f"job {job!r}")
        raise


def admit(
    connection: AnyConnection,
    trigger: Trigger,
    *,
    offered: bool = False,
    notify: str | None = "work",
) -> RunHandle:
    """Create the run that ``trigger`` asks for, or hand back the one that stands for it.

    ``offered`` marks it as offered already, for a caller that publishes after its commit;
    ``notify`` is the kind of notification for a run that is due now, or None. A later one always
    notifies as `deadlines`. Raises as `enqueue` does, but the driver's errors as they come.
    """
    asked = {**trigger.parameters, "offered": offered, "notify": notify}
    for _ in range(_RACES):
        created = statements.row(connection, _SQL["enqueue"], asked)
        assert created is not None
        if created["id"] is not None:
            return RunHandle(
                run_id=trigger.run_id,
                requested_id=trigger.run_id,
                created=True,
                job=trigger.job,
                queue=created["queue"],
                priority=created["priority"],
                offerable=created["offerable"],
            )
        if created["keys"]:
            statements.rows(
                connection, _SQL["forget_key"], {**asked, "job_id": str(created["job_id"])}
            )
        handle = _stand_in(connection, trigger, asked)
        if handle is not None:
            return handle
    raise _outrun(trigger.job)


def _stand_in(
    connection: AnyConnection, trigger: Trigger, asked: Mapping[str, Any]
) -> RunHandle | None:
    """The run that stands for a trigger that created none; None where it is to be tried again."""
    found = statements.row(connection, _SQL["stand_in"], asked)
    assert found is not None
    outcome = found["outcome"]
    if outcome == "raced":
        return None
    if outcome in _REFUSALS:
        raise _REFUSALS[outcome](connection, trigger.job)
    if outcome == "same_id" and found["other_job"] != trigger.job:
        raise InvalidParameters(
            f"run_id {trigger.run_id} is a run of job {found['other_job']!r} already"
        )
    run_id = UUID(str(found["run_id"]))
    if outcome == "active" and asked["chain"] is not None:
        follow = {"run_id": str(run_id), "chain": asked["chain"]}
        followed = statements.row(connection, _SQL["follow_active_run"], follow)
        assert followed is not None
        if followed["id"] is None:
            return None  # it ended meanwhile: the step can be a run of its own
    return RunHandle(
        run_id=run_id,
        requested_id=trigger.run_id if asked["id_handed_out"] else run_id,
        created=False,
        job=trigger.job,
        queue=found["queue"] or "",
        priority=found["priority"] or 0,
        offerable=False,
        stands_for=outcome,
    )


def refuse_chain(connection: AnyConnection, trigger: Trigger) -> None:
    """Raise what the chain's later steps would raise as triggers: UnknownJob or JobDisabled."""
    if not trigger.later_jobs:
        return
    names = {"names": list(trigger.later_jobs)}
    for found in statements.rows(connection, _SQL["chain_jobs"], names):
        for column, outcome in _CONDITIONS:
            if not found[column]:
                raise _REFUSALS[outcome](connection, found["name"])


def submit(
    ports: Ports, job: str, params: Mapping[str, Any] | None = None, **options: Any
) -> RunHandle:
    """Create a run in a transaction of its own, then offer its wake-up. Options as for `enqueue`.

    Never fails nor hangs because the broker is away: the row is durable and the sweep offers it
    again (R-T4). A commit of unknown outcome is settled by repeating it under the same id (R-R7).

    Raises UnknownJob, JobDisabled, InvalidParameters; TriggerBusy where another open transaction
    was waited for for a second; none of these stored anything. DatabaseUnavailable where the
    control database is away; it names the id under which to repeat what may be stored.
    """
    trigger = Trigger.of(job, params, **options)
    handle, is_repeated = settled(
        lambda: _admit_past_races(trigger),
        f"the trigger of {job!r}",
        refuse=lambda error: raise_refusal(error, f"job {job!r}"),
        advice=". Repeat it with this id; a run that was stored is not doubled: "
        f"trigger.apply_async(({job!r},), {{...}}, task_id={str(trigger.run_id)!r})",
    )
    if is_repeated and handle.run_id == trigger.run_id:
        # Stored by the attempt whose answer was lost, as far as anybody can tell.
        handle = replace(handle, created=True)
    if handle.offerable:
        offers.publish(ports, [handle.offer])
    return handle


def _admit_past_races(trigger: Trigger) -> RunHandle:
    for _ in range(_RACES):
        # R-T6's race took the run from under its key, so neither was stored.
        with suppress(psycopg.errors.ForeignKeyViolation):
            return _admit_alone(trigger)
    raise _outrun(trigger.job)


def _admit_alone(trigger: Trigger) -> RunHandle:
    """One statement and its own commit: in autocommit mode that is one round trip."""
    told = sign_of_life.is_due(settings.settings().lease_seconds)
    with (
        session.autocommitting(PATIENCE_SECONDS) as connection,
        connection.transaction() if trigger.later_jobs else nullcontext(),
    ):
        refuse_chain(connection, trigger)
        handle = admit(connection, trigger, offered=True, notify="deadlines" if told else None)
    if told and handle.created:
        sign_of_life.given()
    return handle


def _whole(connection: AnyConnection) -> Any:
    """A transaction for a psycopg connection that would commit each statement by itself."""
    if not isinstance(connection, Connection | Session | psycopg.Connection):
        raise InvalidParameters(
            "connection must be a SQLAlchemy Connection or Session or a psycopg connection, not "
            f"{type(connection).__name__}; under asyncio call this through run_sync"
        )
    if (
        isinstance(connection, psycopg.Connection)
        and connection.autocommit
        and connection.info.transaction_status == TransactionStatus.IDLE
    ):
        return connection.transaction()
    return nullcontext()


def _outrun(job: str) -> TriggerBusy:
    return TriggerBusy(f"job {job!r}: other triggers of it keep getting in between; try again")


def _unknown(connection: AnyConnection, job: str) -> UnknownJob:
    names = [str(found["name"]) for found in statements.rows(connection, _SQL["job_names"])]
    return UnknownJob(unknown("job", job, names))


def _disabled(connection: AnyConnection, job: str) -> JobDisabled:
    return JobDisabled(f"job {job!r} is disabled", f"celery -A tasks job enable {job}")


def _source_disabled(connection: AnyConnection, job: str) -> JobDisabled:
    return JobDisabled(
        f"the source binding of job {job!r} is disabled",
        f"celery -A tasks job enable {job} --binding source",
    )


def _sink_disabled(connection: AnyConnection, job: str) -> JobDisabled:
    return JobDisabled(
        f"the sink binding of job {job!r} is disabled",
        f"celery -A tasks job enable {job} --binding sink",
    )


def _takes_no_params(connection: AnyConnection, job: str) -> InvalidParameters:
    return InvalidParameters(
        f"job {job!r} is a replication, which takes no parameters: what it does is its definition. "
        f"Show it with: celery -A tasks job show {job}"
    )


_REFUSALS: Mapping[str, Callable[[AnyConnection, str], Exception]] = {
    "takes_no_params": _takes_no_params,
    "unknown": _unknown,
    "disabled": _disabled,
    "source_disabled": _source_disabled,
    "sink_disabled": _sink_disabled,
}
_CONDITIONS = (
    ("known", "unknown"),
    ("enabled", "disabled"),
    ("source_enabled", "source_disabled"),
    ("sink_enabled", "sink_disabled"),
)


def raise_refusal(error: BaseException, subject: str) -> None:
    """Raise our own error where the driver's stands for one; else return."""
    code = sqlstate(error)
    if code in {"55P03", "40P01"}:
        raise TriggerBusy(
            f"{subject}: another open transaction holds it, its key or its active run; nothing was "
            "stored. Try again when that has ended"
        ) from None
    if code in {"22P05", "22021"}:
        raise InvalidParameters(
            "the parameters contain a character that the control database cannot store"
        ) from None
    if code == "42P01":
        raise DatabaseUnavailable(
            "this connection does not reach Claimcheck's tables: it must go to the control "
            "database (DATABASE_URL), migrated with: celery -A tasks db upgrade"
        ) from None
