"""One pass over what is due: expired leases, schedules, runs to offer, runs to forget.

Each part stands alone: what fails in one is logged and tried again after a growing pause, and
never keeps the sweep from the others (R-D9). The work needs no broker and no free worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy.exc import DBAPIError

from db.failures import first_line, is_connection_lost
from dispatch import offers, recovery, retention
from dispatch.deadlines import EVERYTHING, Agenda, Scope, Waiting, look
from dispatch.ports import Ports
from dispatch.schedules import ScheduleReconciler

logger = logging.getLogger("claimcheck.sweep")

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
OFFER_PAUSE_SECONDS = 1.0
"""How soon a queue that had no room for all its wake-ups is looked at again, at the earliest."""
SET_ASIDE_SECONDS = 10.0
LONGEST_SET_ASIDE_SECONDS = 600.0
FORGET_SECONDS = 3600.0
"""How often finished runs are forgotten at most; the rest of a large batch follows at once."""


@dataclass(slots=True)
class Pause:
    """When a part that left something due tries again; doubles while nothing moves. Seconds."""

    first: float
    longest: float
    until: float = 0.0
    length: float = 0.0

    def after(self, now: float, *, left: bool, moved: bool) -> None:
        """Note how an attempt ended: whether something due is ``left``, whether any of it moved."""
        if not left:
            self.length = self.until = 0.0
            return
        self.length = self.first if moved else min(self.longest, max(self.first, self.length * 2))
        self.until = now + self.length

    def rest(self, now: float, seconds: float) -> None:
        """Leave the part alone for so long, as it has done what it could."""
        self.length = 0.0
        self.until = now + seconds


@dataclass(slots=True)
class _Part:
    """A duty of the sweep, with its own pause; ``moved`` is None where it was not attempted."""

    name: str
    pause: Pause
    moved: bool | None = None

    def is_due(self, due: float | None, now: float) -> bool:
        return due is not None and due <= now and self.pause.until <= now

    def attempt(self, work: Callable[[], bool], now: float) -> None:
        """Do ``work``, which tells whether anything moved. Raises where the database is away."""
        self.moved = False
        try:
            self.moved = work()
        except Exception as error:
            if is_connection_lost(error):
                raise
            known = isinstance(error, psycopg.Error | DBAPIError)
            logger.error(
                "the sweep's part %r failed and is tried again: %s",
                self.name,
                first_line(error) if known else type(error).__name__,
                exc_info=None if known else error,
            )
            self.pause.after(now, left=True, moved=False)


def _part(name: str) -> _Part:
    return _Part(name, Pause(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS))


class _Aside:
    """Runs that a part could not work on, each left alone for a growing while (R-D9)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[UUID, float] = {}
        self._lengths: dict[UUID, float] = {}

    def add(self, run_id: UUID) -> None:
        now = self._clock()
        # What nobody tried for so long is gone.
        over = now - LONGEST_SET_ASIDE_SECONDS
        self.forget([other for other, until in self._until.items() if until < over])
        length = min(
            LONGEST_SET_ASIDE_SECONDS, self._lengths.get(run_id, SET_ASIDE_SECONDS / 2) * 2
        )
        self._lengths[run_id] = length
        self._until[run_id] = now + length

    def forget(self, run_ids: Iterable[UUID]) -> None:
        for run_id in run_ids:
            self._until.pop(run_id, None)
            self._lengths.pop(run_id, None)

    def resting(self) -> list[UUID]:
        now = self._clock()
        return [run_id for run_id, until in self._until.items() if until > now]

    def back(self) -> set[UUID]:
        """Those whose time is up."""
        return set(self._until).difference(self.resting())

    def next(self) -> list[float]:
        return list(self._until.values())


class Sweep:
    """The sweeps of one process, which never overlap (R-D4). All times are monotonic, in seconds.

    ``agenda`` holds the known deadlines, and `next_deadline` tells when to sweep again.
    """

    def __init__(
        self, ports: Ports, *, clock: Callable[[], float] = time.monotonic, grace: float = 10.0
    ) -> None:
        self.agenda = Agenda()
        self._ports = ports
        self._clock = clock
        self._longest_offer_pause = max(OFFER_PAUSE_SECONDS, grace)
        self._reconciler = ScheduleReconciler()
        self._schedules = _part("schedules")
        self._leases = _part("leases")
        # Work that can wait: what fails there for long is tried as often as it is done.
        self._retention = _Part("retention", Pause(OFFER_PAUSE_SECONDS, FORGET_SECONDS))
        self._queues: dict[str, _Part] = {}
        self._unrecovered = _Aside(clock)
        self._unoffered = _Aside(clock)

    def next_deadline(self) -> float | None:
        """When something is to be done next, or None where nothing is known."""
        times = self._unrecovered.next()
        for due, part in (
            (self.agenda.schedule, self._schedules),
            (self.agenda.lease, self._leases),
            (self.agenda.retention, self._retention),
        ):
            if due is not None:
                times.append(max(due, part.pause.until))
        for queue, due in self.agenda.queues().items():
            times.append(max(due, self._queue(queue).pause.until))
        return min(times, default=None)

    def run(self, connection: psycopg.Connection[Any], scopes: Sequence[Scope] = ()) -> bool:
        """Do what is due, after a look at ``scopes``, which may have changed (R-D6).

        ``connection`` is for the looks, in autocommit mode; each piece of work has a transaction of
        its own. Returns whether anything was done. Raises where the database is away: the agenda
        is stale then.
        """
        if scopes:
            self._look(connection, scopes)
        for part in (self._schedules, self._leases, self._retention, *self._queues.values()):
            part.moved = None
        self._recover()
        self._settle()
        acted = self._leases.moved is not None or self._schedules.moved is not None
        if acted:
            self._look(connection, [EVERYTHING])
            self._note(self._leases, self.agenda.lease)
            self._note(self._schedules, self.agenda.schedule)
        else:
            # Known for a while: what is to be offered may be gone or blocked since.
            due = [queue for queue in self._due_queues() if not _covered(queue, scopes)]
            self._look(connection, [Scope(queue=queue, work=True) for queue in due])
        self._offer(connection, scopes)
        acted |= any(part.moved is not None for part in self._queues.values())
        self._forget(connection, acted)
        return acted

    def _look(self, connection: psycopg.Connection[Any], scopes: Sequence[Scope]) -> None:
        look(connection, self.agenda, scopes, set_aside=self._unrecovered.resting())

    def _note(self, part: _Part, due: float | None) -> None:
        """Set the part's pause by what is due after its attempt."""
        now = self._clock()
        if part.moved is not None:
            part.pause.after(now, left=due is not None and due <= now, moved=part.moved)

    def _settle(self) -> None:
        def settle() -> bool:
            done = self._reconciler.settle_due()
            offers.publish(self._ports, done.offers)
            return bool(done.settled or done.failed)

        now = self._clock()
        if self._schedules.is_due(self.agenda.schedule, now):
            self._schedules.attempt(settle, now)

    def _recover(self) -> None:
        now = self._clock()
        back = self._unrecovered.back()

        def recover() -> bool:
            done = recovery.recover_expired(self._ports, set_aside=self._unrecovered.resting())
            for run_id in done.failed:
                self._unrecovered.add(run_id)
            self._unrecovered.forget(back.difference(done.failed))
            return bool(done.recovered or done.failed)

        if self._leases.is_due(self.agenda.lease, now) or back:
            self._leases.attempt(recover, now)

    def _queue(self, queue: str) -> _Part:
        return self._queues.setdefault(
            queue,
            _Part(f"offers of {queue}", Pause(OFFER_PAUSE_SECONDS, self._longest_offer_pause)),
        )

    def _due_queues(self) -> list[str]:
        now = self._clock()
        return [
            queue
            for queue, due in self.agenda.queues().items()
            if self._queue(queue).is_due(due, now)
        ]

    def _offer(self, connection: psycopg.Connection[Any], scopes: Sequence[Scope]) -> None:
        now = self._clock()
        freed = [scope for scope in scopes if scope.frees_work]
        told = {scope.queue for scope in scopes}
        for queue in self.agenda.queues():
            part = self._queue(queue)
            due = self.agenda.of_queue(queue, now)
            # What was offered while it was blocked, and is not any more (R-D7).
            again = [
                waiting
                for waiting in self.agenda.of_queue(queue, now, regardless=True)
                if waiting not in due and any(scope.job in {None, waiting.job} for scope in freed)
            ]
            if (due or again) and (part.pause.until <= now or queue in told):
                part.attempt(self._offering(connection, queue, due, again), now)
                # Also where nothing moved: another beat may have been quicker.
                self._look(connection, [Scope(queue=queue, work=True)])
                self._note(part, self.agenda.queues().get(queue))

    def _offering(
        self,
        connection: psycopg.Connection[Any],
        queue: str,
        due: Sequence[Waiting],
        again: Sequence[Waiting],
    ) -> Callable[[], bool]:
        def offer() -> bool:
            published = 0
            for waiting, regardless in ((due, False), (again, True)):
                done = offers.offer_waiting(
                    self._ports,
                    connection,
                    queue,
                    waiting,
                    regardless=regardless,
                    set_aside=self._unoffered.resting(),
                )
                published += done.published
                for run_id in done.failed:
                    self._unoffered.add(run_id)
                self._unoffered.forget(done.marked)
            return published > 0

        return offer

    def _forget(self, connection: psycopg.Connection[Any], acted: bool) -> None:
        now = self._clock()
        overdue = self._retention.is_due(self.agenda.retention, now)
        if not overdue and not (acted and self._retention.pause.until <= now):
            return
        more = False

        def prune() -> bool:
            nonlocal more
            more = retention.prune(connection).more
            return True

        self._retention.attempt(prune, now)
        if overdue:
            self._look(connection, [EVERYTHING])
        if self._retention.moved:
            self._retention.pause.rest(
                self._clock(), OFFER_PAUSE_SECONDS if more else FORGET_SECONDS
            )


def _covered(queue: str, scopes: Sequence[Scope]) -> bool:
    return any(scope.job is None and scope.queue in {None, queue} for scope in scopes)
