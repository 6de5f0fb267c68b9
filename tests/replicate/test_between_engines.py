"""Whole jobs between different engines: what arrives is what was there, or its column is refused.

One table with a column of each common type goes from every engine to every other, in every mode
that both can, verified by the job itself and then by reading both ends as cells. Odd values go one
by one, and each either arrives or is refused by name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import psycopg
import pytest
from mysql_kit import a_database as mysql_database
from mysql_kit import connect as mysql_connect
from replication_kit import Database, Job, definition, fresh_database

from dispatch.context import HandlerFailure
from tasks.replicate import checksum, registry
from tasks.replicate.connector import (
    ColumnPlan,
    Kind,
    Lane,
    Part,
    ReadRequest,
    SinkError,
    SourceError,
)
from tasks.replicate.names import split_name

TYPES = """
id bigint primary key, small smallint, whole int, price numeric(12,2), ratio double precision,
name varchar(40), note text, flag boolean, day date, wall timestamp(6), at timestamptz(6),
doc json, mark uuid, octets bytea
"""
ROWS = """
insert into t values
(1, 32767, -2147483648, -9999999999.99, 0.1, 'Zoë', E'tab\\t "quote", back\\\\slash\\nline', true,
 '2026-11-01', '2026-11-01 23:59:59.123456', '2026-11-01 23:59:59.123456+00', '{"a": 1.10}',
 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '\\x0001ff5c'),
(2, 0, 0, 0.10, 1e-300, '', '', false, '1970-01-01', '1970-01-02 00:00:00',
 '1970-01-02 00:00:00+00', '[]', '00000000-0000-0000-0000-000000000000', ''),
(3, null, null, null, null, null, null, null, null, null, null, null, null, null),
(4, -1, 1, 1.00, -2.5, 'ünï 😀', E'\\\\N', true, '9999-12-31', '9999-12-31 23:59:59.999999',
 '2038-01-19 03:14:07+00', '"text"', 'ffffffff-ffff-ffff-ffff-ffffffffffff', '\\x00')
"""
MORE = "insert into t (id, name) select i, 'row ' || i from generate_series(10, 3000) i"


@dataclass
class Place:
    """One engine's end: the connector, its configuration, and the table there."""

    connector: str
    config: Mapping[str, Any]
    table: str = "t"

    def cells(self) -> list[tuple[Any, ...]]:
        """All rows, in an order of their own, each cell in its kind's one form."""
        with registry.get(self.connector).source(self.config) as source:
            request = ReadRequest(table=split_name(self.table))
            columns = sorted(source.describe(request).columns, key=lambda column: column.name)
            request = request.planned([ColumnPlan(column, column) for column in columns])
            source.snapshot()
            rows = [row for batch in source.read(request, Part(0), Lane.ROWS) for row in batch.data]
        return sorted((tuple(map(plain, row)) for row in rows), key=lambda row: float(row[ID] or 0))


ID = 4  # of the columns in the order of their names


MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:.*")


def plain(cell: Any) -> str | None:
    """One text for a value in whatever engine: some write 1 for true and 1.00 for 1."""
    if cell is None:
        return None
    if isinstance(cell, bytes):
        return "\\x" + cell.hex()
    text = {"true": "1", "false": "0", "t": "1", "f": "0"}.get(str(cell).lower(), str(cell))
    if text.startswith('"') and text.endswith('"'):
        # A JSON string that is read as text from JSON lines is the text.
        return str(json.loads(text))
    if MOMENT.fullmatch(text):
        return checksum.canonical(text, Kind.TIMESTAMPTZ)
    try:
        return str(Decimal(text).normalize())
    except InvalidOperation:
        return text


@pytest.fixture
def engines(
    new_database: Callable[[], Database], tmp_path: Path
) -> Iterator[Callable[[str], Place]]:
    """Makes an empty end of the engine's."""
    with contextlib.ExitStack() as stack:

        def make(engine: str) -> Place:
            if engine == "postgresql":
                return Place(engine, new_database().config)
            if engine == "mysql":
                return Place(engine, stack.enter_context(mysql_database()).config)
            place = tmp_path / uuid.uuid4().hex
            place.mkdir()
            if engine == "sqlite":
                return Place(engine, {"url": f"sqlite:///{place}/t.db"})
            return Place("file", {"path": str(place), "format": engine})

        yield make


def told(end: Place, statement: str) -> Any:
    """Run a statement in a database, and return the rows it gives."""
    url = end.config["url"]
    made: Any
    if end.connector == "sqlite":
        made = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    elif end.connector == "mysql":
        made = mysql_connect(url.rpartition("/")[2])
    else:
        made = psycopg.connect(url, autocommit=True)
    with contextlib.closing(made):
        cursor = made.cursor()
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else ()


def copied(source: Place, sink: Place, mode: str = "complete", **more: Any) -> Any:
    """Run a job that makes its sink and verifies itself."""
    options = {"create": True, "verify": "checksum", "fetch_size": 700} | more
    job = Job(
        source.config,
        sink.config,
        definition({"table": source.table}, {"table": sink.table}, mode, **options),
        connectors=(source.connector, sink.connector),
    )
    return job.run().result


ENGINES = ("postgresql", "mysql", "sqlite", "csv", "jsonl", "parquet")


@pytest.fixture(scope="module")
def filled(database_server: str) -> Iterator[Place]:
    """The table in PostgreSQL, from where it came; no test changes it."""
    with fresh_database(database_server) as database:
        database.execute(f"create table t ({TYPES})")
        database.execute(ROWS)
        database.execute(MORE)
        yield Place("postgresql", database.config)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_postgresql_to_each_engine_and_back(engines, filled, engine):
    there, back = engines(engine), engines("postgresql")
    result = copied(filled, there)
    assert result["written"] == 2995
    assert there.cells() == filled.cells()
    copied(there, back)
    assert back.cells() == filled.cells()


@pytest.mark.parametrize(
    ("one", "other"), list(itertools.pairwise((*ENGINES[1:], "mysql", "jsonl", "sqlite")))
)
def test_between_other_engines(engines, filled, one, other):
    here, there = engines(one), engines(other)
    copied(filled, here)
    copied(here, there)
    assert there.cells() == filled.cells()


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_into_postgresqls_own_types(engines, filled, new_database, engine):
    """The table that it came from takes everything back, type by type, by the fastest lane."""
    there = engines(engine)
    copied(filled, there)
    database = new_database()
    database.execute(f"create table t ({TYPES})")
    back = Place("postgresql", database.config)
    result = copied(there, back, create=False)
    expected = {"parquet": "copy-binary", "csv": "copy-csv"}
    assert result["lane"] == expected.get(engine, "rows")
    assert back.cells() == filled.cells()
    assert checksum.of_table("postgresql", back.config, "t") == checksum.of_table(
        "postgresql", filled.config, "t"
    )


@pytest.mark.parametrize("engine", ["mysql", "sqlite", "csv", "jsonl", "parquet"])
def test_complete_atomic_replaces_all(engines, filled, engine):
    there = engines(engine)
    copied(filled, there)
    result = copied(filled, there, "complete-atomic")
    assert result["written"] == 2995
    assert there.cells() == filled.cells()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("postgresql", "mysql"),
        ("mysql", "postgresql"),
        ("mysql", "mysql"),
        ("mysql", "sqlite"),
        ("sqlite", "sqlite"),
        ("sqlite", "postgresql"),
    ],
)
def test_incremental_between_databases__R_F3(engines, filled, one, other):
    here = filled
    if one != "postgresql":
        here = engines(one)
        copied(filled, here)
    there = engines(other)
    job = Job(
        here.config,
        there.config,
        definition(
            {"table": "t"}, {"table": "t"}, "incremental", watermark="id", lag=0, create=True
        ),
        connectors=(here.connector, there.connector),
    )
    first = job.run().result
    assert first["inserted"] == 2995
    assert job.watermark == "3000"
    second = job.run().result
    assert (second["read"], second["unchanged"], second["updated"]) == (1, 1, 0)
    assert there.cells() == filled.cells()


ONE = 'insert into t (id, "{}") values (1, {})'
TEXT = 'select "{}"::text from {}'
ODD = (
    ("ratio", "'NaN'"),
    ("ratio", "'-Infinity'"),
    ("ratio", "'-0'"),
    ("ratio", "5e-324"),
    ("ratio", "1.7976931348623157e308"),
    ("day", "'infinity'"),
    ("day", "'0044-03-15 BC'"),
    ("day", "'10000-01-01'"),
    ("wall", "'-infinity'"),
    ("wall", "'0001-01-01 00:00:00'"),
    ("at", "'infinity'"),
    ("at", "'1960-01-01 00:00:00+00'"),
    ("at", "'2200-01-01 00:00:00+00'"),
    ("name", "'ends '"),
    ("name", "E'\\t'"),
    ("note", "repeat('x', 100000)"),
    ("note", "'NULL'"),
    ("note", "E'\\\\.'"),
    ("note", "'007'"),
    ("doc", "'{\"a\": 123456789012345678901234567890.123}'"),
    ("doc", '\'{"a": 1, "a": 2}\''),
    ("any", "1234567890123456789012345678901234567890.5"),
    ("any", "'NaN'"),
    ("any", "0.000000000000000000000000000000000000001"),
    ("lapse", "'1 year 2 mons -3 days 04:05:06.789'"),
    ("matrix", "array[[1,2],[3,null]]"),
    ("span", "'[1,5)'::int4range"),
    ("clock", "'24:00:00'"),
    ("clock", "'23:59:59.999999'"),
)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_odd_values_arrive_or_are_refused_by_column(engines, new_database, engine):
    """Right or refused: each value alone, to the engine and, if it arrived, back as it was."""
    database = new_database()
    more = "any numeric, lapse interval, matrix int[], span int4range, clock time"
    database.execute(f"create table t ({TYPES}, {more.replace('any', chr(34) + 'any' + chr(34))})")
    filled = Place("postgresql", database.config)
    there, back = engines(engine), engines("postgresql")
    verdicts: dict[str, str] = {}
    for number, (column, value) in enumerate(ODD):
        database.execute("truncate t")
        database.execute(ONE.format(column, value))
        text = database.value(TEXT.format(column, "t"))
        table = f"t{number}"
        refusal: str | None = None
        for source, sink, reads in ((filled, there, "t"), (there, back, table)):
            job = Job(
                source.config,
                sink.config,
                definition(
                    {"table": reads, "columns": ["id", column]},
                    {"table": table},
                    "complete",
                    create=True,
                ),
                connectors=(source.connector, sink.connector),
            )
            try:
                job.run()
            except HandlerFailure as failure:
                refusal = str(failure)
                break
        if refusal is not None:
            assert f"column {column}" in refusal, (value, refusal)
            verdicts[f"{column} {value}"] = "refused"
        else:
            with psycopg.connect(back.config["url"]) as connection:
                found = connection.execute(TEXT.format(column, table)).fetchone()[0]
            assert same_value(text, found), (column, value, found)
            verdicts[f"{column} {value}"] = "arrives"
    arrived = [name for name, verdict in verdicts.items() if verdict == "arrives"]
    assert len(verdicts) == len(ODD)
    assert len(arrived) >= len(ODD) // 2, verdicts


def same_value(one: str, other: str) -> bool:
    """One text, but for how a number, a moment or a truth value may be written."""
    if one == other:
        return True
    with contextlib.suppress(InvalidOperation):
        return Decimal(one) == Decimal(other) and repr(float(one)) == repr(float(other))
    moments = (checksum.canonical(text, Kind.TIMESTAMPTZ) for text in (one, other))
    return len(set(moments)) == 1


@pytest.mark.parametrize(
    ("engine", "create"),
    [
        ("postgresql", True),
        ("mysql", True),
        ("mysql", False),
        ("sqlite", True),
        ("sqlite", False),
    ],
)
def test_a_schema_that_the_sink_lacks_is_told_with_the_key_of_a_pattern(
    engines, new_database, engine, create
):
    """A pattern's tables keep their schema, and another engine's sink need not have it."""
    database = new_database()
    database.execute("create schema nowhere; create table nowhere.t (id int primary key)")
    there = engines(engine)
    there.table = "nowhere.t"
    with pytest.raises(SinkError, match=r"nowhere.*sink\.table_schema") as caught:
        copied(Place("postgresql", database.config, "nowhere.t"), there, create=create)
    assert caught.value.permanent


@pytest.mark.parametrize(
    ("native", "value", "arrives"),
    [
        ("TIMESTAMP", "2026-11-01 23:59:59", True),
        ("DATETIME", "2026-11-01 23:59:59", True),
        ("TIMESTAMPTZ", "2026-11-01 23:59:59+00", True),
        ("TIMESTAMPTZ", "2026-11-01T23:59:59Z", True),
        ("TIMESTAMPTZ", "2026-11-01 23:59:59", False),
        ("TIMESTAMP", "2026-11-01 23:59:59+00", False),
    ],
)
def test_a_watermark_of_sqlite_has_the_form_of_its_declared_type(engines, native, value, arrives):
    """As docs/replication.md says: the bound takes either form, a column of another engine one."""
    here, there = engines("sqlite"), engines("postgresql")
    with contextlib.closing(sqlite3.connect(here.config["url"].removeprefix("sqlite:///"))) as made:
        made.execute(f"create table t (id integer primary key, up {native})")
        made.execute("insert into t values (1, ?)", (value,))
        made.commit()
    refused = pytest.raises(SourceError, match=r"column up: a value carries .* time zone")
    with contextlib.nullcontext() if arrives else refused:
        assert copied(here, there, "incremental", watermark="up")["written"] == 1


@pytest.mark.parametrize(
    ("native", "value"),
    [
        ("date", "0000-00-00"),
        ("datetime", "2026-02-30 00:00:00"),
        ("timestamp null", "0000-00-00 00:00:00"),
        ("time", "-00:00:01"),
        ("time", "838:59:59"),
    ],
)
def test_a_time_that_no_clock_shows_is_refused_with_the_way_out(engines, native, value):
    there = engines("postgresql")
    with mysql_database() as made:
        made.sql("set sql_mode = 'ALLOW_INVALID_DATES'")
        made.make("t", {"id": "bigint", "odd": native}, [(1, value)], key=["id"])
        with pytest.raises(SinkError, match=r"column odd: .*nullif in a query") as caught:
            copied(Place("mysql", made.config), there)
    assert caught.value.permanent
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "natives", "arrives"),
    [
        ("postgresql", "sqlite", ("numeric", "DECIMAL TEXT"), False),
        ("postgresql", "sqlite", ("numeric", "NUMERIC"), True),
        ("postgresql", "mysql", ("int", "varchar(50)"), False),
        ("postgresql", "mysql", ("int", "bigint"), True),
        ("mysql", "postgresql", ("int", "text"), False),
        ("mysql", "postgresql", ("int", "numeric"), True),
        ("sqlite", "sqlite", ("integer", "text"), False),
        ("sqlite", "sqlite", ("integer", "integer"), True),
    ],
)
def test_the_newest_of_several_rows_with_one_key(engines, one, other, natives, arrives):
    here, there = engines(one), engines(other)
    told(here, f"create table t (id int, v int, u {natives[0]})")
    told(here, "insert into t values (1, 1, 8), (1, 3, 10), (1, 2, 9)")
    told(there, f"create table t (id int not null primary key, v int, u {natives[1]})")
    options = {"watermark": "u", "create": False, "verify": None}
    if not arrives:
        with pytest.raises(SinkError, match=r"column u: .* of which the newest counts"):
            copied(here, there, "incremental", **options)
        assert not told(there, "select v from t")
        return
    copied(here, there, "incremental", **options)
    assert [int(row[0]) for row in told(there, "select v from t")] == [3]
