"""The lower bound of the next read where only a lag stands between it and lost rows (R-F3).

Engines that do not tell which transactions are open leave one way: read again what is younger
than the longest transaction may be. The bound is the greatest value seen, or the present time if
that is earlier (a clock that is ahead must not hide rows), less the lag; never below the old one.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal, InvalidOperation

from tasks.replicate.connector import (
    DEFAULT_LAG_SECONDS,
    DEFAULT_LAG_UNITS,
    Bound,
    Column,
    Kind,
    SourceError,
)
from tasks.replicate.shapes import MOMENTS

NUMBERS = frozenset({Kind.INTEGER, Kind.DECIMAL})
MOST_SECONDS = 36525 * 86400
"""A century: a longer lag is a slip of the pen."""
# Wide enough for every engine's numbers: a bound that is rounded up would hide rows.
_EXACT = Context(prec=1000)


def check(column: Column) -> None:
    """Refuse a column whose values have no order by which "newer" can be told."""
    if column.type.kind not in NUMBERS | MOMENTS:
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


def seconds(column: Column, lag: float | None) -> int:
    """The whole seconds of a lag of time; SourceError (permanent) above a century."""
    found = DEFAULT_LAG_SECONDS if lag is None else math.ceil(lag)
    if found > MOST_SECONDS:
        raise SourceError(
            f"watermark {column.name} is a time, and lag is longer than a century: set it above "
            "the longest transaction, in seconds or as 1h",
            permanent=True,
        )
    return found


def units(lag: float | None) -> int:
    """The whole units of a lag of numbers; a part of one counts as one."""
    return DEFAULT_LAG_UNITS if lag is None else math.ceil(lag)


def instant(text: str) -> datetime:
    """The whole second of a timestamp's text, as a wall clock without its zone."""
    return datetime.fromisoformat(text[:19].replace("T", " "))


def _number(column: Column, greatest: str | None, lag: float | None, since: str | None) -> Bound:
    less = units(lag)
    whole = column.type.kind is Kind.INTEGER and not (
        column.type.unsigned and column.type.bits == 64
    )
    value = since
    if greatest is not None:
        try:
            found = _EXACT.subtract(Decimal(greatest), Decimal(less))
            if since is None or found > Decimal(since):
                value = format(found, "f")
        except InvalidOperation:
            raise SourceError(
                f"watermark {column.name} holds what is no number", permanent=True
            ) from None
    warning = (
        f"watermark {column.name}: rows whose transaction commits after {less} higher numbers "
        "were given out are missed (set lag to change that)"
    )
    return Bound(value, "bigint" if whole else "numeric", warning)


def _time(column: Column, greatest: str | None, lag: float | None, since: str | None) -> Bound:
    kind, less = column.type.kind, seconds(column, lag)
    value = since
    if greatest is not None:
        now = datetime.now(UTC).replace(tzinfo=None)
        if kind is Kind.DATE:
            now = datetime(now.year, now.month, now.day)
        newest = min(_newest(column, greatest), now)
        # Where the calendar ends nothing lies below, and the bound stays where it is.
        if newest - datetime.min >= timedelta(seconds=less):
            found = newest - timedelta(seconds=less)
            if kind is Kind.DATE:
                found = datetime(found.year, found.month, found.day)
            if since is None or found > instant(since):
                value = _written(found, kind)
    warning = (
        f"watermark {column.name}: rows whose transaction takes longer than {less} s to commit "
        "are missed (set lag to change that)"
    )
    return Bound(value, kind.value, warning)


def _newest(column: Column, text: str) -> datetime:
    try:
        return instant(text)
    except ValueError:
        raise SourceError(
            f"watermark {column.name}: its highest value is no time of the calendar (such as day "
            "30 of February, second 60 or a zero date), below which no bound can be said: mend "
            "those rows, or leave them out with source.where",
            permanent=True,
        ) from None


def _written(moment: datetime, kind: Kind) -> str:
    if kind is Kind.DATE:
        return moment.date().isoformat()
    return moment.isoformat(" ", "seconds") + ("+00" if kind is Kind.TIMESTAMPTZ else "")
