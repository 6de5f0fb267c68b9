"""Checks of single values in the row lane, for what an engine would change without an error.

Each guard takes a cell that is not NULL and hands back the cell to store: the same, or the same
value in the form that the sink's kind asks for. It raises ValueError, without the value in it,
where the sink could not hold the value as it is.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from operator import itemgetter

from tasks.replicate.columnwise import Side
from tasks.replicate.connector import Batch, Cell, ColumnPlan, Guard, SourceError

_INTEGER = re.compile(r"[+-]?\d+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d\d:\d\d(:\d\d(\.\d+)?)?")
_MOMENT = re.compile(
    r"\d{4,6}-\d\d-\d\d(?P<clock>[ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?"
    r"(?P<zone> ?(Z|UTC|[+-]\d\d(:?\d\d)?))?(?P<era> BC)?"
)
# What PostgreSQL replaces by the time at which it reads it (epoch and allballs are constants that
# no other engine knows).
_WORDS = re.compile(r"\b(?:now|today|tomorrow|yesterday|epoch|allballs)\b", re.IGNORECASE)
_FRACTION = re.compile(r"\.(\d+)")
_SPECIAL = frozenset({"infinity", "-infinity"})
_TRUE = frozenset({"t", "true", "yes", "y", "on", "1"})
_FALSE = frozenset({"f", "false", "no", "n", "off", "0"})


def _decimal(cell: Cell) -> Decimal:
    try:
        return Decimal(cell if isinstance(cell, int) else str(cell).strip())
    except InvalidOperation:
        raise ValueError("is no number") from None


def scale(cell: Cell, precision: int | None, digits: int | None) -> Cell:
    """At most ``digits`` after the point and ``precision`` in all, trailing zeros not counted."""
    if isinstance(cell, bool):
        cell = int(cell)
    number = _decimal(cell)
    if not number.is_finite():
        return cell
    _sign, figures, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    while figures and figures[-1] == 0 and exponent < 0:
        figures, exponent = figures[:-1], exponent + 1
    if digits is not None and -exponent > digits:
        raise ValueError(f"has more than {digits} digits after the point")
    whole = len(figures) + exponent if any(figures) else 0
    if precision is not None and whole > precision - (digits or 0):
        raise ValueError(f"has more digits than numeric({precision},{digits or 0}) holds")
    return cell


def integer(cell: Cell, bits: int | None, unsigned: int | None) -> Cell:
    """A whole number within the sink's range; ``2.0`` and ``'2'`` become 2."""
    if not isinstance(cell, int):
        number = _decimal(cell)
        if not number.is_finite() or number != number.to_integral_value():
            raise ValueError("is not a whole number")
        cell = int(number)
    if bits is not None:
        low, high = (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        if not low <= cell < high:
            raise ValueError(f"is beyond the sink's {bits}-bit integers")
    return int(cell)


def real(cell: Cell, bits: int | None, _: int | None) -> Cell:
    """A number that a float of ``bits`` holds; whole numbers exactly, text as its nearest float."""
    if isinstance(cell, bytes):
        raise ValueError("is no number")
    try:
        value = float(cell)  # type: ignore[arg-type]
        if isinstance(cell, int) and value != cell:
            raise ValueError("is a whole number that a float would round")
        if bits == 32 and math.isfinite(value):
            narrow = struct.unpack("f", struct.pack("f", value))[0]
            if isinstance(cell, str):
                return cell
            if narrow != value:
                raise ValueError("would be rounded to a 32-bit float")
    except OverflowError:
        raise ValueError("is beyond the range of the sink's floats") from None
    if isinstance(cell, str) and math.isinf(value) and "inf" not in cell.lower():
        raise ValueError("is beyond the range of the sink's floats")
    return value


def finite(cell: Cell, _: int | None, __: int | None) -> Cell:
    """No NaN and no infinity."""
    if not _decimal(cell).is_finite():
        raise ValueError("is not finite, which the sink cannot hold")
    return cell


def boolean(cell: Cell, _: int | None, __: int | None) -> Cell:
    """true or false, also as 0 and 1 or as PostgreSQL's words."""
    if isinstance(cell, int | float) and cell in (0, 1):
        return bool(cell)
    if isinstance(cell, str):
        word = cell.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise ValueError("is neither true nor false")


def number_of_boolean(cell: Cell, _: int | None, __: int | None) -> Cell:
    """true as 1, false as 0."""
    return int(cell) if isinstance(cell, bool) else cell


def text(cell: Cell, length: int | None, _: int | None) -> Cell:
    """Characters, not bytes, and at most ``length`` of them."""
    if isinstance(cell, bytes):
        raise ValueError("holds bytes, not text")
    if isinstance(cell, bool):
        cell = "true" if cell else "false"
    elif isinstance(cell, float):
        cell = repr(cell)
    elif isinstance(cell, int):
        cell = str(cell)
    if length is not None and cell is not None and len(cell) > length:
        raise ValueError(f"is longer than the sink's {length} characters")
    return cell


def octets(cell: Cell, length: int | None, _: int | None) -> Cell:
    """Bytes, also written as ``\\x`` and hexadecimal, and at most ``length`` of them."""
    if isinstance(cell, str):
        if not cell.startswith("\\x"):
            raise ValueError("holds text, not bytes")
        cell = bytes.fromhex(cell[2:])
    if not isinstance(cell, bytes):
        raise ValueError("holds a number, not bytes")
    if length is not None and len(cell) > length:
        raise ValueError(f"is longer than the sink's {length} bytes")
    return cell


def fraction(cell: Cell, digits: int | None, _: int | None) -> Cell:
    """At most ``digits`` of a second's fraction, trailing zeros not counted."""
    found = _FRACTION.search(str(cell))
    if found and digits is not None and len(found[1].rstrip("0")) > digits:
        raise ValueError(f"has more than {digits} digits of a second's fraction")
    return cell


def date(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A date as text."""
    if not isinstance(cell, str) or not (_DATE.fullmatch(cell) or _odd_day(cell)):
        raise ValueError("is no date in the form 2026-11-01")
    return cell


def time(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A time of day as text, without a zone."""
    if not isinstance(cell, str) or not _TIME.fullmatch(cell):
        raise ValueError("is no time in the form 23:59:59")
    return cell


def timestamp(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A wall clock as text, without a zone, which the sink would drop silently."""
    if isinstance(cell, str):
        found = _MOMENT.fullmatch(cell)
        if found and found["zone"]:
            raise ValueError("carries a time zone, which the sink's column would drop")
        if found or cell in _SPECIAL:
            return cell
    raise ValueError("is no timestamp in the form 2026-11-01 23:59:59")


def timestamptz(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A moment as text with its offset."""
    if isinstance(cell, str):
        found = _MOMENT.fullmatch(cell)
        if found and not found["zone"]:
            raise ValueError("carries no time zone, so that the moment is not known")
        if (found and found["clock"]) or cell in _SPECIAL:
            return cell
    raise ValueError("is no moment in the form 2026-11-01 23:59:59+00")


def no_words(cell: Cell, _: int | None, __: int | None) -> Cell:
    """Text of times without a word in it that means another time whenever it is read."""
    if isinstance(cell, str) and _WORDS.search(cell):
        raise ValueError("names a time by a word, such as now or today")
    return cell


def calendar(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A date of the years 1 to 9999: no BC, no infinity, which only PostgreSQL holds."""
    if not isinstance(cell, str) or _odd(cell) or not cell[4:5] == "-":
        raise ValueError("is a date that the sink cannot hold (BC, infinity or beyond year 9999)")
    return cell


def clock(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A time before midnight: PostgreSQL alone knows 24:00:00."""
    if isinstance(cell, str) and cell.startswith("24"):
        raise ValueError("is 24:00:00, which the sink cannot hold")
    return cell


def no_nul(cell: Cell, _: int | None, __: int | None) -> Cell:
    """Text without the NUL character."""
    if isinstance(cell, str) and "\0" in cell:
        raise ValueError("holds a NUL character, which the sink cannot hold")
    return cell


def _odd(cell: str) -> bool:
    """Dates that PostgreSQL holds and ISO forms do not."""
    return cell in _SPECIAL or cell.endswith(" BC") or bool(re.match(r"\d{5,}-\d\d-\d\d", cell))


def _odd_day(cell: str) -> bool:
    found = _MOMENT.fullmatch(cell)
    return cell in _SPECIAL or bool(found and not found["clock"] and not found["zone"])


GUARDS: dict[str, Callable[[Cell, int | None, int | None], Cell]] = {
    "scale": scale,
    "integer": integer,
    "real": real,
    "finite": finite,
    "boolean": boolean,
    "number-of-boolean": number_of_boolean,
    "text": text,
    "octets": octets,
    "fraction": fraction,
    "date": date,
    "time": time,
    "timestamp": timestamp,
    "timestamptz": timestamptz,
    "calendar": calendar,
    "clock": clock,
    "no-nul": no_nul,
    "no-words": no_words,
}


def guarded(batches: Iterable[Batch], columns: Sequence[ColumnPlan]) -> Iterator[Batch]:
    """The same batches with every guard applied; SourceError names the column that fails."""
    watched = [(i, column) for i, column in enumerate(columns) if column.guards]
    if not watched:
        yield from batches
        return
    for batch in batches:
        rows = batch.data
        if isinstance(rows, bytes):
            # In such a lane the source has applied them (Source.guarded_lanes).
            yield batch
            continue
        changed: dict[int, Sequence[Cell]] = {}
        for position, column in watched if rows else ():
            before = list(map(itemgetter(position), rows))
            values = _applied(column, before)
            if values is not before:
                changed[position] = values
        if changed:
            sides = list(zip(*rows, strict=True))
            for position, values in changed.items():
                sides[position] = tuple(values)
            batch = Batch(list(zip(*sides, strict=True)), batch.rows, batch.size)
        yield batch


def _applied(column: ColumnPlan, values: Sequence[Cell]) -> Sequence[Cell]:
    """The column's values behind its guards; the same sequence where nothing had to change."""
    side = Side(values)
    for guard in column.guards:
        if not side.passes(guard):
            values = _one_by_one(guard, values, column)
            side = Side(values)
    return values


def _one_by_one(guard: Guard, values: Sequence[Cell], column: ColumnPlan) -> Sequence[Cell]:
    check, first, second = GUARDS[guard.name], guard.argument, guard.second
    try:
        return [None if value is None else check(value, first, second) for value in values]
    except ValueError as error:
        raise SourceError(
            f"column {column.source.name}: a value {error} (sink column {column.sink.name}, "
            f"{column.sink.type.name}); change the sink column, or convert it in a query",
            permanent=True,
        ) from None
