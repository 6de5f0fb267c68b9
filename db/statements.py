"""The SQL of this code: named statements in ``db/sql/*.sql``, run as they stand there.

A file holds blocks. Each begins with ``-- name: NAME``, goes on with comment lines that say what
it is for and which rule it keeps, and holds one statement. Parameters are psycopg's
(``%(name)s``; a literal per cent sign is ``%%``), so the same text runs on a psycopg connection
and through SQLAlchemy. What several statements must say alike stands once, in a block that begins
with ``-- fragment: NAME``: before them in their file, or in ``shared.sql`` for all files. A line
``-- include: NAME`` is where it goes. Nothing else is ever assembled.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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
    return parse(_text(file), file, _shared())


def parse(
    text: str, file: str, shared: Mapping[str, str] = MappingProxyType({})
) -> Mapping[str, LiteralString]:
    """Split the text of a file into its statements. Raises MalformedStatements."""
    return _parsed(text, file, shared)[0]


def _text(file: str) -> str:
    return (FOLDER / f"{file}.sql").read_text(encoding="utf-8")


@functools.cache
def _shared() -> Mapping[str, str]:
    return _parsed(_text("shared"), "shared", {})[1]


def _parsed(
    text: str, file: str, shared: Mapping[str, str]
) -> tuple[Mapping[str, LiteralString], Mapping[str, str]]:
    """The statements and the fragments of a file."""
    parts = _HEAD.split(text)
    statements: dict[str, LiteralString] = {}
    fragments: dict[str, str] = {}
    for kind, name, block in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if name in statements or name in fragments:
            raise MalformedStatements(f"{file}.sql holds {name} twice")
        purpose, body = _split(block)
        if not purpose:
            raise MalformedStatements(f"{file}.sql: {name} does not say what it is for")
        statement = _put_together(body, {**shared, **fragments}, file)
        if kind == "fragment":
            fragments[name] = statement + "\n"
            continue
        if not statement.endswith(";") or ";" in _without_literals(statement)[:-1]:
            raise MalformedStatements(f"{file}.sql: {name} is not one statement that ends with ;")
        # Only text of this package is put together, never a caller's.
        statements[name] = cast("LiteralString", statement[:-1])
    return statements, fragments


def _put_together(body: str, fragments: Mapping[str, str], file: str) -> str:
    def fragment(line: re.Match[str]) -> str:
        if line[1] not in fragments:
            raise MalformedStatements(
                f"{file}.sql: no fragment {line[1]} stands before its include"
            )
        return fragments[line[1]]

    return _INCLUDE.sub(fragment, f"{body}\n").rstrip("\n")


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
