"""Durations as people write them: ``500ms 60s 5m 1h 1d``, or a number of seconds."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal, InvalidOperation

_UNITS = {
    "d": Decimal(86400),
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}
_SHAPE = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)", re.ASCII)
_MICROSECONDS = Decimal(1_000_000)
# A century: above it a duration is a slip of the pen, and adding it to a date may overflow.
_LONGEST = timedelta(days=36525)


class InvalidDuration(ValueError):
    """What was given is no duration; the message says how one is written."""


def parse_duration(value: str | int | float | timedelta, *, what: str = "duration") -> timedelta:
    """Read a duration such as ``90s``, ``1.5h`` or ``60`` (a bare number counts seconds).

    The result is exact to the microsecond and not negative; zero is a duration. ``what`` names the
    setting in the message of InvalidDuration, which is raised for everything else.
    """
    if isinstance(value, timedelta):
        return _bounded(value, str(value), what)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidDuration(_refusal(what, value))
    text = (value if isinstance(value, str) else repr(value)).strip()
    if isinstance(value, float):
        # repr() is exact but may use an exponent, which nobody writes by hand: 1e-05.
        try:
            text = format(Decimal(text), "f")
        except InvalidOperation as error:
            raise InvalidDuration(_refusal(what, value)) from error
    if text.startswith("-"):
        raise InvalidDuration(f"{what} {text!r} is negative: a duration is 0 or more")
    match = _SHAPE.fullmatch(text)
    unit = match[2] or "s" if match else ""
    if match is None or unit not in _UNITS:
        raise InvalidDuration(_refusal(what, value))
    if len(match[1]) > 40:
        raise InvalidDuration(f"{what} {text[:40]!r}... is longer than a century")
    microseconds = Decimal(match[1]) * _UNITS[unit] * _MICROSECONDS
    if microseconds != microseconds.to_integral_value():
        raise InvalidDuration(f"{what} {text!r} is finer than a microsecond: round it")
    if microseconds > _LONGEST // timedelta(microseconds=1):
        raise InvalidDuration(f"{what} {text!r} is longer than a century")
    return timedelta(microseconds=int(microseconds))


def format_duration(value: timedelta | int | float) -> str:
    """Write a duration so that ``parse_duration`` reads the same: ``90s``, ``15m``, ``500ms``.

    The largest unit that divides it evenly is used; a number counts seconds.
    """
    exact = parse_duration(value)
    if not exact:
        return "0s"
    for unit, seconds in _UNITS.items():
        size = timedelta(microseconds=int(seconds * _MICROSECONDS))
        if not exact % size:
            return f"{exact // size}{unit}"
    milliseconds = Decimal(exact // timedelta(microseconds=1)) / 1000
    return f"{milliseconds.normalize():f}ms"


def _bounded(value: timedelta, text: str, what: str) -> timedelta:
    if value < timedelta(0):
        raise InvalidDuration(f"{what} {text!r} is negative: a duration is 0 or more")
    if value > _LONGEST:
        raise InvalidDuration(f"{what} {text!r} is longer than a century")
    return value


def _refusal(what: str, value: object) -> str:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return (
        f"{what} {shown} is no duration: write a number and one unit, such as "
        "500ms, 60s, 5m, 1h or 1d, or a number of seconds"
    )
