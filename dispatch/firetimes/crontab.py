"""Cron expressions: five fields or an @name, read into the wall-clock fire times that they mean.

The grammar and the rule of the days are cronsim's, which follows Debian's cron: where the
day-of-month or the day-of-week field starts with ``*`` a day must match both, else either.
Beyond Debian it knows ``L``, ``LW`` (the last day, the last weekday of the month), ``5L`` (the last
Friday) and ``1#2`` (the second Monday). Time zones are not the business of this module.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta

from cronsim import CronSim, CronSimError
from cronsim.cronsim import SpecItem

NAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
# name, how many values it has, what may stand there
_FIELDS = (
    ("minute", 60, "0-59"),
    ("hour", 24, "0-23"),
    ("day-of-month", 31, "1-31, L or LW"),
    ("month", 12, "1-12 or JAN-DEC"),
    ("day-of-week", 7, "0-7 (0 and 7 are Sunday) or SUN-SAT"),
)
_ORDER = " ".join(name for name, _, _ in _FIELDS)
_DAY = timedelta(days=1)
_ANY_DAY = datetime(2000, 1, 1)
# 28 years hold every kind of year (leap or not, starting on each weekday), and all that a day can
# be asked for depends on those: what does not fire within them never does.
_ALL_KINDS_OF_YEAR = (datetime(2000, 1, 1), datetime(2028, 1, 1))


class InvalidCron(ValueError):
    """The expression is no cron expression, or it never fires; the message names the field.

    ``problem`` is the message for where the key ``cron`` is named already.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"cron {self.problem}"


class Crontab:
    """The wall-clock fire times of one cron expression. Raises InvalidCron for a bad one.

    All times are naive and local; every range is half open, ``[start, stop)``.
    """

    __slots__ = ("_sim", "names_its_hours", "times")

    def __init__(self, expression: str) -> None:
        fields = [
            _checked_field(expression, index, text)
            for index, text in enumerate(_fields(expression))
        ]
        try:
            self._sim = CronSim(" ".join(fields), _ANY_DAY)
        except CronSimError:
            # Each field is good by itself, so the days and months exclude each other: 30 February.
            raise InvalidCron(_never(expression)) from None
        self.times = tuple(
            h * 60 + m for h in sorted(self._sim.hours) for m in sorted(self._sim.minutes)
        )
        """The fire times of a matching day, in minutes since midnight, ascending."""
        self.names_its_hours = not fields[1].startswith("*")
        """False where the hour is a wildcard: ``*``, ``*/2``, any that starts with ``*`` (R-D2)."""
        if self.first(*_ALL_KINDS_OF_YEAR) is None:
            raise InvalidCron(_never(expression))

    def first(self, start: datetime, stop: datetime) -> datetime | None:
        """The earliest fire time, or None."""
        for day in self._days(start, stop):
            low, high = self._bounds(day, start, stop)
            if low < high:
                return _at(day, self.times[low])
        return None

    def count(self, start: datetime, stop: datetime) -> int:
        """How many fire times there are; the work grows with the days, not with the fire times."""
        if start >= stop:
            return 0
        total = 0
        for day in self._days(start, stop):
            if day == start.date() or day == stop.date():
                low, high = self._bounds(day, start, stop)
                total += max(0, high - low)
            else:
                total += len(self.times)
        return total

    def newest(self, start: datetime, stop: datetime, limit: int) -> Iterator[datetime]:
        """The last ``limit`` fire times, newest first."""
        if start >= stop:
            return
        for day in reversed(list(self._days(start, stop))):
            low, high = self._bounds(day, start, stop)
            for index in range(high - 1, low - 1, -1):
                if limit <= 0:
                    return
                limit -= 1
                yield _at(day, self.times[index])

    def _days(self, start: datetime, stop: datetime) -> Iterator[date]:
        day, last = start.date(), stop.date()
        while day <= last:
            if day.month not in self._sim.months:
                day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
                continue
            if self._sim.match_day(day):
                yield day
            day += _DAY

    def _bounds(self, day: date, start: datetime, stop: datetime) -> tuple[int, int]:
        low, high = 0, len(self.times)
        if day == start.date():
            low = bisect_left(self.times, _minute_at_or_after(start))
        if day == stop.date():
            high = bisect_left(self.times, _minute_at_or_after(stop))
        return low, high


def _at(day: date, minute: int) -> datetime:
    return datetime.combine(day, time(minute // 60, minute % 60))


def _minute_at_or_after(moment: datetime) -> int:
    return moment.hour * 60 + moment.minute + bool(moment.second or moment.microsecond)


def _fields(expression: str) -> list[str]:
    words = expression.upper().split()
    if not words:
        raise InvalidCron(f"is empty: write five fields ({_ORDER}) or @daily")
    if words[0].startswith("@"):
        return _named(expression, words)
    if len(words) != len(_FIELDS):
        advice = f"it has five: {_ORDER}"
        if len(words) == 6:
            advice += "; there is no field for seconds, use an interval such as every: 30s"
        raise InvalidCron(f"{expression!r} has {len(words)} fields: {advice}")
    return words


def _named(expression: str, words: list[str]) -> list[str]:
    name = words[0].lower()
    if name == "@reboot":
        raise InvalidCron(
            "'@reboot' is not known: a schedule has no start-up to wait for; trigger the job "
            "where the deployment starts (run trigger JOB), or give the schedule times"
        )
    if name == "@every":
        raise InvalidCron(f"{expression!r}: for an interval use every, such as every: 15m")
    if name not in NAMES or len(words) > 1:
        near = difflib.get_close_matches(name, NAMES, 1)
        advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(NAMES)}"
        raise InvalidCron(f"{expression!r} is not known: {advice}")
    return NAMES[name].split()


def _checked_field(expression: str, index: int, text: str) -> str:
    """Try one field alone, so that a refusal can name it, and mend what cronsim reads otherwise."""
    name, size, allowed = _FIELDS[index]
    terms = []
    try:
        # cronsim's digits are ASCII, but for "5L" it asks str.isdigit.
        if not text.isascii():
            raise CronSimError
        _values(index, text)
        for term in text.split(","):
            span, _, step = term.partition("/")
            if step and int(step) >= size:
                # Debian refuses what is too wide; cronsim would fire once in each round of the
                # field, which is not what "every 90 minutes" means.
                raise InvalidCron(
                    f"{expression!r}: the step of {name} {text!r} spans all {size} values of "
                    "the field: use an interval such as every: 90m, or a single value"
                )
            # cronsim takes the range 5-5/10 for 5/10, which goes on to the end of the field.
            alone = "-" in span and len(_values(index, span)) == 1
            terms.append(span if alone else term)
    except CronSimError:
        raise InvalidCron(
            f"{expression!r}: bad {name} {text!r}: write {allowed}, "
            "* for all, a list (A,B), a rising range (A-B) or a step (*/N)"
        ) from None
    return ",".join(terms)


def _values(index: int, text: str) -> set[int] | set[SpecItem]:
    fields = ["*"] * len(_FIELDS)
    fields[index] = text
    sim = CronSim(" ".join(fields), _ANY_DAY)
    return (sim.minutes, sim.hours, sim.days, sim.months, sim.weekdays)[index]


def _never(expression: str) -> str:
    return (
        f"{expression!r} never fires: no day of the calendar matches its day-of-month, month "
        "and day-of-week together"
    )
