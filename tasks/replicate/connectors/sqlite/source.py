"""Reading SQLite in one read transaction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Bound,
    Column,
    Lane,
    Part,
    ReadRequest,
    Relation,
    Source,
    SourceError,
    TableName,
)
from tasks.replicate.connectors.sqlite import catalog, values, watermarks
from tasks.replicate.connectors.sqlite.session import Session, identifier
from tasks.replicate.names import join_name

_SELECT = "select {columns} {source}"
_FROM_TABLE = "from {table}"
_FROM_QUERY = "from (\n{query}\n) claimcheck_query"
# The condition stands on lines of its own, so that a comment at its end stays one.
_WHERE = "(\n{where}\n)"
_SINCE = "({column} >= ? or {column} is null)"
_COUNT = "select count(*) {source}"
_TRY = "select 1 {source} limit 0"
_LOOK = "select count(*) from main.sqlite_master"


class SQLiteSource(Source):
    """A connection that reads one state of the file.

    While it reads, writers wait with their commits, unless the file is in WAL mode.
    """

    dialect = "sqlite"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._session = Session(config, SourceError, writable=False)

    def stop(self) -> None:
        self._session.stop()

    def close(self) -> None:
        self._session.close()

    # What there is

    def describe(self, request: ReadRequest) -> Relation:
        if request.query is not None:
            relation = catalog.describe_query(self._session, _inner(request))
        else:
            relation = self._table(request)
        source, parameters = _from(request, relation)
        self._session.execute(_TRY.format(source=source), parameters)
        # A plan of SQLite's says nothing of how many rows meet the conditions.
        return replace(relation, rows=None) if request.is_conditional else relation

    def _table(self, request: ReadRequest) -> Relation:
        assert request.table is not None
        try:
            name = catalog.split(request.table)
        except ValueError as error:
            raise SourceError(f"source: {error}", permanent=True) from None
        relation = catalog.describe(self._session, name)
        if relation is None:
            near = catalog.near(self._session, name)
            hint = f"; did you mean {near}?" if near else ""
            raise SourceError(
                f"source table {join_name(request.table)} does not exist (names are literal: case "
                f"and spaces count){hint}",
                permanent=True,
            )
        return relation

    def reads(self, request: ReadRequest) -> frozenset[Any]:
        source, parameters = _from(request, None)
        read = self._session.tables_of(_TRY.format(source=source), parameters)
        return frozenset(catalog.identity(self._session, name) for name in read)

    def tables(self) -> list[TableName]:
        return catalog.tables(self._session)

    # One state of the data

    def bound(self, request: ReadRequest, column: Column, lag: float | None) -> Bound:
        everything = ReadRequest(table=request.table, query=request.query, where=request.where)
        source, parameters = _from(everything, None)
        conditions = request.where is not None
        return watermarks.bound(
            self._session, source, conditions, parameters, column, lag, request.since
        )

    def snapshot(self) -> None:
        self._session.read_only()
        self._session.execute("begin")
        # The transaction sees nothing before its first read.
        self._session.execute(_LOOK)

    # The rows

    def read(self, request: ReadRequest, part: Part, lane: Lane) -> Iterator[Batch]:
        columns = [plan.source for plan in request.columns]
        source, parameters = _from(request, None)
        names = ", ".join(identifier(column.name) for column in columns)
        statement = _SELECT.format(columns=names, source=source)
        conversions = values.conversions(columns)
        for page in self._session.pages(statement, parameters, request.fetch_size):
            yield Batch.of_rows(page, conversions)

    def count(self, request: ReadRequest) -> int:
        source, parameters = _from(request, None)
        (found,) = self._session.execute(_COUNT.format(source=source), parameters).fetchone()
        return int(found)


def _inner(request: ReadRequest) -> str:
    """The user's query, without a closing semicolon."""
    assert request.query is not None
    return request.query.strip().rstrip(";")


def _from(request: ReadRequest, relation: Relation | None) -> tuple[str, list[Any]]:
    """FROM and WHERE of a request, and the parameters in it."""
    if request.query is not None:
        source = _FROM_QUERY.format(query=_inner(request))
    else:
        assert request.table is not None
        source = _FROM_TABLE.format(table=identifier("main", request.table[-1]))
    conditions: list[str] = []
    parameters: list[Any] = []
    if request.where is not None:
        conditions.append(_WHERE.format(where=request.where))
    if request.watermark is not None and request.since is not None:
        column = next(
            (p.source for p in request.columns if p.source.name == request.watermark),
            None if relation is None else relation.column(request.watermark),
        )
        conditions.append(_SINCE.format(column=identifier(request.watermark)))
        parameters.append(watermarks.since(request, column))
    if conditions:
        source += "\nwhere " + "\n  and ".join(conditions)
    return source, parameters
