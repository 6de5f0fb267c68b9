"""What becomes of due fire times: each fires, or is skipped for a reason (R-D1, R-D2)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from dispatch.firetimes import FireTimes

MISSED_AFTER = timedelta(seconds=60)
"""A fire time that is settled later than this has been missed; up to it, it is on time."""
CATCH_UP_LIMIT = 100
"""How many runs ``catch_up`` fires at once, and how many skipped ones are named one by one."""


class Misfire(StrEnum):
    """The schedule's policy for the fire times that were missed while no beat ran."""

    FIRE_ONCE = "fire_once"
    """All that was missed is one fire, at its newest time, or at one that is on time just now."""
    SKIP = "skip"
    """Nothing that was missed fires."""
    CATCH_UP = "catch_up"
    """The newest 100 that are due fire, each by itself, oldest first."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A fire time at which nothing fires, and why; the reason is what its row keeps."""

    fire_time: datetime
    reason: str


@dataclass(frozen=True, slots=True)
class Settlement:
    """What to do with the due fire times, in order of time, and when to look again.

    ``skipped`` names the newest skipped ones; ``more_skipped`` counts those before them, which
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
    """Settle every fire time in ``[next_fire_at, now]``; both are database time.

    ``misfire`` is None just before the schedule is changed: an edit releases nothing that was
    missed, whatever the policy says, since it may be what the edit is to prevent (R-D2).
    ``next_fire_at`` is an obligation that was stored, so it is one whatever ``times`` says of it
    now (the rules of the zone may have changed since, or a hand may have moved it). Pure and
    repeatable: the caller stores it in the transaction that moves ``next_fire_at``. The work and
    the answer are bounded, also where a schedule of every minute slept for years.
    """
    if next_fire_at > now:
        return Settlement((), (), 0, None, next_fire_at)
    later = times.due(next_fire_at, now, 2 * CATCH_UP_LIMIT)
    fire_times = list(later.newest)
    if later.count == len(fire_times):
        fire_times.insert(0, next_fire_at)
    on_time = [fire_time for fire_time in fire_times if now - fire_time <= MISSED_AFTER]
    missed = [fire_time for fire_time in fire_times if now - fire_time > MISSED_AFTER]
    fire = list(on_time)
    skipped: list[Skipped] = []
    if misfire is Misfire.CATCH_UP:
        fire = fire_times[-CATCH_UP_LIMIT:]
        reason = f"missed: catch_up fires the newest {CATCH_UP_LIMIT} fire times"
        skipped = [Skipped(fire_time, reason) for fire_time in fire_times[:-CATCH_UP_LIMIT]]
    elif misfire is Misfire.SKIP or misfire is None:
        reason = "missed: the misfire policy is skip"
        if misfire is None:
            reason = "missed: the schedule was changed before a beat ran"
        skipped = [Skipped(fire_time, reason) for fire_time in missed]
    else:
        if missed and not on_time:
            fire = [missed.pop()]
        skipped = [
            Skipped(fire_time, f"missed: fired once, at {fire[0].isoformat()}")
            for fire_time in missed
        ]
    skipped = skipped[-CATCH_UP_LIMIT:]
    more = later.count + 1 - len(fire) - len(skipped)
    first_skipped = next_fire_at if more else (skipped[0].fire_time if skipped else None)
    return Settlement(tuple(fire), tuple(skipped), more, first_skipped, times.next_after(now))
