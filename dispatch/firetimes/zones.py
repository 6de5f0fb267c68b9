"""Time zones: an IANA name to its rules, and the instants at which its clocks are moved."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

_SECOND = timedelta(seconds=1)
_DAY = timedelta(days=1)
# Names that zoneinfo opens where the system has such files, but that name no IANA zone: leap-second
# clocks, copies, and "whatever this machine is set to", which differs from one beat to the next.
_NOT_IANA_PREFIXES = ("right/", "posix/")
_NOT_IANA = {"localtime", "posixrules", "Factory"}
_FIXED = re.compile(r"(?:UTC|GMT)([+-])0?(1[0-2]|[1-9])(?::?00)?", re.IGNORECASE)


class UnknownZone(ValueError):
    """The name is no IANA time zone; the message offers the nearest names."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A span of real time, ``[start, end)`` in naive UTC, through which the clock is not moved."""

    start: datetime
    end: datetime
    offset: timedelta


def load_zone(name: str) -> ZoneInfo:
    """The zone of that IANA name, from the system's database or the ``tzdata`` package.

    Raises UnknownZone, with a did-you-mean, for anything that is not the exact name of one.
    """
    try:
        if name in _NOT_IANA or name.startswith(_NOT_IANA_PREFIXES):
            raise KeyError(name)
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        # KeyError: no such zone. ValueError, OSError: not the path of one ("../x", "Europe").
        raise UnknownZone(_unknown(name)) from None


def _unknown(name: str) -> str:
    fixed = _FIXED.fullmatch(name.strip())
    if fixed:
        sign = "-" if fixed[1] == "+" else "+"
        return (
            f"unknown time zone {name!r}: name a place such as Europe/Madrid; the zone without "
            f"summer time is Etc/GMT{sign}{int(fixed[2])} (its sign is turned round)"
        )
    zones = sorted(available_timezones() - _NOT_IANA)
    by_fold = {zone.casefold(): zone for zone in zones}
    folded = name.strip().replace(" ", "_").casefold()
    cities = [zone for zone in zones if zone.casefold().rsplit("/", 1)[-1] == folded]
    if folded in by_fold:
        near = [by_fold[folded]]
    elif cities:
        near = cities[:3]
    else:
        matches = difflib.get_close_matches(folded, by_fold, 3, 0.75)
        close = difflib.get_close_matches(folded, matches, 1, 0.9)
        near = [by_fold[match] for match in close or matches]
    if near:
        advice = f"did you mean {' or '.join(near)}?"
    else:
        advice = "use an IANA name such as Europe/Madrid or UTC"
    return f"unknown time zone {name!r}: {advice}"


def stretches(zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[Stretch]:
    """Cut ``[start, end)`` (naive UTC) where the zone's clock is moved; in order, without holes."""
    offset = _offset(zone, start)
    for year in range(start.year, end.year + 1):
        for at, new_offset in _moves(zone, year):
            if start < at < end:
                yield Stretch(start, at, offset)
                start, offset = at, new_offset
    if start < end:
        yield Stretch(start, end, offset)


@lru_cache(maxsize=8192)
def _moves(zone: ZoneInfo, year: int) -> tuple[tuple[datetime, timedelta], ...]:
    """The moves of the clock after the year's first instant, up to the next year's; new offsets.

    zoneinfo keeps its table to itself, so the moves are found by looking once a day and halving.
    No zone has moved its clock twice within four days (a test holds every zone to more than two),
    so that none is missed. Some 0.2 ms for a year, once.
    """
    moves = []
    day = datetime(year, 1, 1)
    last = datetime(year + 1, 1, 1)
    before = _offset(zone, day)
    while day < last:
        following = day + _DAY
        after = _offset(zone, following)
        if after != before:
            low, high = day, following
            while high - low > _SECOND:
                middle = low + _SECOND * ((high - low) // _SECOND // 2)
                if _offset(zone, middle) == before:
                    low = middle
                else:
                    high = middle
            moves.append((high, after))
        day, before = following, after
    return tuple(moves)


def _offset(zone: ZoneInfo, instant: datetime) -> timedelta:
    offset = instant.replace(tzinfo=UTC).astimezone(zone).utcoffset()
    assert offset is not None
    return offset
