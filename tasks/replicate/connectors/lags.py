"""The lower bound of the next read where only a lag stands between it and lost rows (R-F3).

Engines that do not tell which transactions are open leave one way: read again what is younger
than the longest transaction may be. The bound is the greatest value seen, or the present time if
that is earlier (a clock that is ahead must not hide rows), less the lag; never below the old one.
"""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation

from tasks.replicate.connector import (
    DEFAULT_LAG_SECONDS,
    DEFAULT_LAG_UNITS,
    Bound,
    Column,
    Kind,
    SourceError,
)

NUMBERS = frozenset({Kind.INTEGER, Kind.DECIMAL})
TIMES = frozenset({Kind.DATE, Kind.TIMESTAMP, Kind.TIMESTAMPTZ})


def check(column: Column) -> None:
    """Refuse a column whose values have no order by which "newer" can be told."""
    if column.type.kind not in NUMBERS | TIMES:
        raise SourceError(
            f"watermark {column.name} is {column.type.name}: it must be a number, a date or a "
            "timestamp that rises with each change",
            permanent=True,
        )


def bound(column: Column, greatest: str | None, lag: float | None, since: str | None) -> Bound:
    """The bound below ``greatest`` (the column's maximum as text) by ``lag`` seconds or units."""
    if column.type.kind in NUMBERS:
        return _number(column, greatest, lag, since)
    return _time(column, greatest, lag, since)


def instant(text: str) -> datetime:
    """The whole second of a timestamp's text, as a wall clock without its zone."""
    return datetime.fromisoformat(text[:19].replace("T", " "))


def _number(column: Column, greatest: str | None, lag: float | None, since: str | None) -> Bound:
    units = DEFAULT_LAG_UNITS if lag is None else math.ceil(lag)
    whole = column.type.kind is Kind.INTEGER and not (
        column.type.unsigned and column.type.bits == 64
    )
    value = since
    if greatest is not None:
        try:
            found = Decimal(greatest) - units
            if since is None or found > Decimal(since):
                value = format(found, "f")
        except InvalidOperation:
            raise SourceError(
                f"watermark {column.name} holds what is no number", permanent=True
            ) from None
    warning = (
        f"watermark {column.name}: rows whose transaction commits after {units} higher numbers "
        "were given out are missed (set lag to change that)"
    )
    return Bound(value, "bigint" if whole else "numeric", warning)


def _time(column: Column, greatest: str | None, lag: float | None, since: str | None) -> Bound:
    kind = column.type.kind
    seconds = DEFAULT_LAG_SECONDS if lag is None else math.ceil(lag)
    value = since
    if greatest is not None:
        now = datetime.now(UTC).replace(tzinfo=None)
        if kind is Kind.DATE:
            day = min(date.fromisoformat(greatest[:10]), now.date())
            found = (datetime(day.year, day.month, day.day) - timedelta(seconds=seconds)).date()
            text = found.isoformat()
            newer = since is None or text > since[:10]
        else:
            moment = min(instant(greatest), now) - timedelta(seconds=seconds)
            text = moment.isoformat(" ", "seconds") + ("+00" if kind is Kind.TIMESTAMPTZ else "")
            newer = since is None or moment > instant(since)
        value = text if newer else since
    warning = (
        f"watermark {column.name}: rows whose transaction takes longer than {seconds} s to commit "
        "are missed (set lag to change that)"
    )
    return Bound(value, kind.value, warning)
