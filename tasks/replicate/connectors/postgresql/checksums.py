"""A checksum of rows that PostgreSQL computes itself, the same in every version and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.checksum import Checksum
from tasks.replicate.connector import ColumnPlan
from tasks.replicate.connectors.postgresql.session import raw

# Two sums of 64-bit halves of each row's MD5, so that the order of rows does not matter. The row
# is hashed as the text of a record, in which NULL and '' differ, in UTF-8 whatever the database's
# own encoding is.
_CHECKSUM = sql.SQL("""
select count(*),
       coalesce(sum(('x' || substr(digest, 1, 16))::bit(64)::int8::numeric), 0),
       coalesce(sum(('x' || substr(digest, 17, 16))::bit(64)::int8::numeric), 0)
from (select md5(convert_to(row({columns})::text, 'UTF8')) as digest {source}) digests
""")


def source_column(plan: ColumnPlan) -> sql.Composable:
    """The source's column as the sink's type would show it."""
    column: sql.Composable = sql.Identifier(plan.source.name)
    ours, theirs = plan.source.detail, plan.sink.detail
    if not theirs or ours.get("base") == theirs.get("base"):
        return column
    if ours.get("typname") == "bpchar":
        # What it is padded with is no part of the value.
        column = sql.SQL("({})::text").format(column)
    if not theirs.get("builtin"):
        return column
    return sql.SQL("({})::{}").format(column, raw(theirs["base"]))


def compute(
    connection: psycopg.Connection[Any], columns: Sequence[sql.Composable], source: sql.Composable
) -> Checksum:
    """The checksum of ``source`` (FROM and what follows it)."""
    statement = _CHECKSUM.format(columns=sql.SQL(", ").join(columns), source=source)
    row = connection.execute(statement).fetchone()
    assert row is not None
    rows, first, second = row
    digest = f"{int(first) % 2**64:016x}{int(second) % 2**64:016x}"
    return Checksum(int(rows), digest)
