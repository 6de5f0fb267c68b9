"""What becomes of a run whose holder is gone: exactly one of three ends (R-R1 to R-R6, R-L5)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from db import session, statements
from db.failures import first_line, is_connection_lost
from dispatch import children
from dispatch.finalization import Finished, RunFinalizationService, unsuccessful
from dispatch.policy import DESTRUCTIVE_MODE, RetryPolicy
from dispatch.ports import Ports

LOCK_SECONDS = 1.0
_LEASES = statements.load("leases")
_FINISH = statements.load("finish")
_MESSAGES: Mapping[str, str] = {
    "lease_expired": "the lease expired: its worker died, hung or lost the control database",
    "worker_lost": "the process that worked on the run died",
}
_PARTIAL_SINK = "the worker was lost during a complete load: the sink may hold a part of the rows"
_NEW_ROWS = "the worker was lost: the sink holds its old content or the new rows, all of them"

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
    service = RunFinalizationService(ports)
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
            service.announce(ended)
            service.offer_freed(_rows, ended)
            found.recovered.append(ended)
    return found


def _rows(statement: LiteralString, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    with session.transaction(lock_seconds=LOCK_SECONDS) as connection:
        return statements.rows(connection, statement, parameters)


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
    delay = policy.next_delay(row["attempt"], row["max_attempts"], code, row["previous_code"])
    message = _MESSAGES[code]
    if policy.allows(code) and delay is None:
        message += f"; this was attempt {row['attempt']} of {row['max_attempts']}"
    ending = unsuccessful(delay, code, message, warning=_left_by(row, definition))
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
    logger.warning(
        "run %s of %s held by %s: %s, now %s", run_id, row["job_name"], row["executor"], code,
        ended["status"],
    )  # fmt: skip
    return Finished.of(ended, ending.delay)


def _left_by(run: Mapping[str, Any], definition: Mapping[str, Any]) -> str | None:
    """What a lost attempt may have left, for one that is cancelled (R-F4)."""
    if definition.get("tables") is not None:
        # It moves no rows itself; its children do.
        return children.go_on(run["id"]) if run["has_children"] else None
    mode = definition.get("mode")
    if mode == DESTRUCTIVE_MODE:
        return _PARTIAL_SINK
    return None if mode is None else _NEW_ROWS


def release_lease(connection: psycopg.Connection[Any], executor: str, ports: Ports) -> list[UUID]:
    """End the leases of a dead child by its unique identity, without its tokens (R-L5).

    The runs are recovered at once, with ``worker_lost``, where they can be; else the sweep does it,
    which is told. Their ids. ``connection`` is in autocommit mode, and nothing else asks the
    database: its patience bounds each answer. Raises psycopg.Error.
    """
    released = [
        row["id"] for row in statements.rows(connection, _LEASES["release"], {"executor": executor})
    ]
    service = RunFinalizationService(ports)
    for run_id in released:
        try:
            with connection.transaction():
                ended = recover_run(connection, run_id, "worker_lost")
        except psycopg.Error as error:
            if is_connection_lost(error):
                raise
            logger.error("run %s cannot be recovered: %s", run_id, first_line(error))
            continue
        if ended is not None:
            service.announce(ended)
            service.offer_freed(partial(statements.rows, connection), ended)
    return released
