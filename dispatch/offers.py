"""Wake-ups: bounded, repeated when they may be lost, and never more than a hint (R-D5, R-T4)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg

from db import settings, statements
from db.failures import first_line, is_connection_lost
from dispatch.deadlines import LONGEST_GRACE_SECONDS, Waiting
from dispatch.ports import Capacity, Offer, Ports

logger = logging.getLogger("claimcheck.offers")
_SQL = statements.load("deadlines")


def room(capacity: Capacity) -> int:
    """How many more wake-ups a queue may hold: twice the fleet's executors, less those it holds."""
    return max(0, 2 * capacity.executors - capacity.queued)


def publish(ports: Ports, offers: Iterable[Offer]) -> int:
    """Publish wake-ups of committed runs as far as their queues have room; how many went out.

    A run that finds no room needs none: its queue's wake-ups outlast its commit, and the executors
    that take them go on to it (R-C1). Never raises.
    """
    by_queue: dict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        by_queue[offer.queue].append(offer)
    published = 0
    for queue, waiting in by_queue.items():
        free = room(ports.capacity(queue))
        if free:
            published += ports.offer(waiting[:free])
    return published


@dataclass(slots=True)
class Offered:
    """How many wake-ups went out, and which runs were marked, or could not be (R-D9)."""

    published: int = 0
    marked: set[UUID] = field(default_factory=set)
    failed: list[UUID] = field(default_factory=list)


def offer_waiting(
    ports: Ports,
    connection: psycopg.Connection[Any],
    queue: str,
    due: Sequence[Waiting],
    *,
    regardless: bool = False,
    set_aside: Iterable[UUID] = (),
) -> Offered:
    """Offer the waiting runs of one queue that are due, as far as it has room (R-D5).

    They are marked, then published; what the broker does not take is marked as not offered. With
    ``regardless`` also what was offered a moment ago is offered again, since it was blocked then
    (R-D7). What is set aside is left alone. ``connection`` is in autocommit mode. Raises the
    driver's error where the database is away, and nothing of the broker's.
    """
    free = room(ports.capacity(queue)) if due else 0
    if not free:
        return Offered()
    candidates = statements.rows(
        connection,
        _SQL["offer_candidates"],
        {
            "queue": queue,
            "jobs": [str(waiting.job_id) for waiting in due],
            "levels": [waiting.level for waiting in due],
            "rooms": [waiting.room for waiting in due],
            "room": free,
            "regardless": regardless,
            "set_aside": [str(run_id) for run_id in set_aside],
            "grace": settings.settings().offer_grace_seconds,
            "grace_cap": LONGEST_GRACE_SECONDS,
        },
    )
    done = Offered()
    done.marked = _mark(connection, candidates, done.failed)
    # In the order of claims, so that a broker that fails half-way took the first of them.
    offers = [
        Offer(row["id"], row["queue"], row["priority"])
        for row in candidates
        if row["id"] in done.marked
    ]
    done.published = ports.offer(offers) if offers else 0
    if done.published < len(offers):
        left = [str(offer.run_id) for offer in offers[done.published :]]
        statements.rows(connection, _SQL["unmark_offered"], {"run_ids": left})
    return done


def _mark(
    connection: psycopg.Connection[Any], candidates: Sequence[dict[str, Any]], failed: list[UUID]
) -> set[UUID]:
    """Mark all at once, or one by one where one of them cannot be: that is reported (R-D9)."""
    if not candidates:
        return set()
    asked = {
        "run_ids": [str(row["id"]) for row in candidates],
        "offer_counts": [row["offer_count"] for row in candidates],
    }
    try:
        return {row["id"] for row in statements.rows(connection, _SQL["mark_offered"], asked)}
    except psycopg.Error as error:
        if is_connection_lost(error):
            raise
        if len(candidates) == 1:
            run_id = candidates[0]["id"]
            logger.error("run %s cannot be offered: %s", run_id, first_line(error))
            failed.append(run_id)
            return set()
    return set().union(*(_mark(connection, [row], failed) for row in candidates))
