"""Cells to and from MySQL, which changes some values without an error.

CHAR loses trailing spaces, BINARY is filled up with zeros, an enum takes a number or another case
for a member, a set is put in order, YEAR reads 70 as 1970, and a NULL where none is allowed may
become a default. What would not come back as it was is refused here, by column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from tasks.replicate.batch import Convert
from tasks.replicate.connector import Batch, Column, ColumnPlan, Kind, Side, SinkError
from tasks.replicate.connectors.mysql import types

_NEWEST_YEAR = 2155

# Reading


def conversions(columns: Sequence[Column]) -> dict[int, Convert]:
    """What makes cells of fetched values, by position: a moment gets its offset, all else is
    right."""
    return {
        position: _with_offset
        for position, column in enumerate(columns)
        if column.type.kind is Kind.TIMESTAMPTZ
    }


def _with_offset(value: str) -> str:
    return value + "+00"


# Writing


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return _float(value)
    return str(value)


def _float(value: Any) -> Any:
    if not isinstance(value, float):
        return _number(value)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("is not finite, which MySQL cannot hold")
    if value == 0 and repr(value) == "-0.0":
        raise ValueError("is negative zero, which MariaDB stores as 0; add 0 to it in a query")
    return repr(value)


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        raise ValueError("holds bytes, not text")
    return value if isinstance(value, str) else _number(value)


def _octets(value: Any) -> Any:
    if not isinstance(value, bytes):
        raise ValueError("is text, and the column holds bytes")
    return value


def _moment(value: Any) -> Any:
    """A moment in UTC; the server takes text without an offset in the session's zone, UTC."""
    text = _text(value)
    if text.endswith("+00"):
        return text[:-3]
    raise ValueError("is no moment in UTC")


def _character(value: Any) -> Any:
    text = _text(value)
    if text.endswith(" "):
        raise ValueError("ends with a space, which CHAR cuts off; make the column VARCHAR")
    return text


def _exact_octets(length: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if len(_octets(value)) != length:
            raise ValueError(
                f"does not have {length} bytes, and BINARY would fill it up; make the column "
                "VARBINARY"
            )
        return value

    return check


def _member(shown: str) -> Callable[[Any], Any]:
    known = frozenset(types.members(shown))

    def check(value: Any) -> Any:
        if value not in known:
            raise ValueError("is not, letter for letter, a member of the enum")
        return value

    return check


def _members(shown: str) -> Callable[[Any], Any]:
    places = {member: place for place, member in enumerate(types.members(shown))}

    def check(value: Any) -> Any:
        parts = str(value).split(",") if value != "" else []
        found = [places.get(part, -1) for part in parts]
        if -1 in found or found != sorted(set(found)):
            raise ValueError("is not a list of the set's members in their order")
        return value

    return check


def _year(value: Any) -> Any:
    if value != 0 and not 1901 <= int(value) <= _NEWEST_YEAR:
        raise ValueError("is no year that YEAR holds (1901 to 2155, and 0)")
    return "0000" if value == 0 else str(value)


def _document(value: Any) -> Any:
    """Of MySQL's own JSON, which makes doubles of numbers and keeps one of two equal keys."""
    try:
        json.loads(value, parse_float=_exact, parse_int=_exact, object_pairs_hook=_pairs)
    except json.JSONDecodeError:
        raise ValueError("is no JSON document") from None
    return value


def _exact(digits: str) -> Decimal:
    number = Decimal(digits)
    whole = "." not in digits and "e" not in digits.lower()
    if whole and -(2**63) <= number < 2**64:
        return number
    if Decimal(repr(float(digits))) != number:
        raise ValueError("holds a number that MySQL's JSON would round; make the column LONGTEXT")
    return number


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("holds one key twice, which MySQL's JSON would drop")
    return found


def _converter(column: Column) -> Callable[[Any], Any]:
    base = column.detail["base"]
    special: dict[str, Callable[[Any], Any]] = {"char": _character, "year": _year}
    if base == "binary":
        return _exact_octets(column.type.length or 1)
    if base == "enum":
        return _member(column.detail["shown"])
    if base == "set":
        return _members(column.detail["shown"])
    if base == "json":
        return _document
    if base in special:
        return special[base]
    kinds: dict[Kind, Callable[[Any], Any]] = {
        Kind.INTEGER: _number,
        Kind.DECIMAL: _number,
        Kind.FLOAT: _float,
        Kind.BYTES: _octets,
        Kind.TIMESTAMPTZ: _moment,
    }
    return kinds.get(column.type.kind, _text)


_UNCHANGED: dict[Convert, frozenset[type]] = {
    _text: frozenset({str}),
    _octets: frozenset({bytes}),
}


class Writer:
    """Turns batches of cells into columns of text and bytes; SinkError names the column."""

    def __init__(self, columns: Sequence[ColumnPlan]) -> None:
        self.columns = [plan.sink for plan in columns]
        self._converters = [_converter(column) for column in self.columns]

    def sides(self, batch: Batch) -> list[Side]:
        """The batch's columns: each value None, text or bytes, checked."""
        return [self._checked(position, side) for position, side in enumerate(batch.sides)]

    def _checked(self, position: int, side: Side) -> Side:
        column, convert = self.columns[position], self._converters[position]
        whole = side.present is side.values
        try:
            if not whole and not column.nullable:
                raise ValueError("is NULL, which the column does not allow")
            if side.kinds <= _UNCHANGED.get(convert, frozenset()):
                return side
            if whole and convert is _number and side.kinds == {int}:
                return Side(list(map(str, side.values)))
            return Side([None if value is None else convert(value) for value in side.values])
        except ValueError as error:
            raise SinkError(
                f"column {column.name}: a value {error} ({column.type.name})", permanent=True
            ) from None
