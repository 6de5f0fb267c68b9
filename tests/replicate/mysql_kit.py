"""Databases of one's own on a MySQL or MariaDB server, made and read by PyMySQL.

The server is the one at 127.0.0.1:3306, or that of CLAIMCHECK_TEST_MYSQL_URL (a user that may
create databases).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from conformance import (
    Harness,
    Sample,
    batches,
    identity_plan,
)
from support import missing

from tasks.replicate.connector import (
    Kind,
    Lane,
    Load,
    Row,
)
from tasks.replicate.connectors.mysql import MySQL, drivers
from tasks.replicate.names import split_name

pymysql = pytest.importorskip("pymysql")

SERVER = os.environ.get("CLAIMCHECK_TEST_MYSQL_URL", "mysql://root@127.0.0.1:3306")
INSERT = "insert into {} values {}"
COLUMNS = """
select column_name, data_type from information_schema.columns
where table_schema = database() and table_name = {} order by ordinal_position
"""
STRICT = "set sql_mode = 'STRICT_ALL_TABLES,NO_AUTO_VALUE_ON_ZERO', time_zone = '+00:00'"
NUMBERS = ("tinyint", "smallint", "mediumint", "int", "bigint", "year")

SAMPLES = (
    Sample("tiny", "tinyint", Kind.INTEGER, (127, -128, 0, None)),
    Sample("big", "bigint", Kind.INTEGER, (2**63 - 1, -(2**63), 0, None)),
    Sample("huge", "bigint unsigned", Kind.INTEGER, (2**64 - 1, 0, None, 1)),
    Sample("bits", "bit(9)", Kind.INTEGER, (511, 0, None, 49)),
    Sample("annum", "year", Kind.INTEGER, (1901, 2155, 0, None)),
    Sample("single", "float", Kind.FLOAT, (0.10000000149011612, 16777216.0, None, -1.5)),
    Sample("twice", "double", Kind.FLOAT, (0.1, 1.7976931348623157e308, 5e-324, None)),
    Sample("price", "decimal(10,2)", Kind.DECIMAL, ("-99999999.99", "0.10", None, "1.00")),
    Sample(
        "exact",
        "decimal(65,30)",
        Kind.DECIMAL,
        ("9" * 35 + "." + "9" * 30, "-0." + "0" * 29 + "1", None, "0." + "0" * 30),
    ),
    Sample("fixed", "char(5)", Kind.TEXT, ("abc", "", None, "\U0001f600" * 5)),
    Sample("words", "varchar(40)", Kind.TEXT, ("", "space ", None, "\\N\t\n\r\\ '\"\0\x1a\x1e")),
    Sample("prose", "longtext", Kind.TEXT, ("\U0001f600 ünï", "NULL", None, "x" * 70000)),
    Sample("ascii", "varchar(9) character set latin1", Kind.TEXT, ("é", "a", None, "")),
    Sample("four", "binary(4)", Kind.BYTES, (b"\0\0\0\0", b"\xff\x00\\N", None, b"abcd")),
    Sample("octets", "longblob", Kind.BYTES, (b"", bytes(range(256)), None, b"\t\n")),
    Sample("day", "date", Kind.DATE, ("2026-11-01", "0001-01-01", None, "9999-12-31")),
    Sample("clock", "time(6)", Kind.TIME, ("23:59:59.123456", "-838:59:59.000000", None, None)),
    Sample(
        "wall",
        "datetime(6)",
        Kind.TIMESTAMP,
        ("2026-11-01 23:59:59.123456", "9999-12-31 23:59:59.999999", None, None),
    ),
    Sample(
        "moment",
        "timestamp(6) null",
        Kind.TIMESTAMPTZ,
        ("2038-01-19 03:14:07.999999+00", "1970-01-01 00:00:01.000000+00", None, None),
    ),
    Sample("doc", "json", Kind.JSON, ('{"a": 1.10, "a": 2}', "17", None, '"x"')),
    Sample("mood", "enum('a','B','1','it''s')", Kind.OTHER, ("a", "1", "it's", None)),
    Sample("tags", "set('x','y','z')", Kind.OTHER, ("x,z", "", None, "y")),
)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


class MySQLHarness(Harness):
    connector = MySQL()
    samples = SAMPLES
    key_type = "bigint"
    text_type = "varchar(100)"
    awkward_names = (*Harness.awkward_names, "back`tick", "semi;colon -- #")

    def __init__(self, database: str, driver: str) -> None:
        self.database = database
        base, _, rest = SERVER.partition("://")
        self.config: Mapping[str, Any] = {
            "url": f"{base.partition('+')[0]}+{driver}://{rest.rstrip('/')}/{database}"
        }
        self.admin = connect(database)

    def sql(self, statement: str) -> list[Any]:
        with self.admin.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def make(
        self,
        table: str,
        columns: Mapping[str, str],
        rows: Sequence[Row] = (),
        key: Sequence[str] = (),
    ) -> str:
        parts = [f"{quoted(name)} {native}" for name, native in columns.items()]
        if key:
            parts.append(f"primary key ({', '.join(map(quoted, key))})")
        self.sql(f"drop table if exists {quoted(table)}")
        self.sql(f"create table {quoted(table)} ({', '.join(parts)}) character set utf8mb4")
        for start in range(0, len(rows), 1000):
            values = [
                "(" + ", ".join(map(self.written, row)) + ")" for row in rows[start : start + 1000]
            ]
            self.sql(INSERT.format(quoted(table), ", ".join(values)))
        return '"' + table.replace('"', '""') + '"'

    def written(self, cell: Any) -> str:
        if isinstance(cell, str) and cell.endswith("+00") and len(cell) > 20:
            cell = cell[:-3]
        if isinstance(cell, float):
            cell = repr(cell)
        return self.admin.escape(cell) if cell != 0 or isinstance(cell, str) else "0"

    def rows(self, table: str) -> list[Row]:
        name = split_name(table)[-1]
        columns = self.sql(COLUMNS.format(self.admin.escape(name)))
        wanted = {"float": "{} * 1e0", "bit": "{} + 0"}
        text = ", ".join(wanted.get(base, "{}").format(quoted(c)) for c, base in columns)
        found = self.sql(" ".join(["select", text, "from", quoted(name), "order by 1"]))
        return [
            tuple(cell_of(value, base) for value, (_, base) in zip(row, columns, strict=True))
            for row in found
        ]

    def hold(self) -> Any:
        self.sql("create table naps (id int primary key)")
        self.sql("insert into naps values (29), (30)")
        self.sql("create view blocked as select id, sleep(id) as nap from naps")
        return contextlib.nullcontext()


def connect(database: str | None) -> Any:
    options = drivers.parameters({"url": f"{SERVER.rstrip('/')}/mysql"})
    options["database"] = database
    return pymysql.connect(
        **options,
        charset="utf8mb4",
        autocommit=True,
        conv=dict(pymysql.converters.encoders),
        init_command=STRICT,
    )


def cell_of(value: Any, base: str) -> Any:
    if value is None:
        return None
    if base in (*NUMBERS, "bit"):
        return int(value)
    if base in ("float", "double"):
        return float(value)
    return value + "+00" if base == "timestamp" else value


DRIVERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(module) is None and os.environ.get("CI") != "true",
            reason=f"{module} is not installed",
        ),
    )
    for name, module in (("pymysql", "pymysql"), ("mysqldb", "MySQLdb"))
]


@contextlib.contextmanager
def a_database(driver: str = "pymysql") -> Iterator[MySQLHarness]:
    name = f"cc_test_{uuid.uuid4().hex[:12]}"
    try:
        server = connect(None)
    except pymysql.err.OperationalError as error:
        missing.skip(f"no MySQL server to test with: {error.args[0]}")
    with contextlib.closing(server), server.cursor() as cursor:
        cursor.execute(f"create database {name} character set utf8mb4")
        harness = MySQLHarness(name, driver)
        try:
            yield harness
        finally:
            harness.admin.close()
            cursor.execute(f"drop database {name}")


def load_of(harness: MySQLHarness, table: str, **changes: Any) -> Load:
    with MySQL().sink(harness.config) as sink:
        relation = sink.describe((table,))
        assert relation is not None
        load = Load((table,), identity_plan(relation), "complete", Lane.ROWS, "r", "s", 1)
        return replace(load, relation=relation, key=relation.key, **changes)


def write(harness: MySQLHarness, table: str, rows: list[Row]) -> None:
    load = load_of(harness, table)
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        sink.write(load, batches(rows), staging=False)
        sink.commit()
