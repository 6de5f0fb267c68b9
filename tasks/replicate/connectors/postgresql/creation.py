"""Making the sink's table from a source's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Column, ColumnType, Kind, SinkError, TableName
from tasks.replicate.connectors.postgresql.session import comma, identifier, raw
from tasks.replicate.names import join_name

_CREATE = sql.SQL("create table if not exists {} ({})")
_PATIENCE = sql.SQL("set local lock_timeout = '2s'")
_LOCK = sql.SQL("lock table {} in access exclusive mode")
_EMPTY = sql.SQL("select not exists (select from {})")
_DROP = sql.SQL("drop table {}")
_EXIST = """
select pg_catalog.to_regtype(name) is not null
from unnest(%s::text[]) with ordinality given (name, position) order by position
"""


def create(
    connection: psycopg.Connection[Any],
    table: TableName,
    columns: Sequence[Column],
    key: Sequence[str],
    dialect: str,
) -> None:
    """Create the table; a type that PostgreSQL has no counterpart for is refused by column."""
    types = [type_of(column, dialect) for column in columns]
    definitions: list[sql.Composable] = []
    for column, name in zip(columns, types, strict=True):
        constraint = sql.SQL("") if column.nullable else sql.SQL(" not null")
        definitions.append(
            sql.SQL("{} {}{}").format(sql.Identifier(column.name), raw(name), constraint)
        )
    if key:
        definitions.append(
            sql.SQL("primary key ({})").format(comma([sql.Identifier(name) for name in key]))
        )
    cannot = f"sink {join_name(table)} cannot be created"
    try:
        connection.execute(_CREATE.format(identifier(table[-2:]), comma(definitions)))
    except psycopg.errors.InsufficientPrivilege as error:
        raise SinkError(
            f"{cannot}: {error.diag.message_primary}; grant usage, create on that schema (usage on "
            f"that type) to {connection.info.user}, or create the table for it",
            permanent=True,
        ) from None
    except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidSchemaName) as error:
        lacking = _lacking(connection, columns, types)
        if lacking:
            raise SinkError(
                f"{cannot}: {'; '.join(lacking)}: create the missing types there, or the table "
                "itself with columns of type text in their place",
                permanent=True,
            ) from None
        raise SinkError(
            f"{cannot}: {error.diag.message_primary}; create what is missing, or the table itself, "
            "or name another schema (of a tables pattern: sink.table_schema)",
            permanent=True,
        ) from None


def take_back(connection: psycopg.Connection[Any], table: TableName) -> None:
    """Drop the table, unless it has rows."""
    name = identifier(table[-2:])
    with connection.transaction():
        # Somebody may read or fill it by now.
        connection.execute(_PATIENCE)
        connection.execute(_LOCK.format(name))
        if connection.execute(_EMPTY.format(name)).fetchone() == (True,):
            connection.execute(_DROP.format(name))


def _lacking(
    connection: psycopg.Connection[Any], columns: Sequence[Column], types: Sequence[str]
) -> list[str]:
    """What is missing at the sink, by column."""
    found = connection.execute(_EXIST, (list(types),)).fetchall()
    return [
        f"column {column.name} needs the type {name}, which the sink does not have"
        for column, name, (exists,) in zip(columns, types, found, strict=True)
        if not exists
    ]


def type_of(column: Column, dialect: str) -> str:
    """PostgreSQL's type for a column of some end."""
    if dialect == "postgresql":
        return column.type.name
    return _neutral(column)


_PLAIN = {
    Kind.BOOLEAN: "boolean",
    Kind.BYTES: "bytea",
    Kind.DATE: "date",
    Kind.INTERVAL: "interval",
    Kind.UUID: "uuid",
    Kind.JSON: "json",
    Kind.OTHER: "text",
}


def _neutral(column: Column) -> str:
    kind = column.type
    match kind.kind:
        case Kind.INTEGER:
            return _integer(kind)
        case Kind.DECIMAL:
            if kind.precision is None:
                return "numeric"
            return f"numeric({kind.precision},{kind.scale or 0})"
        case Kind.FLOAT:
            return "real" if kind.bits == 32 else "double precision"
        case Kind.TEXT:
            return f"varchar({kind.length})" if kind.length and kind.length < 10**7 else "text"
        case Kind.TIME | Kind.TIMESTAMP | Kind.TIMESTAMPTZ:
            digits = "" if kind.precision in (None, 6) else f"({kind.precision})"
            zone = " with time zone" if kind.kind is Kind.TIMESTAMPTZ else ""
            return f"{'time' if kind.kind is Kind.TIME else 'timestamp'}{digits}{zone}"
    return _PLAIN[kind.kind]


def _integer(kind: ColumnType) -> str:
    bits = 65 if kind.bits is None else kind.bits + (1 if kind.unsigned else 0)
    if kind.loose:
        return "bigint"
    return (
        "smallint"
        if bits <= 16
        else "integer"
        if bits <= 32
        else "bigint"
        if bits <= 64
        else "numeric"
    )
