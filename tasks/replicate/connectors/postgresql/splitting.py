"""Shares of a read that several connections take at once, under one exported snapshot."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
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

# Each reader runs a query for itself and keeps its share of the rows, so it must give the same
# rows to all of them. These steps of a plan do; others (Limit, Aggregate, WindowAgg, Sample Scan,
# Foreign Scan) may choose among rows by their order, by chance or by another server's state.
_REPEATABLE = frozenset(
    {
        "Append", "Bitmap Heap Scan", "Bitmap Index Scan", "BitmapAnd", "BitmapOr", "CTE Scan",
        "Function Scan", "Gather", "Gather Merge", "Hash", "Hash Join", "Incremental Sort",
        "Index Only Scan", "Index Scan", "Materialize", "Memoize", "Merge Append", "Merge Join",
        "Nested Loop", "ProjectSet", "Result", "Seq Scan", "Sort", "Subquery Scan", "Tid Scan",
        "Tid Range Scan", "Values Scan",
    }
)  # fmt: skip
_CALL = re.compile(r'("(?:[^"]|"")+"|[^\W\d][\w$]*)\s*\(')
_SESSION = re.compile(r"\b(?:CURRENT_|LOCALTIME|SESSION_USER)\w*")
_CHANGING = """
select proname from pg_catalog.pg_proc where proname = any(%s) and provolatile <> 'i'
order by 1 limit 1
"""


def split(connection: psycopg.Connection[Any], request: ReadRequest, parts: int) -> list[Part]:
    """Ranges of pages for a plain heap table; a hash of the row's key otherwise.

    One part, with a warning, where several readers might not see the same rows.
    """
    conditions = _by_page(connection, request, parts)
    if conditions is None:
        reason = _unrepeatable(connection, request)
        if reason is not None:
            return [Part(0, {"warning": f"one reader instead of {parts}: {reason}"})]
        conditions = _by_key(connection, request, parts)
    row = connection.execute(_EXPORT).fetchone()
    snapshot = row[0] if row else None
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


def _unrepeatable(connection: psycopg.Connection[Any], request: ReadRequest) -> str | None:
    """Why several readers might not get the same rows, or None where they surely do."""
    from tasks.replicate.connectors.postgresql.source import rows_of

    plan = catalog.explain(connection, sql.SQL("select * {}").format(rows_of(request)))
    steps = {node["Node Type"] for node in catalog.nodes(plan)}
    if request.table is not None:
        found = catalog.find(connection, request.table)
        if found is not None and found["relkind"] in "rpm":
            # A row that is stored is the same for all, whatever the job's where says of it.
            return _of_others(steps)
    unsure = sorted(steps - _REPEATABLE)
    if unsure:
        return _of_others(steps) or (
            f"several might not get the same rows of the query or view ({unsure[0]} in its plan)"
        )
    written = "\n".join(_texts(plan))
    names = [_name(call) for call in _CALL.findall(written)]
    row = connection.execute(_CHANGING, (names,)).fetchone()
    word = _SESSION.search(written)
    if row is not None or word is not None:
        what = row[0] if row is not None else word and word[0]
        return f"several might not get the same rows of the query or view ({what} in its plan)"
    return None


def _of_others(steps: set[str]) -> str | None:
    if "Foreign Scan" in steps:
        return "rows of a foreign table are not in one snapshot for several"
    return None


def _texts(value: Any) -> Iterator[str]:
    """All that a plan says in words."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _name(call: str) -> str:
    return call[1:-1].replace('""', '"') if call.startswith('"') else call


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
