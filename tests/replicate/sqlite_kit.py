"""SQLite files made and read by Python's own driver."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance import (
    Harness,
    Sample,
    batches,
    identity_plan,
)

from tasks.replicate.connector import (
    Kind,
    Lane,
    Load,
    Row,
)
from tasks.replicate.connectors.sqlite import SQLite
from tasks.replicate.names import split_name

SAMPLES = (
    Sample("whole", "INTEGER", Kind.INTEGER, (0, 2**63 - 1, -(2**63), None)),
    Sample("flag", "BOOLEAN", Kind.BOOLEAN, (True, False, None, True)),
    Sample("real", "REAL", Kind.FLOAT, (0.1, float("inf"), 1.7976931348623157e308, None)),
    Sample("exact", "DECIMAL TEXT(40,20)", Kind.DECIMAL, ("1.10", "-" + "9" * 38, None, "NaN")),
    Sample("words", "TEXT", Kind.TEXT, ("", "007", "nul\0 \U0001f600 \t\n\\N", None)),
    Sample("octets", "BLOB", Kind.BYTES, (b"", b"\x00\xff", None, bytes(range(256)))),
    Sample("day", "DATE", Kind.DATE, ("2026-11-01", "infinity", "0044-03-15 BC", None)),
    Sample("clock", "TIME", Kind.TIME, ("23:59:59.123456", "00:00:00", "24:00:00", None)),
    Sample("wall", "TIMESTAMP", Kind.TIMESTAMP, ("2026-11-01 23:59:59.5", "infinity", None, None)),
    Sample("moment", "TIMESTAMPTZ", Kind.TIMESTAMPTZ, ("2026-11-01 23:59:59.123456+00", None) * 2),
    Sample("ident", "UUID", Kind.UUID, ("00000000-0000-0000-0000-000000000000", None, None, None)),
    Sample("doc", "JSON TEXT", Kind.JSON, ('{"a": 1.10}', "17", '"x"', None)),
)


INSERT = "insert into {} values ({})"
SELECT = "select * from {} order by 1"


class SQLiteHarness(Harness):
    connector = SQLite()
    samples = SAMPLES
    key_type = "INTEGER"
    text_type = "TEXT"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = {"url": f"sqlite:///{path}"}
        self.sql("pragma journal_mode = wal")

    def sql(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            return connection.execute(statement, parameters).fetchall()

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
        self.sql(f"create table {quoted(table)} ({', '.join(parts)})")
        places = ", ".join("?" for _ in columns)
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.executemany(INSERT.format(quoted(table), places), rows)
        return '"' + table.replace('"', '""') + '"'

    def rows(self, table: str) -> list[Row]:
        (name,) = split_name(table)
        booleans = [
            row[0] for row in self.sql(f"pragma table_info({quoted(name)})") if row[2] == "BOOLEAN"
        ]
        found = self.sql(SELECT.format(quoted(name)))
        return [
            tuple(
                bool(cell) if i in booleans and cell is not None else cell
                for i, cell in enumerate(row)
            )
            for row in found
        ]

    def hold(self) -> Any:
        """A view that counts for ever is a read that does not end by itself."""
        self.sql(
            "create view blocked as with recursive n(i) as (select 1 union all select i + 1 from n)"
            " select count(*) as i from n"
        )
        return closing(sqlite3.connect(self.path))


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def load_of(harness: SQLiteHarness, table: str, **changes: Any) -> Load:
    with SQLite().sink(harness.config) as sink:
        relation = sink.describe((table,))
        assert relation is not None
        load = Load((table,), identity_plan(relation), "complete", Lane.ROWS, "r", "s", 1)
        return replace(load, relation=relation, key=relation.key, **changes)


def write(harness: SQLiteHarness, table: str, rows: list[Row]) -> None:
    load = load_of(harness, table)
    with SQLite().sink(harness.config) as sink:
        sink.begin(load)
        sink.write(load, batches(rows), staging=False)
        sink.commit()
