"""When a schedule fires: cron in a time zone, or an interval. Pure computation, no database (R-D2).

What cron does where the clock is moved is stated over two clocks of a zone: its wall clock, and
the furthest that the wall clock has yet shown, which never goes back.

- An expression that names its hours fires at the first instant at which the furthest clock has
  reached the fire time. So what a gap swallows fires at the end of the gap, all of it as one, and
  a fire time in an hour that is shown twice counts the first time only.
- One whose hour is a wildcard (its field starts with ``*``, as ``@hourly`` does) fires whenever
  the wall clock shows the fire time: not in a gap, and twice where an hour is shown twice. It goes
  on in real time.

That is Debian's cron with three differences, which R-D2 makes. The hour alone decides: Debian also
calls ``*/15 2 * * *`` a wildcard, loses the whole of it in a gap and fires it eight times in a
repeated hour. Several swallowed fire times are one fire. And Debian takes a jump of more than three
hours for a corrected clock and fires nothing for it; here a day that an island skips is a gap.

cronsim reads the expressions; its daylight-saving arithmetic is not used. Measured against the rule
minute by minute, it went wrong in two places. Asked for the fire time after an instant in the
second pass of a repeated hour, it answers with one of the first pass, which is before that instant:
a beat that wakes there would stall. And it takes a starred minute for a wildcard, as Debian does.
(croniter 7 fires ``30 2 * * *`` twice in a repeated hour.) Nor can either count the fire times of
five years without walking through all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo

from dispatch.durations import format_duration, parse_duration
from dispatch.firetimes.crontab import Crontab
from dispatch.firetimes.zones import load_zone, stretches

_TICK = timedelta(microseconds=1)
_WINDOW = timedelta(days=366)
# Longer than the furthest clock can stay ahead of the wall clock: none was ever put back by more
# than a day.
_LOOK_BACK = timedelta(days=2)
# The rarest day, a 29 February of one weekday, may stay away for 40 years (over 1900 or 2100).
_RAREST_WINDOWS = 41
_DAWN = datetime(2, 1, 1)
_DUSK = datetime(9990, 1, 1)
SHORTEST_INTERVAL = timedelta(seconds=1)


class InvalidInterval(ValueError):
    """An interval that no schedule can keep; the message says why."""


@dataclass(frozen=True, slots=True)
class Due:
    """The fire times of a span: how many there are, and the newest of them, ascending, UTC."""

    count: int
    newest: tuple[datetime, ...]


class FireTimes(Protocol):
    """The fire times of a schedule: an endless, strictly rising row of instants.

    Instants go in as aware datetimes of any zone and come out in UTC; a naive one raises
    ValueError.
    """

    def next_after(self, t: datetime) -> datetime | None:
        """The first fire time later than ``t``, never ``t``; None past the end of the calendar."""
        ...

    def due(self, after: datetime, until: datetime, limit: int) -> Due:
        """The fire times in ``(after, until]``: the count of all, and the newest ``limit``.

        The work is bounded by ``limit`` and the days of the span, however many fire times it holds.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Span:
    """Perhaps one for what a gap swallowed, then those of the wall clock in ``[start, stop)``."""

    swallowed: datetime | None
    start: datetime
    stop: datetime
    offset: timedelta


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in an IANA time zone. Raises InvalidCron or UnknownZone (R-D2)."""

    expression: str
    timezone: str
    _crontab: Crontab = field(init=False, repr=False, compare=False)
    _zone: ZoneInfo = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_crontab", Crontab(self.expression))
        object.__setattr__(self, "_zone", load_zone(self.timezone))

    def next_after(self, t: datetime) -> datetime | None:
        """The first fire time later than ``t``, never ``t``; None past the end of the calendar."""
        after = _naive_utc(t)
        for _ in range(_RAREST_WINDOWS):
            until = min(after + _WINDOW, _DUSK) if after < _DUSK else after
            for span in self._spans(after, until):
                if span.swallowed is not None:
                    return span.swallowed.replace(tzinfo=UTC)
                fire_time = self._crontab.first(span.start, span.stop)
                if fire_time is not None:
                    return (fire_time - span.offset).replace(tzinfo=UTC)
            after = until
        return None

    def due(self, after: datetime, until: datetime, limit: int) -> Due:
        """The fire times in ``(after, until]``: the count of all, and the newest ``limit``.

        The work is bounded by ``limit`` and the days of the span, however many fire times it holds.
        """
        spans = list(self._spans(_naive_utc(after), _naive_utc(until)))
        count = 0
        for span in spans:
            count += span.swallowed is not None
            count += self._crontab.count(span.start, span.stop)
        newest: list[datetime] = []
        for span in reversed(spans):
            wanted = limit - len(newest)
            if wanted <= 0:
                break
            newest += (
                fire_time - span.offset
                for fire_time in self._crontab.newest(span.start, span.stop, wanted)
            )
            if span.swallowed is not None and len(newest) < limit:
                newest.append(span.swallowed)
        return Due(count, tuple(fire_time.replace(tzinfo=UTC) for fire_time in reversed(newest)))

    def _spans(self, after: datetime, until: datetime) -> Iterator[_Span]:
        """Those of ``(after, until]``, naive UTC, a span for each stretch of unmoved clock."""
        after = max(after, _DAWN)
        if after >= until:
            return
        furthest: datetime | None = None
        for stretch in stretches(self._zone, after - _LOOK_BACK, until + _TICK):
            shown_from = stretch.start + stretch.offset
            shown_to = stretch.end + stretch.offset
            start = shown_from
            swallowed = None
            if self._crontab.names_its_hours and furthest is not None:
                start = max(shown_from, furthest)
                # One at the very end of the gap is the same instant, so it is one with them.
                if (
                    furthest < shown_from
                    and self._crontab.first(furthest, shown_from + _TICK) is not None
                ):
                    swallowed = stretch.start
                    start = shown_from + _TICK
            furthest = shown_to if furthest is None else max(furthest, shown_to)
            if stretch.end <= after:
                continue
            if swallowed is not None and swallowed <= after:
                swallowed = None
            yield _Span(
                swallowed,
                max(start, after + stretch.offset + _TICK),
                shown_to,
                stretch.offset,
            )


@dataclass(frozen=True, slots=True)
class Every:
    """An interval from an anchor, in real time: fires at ``anchor + k * interval``, k = 1, 2, 3...

    Exact to the microsecond, without drift. Raises InvalidInterval below one second, and
    InvalidDuration where it is no duration at all.
    """

    interval_seconds: float
    anchor: datetime
    _step: timedelta = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        step = parse_duration(self.interval_seconds, what="interval")
        if step < SHORTEST_INTERVAL:
            raise InvalidInterval(
                f"an interval of {format_duration(step)} is too short: a schedule fires at most "
                "once a second"
            )
        _naive_utc(self.anchor)
        object.__setattr__(self, "_step", step)

    def next_after(self, t: datetime) -> datetime | None:
        """The first fire time later than ``t``, never ``t``; None past the end of the calendar."""
        return self._fire_time(max(1, self._passed(t) + 1))

    def due(self, after: datetime, until: datetime, limit: int) -> Due:
        """The fire times in ``(after, until]``: the count of all, and the newest ``limit``."""
        first = max(1, self._passed(after) + 1)
        last = self._passed(until)
        count = max(0, last - first + 1)
        numbers = range(max(first, last - limit + 1), last + 1) if limit > 0 else range(0)
        fire_times = (self._fire_time(number) for number in numbers)
        return Due(count, tuple(fire_time for fire_time in fire_times if fire_time is not None))

    def _passed(self, t: datetime) -> int:
        """The number of the last fire time at or before ``t``; 0 or less before the first."""
        return (_naive_utc(t) - _naive_utc(self.anchor)) // self._step

    def _fire_time(self, number: int) -> datetime | None:
        try:
            return (_naive_utc(self.anchor) + number * self._step).replace(tzinfo=UTC)
        except OverflowError:
            return None


def upcoming(times: FireTimes, after: datetime, count: int) -> Iterator[datetime]:
    """The first ``count`` fire times later than ``after``."""
    for _ in range(count):
        fire_time = times.next_after(after)
        if fire_time is None:
            return
        yield fire_time
        after = fire_time


def _naive_utc(t: datetime) -> datetime:
    if t.tzinfo is None:
        raise ValueError(f"{t.isoformat()} has no time zone: fire times are computed on instants")
    return t.astimezone(UTC).replace(tzinfo=None)
