"""Staging tables: named by job and fence number, and gone when their run is."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg import sql

from tasks.replicate.connector import Load
from tasks.replicate.connectors.postgresql.session import comma, identifier

PREFIX = "cc_stage_"

# Unlogged and without constraints: what matters is checked when the rows are published.
_MAKE = sql.SQL("create unlogged table {staging} as select {columns} from {target} with no data")

_ORPHANS = """
select n.nspname, c.relname
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = %s and c.relname ~ '^cc_stage_[0-9a-f]{32}_[0-9]+$' and c.relkind = 'r'
  and pg_catalog.pg_has_role(current_user, c.relowner, 'usage')
"""
# The owner holds this lock as long as it lives; whoever gets it may drop the table.
_OWN = "select pg_catalog.pg_advisory_lock(pg_catalog.hashtextextended(%s, 0))"
_TRY = "select pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended(%s, 0))"
_RELEASE = "select pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended(%s, 0))"
_DROP = sql.SQL("drop table if exists {}")


def table_name(load: Load) -> str:
    return f"{PREFIX}{load.scope.replace('-', '')[:32]}_{load.fence}"


def schema(load: Load) -> str:
    """The staging schema; ``rename`` stages where the target stands."""
    assert load.relation is not None
    own: str = load.relation.detail["schema"]
    return own if load.how == "rename" else load.staging_schema or own


def name(load: Load) -> sql.Identifier:
    return identifier((schema(load), table_name(load)))


def make(connection: psycopg.Connection[Any], load: Load) -> None:
    """Sweep orphans of any job in the staging schema, then make this run's table, empty."""
    assert load.relation is not None
    sweep(connection, schema(load))
    connection.execute(_OWN, (table_name(load),))
    connection.execute(_DROP.format(name(load)))
    target = identifier((load.relation.detail["schema"], load.relation.detail["table"]))
    if load.how == "rename":
        from tasks.replicate.connectors.postgresql import renaming

        renaming.make(connection, load)
    else:
        columns = comma([sql.Identifier(plan.sink.name) for plan in load.columns])
        connection.execute(_MAKE.format(staging=name(load), columns=columns, target=target))


def sweep(connection: psycopg.Connection[Any], schema: str) -> list[str]:
    """Drop staging tables whose owner's session is gone; returns their names."""
    dropped = []
    for owner, table in connection.execute(_ORPHANS, (schema,)).fetchall():
        assert re.fullmatch(rf"{PREFIX}[0-9a-f]{{32}}_\d+", table)
        row = connection.execute(_TRY, (table,)).fetchone()
        if row and row[0]:
            connection.execute(_DROP.format(identifier((owner, table))))
            connection.execute(_RELEASE, (table,))
            dropped.append(table)
    return dropped


def drop(connection: psycopg.Connection[Any], load: Load) -> None:
    connection.execute(_DROP.format(name(load)))
    connection.execute(_RELEASE, (table_name(load),))
