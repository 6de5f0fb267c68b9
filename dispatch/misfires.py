"""What becomes of a schedule's due slots: each is fired, or skipped for a reason (R-D1, R-D2)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from dispatch.firetimes import FireTimes

MISSED_AFTER = timedelta(seconds=60)
"""A slot that is settled later than this has been missed; up to it, it is on time."""
CATCH_UP_LIMIT = 100
"""How many slots ``catch_up`` fires at once, and how many skipped ones are named one by one."""


class Misfire(StrEnum):
    """The schedule's policy for the slots that were missed while no beat ran."""

    FIRE_ONCE = "fire_once"
    """All that was missed is one fire, of its newest slot, or of one that is on time just now."""
    SKIP = "skip"
    """Nothing that was missed fires."""
    CATCH_UP = "catch_up"
    """The newest 100 due slots fire, each by itself, oldest first."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A slot that does not fire, and why; the reason is what the slot's row keeps."""

    slot: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """What to do with the due slots, in order of time, and when to look again.

    ``skipped`` names the newest skipped slots; ``more_skipped`` counts those before them, which
    lie from the old ``next_fire_at`` (``first_skipped``) on, so that they too leave their trace.
    ``next_fire_at`` is later than the ``now`` of the settlement; None where there is no next.
    """

    fire: tuple[datetime, ...]
    skipped: tuple[Skipped, ...]
    more_skipped: int
    first_skipped: datetime | None
    next_fire_at: datetime | None


def settle(
    times: FireTimes, next_fire_at: datetime, now: datetime, misfire: Misfire | None
) -> Settlement:
    """Settle every slot in ``[next_fire_at, now]``; both are database time.

    ``misfire`` is None just before the schedule is changed: an edit releases nothing that was
    missed, whatever the policy says, since it may be what the edit is to prevent (R-D2).
    ``next_fire_at`` is an obligation that was stored, so it is a slot whatever ``times`` says of it
    now (the rules of the zone may have changed since, or a hand may have moved it). Pure and
    repeatable: the caller stores it in the transaction that moves ``next_fire_at``. The work and
    the answer are bounded, also where a schedule of every minute slept for years.
    """
    if next_fire_at > now:
        return Settlement((), (), 0, None, next_fire_at)
    later = times.due(next_fire_at, now, 2 * CATCH_UP_LIMIT)
    slots = list(later.newest)
    if later.count == len(slots):
        slots.insert(0, next_fire_at)
    on_time = [slot for slot in slots if now - slot <= MISSED_AFTER]
    missed = [slot for slot in slots if now - slot > MISSED_AFTER]
    fire = list(on_time)
    skipped: list[Skipped] = []
    if misfire is Misfire.CATCH_UP:
        fire = slots[-CATCH_UP_LIMIT:]
        reason = f"missed: catch_up fires the newest {CATCH_UP_LIMIT} slots"
        skipped = [Skipped(slot, reason) for slot in slots[:-CATCH_UP_LIMIT]]
    elif misfire is Misfire.SKIP or misfire is None:
        reason = "missed: the misfire policy is skip"
        if misfire is None:
            reason = "missed: the schedule was changed before a beat ran"
        skipped = [Skipped(slot, reason) for slot in missed]
    else:
        if missed and not on_time:
            fire = [missed.pop()]
        skipped = [
            Skipped(slot, f"missed: fired once, at the slot {fire[0].isoformat()}")
            for slot in missed
        ]
    skipped = skipped[-CATCH_UP_LIMIT:]
    more = later.count + 1 - len(fire) - len(skipped)
    first_skipped = next_fire_at if more else (skipped[0].slot if skipped else None)
    return Settlement(tuple(fire), tuple(skipped), more, first_skipped, times.next_after(now))
