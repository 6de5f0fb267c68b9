"""What becomes of a run whose holder is gone: exactly one of three ends (R-R1 to R-R6, R-L5)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from db import session, statements
from db.failures import first_line, is_connection_lost
from dispatch import offers
from dispatch.finalization import Ending, Finished, freed_parameters
from dispatch.lifecycle import JobRunStatus
from dispatch.policy import DESTRUCTIVE_MODE, RetryPolicy
from dispatch.ports import Offer, Ports

LOCK_SECONDS = 1.0
_LEASES = statements.load("leases")
_FINISH = statements.load("finish")
_MESSAGES: Mapping[str, str] = {
    "lease_expired": "the lease expired: its worker died, hung or lost the control database",
    "worker_lost": "the process that worked on the run died",
}
_PARTIAL_SINK = "the worker was lost during a complete load: the sink may hold a part of the rows"

logger = logging.getLogger("claimcheck.recovery")


@dataclass(slots=True)
class Recovery:
    """What a pass did: the runs that it recovered, and those that it could not (R-D9)."""

    recovered: list[Finished] = field(default_factory=list)
    failed: list[UUID] = field(default_factory=list)


def recover_expired(ports: Ports, *, limit: int = 100, set_aside: Sequence[UUID] = ()) -> Recovery:
    """Recover the runs whose lease has run out, each in a transaction of its own.

    Any number of processes may do so at once; none waits for another (R-R2). What was set aside is
    left alone. A run that cannot be recovered is logged and named in ``failed``. Raises the
    driver's error where the database is away.
    """
    found = Recovery()
    with session.transaction(lock_seconds=LOCK_SECONDS) as connection:
        expired = statements.rows(
            connection, _LEASES["expired"], {"limit": limit, "set_aside": list(set_aside)}
        )
    for row in expired:
        run_id = row["id"]
        try:
            with session.transaction(lock_seconds=LOCK_SECONDS) as connection:
                ended = recover_run(connection, run_id)
        except (psycopg.Error, DBAPIError) as error:
            if is_connection_lost(error):
                raise
            logger.error("run %s cannot be recovered: %s", run_id, first_line(error))
            found.failed.append(run_id)
            continue
        if ended is not None:
            announce(ports, ended)
            found.recovered.append(ended)
    return found


def recover_run(
    connection: Connection | psycopg.Connection[Any], run_id: UUID, code: str = "lease_expired"
) -> Finished | None:
    """Recover one run in the caller's transaction, if its lease has run out at this moment.

    A cancel that was asked for becomes CANCELLED; an eligible retry RETRY_SCHEDULED with its new
    attempt; the rest FAILED with ``code`` (R-R1). None where there is nothing to recover, or
    another has it. Raises the driver's errors.
    """
    row = statements.row(connection, _LEASES["lock_expired"], {"run_id": run_id})
    if row is None:
        return None
    definition = row["definition"] if isinstance(row["definition"], Mapping) else {}
    policy = RetryPolicy.of(definition)
    again = row["attempt"] < row["max_attempts"] and policy.allows(code)
    message = _MESSAGES[code]
    if policy.allows(code) and not again:
        message += f"; this was attempt {row['attempt']} of {row['max_attempts']}"
    ending = Ending(
        JobRunStatus.RETRY_SCHEDULED if again else JobRunStatus.FAILED,
        error_code=code,
        error_message=message,
        warning=_PARTIAL_SINK if definition.get("mode") == DESTRUCTIVE_MODE else None,
        delay=policy.delay(row["attempt"], code, row["previous_code"]) if again else 0.0,
    )
    ended = statements.row(
        connection,
        _FINISH["finish"],
        {
            **ending.parameters(),
            "run_id": run_id,
            "token": row["lease_token"],
            "actor": "recovery",
            "in_transaction": True,
        },
    )
    if ended is None or ended["id"] is None:
        return None
    due = []
    if ended["next_run_id"] is not None and ending.delay == 0:
        due.append(Offer(ended["next_run_id"], ended["queue"], ended["priority"]))
    logger.warning(
        "run %s of %s held by %s: %s, now %s", run_id, row["job_name"], row["executor"], code,
        ended["status"],
    )  # fmt: skip
    return Finished.of(ended, due)


def release_lease(
    connection: psycopg.Connection[Any], executor: str, ports: Ports | None = None
) -> list[UUID]:
    """End the leases of a dead child by its unique identity, without its tokens (R-L5).

    The runs are recovered at once, with ``worker_lost``, where they can be; else the sweep does it,
    which is told. Their ids. ``connection`` is in autocommit mode. Raises psycopg.Error.
    """
    released = [
        row["id"] for row in statements.rows(connection, _LEASES["release"], {"executor": executor})
    ]
    for run_id in released:
        try:
            with connection.transaction():
                ended = recover_run(connection, run_id, "worker_lost")
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            logger.error("run %s cannot be recovered: %s", run_id, first_line(error))
            continue
        if ended is not None and ports is not None:
            announce(ports, ended)
    return released


def announce(ports: Ports, ended: Finished) -> None:
    """Publish the wake-ups of a due new attempt and of what the end freed, and its event."""
    due = list(ended.offers)
    if ended.job_id is not None and (ended.exclusive or ended.slot_key is not None):
        due += _freed(ended)
    if due:
        offers.publish(ports, due)
    ports.emit(ended.event)


def _freed(ended: Finished) -> list[Offer]:
    try:
        with session.transaction(lock_seconds=LOCK_SECONDS) as connection:
            row = statements.row(
                connection,
                _FINISH["offer_freed"],
                freed_parameters(ended, turn=ended.exclusive, slot=True),
            )
    except (psycopg.Error, DBAPIError) as error:
        # A hint that is lost costs the time until the sweep.
        logger.warning("what run %s freed was not offered: %s", ended.run_id, first_line(error))
        return []
    return [] if row is None else [Offer(row["id"], row["queue"], row["priority"])]
