"""What the system has to do next, and when: read from what is stored, kept as an agenda (R-D3).

The database tells each obligation as seconds from now by its own clock; here they become times of
the monotonic clock, so a wrong wall clock changes nothing (R-L2).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg

from db import settings, statements

LONGEST_GRACE_SECONDS = 600.0
"""How long the grace of a run that was offered often may grow (R-D3)."""

_SQL = statements.load("deadlines")


class SignOfLife:
    """When this process must tell the beat that runs and leases come from it (R-D3).

    Claims and enqueues do not notify one by one; a process that does either notifies at most once
    each third of a lease. Times are monotonic, in seconds. Safe to share between threads, where
    two of them may notify at once, which does no harm.
    """

    def __init__(self) -> None:
        self._last: float | None = None

    def is_due(self, lease_seconds: float) -> bool:
        """Whether the next enqueue or claim should notify; call `given` after it has committed."""
        return self._last is None or time.monotonic() - self._last >= lease_seconds / 3

    def given(self) -> None:
        """A notification of kind `deadlines` was committed just now."""
        self._last = time.monotonic()

    def forget(self) -> None:
        """This process has given none yet."""
        self._last = None


sign_of_life = SignOfLife()
# A forked child is a process of its own, whose leases the beat has not heard of.
os.register_at_fork(after_in_child=sign_of_life.forget)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a look or a notification is about: one queue, one job, or everything (R-D6).

    ``work`` says that only eligible work may have changed, not the deadlines.
    """

    queue: str | None = None
    job: str | None = None
    work: bool = False

    @classmethod
    def of(cls, payload: str) -> Scope:
        """Read a notification, ``KIND queue:NAME``, ``KIND job:NAME`` or ``KIND all``.

        What does not read so means everything: to look once too often loses nothing.
        """
        kind, _, scope = payload.partition(" ")
        what, _, name = scope.partition(":")
        if kind not in {"work", "deadlines"} or (scope != "all" and not name):
            return EVERYTHING
        return cls(
            queue=name if what == "queue" else None,
            job=name if what == "job" else None,
            work=kind == "work",
        )

    @property
    def schedules(self) -> bool:
        """Whether the next fire of a schedule may have moved."""
        return not self.work and self.queue is None

    @property
    def leases(self) -> bool:
        """Whether the next expiry of a lease may have moved."""
        return not self.work and self.job is None

    @property
    def frees_work(self) -> bool:
        """Whether runs that were offered before may have become eligible again (R-D7)."""
        return self.work and self.queue is None


EVERYTHING = Scope()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting runs of one queue, job and number of offers; ``due`` is when to offer the first."""

    queue: str
    job_id: UUID
    job: str
    level: int
    room: int
    due: float


@dataclass(slots=True)
class Agenda:
    """The known deadlines, as times of the monotonic clock; None where there is none."""

    schedule: float | None = None
    lease: float | None = None
    retention: float | None = None
    waiting: list[Waiting] = field(default_factory=list)

    def take(self, scope: Scope, rows: Iterable[dict[str, Any]], now: float) -> None:
        """Put what a look at ``scope`` found in the place of what was known of it."""
        found: dict[str, float] = {}
        waiting = []
        for row in rows:
            due = now + row["seconds"]
            if row["part"] == "offer":
                waiting.append(
                    Waiting(row["queue"], row["job_id"], row["job"], row["level"], row["room"], due)
                )
            else:
                found[row["part"]] = due
        if scope.schedules:
            known = self.schedule if scope.job is not None else None
            # Of one job only: the earlier of both may be early, and is never late.
            self.schedule = _earlier(known, found.get("schedule"))
        if scope.leases:
            self.lease = found.get("lease")
        if scope.schedules and scope.job is None:
            self.retention = found.get("retention")
        self.waiting = [
            known
            for known in self.waiting
            if (scope.queue is not None and known.queue != scope.queue)
            or (scope.job is not None and known.job != scope.job)
        ] + waiting

    def of_queue(self, queue: str, now: float, *, regardless: bool = False) -> list[Waiting]:
        """What is to be offered in ``queue`` now; ``regardless`` of the grace of old offers."""
        return [
            known
            for known in self.waiting
            if known.queue == queue
            and known.room > 0
            and (known.due <= now or (regardless and known.level > 0))
        ]

    def queues(self) -> dict[str, float]:
        """Of each queue with waiting runs, when the first is to be offered."""
        first: dict[str, float] = {}
        for known in self.waiting:
            first[known.queue] = min(known.due, first.get(known.queue, known.due))
        return first


def look(
    connection: psycopg.Connection[Any],
    agenda: Agenda,
    scopes: Sequence[Scope] = (EVERYTHING,),
    *,
    set_aside: Iterable[UUID] = (),
) -> None:
    """Read what is due next of ``scopes`` and put it into ``agenda``; one statement for each scope.

    ``set_aside`` are held runs whose recovery failed and is tried again later (R-D9).
    Raises psycopg.Error.
    """
    chosen = settings.settings()
    for scope in merged(scopes):
        rows = statements.rows(
            connection,
            _SQL["look"],
            {
                "queue": scope.queue,
                "job": scope.job,
                "schedules": scope.schedules,
                "leases": scope.leases,
                "set_aside": [str(run_id) for run_id in set_aside],
                "grace": chosen.offer_grace_seconds,
                "grace_cap": LONGEST_GRACE_SECONDS,
                "retention": chosen.retention_days * 86_400
                if scope.schedules and scope.job is None
                else 0.0,
            },
        )
        agenda.take(scope, rows, time.monotonic())


def merged(scopes: Sequence[Scope]) -> list[Scope]:
    """The scopes without those that another one covers; many of them become one look at all."""
    wanted = list(dict.fromkeys(scopes))
    everything = [scope for scope in wanted if scope.queue is None and scope.job is None]
    if everything or len(wanted) > 8:
        return [Scope(work=all(scope.work for scope in wanted))]
    whole = {(scope.queue, scope.job) for scope in wanted if not scope.work}
    return [scope for scope in wanted if not scope.work or (scope.queue, scope.job) not in whole]


def _earlier(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
