"""Staging tables: named by job and fence number, and gone when their run is."""

from __future__ import annotations

import re
import time
from typing import Any

import psycopg
from psycopg import sql
from psycopg.errors import LockNotAvailable

from tasks.replicate.connector import Load
from tasks.replicate.connectors.postgresql.session import comma, identifier, patience

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

# Whoever reads a staging table holds it, pg_dump until it has ended. More than the second after
# which PostgreSQL ends an autovacuum that stands in the way.
DROP_SECONDS = 3.0
# A session that was just told to end, or whose client has just died, still has its lock.
ENDING_SECONDS = 2.0
_NAP_SECONDS = 0.02


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
    sweep(connection, load)
    connection.execute(_OWN, (table_name(load),))
    connection.execute(_DROP.format(name(load)))
    target = identifier((load.relation.detail["schema"], load.relation.detail["table"]))
    if load.how == "rename":
        from tasks.replicate.connectors.postgresql import renaming

        renaming.make(connection, load)
    else:
        columns = comma([sql.Identifier(plan.sink.name) for plan in load.columns])
        connection.execute(_MAKE.format(staging=name(load), columns=columns, target=target))


def sweep(connection: psycopg.Connection[Any], load: Load) -> None:
    """Drop staging tables whose owner's session is gone; older attempts' may yet be ending."""
    own = table_name(load).rpartition("_")[0]
    began = time.monotonic()
    for place, table in connection.execute(_ORPHANS, (schema(load),)).fetchall():
        assert re.fullmatch(rf"{PREFIX}[0-9a-f]{{32}}_\d+", table)
        until = began + ENDING_SECONDS if table.rpartition("_")[0] == own else began
        if _orphaned(connection, table, until):
            # Together they take no longer than one: a dump holds them all.
            left = began + DROP_SECONDS - time.monotonic()
            _drop(connection, identifier((place, table)), left)
            connection.execute(_RELEASE, (table,))


def _orphaned(connection: psycopg.Connection[Any], table: str, until: float) -> bool:
    """Whether its owner's lock could be had by then (monotonic); this session has it now."""
    while True:
        row = connection.execute(_TRY, (table,)).fetchone()
        if row and row[0]:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_NAP_SECONDS)


def drop(connection: psycopg.Connection[Any], load: Load) -> bool:
    """Drop this run's table, and tell whether it could be: a later run sweeps what is held."""
    dropped = _drop(connection, name(load), DROP_SECONDS)
    connection.execute(_RELEASE, (table_name(load),))
    return dropped


def _drop(connection: psycopg.Connection[Any], table: sql.Identifier, seconds: float) -> bool:
    try:
        with patience(connection, seconds):
            connection.execute(_DROP.format(table))
    except LockNotAvailable:
        return False
    return True
