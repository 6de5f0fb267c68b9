"""Incremental reads of SQLite: how a watermark is compared, and when its order cannot be trusted.

A column holds what it was given. Numbers sort before all text, and text sorts by its letters, so
that one value of another form would silently fall out of every read. Each bound is only given out
after a look that finds no such value.
"""

from __future__ import annotations

from typing import Any

from tasks.replicate.connector import Bound, Column, Kind, ReadRequest, SourceError
from tasks.replicate.connectors import lags
from tasks.replicate.connectors.sqlite.session import Session, identifier
from tasks.replicate.shapes import MOMENTS

_GREATEST = "select max({column}) {source}"
# Nothing lies above an infinite number.
_GREATEST_NUMBER = "select max({column}) {source} {and} abs({column}) < 9e999"
_BAD_NUMBER = """
select count(*) {source} {and} typeof({column}) not in ('null', 'integer', {also})
"""
_BAD_DAY = """
select count(*) {source} {and} {column} is not null
  and not (typeof({column}) = 'text' and length({column}) = 10
           and {column} glob '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]')
"""
# Offsets other than UTC, and times without seconds, would sort by their letters.
_BAD_MOMENT = """
select count(*) {source} {and} {column} is not null
  and not (typeof({column}) = 'text'
           and substr({column}, 1, 10) glob '[0-9][0-9][0-9][0-9]-[01][0-9]-[0-3][0-9]'
           and substr({column}, 11, 9) glob '[ T][0-2][0-9]:[0-5][0-9]:[0-6][0-9]'
           and (substr({column}, 20) not glob '*[+-]*'
                or {column} glob '*+00' or {column} glob '*+00:00'))
"""


def bound(
    session: Session,
    source: str,
    conditions: bool,
    parameters: list[Any],
    column: Column,
    lag: float | None,
    since: str | None,
) -> Bound:
    """The bound for reads of ``source`` (FROM and WHERE; ``conditions`` tells if it has WHERE)."""
    lags.check(column)
    kind, name = column.type.kind, identifier(column.name)
    if kind is Kind.DECIMAL and column.detail.get("affinity") == "TEXT":
        raise SourceError(
            f"watermark {column.name} holds numbers as text, which sort by their letters; "
            "use a column of type INTEGER, or cast it in a query",
            permanent=True,
        )
    test = {Kind.INTEGER: _BAD_NUMBER, Kind.DECIMAL: _BAD_NUMBER, Kind.DATE: _BAD_DAY}
    parts = {
        "source": source,
        "column": name,
        "also": "'real'" if kind is Kind.DECIMAL else "'integer'",
        "and": "and" if conditions else "where",
    }
    statement = test.get(kind, _BAD_MOMENT).format(**parts)
    (bad,) = session.execute(statement, parameters).fetchone()
    if bad:
        forms = {Kind.INTEGER: "whole number", Kind.DECIMAL: "number", Kind.DATE: "2026-11-01"}
        raise SourceError(
            f"watermark {column.name}: {bad} rows hold something else than "
            f"{forms.get(kind, '2026-11-01 23:59:59 in UTC')}, which would be missed; "
            "mend them, or convert the column in a query",
            permanent=True,
        )
    statement = (_GREATEST_NUMBER if kind is Kind.DECIMAL else _GREATEST).format(**parts)
    (greatest,) = session.execute(statement, parameters).fetchone()
    # As Python writes it: SQLite writes 15 digits of a float, which may be more than it is.
    return lags.bound(column, None if greatest is None else str(greatest), lag, since)


def since(request: ReadRequest, column: Column | None) -> int | float | str:
    """The lower bound as a value that sorts before every form in which it may be stored."""
    assert request.since is not None
    kind = None if column is None else column.type.kind
    if kind is Kind.INTEGER:
        return int(request.since)
    if kind is Kind.DECIMAL:
        return float(request.since)
    if kind is Kind.DATE:
        return request.since[:10]
    if kind in MOMENTS:
        # Whole seconds, and the space that sorts before the letter T: never too high.
        return lags.instant(request.since).isoformat(" ", "seconds")
    return request.since
