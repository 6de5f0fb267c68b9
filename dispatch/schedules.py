"""Due schedules: each fire time settled exactly once, under any number of beats (R-D1, R-D2)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from db import session, statements
from db.failures import is_connection_lost, sqlstate
from dispatch import parameters
from dispatch.enqueue import RunHandle, Trigger, admit
from dispatch.errors import JobDisabled
from dispatch.firetimes import Cron, Every, FireTimes
from dispatch.misfires import Misfire, settle
from dispatch.ports import Offer

logger = logging.getLogger("claimcheck.schedules")

LOCK_SECONDS = 1.0
MOST_AT_ONCE = 100
"""How many schedules one pass settles before the beat looks at its other duties."""
_BUSY = frozenset({"55P03", "40P01", "40001"})

_SQL = statements.load("schedules")


@dataclass(slots=True)
class Reconciled:
    """What one pass did."""

    settled: int = 0
    failed: int = 0
    offers: list[Offer] = field(default_factory=list)


class ScheduleReconciler:
    """Settles due fire times: a run for each that fires, an outcome for each, and the next one."""

    def settle_due(self, most: int = MOST_AT_ONCE) -> Reconciled:
        """Settle the schedules that are due now, each in a transaction of its own.

        A schedule that cannot be settled is logged and backed off, and never keeps the pass from
        the rest (R-D9); one that another transaction holds is left to it. The runs are marked as
        offered: publish the offers. Raises the driver's error where the database is away.
        """
        done = Reconciled()
        passed: list[str] = []
        while len(passed) < most:
            found: Mapping[str, Any] | None = None
            try:
                with session.transaction(lock_seconds=LOCK_SECONDS) as connection:
                    found = statements.row(
                        connection, _SQL["lock_due_schedule"], {"passed": passed}
                    )
                    if found is None:
                        return done
                    misfire = Misfire(found["misfire"])
                    handles = _settle(connection, found, fire_times(found), misfire, offered=True)
                done.settled += 1
                done.offers += [handle.offer for handle in handles if handle.offerable]
            except Exception as error:
                if found is None or is_connection_lost(error):
                    raise
                if sqlstate(error) not in _BUSY:
                    done.failed += 1
                    _back_off(found, error)
            passed.append(str(found["id"]))
        return done

    def settle_before_change(self, connection: Connection | Session, schedule_id: UUID) -> datetime:
        """Settle what is due of one schedule, in the transaction that is about to change it (R-D2).

        What is on time fires; what was missed is skipped, whatever the misfire policy.
        Returns the moment, in database time, up to which they are settled: the changed
        schedule's next fire is the first after it. A schedule whose stored times cannot be read
        has none to settle. Locks the schedule's row. Raises the driver's errors.
        """
        found = statements.row(connection, _SQL["lock_schedule"], {"schedule_id": str(schedule_id)})
        assert found is not None
        try:
            times = fire_times(found)
        except ValueError as error:
            logger.warning(
                "schedule %s is changed, its due fire times are void: %s", found["name"], error
            )
        else:
            _settle(connection, found, times, None, offered=False)
        moment = found["now"]
        assert isinstance(moment, datetime)
        return moment


def fire_times(stored: Mapping[str, Any]) -> FireTimes:
    """The fire times of a stored schedule. Raises a ValueError that says what is wrong with it."""
    if stored["every_seconds"] is not None:
        return Every(stored["every_seconds"], stored["anchor_at"])
    return Cron(stored["cron"], stored["timezone"])


def _settle(
    connection: Connection | Session,
    stored: Mapping[str, Any],
    times: FireTimes,
    misfire: Misfire | None,
    *,
    offered: bool,
) -> list[RunHandle]:
    """Settle the due fire times of a locked schedule and move it on; what became of the fires."""
    if stored["next_fire_at"] is None or stored["next_fire_at"] > stored["now"]:
        return []
    plan = settle(times, stored["next_fire_at"], stored["now"], misfire)
    schedule = {"schedule_id": str(stored["id"])}
    asked = {**schedule, "slots": [*plan.fire, *(skipped.fire_time for skipped in plan.skipped)]}
    settled = {row["fire_at"] for row in statements.rows(connection, _SQL["settled_slots"], asked)}
    outcomes = _Outcomes()
    if plan.more_skipped and plan.first_skipped is not None:
        outcomes.skip(
            plan.first_skipped, f"missed, as {plan.more_skipped} fire times from this one on"
        )
    for skipped in plan.skipped:
        outcomes.skip(skipped.fire_time, skipped.reason)
    handles = []
    for fire_time in plan.fire:
        if fire_time in settled:
            continue
        trigger = Trigger.of(
            stored["job"],
            actor=f"schedule {stored['name']}"[: parameters.MAX_NAME],
            schedule_id=stored["id"],
            scheduled_for=fire_time,
        )
        try:
            handle = admit(connection, trigger, offered=offered, notify=None if offered else "work")
        except JobDisabled as refusal:
            outcomes.skip(fire_time, refusal.reason)
            continue
        handles.append(handle)
        if handle.created:
            outcomes.run(fire_time, handle.run_id)
        else:
            outcomes.skip(fire_time, f"run {handle.run_id} of the job was active", handle.run_id)
    statements.rows(connection, _SQL["record_slots"], {**schedule, **outcomes.columns()})
    moved = {
        "next_fire_at": plan.next_fire_at,
        "last_fire_at": plan.fire[-1] if plan.fire else None,
    }
    statements.rows(connection, _SQL["move_schedule"], {**schedule, **moved})
    return handles


class _Outcomes:
    """The outcomes of fire times, as columns for one insert."""

    def __init__(self) -> None:
        self._rows: list[tuple[datetime, str, str | None, str | None]] = []

    def run(self, fire_time: datetime, run_id: UUID) -> None:
        self._rows.append((fire_time, "run", None, str(run_id)))

    def skip(self, fire_time: datetime, reason: str, run_id: UUID | None = None) -> None:
        self._rows.append((fire_time, "skipped", reason, None if run_id is None else str(run_id)))

    def columns(self) -> dict[str, list[Any]]:
        names = ("fire_at", "outcome", "reason", "run_id")
        return {name: [row[place] for row in self._rows] for place, name in enumerate(names)}


def _back_off(stored: Mapping[str, Any], error: Exception) -> None:
    """Report a schedule that cannot be settled, and let it wait longer each time (R-D9)."""
    asked = {"schedule_id": str(stored["id"]), "next_fire_at": stored["next_fire_at"]}
    try:
        with session.transaction(lock_seconds=LOCK_SECONDS) as connection:
            moved = statements.row(connection, _SQL["back_off_schedule"], asked)
    except DBAPIError as again:
        if is_connection_lost(again):
            raise
        moved = None
    logger.error(
        "schedule %s of job %s cannot be settled (%s: %s); it is tried again %s",
        stored["name"],
        stored["job"],
        type(error).__name__,
        error if isinstance(error, ValueError) else sqlstate(error) or "see the code",
        "at once" if moved is None else f"at {moved['retry_at'].isoformat()}",
        exc_info=None if isinstance(error, ValueError | DBAPIError) else error,
    )
