"""Whether two ends hold the same rows: a count and a digest that no order of rows changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tasks.replicate.canonical import canonical
from tasks.replicate.connector import (
    Batch,
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


@dataclass(frozen=True, slots=True)
class Checksum:
    """Rows, and 32 hexadecimal digits; comparable between ends of one dialect, or of cells."""

    rows: int
    digest: str

    def __str__(self) -> str:
        return f"{self.digest} over {self.rows} rows"


def of_cells(batches: Iterable[Batch], columns: Sequence[ColumnPlan]) -> Checksum:
    """The checksum of rows in the row lane, each cell in the one form of its kind.

    The type is the sink's; what the sink holds as text is compared as what it was at the source.
    """
    types = [
        plan.source.type if plan.sink.type.kind is Kind.TEXT else plan.sink.type for plan in columns
    ]
    kinds, bits = [type_.kind for type_ in types], [type_.bits for type_ in types]
    rows = first = second = 0
    for batch in batches:
        assert isinstance(batch.data, list)
        for row in batch.data:
            text = "\x1f".join(map(canonical, row, kinds, bits))
            digest = hashlib.md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False)
            first += int.from_bytes(digest.digest()[:8], "big")
            second += int.from_bytes(digest.digest()[8:], "big")
        rows += len(batch.data)
    return Checksum(rows, f"{first % 2**64:016x}{second % 2**64:016x}")


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


def of_source(
    source: Source,
    request: ReadRequest,
    *,
    native: bool,
    shown: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
) -> Checksum:
    """The checksum of a planned request: by the database itself where ``native``, else of cells.

    ``shown`` brings texts into the form in which a sink shows them (:meth:`Sink.shown`).
    """
    if native:
        try:
            found: Checksum = source.checksum(request)
        except NotImplementedError:
            pass
        else:
            return found
    with reading(source, source.read(request, Part(0), Lane.ROWS)) as batches:
        # A guard may hand on another form of the value, and that is what the sink has.
        return of_cells(shown(guarded(batches, request.columns)), request.columns)


def of_both(
    source: Source, sink: Sink, request: ReadRequest, load: Load
) -> tuple[Checksum, Checksum]:
    """The source's rows and the sink's, by their databases if they speak one dialect."""
    if source.dialect and source.dialect == sink.dialect:
        try:
            return source.checksum(request), sink.checksum(load)
        except NotImplementedError:
            pass
    one = of_source(source, request, native=False, shown=partial(sink.shown, load))
    return one, of_cells(sink.scan(load), load.columns)
