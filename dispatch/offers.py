"""Wake-ups: bounded, repeated when they may be lost, and never more than a hint (R-D5, R-T4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import psycopg
from sqlalchemy import Connection

from db import settings, statements
from dispatch.deadlines import LONGEST_GRACE_SECONDS, Waiting
from dispatch.ports import Capacity, Offer, Ports

_SQL = statements.load("deadlines")


def room(capacity: Capacity) -> int:
    """How many more wake-ups a queue may hold: twice the fleet's slots, less those it holds."""
    return max(0, 2 * capacity.slots - capacity.queued)


def publish(ports: Ports, offers: Iterable[Offer]) -> int:
    """Publish wake-ups of committed runs as far as their queues have room; how many went out.

    A run that finds no room needs none: its queue's wake-ups outlast its commit, and the slots
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


def offer_waiting(
    ports: Ports,
    connection: Connection | psycopg.Connection[object],
    queue: str,
    due: Sequence[Waiting],
    *,
    regardless: bool = False,
) -> int:
    """Offer the waiting runs of one queue that are due, as far as it has room; how many (R-D5).

    They are marked, then published; what the broker does not take is marked as not offered. With
    ``regardless`` also what was offered a moment ago is offered again, since it was blocked then
    (R-D7). Raises the driver's errors, and nothing of the broker's.
    """
    free = room(ports.capacity(queue)) if due else 0
    if not free:
        return 0
    rows = statements.rows(
        connection,
        _SQL["mark_offered"],
        {
            "queue": queue,
            "jobs": [str(waiting.job_id) for waiting in due],
            "levels": [waiting.level for waiting in due],
            "rooms": [waiting.room for waiting in due],
            "room": free,
            "regardless": regardless,
            "grace": settings.settings().offer_grace_seconds,
            "grace_cap": LONGEST_GRACE_SECONDS,
        },
    )
    # In the order of claims, so that a broker that fails half-way took the first of them.
    rows.sort(key=lambda row: (-row["priority"], row["available_at"], row["created_at"], row["id"]))
    offers = [Offer(row["id"], row["queue"], row["priority"]) for row in rows]
    published = ports.offer(offers) if offers else 0
    if published < len(offers):
        left = [str(offer.run_id) for offer in offers[published:]]
        statements.rows(connection, _SQL["unmark_offered"], {"run_ids": left})
    return published
