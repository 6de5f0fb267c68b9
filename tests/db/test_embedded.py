"""The embedded servers: shared by processes, started safely, stopped cleanly, never wedged."""

from __future__ import annotations

import psycopg


def test_empty_database_is_empty(empty_database: str) -> None:
    with psycopg.connect(empty_database) as connection:
        row = connection.execute(
            "select count(*) from pg_class where relnamespace = 'public'::regnamespace"
        ).fetchone()
    assert row == (0,)
