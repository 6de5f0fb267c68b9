"""Reading MySQL: one consistent snapshot, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from tasks.replicate.connector import (
    Batch,
    Bound,
    Column,
    Kind,
    Lane,
    Part,
    ReadRequest,
    Relation,
    Source,
    SourceError,
    TableName,
    was_altered,
)
from tasks.replicate.connectors import lags
from tasks.replicate.connectors.mysql import catalog, faults, mentions, sqlmodes, types, values
from tasks.replicate.connectors.mysql.session import Session, identifier, literal
from tasks.replicate.names import join_name
from tasks.replicate.shapes import MOMENTS

_SELECT = "select {columns} {source}"
_FROM_TABLE = "from {table}"
_FROM_QUERY = "from (\n{query}\n) claimcheck_query"
# The condition stands on lines of its own, so that a comment at its end stays one.
_WHERE = "(\n{where}\n)"
_SINCE = "({column} >= {since} or {column} is null)"
_COUNT = "select count(*) {source}"
_TRY = "select 1 {source} limit 0"
_GREATEST = "select cast(max({column}) as char) {source}"
_WARNINGS = "show warnings"
# By GROUP_CONCAT, for a packet's sake, and of a recursive query's rows: told in warnings alone.
_CUT = frozenset({1260, 1301, 1931})
_BEGIN = "start transaction read only"


class MySQLSource(Source):
    """A connection that reads one snapshot (of InnoDB's tables; other engines keep none)."""

    dialect = "mysql"

    def __init__(self, config: Mapping[str, Any], *, name: str = "") -> None:
        self._session = Session(config, SourceError, name=name)
        self._described: tuple[ReadRequest, Relation] | None = None

    def stop(self) -> None:
        self._session.stop()

    def close(self) -> None:
        self._session.close()

    # What there is

    def describe(self, request: ReadRequest) -> Relation:
        for written in (request.query, request.where):
            for clash in sqlmodes.clashes(written or "", self._session.modes):
                raise SourceError(f"source: {clash}", permanent=True)
        relation = self._relation(request)
        source = _from(request, relation)
        self._session.execute(_TRY.format(source=source))
        self._described = (request, relation)
        if relation.rows is None or not request.is_conditional:
            return relation
        return replace(relation, rows=catalog.estimate(self._session, source))

    def _relation(self, request: ReadRequest) -> Relation:
        if request.query is not None:
            return catalog.describe_query(self._session, _inner(request))
        return self._table(request)

    def _table(self, request: ReadRequest) -> Relation:
        assert request.table is not None
        try:
            schema, name = catalog.split(self._session, request.table)
        except ValueError as error:
            raise SourceError(f"source: {error}", permanent=True) from None
        relation = catalog.describe(self._session, schema, name)
        if relation is None:
            near = catalog.near(self._session, schema, name)
            hint = f"; did you mean {near}?" if near else ""
            raise SourceError(
                f"source table {join_name(request.table)} does not exist, or is not visible to "
                f"this user (names are literal: case and spaces count){hint}",
                permanent=True,
            )
        return relation

    def reads(self, request: ReadRequest) -> frozenset[Any]:
        read = mentions.tables(self._session, _from(request, None))
        return catalog.identities(self._session, read)

    def tables(self) -> list[TableName]:
        return catalog.tables(self._session)

    # One state of the data

    def bound(self, request: ReadRequest, column: Column, lag: float | None) -> Bound:
        lags.check(column)
        everything = ReadRequest(table=request.table, query=request.query, where=request.where)
        statement = _GREATEST.format(column=identifier(column.name), source=_from(everything, None))
        (greatest,) = self._session.row(statement)
        return lags.bound(column, greatest, lag, request.since)

    def snapshot(self) -> None:
        """Hold what was described, and see from the first row that is read on one state of it.

        A snapshot sees a table empty that another one's rows were copied to afterwards and that
        was then renamed to it. So the tables are locked first: naming them is enough for that, and
        reads no row yet, and whoever renames, alters or empties one waits from then on. WITH
        CONSISTENT SNAPSHOT would come before any lock.
        """
        self._session.execute(_BEGIN)
        if self._described is not None:
            request, relation = self._described
            self._session.execute(_TRY.format(source=_from(request, relation)))
            if self._relation(request).columns != relation.columns:
                raise SourceError(f"nothing was changed: source: {was_altered(request.table)}")

    # The rows

    def read(self, request: ReadRequest, part: Part, lane: Lane) -> Iterator[Batch]:
        columns = [plan.source for plan in request.columns]
        wanted = ", ".join(
            types.read_as(column).format(identifier(column.name)) for column in columns
        )
        statement = _SELECT.format(columns=wanted, source=_from(request, None))
        conversions = values.conversions(columns)
        for page in self._session.pages(statement, request.fetch_size):
            yield Batch.of_rows(page, conversions)
        for _, code, text in self._session.rows(_WARNINGS):
            if int(code) in _CUT:
                raise SourceError(
                    f"source: the server left out a part of the result: {faults.clean(code, text)}",
                    permanent=True,
                )

    def count(self, request: ReadRequest) -> int:
        return int(self._session.row(_COUNT.format(source=_from(request, None)))[0])


def _inner(request: ReadRequest) -> str:
    """The user's query, without a closing semicolon."""
    assert request.query is not None
    return request.query.strip().rstrip(";")


def _from(request: ReadRequest, relation: Relation | None) -> str:
    """FROM and WHERE of a request."""
    if request.query is not None:
        source = _FROM_QUERY.format(query=_inner(request))
    else:
        assert request.table is not None
        source = _FROM_TABLE.format(table=identifier(*request.table))
    conditions: list[str] = []
    if request.where is not None:
        conditions.append(_WHERE.format(where=request.where))
    if request.watermark is not None and request.since is not None:
        column = next(
            (p.source for p in request.columns if p.source.name == request.watermark),
            None if relation is None else relation.column(request.watermark),
        )
        conditions.append(
            _SINCE.format(column=identifier(request.watermark), since=_since(request, column))
        )
    if conditions:
        source += "\nwhere " + "\n  and ".join(conditions)
    return source


def _since(request: ReadRequest, column: Column | None) -> str:
    """The lower bound as a literal that the column is compared with as its own type."""
    assert request.since is not None
    kind = None if column is None else column.type.kind
    if kind in lags.NUMBERS:
        # Digits and a point, which the server takes for an exact number.
        return format(Decimal(request.since), "f")
    if kind is Kind.DATE:
        return literal(request.since[:10])
    if kind in MOMENTS:
        return literal(lags.instant(request.since).isoformat(" ", "seconds"))
    return literal(request.since)
