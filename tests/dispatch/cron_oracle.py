"""R-D2 told a second time, as slowly and plainly as possible: look at the clock on every minute.

Nothing here is shared with the code under test: expressions are read by a few lines of their own,
and the wall clock is Python's.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1)
RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def read_field(text: str, low: int, high: int) -> set[int]:
    values: set[int] = set()
    for term in text.split(","):
        span, _, step = term.partition("/")
        if span == "*":
            first, last = low, high
        else:
            start, _, end = span.partition("-")
            first, last = int(start), int(end or start)
        values.update(range(first, last + 1, int(step or 1)))
    return values


class Oracle:
    """The fires of one expression, from the wall clock as it is seen at each step of real time."""

    def __init__(self, expression: str) -> None:
        texts = expression.split()
        fields = [read_field(text, *RANGES[i]) for i, text in enumerate(texts)]
        self.minutes, self.hours, self.days, self.months, weekdays = fields
        self.weekdays = {day % 7 for day in weekdays}
        self.both_days = texts[2].startswith("*") or texts[4].startswith("*")
        self.wildcard_hour = texts[1].startswith("*")
        self._day_cache: dict[int, bool] = {}

    def day_matches(self, day_number: int) -> bool:
        known = self._day_cache.get(day_number)
        if known is None:
            day = EPOCH + timedelta(days=day_number)
            dom = day.day in self.days
            dow = day.isoweekday() % 7 in self.weekdays
            in_day = (dom and dow) if self.both_days else (dom or dow)
            known = self._day_cache[day_number] = in_day and day.month in self.months
        return known

    def slot_at(self, wall: int) -> bool:
        """Whether a slot stands at that wall-clock time, in seconds since 1970 on the wall."""
        if wall % 60:
            return False
        day, second = divmod(wall, 86400)
        return (
            second // 60 % 60 in self.minutes
            and second // 3600 in self.hours
            and self.day_matches(day)
        )

    def fires(self, walls: list[int], step: int) -> list[int]:
        """Indexes of the steps at which it fires. The first step only sets the clocks."""
        furthest = walls[0]
        found = []
        for index in range(1, len(walls)):
            wall = walls[index]
            if self.wildcard_hour:
                if self.slot_at(wall):
                    found.append(index)
            elif wall > furthest:
                if wall - furthest == step:
                    fire = self.slot_at(wall)
                else:
                    fire = any(
                        self.slot_at(late) for late in range(furthest + step, wall + 1, step)
                    )
                if fire:
                    found.append(index)
                furthest = wall
        return found


def wall_clock(zone: ZoneInfo, start: datetime, steps: int, step: int) -> list[int]:
    """What the wall shows at ``start`` (UTC) and at each step after it, in seconds since 1970."""
    first = int(start.timestamp())
    walls = []
    for real in range(first, first + steps * step, step):
        offset = datetime.fromtimestamp(real, zone).utcoffset()
        walls.append(real + offset.days * 86400 + offset.seconds)
    return walls


def expected(
    expression: str, zone: ZoneInfo, start: datetime, end: datetime, step: int = 60
) -> list[datetime]:
    """Every fire in ``(start, end]``, by looking each ``step`` seconds from ``start`` on."""
    assert start.tzinfo is UTC
    steps = int((end - start).total_seconds()) // step + 1
    indexes = Oracle(expression).fires(wall_clock(zone, start, steps, step), step)
    return [start + timedelta(seconds=index * step) for index in indexes]
