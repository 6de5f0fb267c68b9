"""One text for one value, however an engine or a file spells it: what checksums are taken of."""

from __future__ import annotations

import datetime
import json
import math
import re
import struct
from decimal import Decimal, InvalidOperation
from typing import Any

from tasks.replicate.connector import Cell, Kind

# More than any engine's numbers have; a text may claim a thousand million.
_MOST_DIGITS = 200_000
_FRACTION = re.compile(r"(\.\d*?)0+$")
_WHOLE_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_WHOLE_MOMENT = re.compile(r"\d{4}-\d\d-\d\d (?:[01]\d|2[0-3]):\d\d:\d\d(?:\.\d*[1-9])?(?:\+00)?")
_MOMENT = re.compile(
    r"(?:(\d{4,6})-(\d\d)-(\d\d))?"
    r"(?:(?:^|[ T])(\d\d):(\d\d)(?::(\d\d)(?:\.(\d+))?)?)?"
    r"(?: ?(?:(Z|UTC)|([+-])(\d\d)(?::?(\d\d))?))?( BC)?"
)
_TIMES = frozenset({Kind.DATE, Kind.TIME, Kind.TIMESTAMP, Kind.TIMESTAMPTZ})
_DAY_MINUTES = 24 * 60


def canonical(cell: Cell, kind: Kind, bits: int | None = None) -> str:
    """One text for one value, whichever engine handed it out and however a text that stands for
    it spells it; NULL is like no other text. ``bits`` are those of a FLOAT."""
    if cell is None:
        return "\0"
    if kind is Kind.BOOLEAN:
        if isinstance(cell, str):
            return "t" if cell.lower() in ("t", "true", "1", "yes", "y", "on") else "f"
        return "t" if cell else "f"
    if kind in (Kind.INTEGER, Kind.DECIMAL):
        return _number(cell)
    if kind is Kind.FLOAT:
        return _float(cell, bits)
    if kind is Kind.BYTES:
        return "\\x" + cell.hex() if isinstance(cell, bytes) else str(cell)
    if isinstance(cell, bytes):
        return "\\x" + cell.hex()
    text = cell if isinstance(cell, str) else _number(cell)
    if kind in _TIMES:
        return _moment(text, kind)
    if kind is Kind.JSON:
        return _document(text)
    return _uuid(text) if kind is Kind.UUID else text


def _float(cell: Cell, bits: int | None) -> str:
    try:
        # A number is compared as it is.
        value = float_of(cell, bits) if isinstance(cell, str) else float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(cell)
    return "nan" if math.isnan(value) else repr(value)


def float_of(text: str, bits: int | None) -> float:
    """The float of that many bits that is nearest to the text. Raises ValueError.

    Engines write a 32-bit float in as few digits as tell it from others, and these are nearest
    to another 64-bit float than its value.
    """
    value = float(text)
    return _nearest_single(value, text) if bits == 32 and math.isfinite(value) else value


def _nearest_single(value: float, text: str) -> float:
    """The 32-bit float that is nearest to the text, whose nearest 64-bit float is ``value``."""
    single = _single(value)
    other = 2 * value - single
    if single != value and math.isfinite(other) and _single(other) == other:
        # Half way between two; on which side the text is, its digits tell.
        exact = Decimal(text.strip())
        if exact != Decimal(value):
            return max(single, other) if exact > Decimal(value) else min(single, other)
    return single


def _single(value: float) -> float:
    try:
        found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return found


def _uuid(text: str) -> str:
    """With its hyphens and in lower case; braces and the hyphens' places mean nothing."""
    figures = text.strip("{}").replace("-", "").lower()
    if len(figures) != 32:
        return text.lower()
    return "-".join((figures[:8], figures[8:12], figures[12:16], figures[16:20], figures[20:]))


class _Literal(str):
    """A number as it is written: 1.0 and 1.00 are two."""


def _document(text: str) -> str:
    """JSON without what means nothing: white space, and how a character is escaped.

    Doubled keys, the order of keys and the digits of numbers stay.
    """
    try:
        found = json.loads(text, object_pairs_hook=tuple, parse_float=_Literal, parse_int=_Literal)
    except ValueError:
        return text
    return _written(found)


def _written(value: Any) -> str:
    if isinstance(value, _Literal):
        return str(value)
    if isinstance(value, tuple):
        inside = (f"{json.dumps(key)}:{_written(item)}" for key, item in value)
        return "{" + ",".join(inside) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


def _number(cell: Cell) -> str:
    if isinstance(cell, bool):
        return str(int(cell))
    try:
        number = Decimal(cell if isinstance(cell, int) else str(cell).strip())
    except InvalidOperation:
        try:
            # Such as 0x1f, which newer PostgreSQL reads.
            return str(int(str(cell), 0))
        except ValueError:
            return str(cell)
    if not number.is_finite():
        return str(number)
    if abs(number.adjusted()) > _MOST_DIGITS:
        sign, figures, _ = number.as_tuple()
        text = "".join(map(str, figures)).rstrip("0")
        return f"{'-' * sign}{text}e{number.adjusted()}" if text else "0"
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _moment(text: str, kind: Kind) -> str:
    """A time with all that a shorter spelling leaves out; a moment in UTC."""
    if (_WHOLE_DAY if kind is Kind.DATE else _WHOLE_MOMENT).fullmatch(text):
        return text
    found = _MOMENT.fullmatch(text)
    if found is None or not text:
        # Such as an infinity, or a time of more than a day.
        return _FRACTION.sub(r"\1", text).rstrip(".")
    year, month, day, hour, minute, second, fraction, utc, sign, hours, minutes, era = (
        found.groups()
    )
    clock = (int(hour) * 60 + int(minute)) if hour else 0
    zone = ""
    if utc or sign:
        zone = "+00"
        away = int(hours) * 60 + int(minutes or 0) if sign else 0
        if kind is Kind.TIMESTAMPTZ:
            clock += away if sign == "-" else -away
        elif away:
            zone = f"{sign}{hours}:{minutes or '00'}"
    date = ""
    if year:
        number = 1 - int(year) if era else int(year)
        days, clock = divmod(clock, _DAY_MINUTES) if kind is not Kind.DATE else (0, clock)
        number, month, day = _days_on(number, int(month), int(day), days)
        date = f"{number if number > 0 else 1 - number:04d}-{month:02d}-{day:02d}"
        era = "" if number > 0 else " BC"
    if kind is Kind.DATE and not hour:
        return date + (era or "")
    part = (fraction or "").rstrip("0")
    time = f"{clock // 60:02d}:{clock % 60:02d}:{second or '00'}{'.' if part else ''}{part}"
    return f"{date} {time}{zone}{era or ''}".strip()


def _days_on(year: int, month: int, day: int, days: int) -> tuple[int, int, int]:
    """The date some days later or earlier; of years before 1, 0 is 1 BC."""
    if not days or month not in range(1, 13):
        return year, month, day
    # The calendar has itself each 400 years; Python's begins with year 1.
    cycles, year = divmod(year, 400)
    ordinal = datetime.date(year + 400, month, day).toordinal() + days
    found = datetime.date.fromordinal(ordinal)
    return found.year - 400 + 400 * cycles, found.month, found.day
