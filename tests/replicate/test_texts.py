"""Texts of other engines in PostgreSQL's own types: their value, or a refusal by column."""

from __future__ import annotations

import csv
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from replication_kit import Database, Job, definition, fresh_database

from dispatch.context import HandlerFailure

REFUSED = [
    ("money", "1.005"),
    ("name", "é" * 40),
    ('"char"', "é"),
    ("oid", "-1"),
    ("oid[]", "{-1}"),
    ("interval(0)", "1.7 seconds"),
    ("interval(0)", "1700 ms"),
    ("interval(3)", "00:00:01.0004"),
    ("interval", "00:00:01.0000004"),
    ("interval", "PT1E-7S"),
    ("interval", "1.23 years"),
    ("interval", "1.5 us"),
    ("interval year to month", "1 year 3 days 04:00:00"),
    ("interval[]", "{1.0000004 s}"),
    ("span[]", "{1.7 s}"),
    ("numeric(5,2)[]", "{1.00,1.239}"),
    ("amount[]", "{1.2345}"),
    ("pair", "(1,1.2345)"),
    ("moment", "(01/02/03)"),
    ("date[]", "{01/02/03}"),
    ("date[]", "{2026-11-02,now}"),
    ("daterange", "[01/02/03,)"),
    ("timestamp(0)[]", "{2026-01-01 00:00:00.7}"),
    ("timestamp[]", "{2026-01-01 00:00:00+05}"),
    ("tsrange", "[2026-01-01 00:00:00+05,)"),
    ("timestamptz[]", "{2026-01-01 00:00:00}"),
    ("tstzrange", "[2026-01-01 00:00,2026-02-01)"),
    ("tstzmultirange", "{[2026-01-01 00:00,2026-02-01)}"),
    ("timetz", "12:00:00"),
    ("timetz(0)", "12:00:00.7+00"),
    ("timetz[]", "{12:00:00}"),
    ("time[]", "{23:59:60}"),
    ("time", "23:59:60"),
    ("timestamp", "2026-12-31 23:59:60"),
    ("timestamptz", "2026-12-31 23:59:60+00"),
    ("timetz", "23:59:60+00"),
    ("jsonb", '{"a":1,"b":2,"a":3}'),
    ("jsonb", '[{"a":{"b":1,"\\u0062":2}}]'),
    ("jsonb[]", '{"{\\"a\\":1,\\"a\\":2}"}'),
    ("char(5)", "ab "),
    ("char(5)[]", '{"ab "}'),
    ("varchar(3)", "ab   "),
    ("varchar(3)[]", '{"ab   "}'),
    ("cidr", "192.168"),
    ("cidr[]", "{10/8,128}"),
]
ARRIVE = [
    ("uuid", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("jsonb", '{"b": 1.00, "a": {"b": [2]}}', '{"a": {"b": [2]}, "b": 1.00}'),
    ("jsonb", "1" * 5000, "1" * 5000),
    ("interval", "1 year 2 days 03:04:05.600000", "1 year 2 days 03:04:05.6"),
    ("interval", "1.5 hours", "01:30:00"),
    ("interval", "PT1.5M", "00:01:30"),
    ("interval", "250 ms", "00:00:00.25"),
    ("interval(0)", "1 day 00:00:02.000", "1 day 00:00:02"),
    ("text[]", '{"a b ",NULL,"now "}', '{"a b ",NULL,"now "}'),
    ("int[]", "{{1,2},{3,NULL}}", "{{1,2},{3,NULL}}"),
    ("varchar[]", '{"ab "}', '{"ab "}'),
    ("numeric[]", "{1.239}", "{1.239}"),
    ("numeric(5,2)[]", "{1.20,NULL,NaN}", "{1.20,NULL,NaN}"),
    ("numeric(5,-2)[]", "{12300}", "{12300}"),
    ("amount[]", "{1.23}", "{1.23}"),
    ("oid[]", "{4000000000}", "{4000000000}"),
    ("pace", "[0.1,0.5)", "[0.1,0.5)"),
    ("moment", "(2026-11-02)", "(2026-11-02)"),
    ("interval[]", '{"1 day 00:00:01.5"}', '{"1 day 00:00:01.5"}'),
    ("date[]", "{2026-11-02,NULL}", "{2026-11-02,NULL}"),
    ("daterange", "[2026-11-02,)", "[2026-11-02,)"),
    ("daterange", "empty", "empty"),
    (
        "tstzrange",
        '["2026-01-01 00:00:00+00",infinity)',
        '["2026-01-01 00:00:00+00",infinity)',
    ),
    ("timestamptz[]", "{2026-01-01 00:00:00+02}", '{"2025-12-31 22:00:00+00"}'),
    ("timetz", "12:00:00.5+02", "12:00:00.5+02"),
    ("timetz(0)", "12:00:00.0Z", "12:00:00+00"),
    ("char(5)", "ab", "ab"),
    ("bit(3)", "101", "101"),
    ("inet", "192.168.0.1/24", "192.168.0.1/24"),
    ("cidr", "10/8", "10.0.0.0/8"),
    ("cidr[]", "{10.0.0.1,::1}", "{10.0.0.1/32,::1/128}"),
]
MADE = """
create domain amount as numeric(10,2);
create domain span as interval(0);
create type pair as (a int, b amount);
create type moment as (at date);
create type pace as range (subtype = float8);
"""


def _from_csv(folder: Path, sink: Database, text: str) -> Job:
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["id", "x"], ["1", text]])
    return _job(sink, "file", {"path": str(folder), "format": "csv"})


def _from_sqlite(folder: Path, sink: Database, text: str) -> Job:
    path = folder / "t.db"
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("create table t (id integer primary key, x text)")
    connection.execute("insert into t values (1, ?)", (text,))
    connection.commit()
    connection.close()
    return _job(sink, "sqlite", {"url": f"sqlite:///{path}"})


def _job(sink: Database, connector: str, config: dict[str, str]) -> Job:
    reads, writes = {"table": "t"}, {"table": "public.t"}
    return Job(
        config, sink.config, definition(reads, writes, "complete"), (connector, "postgresql")
    )


FROM = {"csv": _from_csv, "sqlite": _from_sqlite}


@pytest.fixture(scope="module")
def made(database_server: str) -> Iterator[Database]:
    with fresh_database(database_server) as database:
        database.execute(MADE)
        database.execute("set timezone = 'UTC'")
        yield database


@pytest.mark.parametrize("source", FROM)
@pytest.mark.parametrize(("kind", "text"), REFUSED)
def test_what_would_be_changed_is_refused(
    tmp_path: Path, made: Database, kind: str, text: str, source: str
) -> None:
    made.execute(f"drop table if exists t; create table t (id int, x {kind})")
    with pytest.raises(HandlerFailure, match="column x: ") as caught:
        FROM[source](tmp_path, made, text).run()
    assert text not in str(caught.value)
    assert made.value("select count(*) from t") == 0


@pytest.mark.parametrize("source", FROM)
@pytest.mark.parametrize(("kind", "text", "found"), ARRIVE)
def test_what_has_one_meaning_arrives(
    tmp_path: Path, made: Database, kind: str, text: str, found: str, source: str
) -> None:
    made.execute(f"drop table if exists t; create table t (id int, x {kind})")
    FROM[source](tmp_path, made, text).run()
    assert made.value("select x::text from t") == found
