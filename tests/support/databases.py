"""Dropping a test's database on any server that is tested against."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql


def drop(admin: psycopg.Connection[Any], name: str) -> None:
    """Drop ``name``, also where a test left a connection to it open; nothing where it is gone.

    PostgreSQL 12 has no ``with (force)``, so sessions are ended by hand there.
    """
    statement = sql.SQL("drop database if exists {}").format(sql.Identifier(name))
    if admin.info.server_version >= 130000:
        admin.execute(statement + sql.SQL(" with (force)"))
        return
    admin.execute(sql.SQL("alter database {} allow_connections false").format(sql.Identifier(name)))
    admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name]
    )
    # It waits five seconds for sessions that are on their way out.
    admin.execute(statement)
