"""Rows as the text that COPY reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tasks.replicate.connector import Batch, ColumnPlan, Side, SourceError
from tasks.replicate.connectors import tabbed

_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_INFINITE = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
BLOCK = 128 * 1024
"""Bytes that go to the server at a time, about: what a socket takes without a wait for it."""


def blocks(batch: Batch, columns: Sequence[ColumnPlan]) -> Iterator[bytes]:
    """The rows of a batch. Raises SourceError naming the column of a value that PostgreSQL's text
    cannot hold."""
    if not batch.rows:
        return
    fields = [
        tabbed.with_nulls(side, _written(side, plan))
        for side, plan in zip(batch.sides, columns, strict=True)
    ]
    try:
        yield from tabbed.lines(fields, max(1, batch.rows * BLOCK // max(batch.weight, 1)))
    except UnicodeEncodeError:
        sides = zip(batch.sides, columns, strict=True)
        lacking = ", ".join(plan.source.name for side, plan in sides if tabbed.not_unicode(side))
        raise SourceError(
            f"column {lacking}: a text is not valid Unicode", permanent=True
        ) from None


def _written(side: Side, column: ColumnPlan) -> Sequence[str]:
    """The values that are not NULL."""
    if side.kinds == {str}:
        if "\0" in side.joined:
            raise SourceError(
                f"column {column.source.name}: a value holds a NUL character, which PostgreSQL's "
                "text cannot hold; remove it in a query",
                permanent=True,
            )
        return tabbed.escaped(side, _ESCAPES)
    if len(side.kinds) > 1:
        return [_written(Side((value,)), column)[0] for value in side.present]
    for kind in side.kinds:
        if kind not in _WRITTEN:
            raise SourceError(
                f"column {column.source.name}: the source hands over values of Python's type "
                f"{kind.__name__}, which is none of a cell's",
                permanent=True,
            )
        return _WRITTEN[kind](side.present)
    return ()


def _floats(values: Sequence[float]) -> Sequence[str]:
    written = list(map(repr, values))
    # Only the words for what is no number have this letter.
    if "n" in "".join(written):
        return [_INFINITE.get(value, value) for value in written]
    return written


_WRITTEN: dict[type, Callable[[Sequence[Any]], Sequence[str]]] = {
    int: lambda values: list(map(repr, values)),
    float: _floats,
    bool: lambda values: ["t" if value else "f" for value in values],
    bytes: lambda values: ["\\\\x" + value.hex() for value in values],
}
