"""Guards over a whole column of a batch at once, for the common case that all is well.

Looking at each value in Python costs more than moving it. Here a column passes by a few
calls that loop in C: its types, its extremes, or one regular expression over all its values
joined. What does not pass is looked at value by value by :mod:`tasks.replicate.guards`, which
decides; so a pattern may be stricter than the guard, never laxer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from tasks.replicate.connector import Cell, Guard

_DAY = r"\d{4}-\d\d-\d\d"
_CLOCK = r"(?:[01]\d|2[0-3]):\d\d:\d\d"
_BY_PATTERN = {
    "date": _DAY,
    "calendar": rf"{_DAY}(?:[ T]{_CLOCK}(?:\.\d+)?(?:[+-]\d\d)?)?",
    "time": rf"{_CLOCK}(?:\.\d+)?",
    "clock": rf"{_CLOCK}(?:\.\d+)?",
    "timestamp": rf"{_DAY}[ T]{_CLOCK}(?:\.\d+)?",
    "timestamptz": rf"{_DAY}[ T]{_CLOCK}(?:\.\d+)?(?:Z|[+-]\d\d(?::?\d\d)?)",
    "finite": r"[+-]?\d+(?:\.\d+)?",
}


def passes(guard: Guard, values: Sequence[Cell]) -> bool:
    """Whether every value surely passes the guard and stays as it is."""
    kinds = set(map(type, values))
    if type(None) in kinds:
        kinds.discard(type(None))
        values = [value for value in values if value is not None]
    if not kinds:
        return True
    if len(kinds) != 1:
        return False
    found = _CHECKS.get((guard.name, kinds.pop()))
    return found is not None and found(values, guard.argument, guard.second)


def _lengths(values: Sequence[Cell], length: int | None, _: int | None) -> bool:
    return length is None or max(map(len, values)) <= length  # type: ignore[arg-type]


def _range(values: Sequence[Cell], bits: int | None, unsigned: int | None) -> bool:
    if bits is None:
        return True
    low, high = (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return low <= min(values) and max(values) < high  # type: ignore[type-var, operator]


def _double(values: Sequence[Cell], bits: int | None, _: int | None) -> bool:
    return bits != 32


def _always(values: Sequence[Cell], _: int | None, __: int | None) -> bool:
    return True


def _no_nul(values: Sequence[Cell], _: int | None, __: int | None) -> bool:
    return "\0" not in "".join(values)  # type: ignore[arg-type]


@functools.cache
def _repeated(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:(?:{pattern})\n)*")


def _all_match(pattern: str, values: Sequence[Cell]) -> bool:
    joined = "\n".join(values) + "\n"  # type: ignore[arg-type]
    # A value with a line break in it would look like two.
    return joined.count("\n") == len(values) and bool(_repeated(pattern).fullmatch(joined))


def _matching(pattern: str) -> Callable[[Sequence[Cell], int | None, int | None], bool]:
    return lambda values, _, __: _all_match(pattern, values)


def _scaled(values: Sequence[Cell], precision: int | None, digits: int | None) -> bool:
    whole = "*" if precision is None else f"{{1,{max(precision - (digits or 0), 1)}}}"
    if precision is not None and precision <= (digits or 0):
        return False
    after = "" if digits == 0 else r"(?:\.\d+)?" if digits is None else rf"(?:\.\d{{1,{digits}}})?"
    return _all_match(rf"-?\d{whole}{after}" if whole != "*" else rf"-?\d+{after}", values)


def _fraction(values: Sequence[Cell], digits: int | None, _: int | None) -> bool:
    if digits is None:
        return True
    joined = "\n".join(values)  # type: ignore[arg-type]
    return re.search(rf"\.\d{{{digits}}}\d*[1-9]", joined) is None


_CHECKS: dict[tuple[str, type], Callable[[Sequence[Cell], int | None, int | None], bool]] = {
    ("text", str): _lengths,
    ("octets", bytes): _lengths,
    ("integer", int): _range,
    ("real", float): _double,
    ("boolean", bool): _always,
    ("number-of-boolean", int): _always,
    ("no-nul", str): _no_nul,
    ("scale", str): _scaled,
    ("fraction", str): _fraction,
} | {(name, str): _matching(pattern) for name, pattern in _BY_PATTERN.items()}
