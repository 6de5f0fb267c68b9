"""Checks of single values in the row lane, for what an engine would change without an error.

Each guard takes a cell that is not NULL and hands back the cell to store: the same, or the same
value in the form that the sink's kind asks for. It raises ValueError, without the value in it,
where the sink could not hold the value as it is.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation

from tasks.replicate.columnwise import passes
from tasks.replicate.connector import Batch, Cell, ColumnPlan, Guard, Side, SourceError

_INTEGER = re.compile(r"[+-]?\d+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
# No engine here has a leap second: PostgreSQL makes 24:00:00 of 23:59:60, or the next day.
_CLOCK = r"\d\d:\d\d(?::(?!60)\d\d(?:\.\d+)?)?"
_ZONE = r" ?(?:Z|UTC|[+-]\d\d(?::?\d\d)?)"
_TIME = re.compile(_CLOCK)
_TIMETZ = re.compile(_CLOCK + _ZONE)
_MOMENT = re.compile(rf"\d{{4,6}}-\d\d-\d\d(?P<clock>[ T]{_CLOCK})?(?P<zone>{_ZONE})?(?P<era> BC)?")
# What stands between the values of an array, a range or a composite.
_BETWEEN = re.compile(r"[][{}(),\"]")
_NO_VALUE = frozenset({"", "null", "empty"})
# Of an interval: a fraction and its unit; what is below seconds; a number with an exponent.
_PORTION = re.compile(r"\.(\d*) *([a-z]*)")
_SHORT = re.compile(r"\d *(?:ms|millis|mic|u)")
_EXPONENT = re.compile(r"\de[+-]?\d")
# Units that a fraction divides into whole microseconds; those of calendars it does not.
_DIVISIBLE = re.compile(r"(?:s|h|m$|min|d(?!ec)|w).*")
# Of less, PostgreSQL guesses the rest.
_WHOLE_NET = re.compile(r"[/:]|\d\.\d+\.\d+\.\d")
_FRACTION = re.compile(r"\.(\d+)")
_SPECIAL = frozenset({"infinity", "-infinity"})
_TRUE = frozenset({"t", "true", "yes", "y", "on", "1"})
_FALSE = frozenset({"f", "false", "no", "n", "off", "0"})
MOST_FIGURES = 4300
"""Of a whole number: Python neither reads nor writes longer ones, and an exponent of a few figures
would have it work for minutes, in which no other thread runs."""


def _decimal(cell: Cell) -> Decimal:
    try:
        return Decimal(cell if isinstance(cell, int) else str(cell).strip())
    except InvalidOperation:
        raise ValueError("is no number") from None


def _float(cell: Cell) -> float:
    try:
        return float(cell)  # type: ignore[arg-type]
    except ValueError:
        raise ValueError("is no number") from None


def scale(cell: Cell, precision: int | None, digits: int | None) -> Cell:
    """At most ``digits`` after the point and ``precision`` in all, trailing zeros not counted."""
    if isinstance(cell, bool):
        cell = int(cell)
    number = _decimal(cell)
    if not number.is_finite():
        return cell
    if not number:
        return cell
    _sign, figures, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    whole = len(figures) + exponent
    # Zeros behind the last digit that counts: PostgreSQL's scale may be before the point.
    zeros = max(0, -digits) if digits is not None else 0
    used = len(figures)
    while figures[used - 1] == 0 and exponent < zeros:
        used, exponent = used - 1, exponent + 1
    if digits is not None and -exponent > digits:
        raise ValueError(
            f"has more than {digits} digits after the point"
            if digits >= 0
            else f"has digits that numeric({precision},{digits}) rounds"
        )
    if precision is not None and whole > precision - (digits or 0):
        raise ValueError(f"has more digits than numeric({precision},{digits or 0}) holds")
    return cell


def integer(cell: Cell, bits: int | None, unsigned: int | None) -> Cell:
    """A whole number within the sink's range; ``2.0`` and ``'2'`` become 2."""
    if not isinstance(cell, int):
        number = _decimal(cell)
        if not number.is_finite() or number != number.to_integral_value():
            raise ValueError("is not a whole number")
        if number and number.adjusted() >= MOST_FIGURES:
            raise ValueError(f"is a whole number of more than {MOST_FIGURES} figures")
        # Zero may have any exponent.
        cell = int(number) if number else 0
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
        value = _float(cell)
        if isinstance(cell, int) and value != cell:
            raise ValueError("is a whole number that a float would round")
        narrow = value
        if bits == 32 and math.isfinite(value):
            narrow = struct.unpack("f", struct.pack("f", value))[0]
            if not isinstance(cell, str) and narrow != value:
                raise ValueError("would be rounded to a 32-bit float")
    except OverflowError:
        raise ValueError("is beyond the range of the sink's floats") from None
    if isinstance(cell, str):
        if math.isinf(value) and "inf" not in cell.lower():
            raise ValueError("is beyond the range of the sink's floats")
        if narrow == 0 and _decimal(cell):
            raise ValueError("is nearer to 0 than any of the sink's floats")
        if bits == 32 and value:
            # Two steps to the nearest float may end at another one than the sink's single step.
            return cell
    return value


def nearest(cell: Cell, bits: int | None, _: int | None) -> Cell:
    """As ``real``, for a sink that itself takes a text for its nearest float, or refuses it."""
    if isinstance(cell, int | float):
        real(cell, bits, None)
    return cell


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


def timetz(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A time of day as text with its offset."""
    if not isinstance(cell, str) or not _TIMETZ.fullmatch(cell):
        raise ValueError("is no time with its zone in the form 23:59:59+00")
    return cell


def interval(cell: Cell, digits: int | None, _: int | None) -> Cell:
    """A span of time as text, in which nothing is shorter than ``digits`` of a second show."""
    text, most = str(cell).lower(), 6 if digits is None else digits
    for figures, unit in _PORTION.findall(text):
        if len(figures.rstrip("0")) > most:
            raise ValueError(f"has more than {most} digits of a second's fraction")
        exact = unit[:1] in ("", "s") or (most == 6 and _DIVISIBLE.fullmatch(unit))
        if not exact and figures.rstrip("0"):
            raise ValueError("has a fraction of a unit of time that does not divide exactly")
    if _EXPONENT.search(text) or (most < 6 and _SHORT.search(text)):
        raise ValueError(f"may have more than {most} digits of a second's fraction")
    return cell


def distinct_keys(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A document with no key twice in one object, of which the sink would keep the last.

    What is no document the sink refuses by itself.
    """
    try:
        # Only the keys are looked at: no number is made of digits.
        json.loads(str(cell), object_pairs_hook=_distinct, parse_int=len, parse_float=len)
    except json.JSONDecodeError:
        return cell
    except RecursionError:
        raise ValueError("is too deep a JSON document") from None
    return cell


def _distinct(pairs: list[tuple[str, object]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("holds one key twice, of which the sink would keep the last")


def unpadded(cell: Cell, _: int | None, __: int | None) -> Cell:
    """Text without a space at its end, which the sink would take for padding."""
    if isinstance(cell, str) and cell.endswith(" "):
        raise ValueError("ends with a space, which the sink's column would drop")
    return cell


def net(cell: Cell, _: int | None, __: int | None) -> Cell:
    """A whole address, or one with the length of its net."""
    if not isinstance(cell, str) or not _WHOLE_NET.search(cell):
        raise ValueError("is no whole address, and has no length of its net")
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


CellGuard = Callable[[Cell, int | None, int | None], Cell]


def _each(*guards: CellGuard) -> CellGuard:
    """Every value in the text of an array, a range or a composite whose values are of one type."""

    def each(cell: Cell, first: int | None, second: int | None) -> Cell:
        if not isinstance(cell, str):
            raise ValueError("is no text of such values")
        for part in map(str.strip, _BETWEEN.split(cell)):
            if part.lower() not in _NO_VALUE:
                for guard in guards:
                    guard(part, first, second)
        return cell

    return each


GUARDS: dict[str, CellGuard] = {
    "scale": scale,
    "integer": integer,
    "real": real,
    "nearest": nearest,
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
    "timetz": timetz,
    "interval": interval,
    "distinct-keys": distinct_keys,
    "unpadded": unpadded,
    "net": net,
    "each-scale": _each(scale),
    "each-integer": _each(integer),
    "each-interval": _each(interval),
    "each-net": _each(net),
    "each-date": _each(date),
    "each-time": _each(time, fraction),
    "each-timetz": _each(timetz, fraction),
    "each-timestamp": _each(timestamp, fraction),
    "each-timestamptz": _each(timestamptz, fraction),
}


def guarded(batches: Iterable[Batch], columns: Sequence[ColumnPlan]) -> Iterator[Batch]:
    """The same batches with every guard applied; SourceError names the column that fails."""
    watched = [(i, column) for i, column in enumerate(columns) if column.guards]
    for batch in batches:
        # To bytes the source has applied them (Source.guarded_lanes).
        yield batch if batch.in_bytes else _guarded(batch, watched)


def _guarded(batch: Batch, watched: Sequence[tuple[int, ColumnPlan]]) -> Batch:
    """The batch behind the guards; the same where nothing had to change."""
    changed: dict[int, Side] = {}
    for position, column in watched if batch.rows else ():
        before = batch.sides[position]
        side = _applied(column, before)
        if side is not before:
            changed[position] = side
    return batch.with_sides(changed) if changed else batch


def _applied(column: ColumnPlan, side: Side) -> Side:
    """The column behind its guards; the same where nothing had to change."""
    for guard in column.guards:
        if not passes(side, guard):
            side = Side(_one_by_one(guard, side.values, column))
    return side


def _one_by_one(guard: Guard, values: Sequence[Cell], column: ColumnPlan) -> Sequence[Cell]:
    cell_guard, first, second = GUARDS[guard.name], guard.argument, guard.second
    try:
        return [None if value is None else cell_guard(value, first, second) for value in values]
    except ValueError as error:
        raise SourceError(
            f"column {column.source.name}: a value {error} (sink column {column.sink.name}, "
            f"{column.sink.type.name}); change the sink column, or convert it at the source, "
            "such as in a query",
            permanent=True,
        ) from None
