"""Guards over a whole column of a batch at once, for the common case that all is well.

A column passes by its types, its extremes or the shapes of its values. A column of times has a
handful of shapes however many rows there are, so that one translation and a set replace a pattern
over all its characters.

What does not pass is looked at value by value by :mod:`tasks.replicate.guards`, which decides; so
a guard here may be stricter than that of a cell, never laxer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from tasks.replicate.batch import BETWEEN, Cell, Side
from tasks.replicate.shapes import Guard

# Zeros would be no numbers where they lead.
_ONES = str.maketrans("023456789", "111111111")

_DAY = "0000-00-00"
_CLOCK = "00:00:00"
_FRACTION = r"(?:\.0+)?"
_ZONE = "(?:Z|[+-]00(?::?00)?)"
_SHAPES = {
    "date": _DAY,
    "calendar": rf"{_DAY}(?:[ T]{_CLOCK}{_FRACTION}(?:[+-]00)?)?",
    "time": rf"{_CLOCK}{_FRACTION}",
    "timestamp": rf"{_DAY}[ T]{_CLOCK}{_FRACTION}",
    "timestamptz": rf"{_DAY}[ T]{_CLOCK}{_FRACTION}{_ZONE}",
    "timetz": rf"{_CLOCK}{_FRACTION}{_ZONE}",
    "finite": r"[+-]?0+(?:\.0+)?",
}
_WITH_SECONDS = frozenset({"time", "timestamp", "timestamptz", "timetz"})
# Of an interval, what may be a part of a second, or of another unit.
_PART = re.compile(r"\.|\d[eE]")


def passes(side: Side, guard: Guard) -> bool:
    """Whether every value surely passes the guard and stays as it is."""
    if len(side.kinds) != 1:
        return not side.kinds
    (kind,) = side.kinds
    found = _GUARDS.get((guard.name, kind))
    return found is not None and found(side, guard.argument, guard.second)


ColumnGuard = Callable[[Side, int | None, int | None], bool]


def _lengths(side: Side, length: int | None, _: int | None) -> bool:
    return length is None or max(map(len, side.present)) <= length  # type: ignore[arg-type]


def _range(side: Side, bits: int | None, unsigned: int | None) -> bool:
    if bits is None:
        return True
    low, high = (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return low <= min(side.present) and max(side.present) < high  # type: ignore[type-var, operator]


def _double(side: Side, bits: int | None, _: int | None) -> bool:
    return bits != 32


def _exact(side: Side, bits: int | None, _: int | None) -> bool:
    """Whole numbers that a float has each of."""
    most = 2**24 if bits == 32 else 2**53
    return -most <= min(side.present) and max(side.present) <= most  # type: ignore[type-var, operator]


def _without_parts(side: Side, digits: int | None, _: int | None) -> bool:
    return digits in (None, 6) and _PART.search(side.joined) is None


def _unpadded(side: Side, _: int | None, __: int | None) -> bool:
    return f" {BETWEEN}" not in side.joined and not side.joined.endswith(" ")


def _always(side: Side, _: int | None, __: int | None) -> bool:
    return True


def _no_nul(side: Side, _: int | None, __: int | None) -> bool:
    return "\0" not in side.joined


def _shaped(pattern: str, *, seconds: bool = False) -> ColumnGuard:
    whole = re.compile(pattern)
    if seconds:
        # A shape does not tell second 60, which is none.
        return lambda side, _, __: (
            all(map(whole.fullmatch, side.shapes)) and ":60" not in side.joined
        )
    return lambda side, _, __: all(map(whole.fullmatch, side.shapes))


def _scaled(side: Side, precision: int | None, digits: int | None) -> bool:
    if (precision is not None and precision <= (digits or 0)) or (digits or 0) < 0:
        return False
    whole = "+" if precision is None else f"{{1,{precision - (digits or 0)}}}"
    after = "" if digits == 0 else r"(?:\.0+)?" if digits is None else rf"(?:\.0{{1,{digits}}})?"
    return _shaped(rf"-?0{whole}{after}")(side, None, None)


def _fraction(side: Side, digits: int | None, _: int | None) -> bool:
    if digits is None or not any(map(re.compile(rf"\.\d{{{digits + 1}}}").search, side.shapes)):
        return True
    # Zeros behind the last digit that counts are none.
    return re.search(rf"\.\d{{{digits}}}\d*[1-9]", side.joined) is None


class _Doubled(Exception):
    """A key stands twice in one object."""


def _keys(pairs: list[tuple[str, object]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise _Doubled


_DOCUMENTS = json.JSONDecoder(object_pairs_hook=_keys, parse_int=len, parse_float=len)


def _whole_documents(texts: Collection[Cell]) -> bool:
    """Whether these are JSON documents without a key twice; parsed in one call.

    Each stands in a list of its own, so that halves of two do not make one.
    """
    try:
        found = _DOCUMENTS.decode(f"[[{'],['.join(texts)}]]")  # type: ignore[arg-type]
    except (ValueError, RecursionError, _Doubled):
        return False
    return len(found) == len(texts) and set(map(len, found)) == {1}


def _distinct_keys(side: Side, _: int | None, __: int | None) -> bool:
    if "\\" not in side.joined:
        # Documents that a program wrote are often alike but for their numbers. (With an escape in
        # it, one key can be spelt in two ways.)
        alike = set(side.joined.translate(_ONES).split(BETWEEN))
        if _whole_documents(alike):
            return True
    return _whole_documents(side.present)


def _before_midnight(side: Side, _: int | None, __: int | None) -> bool:
    none = f"{BETWEEN}24" not in f"{BETWEEN}{side.joined}"
    return none and _GUARDS["time", str](side, None, None)


_GUARDS: dict[tuple[str, type], ColumnGuard] = {
    ("text", str): _lengths,
    ("octets", bytes): _lengths,
    ("integer", int): _range,
    ("real", float): _double,
    ("nearest", str): _always,
    ("nearest", float): _double,
    ("nearest", int): _exact,
    ("boolean", bool): _always,
    ("number-of-boolean", int): _always,
    ("no-nul", str): _no_nul,
    ("scale", str): _scaled,
    ("fraction", str): _fraction,
    ("clock", str): _before_midnight,
    ("interval", str): _without_parts,
    ("unpadded", str): _unpadded,
    ("distinct-keys", str): _distinct_keys,
} | {
    (name, str): _shaped(pattern, seconds=name in _WITH_SECONDS)
    for name, pattern in _SHAPES.items()
}


def takes_any_text(guard: Guard) -> bool:
    """Whether no text fails the guard or is changed by it."""
    return (guard.name, guard.argument) == ("text", None) or guard.name == "nearest"
