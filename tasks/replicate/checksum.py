"""Whether two ends hold the same rows: a count and a digest that no order of rows changes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Cell,
    ColumnPlan,
    Kind,
    Lane,
    Load,
    Part,
    ReadRequest,
    Sink,
    Source,
)
from tasks.replicate.ends import reading
from tasks.replicate.guards import guarded

# More than any engine's numbers have; a text may claim a thousand million.
_MOST_DIGITS = 200_000
_FRACTION = re.compile(r"(\.\d*?)0+(?=\D|$)")


@dataclass(frozen=True, slots=True)
class Checksum:
    """Rows, and 32 hexadecimal digits; comparable between ends of one dialect, or of cells."""

    rows: int
    digest: str

    def __str__(self) -> str:
        return f"{self.digest} over {self.rows} rows"


def of_cells(batches: Iterable[Batch], columns: Sequence[ColumnPlan]) -> Checksum:
    """The checksum of rows in the row lane, each cell in the one form of its kind.

    The kind is the sink's; what the sink holds as text is compared as what it was at the source.
    """
    kinds = [
        plan.source.type.kind if plan.sink.type.kind is Kind.TEXT else plan.sink.type.kind
        for plan in columns
    ]
    rows = first = second = 0
    for batch in batches:
        assert isinstance(batch.data, list)
        for row in batch.data:
            text = "\x1f".join(map(canonical, row, kinds))
            digest = hashlib.md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False)
            first += int.from_bytes(digest.digest()[:8], "big")
            second += int.from_bytes(digest.digest()[8:], "big")
        rows += len(batch.data)
    return Checksum(rows, f"{first % 2**64:016x}{second % 2**64:016x}")


def canonical(cell: Cell, kind: Kind) -> str:
    """One text for one value, whichever engine handed it out; NULL is like no other text."""
    if cell is None:
        return "\0"
    if kind is Kind.BOOLEAN:
        if isinstance(cell, str):
            return "t" if cell.lower() in ("t", "true", "1", "yes", "y", "on") else "f"
        return "t" if cell else "f"
    if kind in (Kind.INTEGER, Kind.DECIMAL):
        return _number(cell)
    if kind is Kind.FLOAT:
        try:
            value = float(cell)
        except (TypeError, ValueError):
            return str(cell)
        return "nan" if math.isnan(value) else repr(value)
    if kind is Kind.BYTES:
        return "\\x" + cell.hex() if isinstance(cell, bytes) else str(cell)
    if isinstance(cell, bytes):
        return "\\x" + cell.hex()
    text = cell if isinstance(cell, str) else _number(cell)
    if kind in (Kind.TIME, Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        return _moment(text, kind)
    if kind is Kind.JSON:
        return _document(text)
    return text.lower() if kind is Kind.UUID else text


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
    text = text.replace("T", " ", 1)
    text = _FRACTION.sub(r"\1", text).replace(".+", "+").rstrip(".")
    if kind is Kind.TIMESTAMPTZ:
        text = re.sub(r" ?(Z|UTC|\+00:?00)$", "+00", text)
    return text


def of_table(
    connector: str,
    config: Mapping[str, Any],
    table: str,
    columns: Sequence[str] = (),
    *,
    where: str | None = None,
) -> Checksum:
    """The checksum of a table (named as a job names it), computed by its own database if it can.

    Comparable between datasources of one connector whose columns have the same types.
    Raises SourceError.
    """
    from tasks.replicate import registry
    from tasks.replicate.names import split_name

    with registry.get(connector).source(config, name="cc/checksum") as source:
        request = ReadRequest(table=split_name(table), where=where)
        relation = source.describe(request)
        chosen = [c for c in relation.columns if not columns or c.name in columns]
        request = request.planned([ColumnPlan(column, column) for column in chosen])
        source.snapshot()
        return of_source(source, request, native=True)


def of_source(source: Source, request: ReadRequest, *, native: bool) -> Checksum:
    """The checksum of a planned request: by the database itself where ``native``, else of cells."""
    if native:
        try:
            found: Checksum = source.checksum(request)
        except NotImplementedError:
            pass
        else:
            return found
    with reading(source, source.read(request, Part(0), Lane.ROWS)) as batches:
        # A guard may hand on another form of the value, and that is what the sink has.
        return of_cells(guarded(batches, request.columns), request.columns)


def of_both(
    source: Source, sink: Sink, request: ReadRequest, load: Load
) -> tuple[Checksum, Checksum]:
    """The source's rows and the sink's, by their databases if they speak one dialect."""
    native = bool(source.dialect) and source.dialect == sink.dialect
    one = of_source(source, request, native=native)
    if native:
        try:
            return one, sink.checksum(load)
        except NotImplementedError:
            one = of_source(source, request, native=False)
    return one, of_cells(sink.scan(load), load.columns)
