"""What the database holds: tables, columns and keys, and the columns of a query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tasks.replicate.connector import Column, Kind, Relation, SourceError, TableName
from tasks.replicate.connectors.mysql import types
from tasks.replicate.connectors.mysql.session import Session, identifier, literal
from tasks.replicate.names import join_name

FENCE = "claimcheck_fence"
STAGE = "claimcheck_stage_"

_SCHEMA = "select 1 from information_schema.schemata where schema_name = {schema}"
_TABLE = """
select table_name, table_type, engine, table_rows from information_schema.tables
where table_schema = {schema} and table_name = {name}
"""
_TABLES = """
select table_name from information_schema.tables
where table_schema = {schema} and table_type in ('BASE TABLE', 'SYSTEM VERSIONED')
order by table_name
"""
_COLUMNS = """
select column_name, data_type, column_type, is_nullable, column_default, extra,
       character_maximum_length, numeric_precision, numeric_scale, datetime_precision,
       character_set_name, collation_name, generation_expression
from information_schema.columns
where table_schema = {schema} and table_name = {name} order by ordinal_position
"""
# MariaDB's JSON is text with a check.
_JSON_CHECKS = """
select check_clause from information_schema.check_constraints
where constraint_schema = {schema} and table_name = {name}
"""
_KEYS = """
select index_name, column_name, sub_part, nullable, collation
from information_schema.statistics
where table_schema = {schema} and table_name = {name} and non_unique = 0
order by index_name <> 'PRIMARY', index_name, seq_in_index
"""
# Which server this is, whatever it is called in a URL; each product knows some of them.
_SERVER = """
show global variables where variable_name in
  ('server_uuid', 'server_uid', 'hostname', 'port', 'datadir', 'lower_case_table_names')
"""
# By whether it is MariaDB: how the plan is shown as a table with ``filtered`` in it.
_PLAN = {
    True: "explain extended select 1 {source}",
    False: "explain format=traditional select 1 {source}",
}
_FROM_QUERY = "(\n{query}\n) claimcheck_query"
_NO_ROWS = "select * from {source} limit 0"
# An aggregate has one row even where there is none, and its type is known all the same.
_CHARSETS = "select {charsets} from (select * from {source} limit 0) claimcheck_empty"

_UNSIGNED, _BINARY, _ENUM, _SET = 32, 128, 256, 2048
_BASES = {
    0: "decimal",
    1: "tinyint",
    2: "smallint",
    3: "int",
    4: "float",
    5: "double",
    7: "timestamp",
    8: "bigint",
    9: "mediumint",
    10: "date",
    11: "time",
    12: "datetime",
    13: "year",
    16: "bit",
    245: "json",
    246: "decimal",
    255: "geometry",
}


def split(session: Session, table: TableName) -> tuple[str, str]:
    """Database and table; the connection's database where none is named."""
    if len(table) > 2:
        raise ValueError(f"{join_name(table)} has more parts than database and table")
    if any(character > "\uffff" for part in table for character in part):
        raise ValueError(f"{join_name(table)} has a character that no name holds here (an emoji?)")
    return (table[0], table[1]) if len(table) == 2 else (session.database, table[0])


def describe(session: Session, schema: str, name: str) -> Relation | None:
    """The table or view of exactly that name, or None."""
    place = {"schema": literal(schema), "name": literal(name)}
    # A server may compare names without their case; a job's names are literal.
    found = [row for row in session.rows(_TABLE.format(**place)) if row[0] == name]
    if not found:
        return None
    _, kind, engine, estimate = found[0]
    json = _json_columns(session, place)
    columns = [_column(row, json) for row in session.rows(_COLUMNS.format(**place))]
    unique = _unique(session, place)
    key = next((tuple(parts) for parts in unique if _required(columns, parts)), ())
    detail = {
        "schema": schema,
        "table": name,
        "type": kind,
        "engine": engine,
        "unique": [tuple(parts) for parts in unique],
    }
    rows = None if kind == "VIEW" or estimate is None else int(estimate)
    return Relation(tuple(columns), key, rows, detail)


def estimate(session: Session, source: str) -> int | None:
    """The rows of one table that meet conditions, as the server plans; None where it does not say.

    Where no index and no histogram tells how many do, MariaDB plans with all of them.
    """
    try:
        plan = session.rows(_PLAN[session.mariadb].format(source=source))
    except SourceError:
        # No run fails for want of an estimate; a lost connection shows at the next statement.
        return None
    *_, access, _, _, _, _, rows, filtered, _ = plan[0]
    if len(plan) > 1 or rows is None:
        return None
    if access.lower() in ("all", "index") and float(filtered) >= 100:
        return None
    return round(int(rows) * float(filtered) / 100)


def exists(session: Session, schema: str) -> bool:
    """Whether there is a database of that name, and the user may see it."""
    return bool(session.rows(_SCHEMA.format(schema=literal(schema))))


def near(session: Session, schema: str, name: str) -> str | None:
    """A name that differs by case only."""
    for (other,) in session.rows(_TABLES.format(schema=literal(schema))):
        if other.lower() == name.lower():
            return str(other)
    return None


def identities(session: Session, places: Iterable[tuple[str, str]]) -> frozenset[Any]:
    """Values for tables, given by database and name, that are equal where the tables are one."""
    server = dict(session.rows(_SERVER))
    folds = server.get("lower_case_table_names", "0") != "0"
    names = ((s.lower(), t.lower()) if folds else (s, t) for s, t in places)
    return frozenset((*sorted(server.items()), *name) for name in names)


def tables(session: Session) -> list[TableName]:
    rows = session.rows(_TABLES.format(schema=literal(session.database)))
    return [(name,) for (name,) in rows if name != FENCE and not name.startswith(STAGE)]


def describe_query(session: Session, query: str) -> Relation:
    """The columns of a query, as the protocol tells their types."""
    source = _FROM_QUERY.format(query=query)
    described = session.columns(_NO_ROWS.format(source=source))
    asked = ", ".join(f"charset(max({identifier(name)}))" for name, *_ in described)
    charsets = session.row(_CHARSETS.format(charsets=asked, source=source))
    columns = []
    for (name, code, length, scale, flags), charset in zip(described, charsets, strict=True):
        columns.append(_query_column(name, code, length, scale, flags, charset == "binary"))
    return Relation(tuple(columns))


def _query_column(
    name: str, code: int, length: int, scale: int, flags: int, binary: bool
) -> Column:
    base = _BASES.get(code)
    if base is None:
        # Strings and blobs of every size; enums and sets come as strings with a flag.
        base = "longblob" if binary else "longtext"
    unsigned = " unsigned" if flags & _UNSIGNED else ""
    precision = None
    if base == "decimal":
        precision = length - (0 if unsigned else 1) - (1 if scale else 0)
    elif base == "bit":
        precision = length
    digits = scale if base in ("time", "datetime", "timestamp") and scale <= 6 else None
    kind = types.type_of(base, f"{base}{unsigned}", precision=precision, scale=scale, digits=digits)
    return Column(name, kind, detail=types.detail_of(base, f"{base}{unsigned}"))


def _column(row: tuple[Any, ...], json: frozenset[str]) -> Column:
    name, base, shown, nullable, default, extra, length, precision, scale, digits, *text = row
    extra = extra.lower()
    kind = types.type_of(
        base,
        shown,
        length=length,
        precision=precision,
        scale=scale,
        digits=digits,
        json=base == "longtext" and name in json,
    )
    charset, collation, expression = text
    characters = f"character set {charset} collate {collation}" if charset else ""
    automatic = "auto_increment" in extra
    return Column(
        name,
        kind,
        nullable=nullable == "YES",
        # MariaDB writes the absence of a default as the word NULL.
        has_default=automatic or (default is not None and str(default).upper() != "NULL"),
        generated=" generated" in extra.replace("default_generated", ""),
        expression=expression or None,
        identity=automatic,
        detail=types.detail_of(base, shown, characters, automatic=automatic),
    )


def _json_columns(session: Session, place: dict[str, str]) -> frozenset[str]:
    if not session.mariadb:
        return frozenset()
    found = set()
    for (clause,) in session.rows(_JSON_CHECKS.format(**place)):
        if clause.startswith("json_valid(`") and clause.endswith("`)"):
            found.add(clause[len("json_valid(`") : -2].replace("``", "`"))
    return frozenset(found)


def _unique(session: Session, place: dict[str, str]) -> list[list[str]]:
    """The column sets of unique indexes, the primary key first; prefixes and expressions aside."""
    found: dict[str, list[str] | None] = {}
    for index, column, prefix, _, _ in session.rows(_KEYS.format(**place)):
        parts = found.setdefault(index, [])
        if column is None or prefix is not None:
            found[index] = None
        elif parts is not None:
            parts.append(column)
    return [parts for parts in found.values() if parts]


def _required(columns: list[Column], parts: list[str]) -> bool:
    required = {column.name for column in columns if not column.nullable}
    return set(parts) <= required


def is_textual(column: Column) -> bool:
    """Whether a collation decides what is equal in the column."""
    return column.type.kind in (Kind.TEXT, Kind.OTHER, Kind.JSON) or bool(
        column.detail.get("characters")
    )
