"""What a SQLite file holds: tables, columns, their affinities, and keys."""

from __future__ import annotations

import re
from typing import Any

from tasks.replicate.connector import Column, ColumnType, Kind, Relation, TableName
from tasks.replicate.connectors.sqlite.session import Session, identifier
from tasks.replicate.names import join_name

FENCE = "claimcheck_fence"

_TABLE = "select type, sql from main.sqlite_master where name = ? and type in ('table', 'view')"
_NEAR = """
select name from main.sqlite_master
where type in ('table', 'view') and name = ? collate nocase
"""
_TABLES = """
select name from main.sqlite_master
where type = 'table' and name not like 'sqlite~_%' escape '~' and name <> 'claimcheck_fence'
  and sql not like 'create virtual%'
order by name
"""
_COLUMNS = """
select name, type, "notnull", dflt_value, pk, hidden from pragma_table_xinfo(?, ?)
where hidden <> 1 order by cid
"""
_STRICT = "select strict, wr from pragma_table_list where schema = 'main' and name = ?"
_UNIQUE = """
select name from pragma_index_list(?, 'main') where "unique" and not partial order by seq desc
"""
_INDEXED = """
select name, coll from pragma_index_xinfo(?, 'main') where key order by seqno
"""
_ESTIMATE = "select (select max(rowid) from {table}) - (select min(rowid) from {table}) + 1"
_VIEW = "create temp view {view} as select * from (\n{query}\n)"
_DROP_VIEW = "drop view temp.{view}"

_ARGUMENTS = re.compile(r"\((\d+)(?:\s*,\s*(\d+))?\)")


def split(table: TableName) -> str:
    """The bare name; raises ValueError for a schema other than main."""
    if len(table) > 2 or (len(table) == 2 and table[0] != "main"):
        raise ValueError(
            f"{join_name(table)} names a schema; a SQLite file has only main: write {table[-1]} "
            "(as sink of a tables pattern: sink.table_schema: main)"
        )
    return table[-1]


def describe(session: Session, name: str) -> Relation | None:
    """The table or view of exactly that name, or None.

    SQLite itself takes names of any case for one; a job's names are literal, so they are compared.
    """
    found = session.execute(_TABLE, (name,)).fetchone()
    if found is None:
        return None
    kind, definition = found
    row = session.execute(_STRICT, (name,)).fetchone() if kind == "table" else None
    strict, without_rowid = (bool(row[0]), bool(row[1])) if row else (False, False)
    columns, primary = _columns(session, name, "main", strict, without_rowid)
    unique = _unique(session, name, columns) if kind == "table" else []
    detail = {
        "table": name,
        "type": kind,
        "unique": unique,
        "virtual": bool(re.match(r"\s*create\s+virtual", definition or "", re.IGNORECASE)),
    }
    rows = None
    if kind == "table" and not without_rowid and not detail["virtual"]:
        rows = session.execute(_ESTIMATE.format(table=identifier("main", name))).fetchone()[0] or 0
    return Relation(tuple(columns), tuple(_key(columns, primary, unique)), rows, detail)


def describe_query(session: Session, query: str) -> Relation:
    """The columns of a query; a computed one has no type, so that any cell may come."""
    view = "claimcheck_query"
    session.execute(_VIEW.format(view=identifier(view), query=query))
    try:
        columns, _ = _columns(session, view, "temp", strict=False, without_rowid=False)
    finally:
        session.execute(_DROP_VIEW.format(view=identifier(view)))
    return Relation(tuple(columns))


def identity(session: Session, name: str) -> tuple[int, int, str]:
    """A value for a table that is equal where the file is one and the same, by whatever path."""
    return (*session.file(), name)


def near(session: Session, name: str) -> str | None:
    """A name that differs by case only."""
    row = session.execute(_NEAR, (name,)).fetchone()
    return None if row is None else row[0]


def tables(session: Session) -> list[TableName]:
    return [(name,) for (name,) in session.execute(_TABLES)]


def _columns(
    session: Session, name: str, schema: str, strict: bool, without_rowid: bool
) -> tuple[list[Column], list[str]]:
    rows = session.execute(_COLUMNS, (name, schema)).fetchall()
    primary = [row[0] for row in sorted(rows, key=lambda row: row[4]) if row[4]]
    columns = []
    for column, declared, not_null, default, pk, hidden in rows:
        alone = bool(pk) and len(primary) == 1 and declared.upper() == "INTEGER"
        rowid = alone and not without_rowid
        columns.append(
            Column(
                column,
                type_of(declared, strict),
                nullable=not (not_null or rowid or (pk and without_rowid)),
                has_default=default is not None or rowid,
                generated=hidden in (2, 3),
                detail={"affinity": affinity(declared, strict), "rowid": rowid},
            )
        )
    return columns, primary


def _unique(session: Session, name: str, columns: list[Column]) -> list[dict[str, str]]:
    """What the table keeps unique: for each set of plain columns, each column's collation."""
    found = [{column.name: "BINARY"} for column in columns if column.detail["rowid"]]
    for (index,) in session.execute(_UNIQUE, (name,)).fetchall():
        parts = session.execute(_INDEXED, (index,)).fetchall()
        if all(part is not None for part, _ in parts):
            found.append(dict(parts))
    return found


def _key(columns: list[Column], primary: list[str], unique: list[dict[str, str]]) -> list[str]:
    """The primary key, or else the first unique columns that are all NOT NULL."""
    required = {column.name for column in columns if not column.nullable}
    candidates = [list(parts) for parts in unique if parts.keys() <= required]
    return primary or (candidates[0] if candidates else [])


def affinity(declared: str, strict: bool = False) -> str:
    """The affinity of a declared type, by SQLite's five rules."""
    name = declared.upper()
    if strict and name == "ANY":
        return "BLOB"
    if "INT" in name:
        return "INTEGER"
    if any(word in name for word in ("CHAR", "CLOB", "TEXT")):
        return "TEXT"
    if not name or "BLOB" in name:
        return "BLOB"
    if any(word in name for word in ("REAL", "FLOA", "DOUB")):
        return "REAL"
    return "NUMERIC"


def type_of(declared: str, strict: bool) -> ColumnType:
    """What the column holds by its declared type.

    Only a STRICT table binds its values to the type; everywhere else any cell may stand in any
    column, and lengths and digits are decoration.
    """
    name = declared.lower()
    word = _ARGUMENTS.sub("", name).strip()
    loose = not strict or word == "any"
    shown = declared or "any"

    def made(kind: Kind, **limits: Any) -> ColumnType:
        return ColumnType(kind, shown, loose=loose, **limits)

    if word in ("date", "time", "uuid", "guid"):
        return made({"guid": Kind.UUID}.get(word) or Kind(word))
    if word in ("timestamptz", "timestamp with time zone"):
        return made(Kind.TIMESTAMPTZ)
    if word in ("timestamp", "datetime", "timestamp without time zone"):
        return made(Kind.TIMESTAMP)
    if word.startswith("json"):
        return made(Kind.JSON)
    if word.startswith(("decimal", "numeric", "number")):
        return made(Kind.DECIMAL)
    if word.startswith("bool"):
        return made(Kind.BOOLEAN)
    kinds = {
        "INTEGER": made(Kind.INTEGER, bits=64),
        "REAL": made(Kind.FLOAT, bits=64),
        "BLOB": made(Kind.BYTES if word else Kind.TEXT),
        "NUMERIC": made(Kind.DECIMAL),
    }
    return kinds.get(affinity(declared, strict)) or made(Kind.TEXT)
