"""Wake-ups: bounded, repeated when they may be lost, and never more than a hint (R-D5, R-T4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dispatch.ports import Capacity, Offer, Ports


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
