"""The SQL of this code: named statements in ``db/sql/*.sql``, run as they stand there.

A file holds blocks. Each begins with ``-- name: NAME``, goes on with comment lines that say what
it is for and which rule it keeps, and holds one statement. Parameters are psycopg's
(``%(name)s``; a literal per cent sign is ``%%``), so the same text runs on a psycopg connection
and through SQLAlchemy. What several statements of a file must say alike stands once, in a block
that begins with ``-- fragment: NAME``; a line ``-- include: NAME`` is where it goes. Nothing else
is ever assembled.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import dict_row
from sqlalchemy import Connection
from sqlalchemy.orm import Session

FOLDER = Path(__file__).resolve().parent / "sql"
_HEAD = re.compile(r"^-- (name|fragment): ([a-z][a-z0-9_]*)\n", re.MULTILINE)
_INCLUDE = re.compile(r"^ *-- include: (.*)\n", re.MULTILINE)

AnyConnection = Connection | Session | psycopg.Connection[Any]
"""What a statement runs on: ours, or a caller's own in its transaction."""


class MalformedStatements(Exception):
    """A file of db/sql does not read as named statements; the message names it and the place."""


@functools.cache
def load(file: str) -> Mapping[str, LiteralString]:
    """The statements of ``db/sql/FILE.sql`` by name. Raises MalformedStatements."""
    return parse((FOLDER / f"{file}.sql").read_text(encoding="utf-8"), file)


def parse(text: str, file: str) -> Mapping[str, LiteralString]:
    """Split the text of a file into its statements. Raises MalformedStatements."""
    parts = _HEAD.split(text)
    statements: dict[str, LiteralString] = {}
    fragments: dict[str, str] = {}
    for kind, name, block in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if name in statements or name in fragments:
            raise MalformedStatements(f"{file}.sql holds {name} twice")
        purpose, body = _split(block)
        if not purpose:
            raise MalformedStatements(f"{file}.sql: {name} does not say what it is for")
        if kind == "fragment":
            fragments[name] = body + "\n"
            continue
        statement = _INCLUDE.sub(lambda line: _fragment(fragments, line[1], file), body)
        if not statement.endswith(";") or ";" in _without_literals(statement)[:-1]:
            raise MalformedStatements(f"{file}.sql: {name} is not one statement that ends with ;")
        # Only text of this package is put together, never a caller's.
        statements[name] = cast("LiteralString", statement[:-1])
    return statements


def _fragment(fragments: Mapping[str, str], name: str, file: str) -> str:
    if name not in fragments:
        raise MalformedStatements(f"{file}.sql: no fragment {name} stands before its include")
    return fragments[name]


def _split(block: str) -> tuple[str, str]:
    lines = block.strip().splitlines()
    count = next((n for n, line in enumerate(lines) if not line.startswith("--")), len(lines))
    return "\n".join(lines[:count]), "\n".join(lines[count:])


def _without_literals(statement: str) -> str:
    return re.sub(r"'[^']*'|--[^\n]*", "", statement)


def rows(
    connection: AnyConnection, statement: LiteralString, parameters: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Run ``statement`` in the connection's transaction; its rows as dictionaries.

    Raises psycopg.Error on a psycopg connection, sqlalchemy.exc.DBAPIError on SQLAlchemy's.
    """
    if isinstance(connection, Session):
        connection = connection.connection()
    if isinstance(connection, Connection):
        result = connection.exec_driver_sql(statement, dict(parameters or {}))
        return [dict(row) for row in result.mappings()] if result.returns_rows else []
    with connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(statement, parameters or {})
        return cursor.fetchall() if cursor.description else []


def row(
    connection: AnyConnection, statement: LiteralString, parameters: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Run ``statement``; its first row, or None."""
    return next(iter(rows(connection, statement, parameters)), None)
