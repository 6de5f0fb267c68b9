"""Shares of a read that several connections take at once, under one exported snapshot."""

from __future__ import annotations

import itertools
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Part, ReadRequest
from tasks.replicate.connectors.postgresql import catalog

_EXPORT = "select pg_catalog.pg_export_snapshot()"
_PAGES = """
select c.relkind::text, pg_catalog.pg_relation_size(c.oid) / current_setting('block_size')::int8,
       (select amname from pg_catalog.pg_am where oid = c.relam),
       exists (select from pg_catalog.pg_inherits where inhparent = c.oid)
from pg_catalog.pg_class c where c.oid = %s::oid
"""
# Fewer pages than this are read faster by one connection.
FEWEST_PAGES = 16

_RANGE = sql.SQL("ctid >= {}::tid and ctid < {}::tid")
_OPEN_RANGE = sql.SQL("ctid >= {}::tid")
_HASH = sql.SQL("({hash} & 2147483647) % {parts} = {number}")


def split(connection: psycopg.Connection[Any], request: ReadRequest, parts: int) -> list[Part]:
    """Ranges of pages for a plain heap table; a hash of the row's key otherwise."""
    row = connection.execute(_EXPORT).fetchone()
    snapshot = row[0] if row else None
    conditions = _by_page(connection, request, parts)
    if conditions is None:
        conditions = _by_key(connection, request, parts)
    if not conditions:
        return [Part(0, {"snapshot": snapshot})]
    return [
        Part(number, {"snapshot": snapshot, "condition": condition.as_string(connection)})
        for number, condition in enumerate(conditions)
    ]


def _by_page(
    connection: psycopg.Connection[Any], request: ReadRequest, parts: int
) -> list[sql.Composed] | None:
    """Ranges of ctid; the last one is open, because the table may grow after this look."""
    if request.table is None or connection.info.server_version < 140000:
        # Before version 14 a range of ctid is a filter over the whole table.
        return None
    found = catalog.find(connection, request.table)
    assert found is not None
    row = connection.execute(_PAGES, (found["oid"],)).fetchone()
    assert row is not None
    kind, pages, method, inherited = row
    if kind not in "rm" or method != "heap" or inherited:
        return None
    if pages < FEWEST_PAGES:
        return []
    share = -(-pages // parts)
    starts = [number * share for number in range(parts) if number * share < pages]
    tids = [sql.Literal(f"({start},0)") for start in starts]
    closed = [_RANGE.format(low, high) for low, high in itertools.pairwise(tids)]
    return [*closed, _OPEN_RANGE.format(tids[-1])]


def _by_key(
    connection: psycopg.Connection[Any], request: ReadRequest, parts: int
) -> list[sql.Composed]:
    """A hash of the table's key, or of the query's first columns; each connection reads all."""
    if request.table is not None:
        found = catalog.find(connection, request.table)
        assert found is not None
        relation = catalog.describe_table(connection, found)
        names = list(relation.key)
    else:
        names = [plan.source.name for plan in request.columns[:1]]
    if not names:
        names = [plan.source.name for plan in request.columns[:1]]
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    # The text is hashed: every type has one, and not every type has a hash of its own.
    hashed = sql.SQL("pg_catalog.hashtext(row({})::text)").format(columns)
    return [
        _HASH.format(hash=hashed, parts=sql.Literal(parts), number=sql.Literal(number))
        for number in range(parts)
    ]
