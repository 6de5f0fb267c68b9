"""Cells to and from SQLite, which changes some values without an error.

A column's affinity turns text that looks like a number into one, and numbers into text of 15
digits; NaN becomes NULL, and -0.0 becomes 0. What would not come back as it was is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from tasks.replicate.batch import Convert
from tasks.replicate.connector import Batch, Column, ColumnPlan, Kind, Row, Side, SinkError

_NUMERIC = re.compile(
    r"[ \t\n\v\f\r]*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[ \t\n\v\f\r]*", re.ASCII
)
_INFINITE = frozenset({"Infinity", "-Infinity"})
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


# Reading


def _boolean(value: Any) -> Any:
    return bool(value) if type(value) is int and value in (0, 1) else value


def _decimal(value: Any) -> Any:
    if type(value) is int:
        return str(value)
    if type(value) is float:
        return format(Decimal(repr(value)), "f")
    return value


_READ: dict[Kind, Convert] = {Kind.BOOLEAN: _boolean, Kind.DECIMAL: _decimal}


def conversions(columns: Sequence[Column]) -> dict[int, Convert]:
    """What makes cells of fetched values, by position. Values of other types than the column's
    stay."""
    return {
        position: _READ[column.type.kind]
        for position, column in enumerate(columns)
        if column.type.kind in _READ
    }


# Writing


def _text(value: Any) -> Any:
    """Into TEXT affinity: SQLite would write a float with 15 digits."""
    if isinstance(value, bool):
        raise ValueError("is a truth value, which a text column cannot hold as such")
    if isinstance(value, float):
        return repr(value)
    return str(value) if isinstance(value, int) else value


def _number(value: Any) -> Any:
    """Into NUMERIC, INTEGER or REAL affinity."""
    if isinstance(value, str):
        if _NUMERIC.fullmatch(value):
            raise ValueError(
                "is text that looks like a number, which SQLite would store as one; "
                "declare the column TEXT"
            )
    elif isinstance(value, float):
        _float(value)
    elif isinstance(value, int):
        _integer(value)
    return value


def _real(value: Any) -> Any:
    """Into REAL affinity, which makes a float of every integer."""
    if isinstance(value, int) and not isinstance(value, bool) and float(value) != value:
        raise ValueError("is a whole number that a float would round")
    return _number(value)


def _digits(value: Any) -> Any:
    """A decimal's text into NUMERIC affinity, which keeps 64-bit integers and floats."""
    if not isinstance(value, str) or not _NUMERIC.fullmatch(value):
        # As text it would sort above every number, and be none in the file it came from.
        return float(value) if value in _INFINITE else _number(value)
    try:
        exact = Decimal(value.strip())
    except InvalidOperation:
        # An exponent beyond Decimal's; the engine would make it infinite, or 0.
        raise ValueError("has an exponent beyond what SQLite's NUMERIC keeps") from None
    if exact == exact.to_integral_value() and _SMALLEST <= exact <= _LARGEST:
        return int(exact)
    nearest = float(exact)
    if Decimal(repr(nearest)) != exact:
        raise ValueError(
            "has more digits than SQLite's NUMERIC keeps exactly; declare the column TEXT"
        )
    return nearest


def _any(value: Any) -> Any:
    """Without an affinity: as it is, but for what SQLite cannot tell from NULL."""
    if isinstance(value, float) and value != value:
        raise ValueError("is NaN, which SQLite stores as NULL")
    return _integer(value) if isinstance(value, int) else value


def _float(value: float) -> None:
    if value != value:
        raise ValueError("is NaN, which SQLite stores as NULL")
    if value == 0 and str(value) == "-0.0":
        raise ValueError("is negative zero, which SQLite stores as 0; add 0 to it in a query")


def _integer(value: int) -> int:
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError("is beyond 64-bit integers, which SQLite cannot hold; declare it TEXT")
    return value


def _rowid(value: Any) -> Any:
    """Into INTEGER PRIMARY KEY, where SQLite would number a NULL by itself."""
    if not isinstance(value, int):
        raise ValueError("is no integer, and the column is the table's INTEGER PRIMARY KEY")
    return _integer(value)


_WRITE: dict[str, Convert] = {
    "TEXT": _text,
    "REAL": _real,
    "INTEGER": _number,
    "NUMERIC": _number,
    "BLOB": _any,
}
# Types whose cells can be stored in a column of that affinity without a look at each.
_PLAIN: dict[str, frozenset[type]] = {
    "TEXT": frozenset({str, bytes}),
    "REAL": frozenset({bytes}),
    "INTEGER": frozenset({bool, bytes}),
    "NUMERIC": frozenset({bool, bytes}),
    "BLOB": frozenset({str, bytes, bool}),
}


# Whole numbers are something else there.
_NOT_WHOLE: frozenset[Convert] = frozenset({_text, _real})


class Writer:
    """Turns batches of cells into rows to bind, column by column; SinkError names the column."""

    def __init__(self, columns: Sequence[ColumnPlan]) -> None:
        self._columns = [plan.sink for plan in columns]
        self._binders = [_binder(column) for column in self._columns]

    def rows(self, batch: Batch) -> list[Row]:
        """The rows to bind."""
        changed: dict[int, Side] = {}
        for position, (plain, convert, may_be_null) in enumerate(self._binders):
            side = batch.sides[position]
            whole = side.kinds == {int} and convert not in _NOT_WHOLE and _fits(side.present)
            if (whole or side.kinds <= plain) and (may_be_null or side.present is side.values):
                continue
            changed[position] = Side(self._bound(position, side.values, convert, may_be_null))
        return (batch.with_sides(changed) if changed else batch).data  # type: ignore[return-value]

    def _bound(
        self, position: int, side: Sequence[Any], convert: Convert, may_be_null: bool
    ) -> list[Any]:
        try:
            if may_be_null:
                return [None if value is None else convert(value) for value in side]
            return [convert(value) for value in side]
        except ValueError as error:
            column = self._columns[position]
            raise SinkError(
                f"column {column.name}: a value {error} ({column.type.name})", permanent=True
            ) from None

    def explain(self, batch: list[Row], error: Exception) -> str:
        """What of a batch the driver refused to bind, without the value."""
        for row in batch:
            for column, value in zip(self._columns, row, strict=True):
                try:
                    if isinstance(value, str):
                        value.encode()
                except UnicodeError:
                    return f"column {column.name}: a text is not valid Unicode"
        return str(error)


def _fits(side: Sequence[Any]) -> bool:
    return min(side) >= _SMALLEST and max(side) <= _LARGEST


def _binder(column: Column) -> tuple[frozenset[type], Convert, bool]:
    if column.detail.get("rowid"):
        return frozenset(), _rowid, False
    kind, affinity = column.type.kind, column.detail.get("affinity", "BLOB")
    convert = _WRITE[affinity]
    if affinity == "NUMERIC" and kind is Kind.DECIMAL:
        convert = _digits
    return _PLAIN[affinity], convert, True
