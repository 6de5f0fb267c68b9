"""MariaDB as source and sink, through both drivers: the suite, and the traps that are MySQL's own.

The server is the one at 127.0.0.1:3306, or that of CLAIMCHECK_TEST_MYSQL_URL (a user that may
create databases); each test has a database of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from conformance import (
    Harness,
    Sample,
    SinkConformance,
    SourceConformance,
    batches,
    identity_plan,
    read_all,
    request_for,
)

from tasks.replicate import checksum
from tasks.replicate.connector import (
    Column,
    ColumnType,
    CommitUnknown,
    Fenced,
    Kind,
    Lane,
    Load,
    Part,
    ReadRequest,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.mysql import MySQL, drivers, faults, loading, types
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
            importlib.util.find_spec(module) is None, reason=f"{module} is not installed"
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
        pytest.skip(f"no MySQL server to test with: {error.args[0]}")
    with contextlib.closing(server), server.cursor() as cursor:
        cursor.execute(f"create database {name} character set utf8mb4")
        harness = MySQLHarness(name, driver)
        try:
            yield harness
        finally:
            harness.admin.close()
            cursor.execute(f"drop database {name}")


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def harness(driver: str) -> Iterator[MySQLHarness]:
    with a_database(driver) as made:
        yield made


@pytest.fixture
def one() -> Iterator[MySQLHarness]:
    """For what does not depend on the driver."""
    with a_database() as made:
        yield made


class TestMySQLSource(SourceConformance):
    @pytest.fixture
    def harness(self, driver: str) -> Iterator[Harness]:
        with a_database(driver) as made:
            yield made


class TestMySQLSink(SinkConformance):
    @pytest.fixture
    def harness(self, driver: str) -> Iterator[Harness]:
        with a_database(driver) as made:
            yield made


class TestMySQLSinkWithoutLoadData(SinkConformance):
    """A server that forbids LOAD DATA LOCAL gets INSERTs."""

    @pytest.fixture
    def harness(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
        monkeypatch.setattr(loading, "allowed", lambda session: False)
        with a_database() as made:
            yield made


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


# --- values that MySQL would change without a word ----------------------------------------------


@pytest.mark.parametrize("way", ["load data", "insert"])
@pytest.mark.parametrize(
    ("native", "cell", "says"),
    [
        ("char(9)", "ends ", "ends with a space"),
        ("binary(4)", b"ab", "does not have 4 bytes"),
        ("enum('a','b')", "A", "letter for letter"),
        ("enum('a','b')", "1", "letter for letter"),
        ("set('x','y')", "y,x", "in their order"),
        ("set('x','y')", "x,x", "in their order"),
        ("year", 70, "no year that YEAR holds"),
        ("double", float("nan"), "not finite"),
        ("double", float("-inf"), "not finite"),
        ("double", -0.0, "negative zero"),
        ("decimal(6,2)", "1.234", "column my col: Data truncated"),
        ("decimal(6,2)", "12345", "column my col: Out of range value"),
        ("varchar(3)", "abc ", "column my col: Data truncated"),
        ("varchar(3)", "secret", "column my col: Data t"),
        ("tinyint", 128, "column my col: Out of range value"),
        ("bigint unsigned", -1, "column my col: Out of range value"),
        ("int", "secret", "column my col: Incorrect integer value"),
        ("date", "2026-02-30", "column my col: "),
        ("date", "0000-00-00", "column my col: "),
        ("timestamp null", "1969-12-31 23:59:59+00", "column my col: "),
        ("timestamp null", "2026-01-01 00:00:00+02", "no moment in UTC"),
        ("varchar(9) character set latin1", "\U0001f600", "column my col: Incorrect string value"),
        ("int not null", None, "is NULL"),
        ("timestamp not null", None, "is NULL"),
        ("text", "\ud800", "not valid Unicode"),
        ("blob", "text", "is text"),
        ("tinytext", "x" * 256, "my col"),
        ("json", "{secret", "json_valid|CONSTRAINT|my col"),
    ],
)
def test_a_value_that_would_be_changed_is_refused_by_column(
    one, monkeypatch, way, native, cell, says
):
    if way == "insert":
        monkeypatch.setattr(loading, "allowed", lambda session: False)
    one.make("t", {"id": "int", "my col": native})
    with pytest.raises(SinkError, match=says) as caught:
        write(one, "t", [(1, None if "not null" not in native else 1), (2, cell)][1:])
    assert "secret" not in str(caught.value)
    assert one.rows("t") == []


def test_null_into_auto_increment_is_refused_and_zero_is_zero(one):
    one.make("t", {"id": "int auto_increment primary key", "v": "text"})
    with pytest.raises(SinkError, match="column id: a value is NULL"):
        write(one, "t", [(None, "a")])
    write(one, "t", [(0, "zero"), (7, "seven")])
    assert one.rows("t") == [(0, "zero"), (7, "seven")]
    one.sql("insert into t (v) values ('next')")
    assert one.rows("t")[-1] == (8, "next")


def test_floats_keep_every_digit(harness):
    values = [(1, 0.1 + 0.2), (2, 5e-324), (3, 1 / 3), (4, 123456789.123456789)]
    harness.make("t", {"id": "int", "v": "double"})
    write(harness, "t", values)
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t")
        source.snapshot()
        assert repr(sorted(read_all(source, request))) == repr(values)


def test_a_column_that_rounds_is_refused_when_planned(one):
    one.make("t", {"v": "double(10,2)", "y": "year", "p": "point"})
    number = Column("v", ColumnType(Kind.FLOAT, "double precision", bits=64))
    with MySQL().sink(one.config) as sink:
        relation = sink.describe(("t",))
        assert relation is not None
        rounding, year, point = relation.columns
        assert "rounds" in (sink.fit(number, rounding, "postgresql").refusal or "")
        assert sink.fit(rounding, rounding, "mysql").refusal is None
        whole = Column("y", ColumnType(Kind.INTEGER, "integer", bits=32))
        assert sink.fit(whole, year, "postgresql").refusal is not None
        assert sink.fit(point, point, "mysql").refusal is None


@pytest.mark.parametrize(
    ("kind", "native", "guard"),
    [
        (Kind.FLOAT, "double", "finite"),
        (Kind.DECIMAL, "decimal(65,30)", "finite"),
        (Kind.DATE, "date", "calendar"),
        (Kind.TIMESTAMP, "datetime(6)", "calendar"),
        (Kind.TIMESTAMPTZ, "timestamp(6) null", "calendar"),
        (Kind.TIMESTAMP, "datetime(3)", "fraction"),
        (Kind.TIME, "time(0)", "fraction"),
        (Kind.FLOAT, "float", "real"),
    ],
)
def test_what_only_others_hold_is_guarded(one, kind, native, guard):
    one.make("t", {"v": native})
    with MySQL().sink(one.config) as sink:
        relation = sink.describe(("t",))
        assert relation is not None
        source = Column("v", ColumnType(kind, kind.value, bits=64))
        fit = sink.fit(source, relation.columns[0], "postgresql")
    assert guard in [g.name for g in fit.guards]


def test_geometry_travels_as_its_bytes(harness):
    harness.make("t", {"id": "int", "g": "geometry"})
    harness.sql("insert into t values (1, st_geomfromtext('POINT(0.1 -2.5)', 4326))")
    harness.make("u", {"id": "int", "g": "geometry"})
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t")
        source.snapshot()
        write(harness, "u", read_all(source, request))
    assert harness.sql("select st_astext(g), st_srid(g) from u") == [("POINT(0.1 -2.5)", "4326")]


def test_servers_messages_lose_their_values_and_keep_their_names():
    cases = {
        (1062, "Duplicate entry 'it's-se'cret' for key 'PRIMARY'"): (
            "duplicate key in index PRIMARY"
        ),
        (1366, "Incorrect integer value: 'secret' for column `d`.`t`.`a``b` at row 1"): (
            "column a`b: Incorrect integer value"
        ),
        (1366, "Incorrect integer value: 'for column 'secret' at' for column 'c' at row 1"): (
            "column c: Incorrect integer value"
        ),
        (1406, "Data too long for column 'c' at row 1"): "column c: Data too long",
        (1048, "Column 'c' cannot be null"): "Column 'c' cannot be null",
        (9999, "Something about 'secret' and 'secret"): "Something about (a value) and (a value)",
    }
    for (code, text), wanted in cases.items():
        found = faults.clean(code, text)
        assert "secret" not in found
        assert found == wanted


# --- keys ---------------------------------------------------------------------------------------


def merge(harness: MySQLHarness, table: str, rows: list[Row], **changes: Any) -> Any:
    load = load_of(harness, table, mode="incremental", how="merge", **changes)
    with MySQL().sink(harness.config) as sink:
        assert sink.refusals(load) == []
        sink.stage(load)
        try:
            sink.write(load, batches(rows), staging=True)
            sink.begin(load)
            counts = sink.publish(load)
            sink.commit()
            return counts
        finally:
            sink.unstage(load)


@pytest.mark.parametrize("pair", [("a", "A"), ("a", "a "), ("e", "é")])
def test_keys_that_a_collation_takes_for_one_are_not_merged(one, pair):
    one.make("t", {"k": "varchar(9)", "v": "int"}, key=["k"])
    with pytest.raises(SinkError, match="key column k: 1 keys differ"):
        merge(one, "t", [(pair[0], 1), (pair[1], 2)])
    merge(one, "t", [(pair[0], 1)])
    with pytest.raises(SinkError, match="key column k: 1 keys differ"):
        merge(one, "t", [(pair[1], 2)])
    assert one.rows("t") == [(pair[0], 1)]


def test_a_change_of_case_alone_is_a_change(one):
    one.make("t", {"k": "int", "v": "varchar(9)"}, [(1, "a"), (2, "b")], key=["k"])
    counts = merge(one, "t", [(1, "A"), (2, "b")])
    assert (counts.updated, counts.unchanged) == (1, 1)
    assert one.rows("t") == [(1, "A"), (2, "b")]


def test_a_conflict_on_another_unique_index_is_an_error_and_not_an_update(one):
    one.make("t", {"k": "int", "u": "int unique", "v": "int"}, [(1, 10, 0)], key=["k"])
    with pytest.raises(SinkError, match="duplicate key in index u"):
        merge(one, "t", [(2, 10, 5)])
    assert one.rows("t") == [(1, 10, 0)]


def test_duplicates_under_load_data_are_an_error_and_not_left_out(one):
    one.make("t", {"k": "int", "v": "int"}, key=["k"])
    with pytest.raises(SinkError, match="duplicate key in index PRIMARY"):
        write(one, "t", [(1, 1), (1, 2)])
    assert one.rows("t") == []


def test_a_missing_parent_under_load_data_is_an_error(one):
    one.make("parent", {"id": "int"}, key=["id"])
    one.sql("create table child (p int, foreign key (p) references parent (id))")
    with pytest.raises(SinkError, match="foreign key constraint fails"):
        write(one, "child", [(7,)])


# --- refusals -----------------------------------------------------------------------------------


def refusals(harness: MySQLHarness, table: str, **changes: Any) -> list[str]:
    load = load_of(harness, table, **changes)
    with MySQL().sink(harness.config) as sink:
        return sink.refusals(load)


def test_harmful_targets_are_refused_before_anything(one):
    one.make("parent", {"id": "int"}, key=["id"])
    one.sql("create table child (p int, foreign key (p) references parent (id))")
    assert "foreign keys of" in refusals(one, "parent")[0]
    assert refusals(one, "parent", mode="incremental", how="merge") == []
    one.sql("create view look as select 1 as one")
    assert "is a view" in refusals(one, "look")[0]
    one.sql("create table old (id int) engine = MyISAM")
    assert "no transactions" in refusals(one, "old")[0]
    one.make("watched", {"id": "int"}, key=["id"])
    one.sql("create trigger t1 before insert on watched for each row set new.id = new.id + 1")
    assert "the trigger t1 on insert" in refusals(one, "watched")[0]
    tables = [row[0] for row in one.sql("show tables")]
    assert "claimcheck_fence" not in tables


def test_rights_are_tried_without_a_change(one):
    one.make("t", {"id": "int"}, [(1,)], key=["id"])
    user = f"u{uuid.uuid4().hex[:10]}"
    one.sql(f"create user {user}@'%' identified by 'pa:ss/word'")
    try:
        one.sql(f"grant select, insert on {one.database}.* to {user}@'%'")
        host = SERVER.rpartition("@")[2].rstrip("/")
        url = f"mysql+pymysql://{user}:pa%3Ass%2Fword@{host}/{one.database}"
        with MySQL().sink({"url": url}) as sink:
            relation = sink.describe(("t",))
            assert relation is not None
            load = replace(load_of(one, "t"), relation=relation)
            found = sink.refusals(load)
        assert len(found) == 1
        assert "may not delete on" in found[0]
        with pytest.raises(SourceError, match="Access denied") as caught:
            MySQL().test({"url": url.replace("word", "wrong")})
        assert "wrong" not in str(caught.value)
    finally:
        one.sql(f"drop user {user}@'%'")
    assert one.rows("t") == [(1,)]


# --- staging, fence and unknown outcomes --------------------------------------------------------


def test_orphaned_staging_of_older_attempts_is_swept_and_no_other(one):
    one.make("t", {"id": "int"}, key=["id"])
    loads = [
        load_of(one, "t", mode="complete-atomic", how="delete", run_id=f"run{n}", fence=n, scope=s)
        for n, s in ((1, "mine"), (2, "other"), (3, "mine"))
    ]
    with MySQL().sink(one.config) as sink:
        for load in loads:
            sink.stage(load)
        names = [row[0] for row in one.sql("show tables like 'claimcheck\\_stage%'")]
        assert names == ["claimcheck_stage_run2", "claimcheck_stage_run3"]
        assert [name for name in sink._session.rows("show tables") if "stage" in name[0]]
    with MySQL().source(one.config) as source:
        assert source.tables() == [("t",)]


def test_a_newer_attempt_ends_the_session_of_a_frozen_older_one__R_F5(one):
    one.make("t", {"id": "int"}, [(1,)], key=["id"])
    old_load = load_of(one, "t")
    new_load = replace(old_load, fence=2, run_id="newer")
    with MySQL().sink(one.config) as old, MySQL().sink(one.config) as new:
        old.begin(old_load)
        old.truncate(old_load)  # holds locks, and is never heard of again
        started = time.monotonic()
        new.begin(new_load)
        new.truncate(new_load)
        new.write(new_load, batches([(2,)]), staging=False)
        new.commit()
        assert time.monotonic() - started < 5
        with pytest.raises((SinkError, CommitUnknown)):
            old.commit()
        old.rollback()
    assert one.rows("t") == [(2,)]


def test_a_later_step_of_an_older_attempt_waits_for_the_newer_and_is_fenced__R_F5(one):
    one.make("t", {"id": "int"}, key=["id"])
    old_load = load_of(one, "t")
    with MySQL().sink(one.config) as old:
        old.begin(old_load)
        old.commit()
        one.sql("update claimcheck_fence set fence = 9 where step = 0")
        with pytest.raises(Fenced):
            old.begin(replace(old_load, step=1))
        old.rollback()


@pytest.mark.parametrize("landed", [True, False])
def test_a_connection_that_breaks_at_commit_is_settled__R_F5(harness, landed):
    harness.make("t", {"id": "int"}, key=["id"])
    load = load_of(harness, "t")
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        sink.write(load, batches([(1,)]), staging=False)
        if landed:
            sink._session.execute("commit")
        sink._session.cut()
        with pytest.raises(CommitUnknown):
            sink.commit()
        assert sink.settle(load) is landed
    assert harness.rows("t") == ([(1,)] if landed else [])


# --- stops --------------------------------------------------------------------------------------


def stopped_within_a_second(end: Any, work: Any, error: type[Exception]) -> None:
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.monotonic())
        end.stop()

    timer = threading.Timer(0.3, stop)
    timer.start()
    with pytest.raises(error):
        work()
    assert time.monotonic() - stopped[0] < 1.0
    timer.join(timeout=5)


def test_stop_breaks_a_wait_for_a_row_lock__R_K2(harness):
    harness.make("t", {"id": "int"}, [(1,)], key=["id"])
    load = load_of(harness, "t")
    harness.admin.begin()
    harness.sql("select * from t for update")
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        stopped_within_a_second(sink, lambda: sink.truncate(load), SinkError)
        sink.rollback()
    harness.admin.rollback()
    assert harness.rows("t") == [(1,)]


def test_stop_breaks_a_load_whose_target_is_locked__R_K2(harness):
    harness.make("t", {"id": "int"}, [(1,)], key=["id"])
    load = load_of(harness, "t")
    harness.admin.begin()
    harness.sql("insert into t values (500)")
    rows: list[Row] = [(i,) for i in range(2, 200_000)]
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        stopped_within_a_second(
            sink, lambda: sink.write(load, batches(rows), staging=False), SinkError
        )
        sink.rollback()
    harness.admin.rollback()
    assert harness.rows("t") == [(1,)]


class FreezingProxy:
    """Passes bytes between a client and the server until it is frozen, and then none."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.frozen = threading.Event()
        self.sockets = [self.listener]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        options = drivers.parameters({"url": f"{SERVER.rstrip('/')}/mysql"})
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection((options["host"], options["port"]))
                self.sockets += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self.pump, args=(one, other), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if self.frozen.is_set():
                    return
                other.sendall(data)

    def close(self) -> None:
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_stop_breaks_what_waits_for_a_frozen_server__R_K2(harness):
    harness.make("t", {"id": "int"}, [(1,)], key=["id"])
    load = load_of(harness, "t")
    with contextlib.closing(FreezingProxy()) as proxy:
        head, _, database = harness.config["url"].rpartition("/")
        url = f"{head.rpartition('@')[0]}@127.0.0.1:{proxy.port}/{database}"
        rows: list[Row] = [(i,) for i in range(2, 500_000)]
        for fence, work in enumerate(("statement", "load"), start=1):
            proxy.frozen.clear()
            load = replace(load, fence=fence)  # a newer attempt ends the session left hanging
            with MySQL().sink({"url": url}) as sink:
                sink.begin(load)
                proxy.frozen.set()
                if work == "statement":
                    blocked = partial(sink.truncate, load)
                else:
                    blocked = partial(sink.write, load, batches(rows), staging=False)
                stopped_within_a_second(sink, blocked, SinkError)
                sink.rollback()
    assert harness.rows("t") == [(1,)]


def test_what_stops_the_source_ends_the_load_and_passes_through(harness):
    class Stopped(BaseException):
        pass

    def broken() -> Iterator[Any]:
        yield from batches([(1,)])
        raise Stopped

    harness.make("t", {"id": "int"}, key=["id"])
    load = load_of(harness, "t")
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        with pytest.raises(Stopped):
            sink.write(load, broken(), staging=False)
        sink.rollback()
        sink.begin(load)  # the connection is as good as before
        sink.rollback()
    assert harness.rows("t") == []
    assert not [t for t in threading.enumerate() if t.name == "claimcheck-load"]


def test_a_reader_that_leaves_early_is_not_made_to_read_the_rest(harness):
    harness.make("t", {"id": "int", "v": "longtext"}, [(i, "x" * 10_000) for i in range(3000)])
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t", fetch_size=10)
        source.snapshot()
        pages = source.read(request, Part(0), Lane.ROWS)
        assert next(pages).rows == 10
        started = time.monotonic()
        pages.close()
        assert time.monotonic() - started < 1.0


# --- reading ------------------------------------------------------------------------------------


def test_a_read_sees_one_state_although_others_write(harness):
    harness.make("t", {"id": "int"}, [(i,) for i in range(100)], key=["id"])
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t", fetch_size=10)
        source.snapshot()
        pages = source.read(request, Part(0), Lane.ROWS)
        first = next(pages)
        harness.sql("delete from t")
        assert first.rows + sum(page.rows for page in pages) == 100
        assert source.count(request) == 100


def test_a_query_knows_its_types(harness):
    columns = {"a": "decimal(10,3)", "b": "varchar(5)", "c": "varbinary(5)", "d": "datetime(3)"}
    columns |= {"e": "bit(9)", "f": "float", "g": "bigint unsigned", "h": "timestamp(6) null"}
    row = ("1.500", "x", b"\xff", "2026-01-01 00:00:00.250", 5, 0.10000000149011612, 2**64 - 1)
    harness.make("t", columns, [(*row, "2026-01-01 00:00:00.000000+00")])
    with MySQL().source(harness.config) as source:
        request = ReadRequest(query="select t.*, a * 2 as twice from t;")
        relation = source.describe(request)
        kinds = {c.name: (c.type.kind, c.type.precision, c.type.scale) for c in relation.columns}
        assert kinds["a"] == (Kind.DECIMAL, 10, 3)
        assert kinds["b"][0] is Kind.TEXT
        assert kinds["c"][0] is Kind.BYTES
        assert kinds["d"][:2] == (Kind.TIMESTAMP, 3)
        assert kinds["e"][0] is kinds["g"][0] is Kind.INTEGER
        assert kinds["h"][0] is Kind.TIMESTAMPTZ
        request = request.planned(identity_plan(relation))
        source.snapshot()
        assert read_all(source, request) == [
            (*row, "2026-01-01 00:00:00.000000+00", "3.000"),
        ]


def test_names_are_literal_and_a_near_one_is_offered(one):
    one.make("Orders", {"id": "int"})
    with (
        MySQL().source(one.config) as source,
        pytest.raises(SourceError, match=r"orders does not exist.*did you mean Orders\?"),
    ):
        source.describe(ReadRequest(table=("orders",)))


def test_another_database_is_named_by_the_first_part(one):
    one.make("t", {"id": "int"}, [(1,)], key=["id"])
    with MySQL().source(one.config) as source:
        request = ReadRequest(table=(one.database, "t"))
        request = request.planned(identity_plan(source.describe(request)))
        source.snapshot()
        assert read_all(source, request) == [(1,)]


def test_generated_defaults_and_keys_are_known(one):
    one.sql(
        "create table t (id int auto_increment primary key, a varchar(5) not null default 'x',"
        " n int not null, m datetime default current_timestamp on update current_timestamp,"
        " g int generated always as (n + 1) stored, v int generated always as (n * 2) virtual,"
        " unique key p (a(2)))"
    )
    with MySQL().sink(one.config) as sink:
        relation = sink.describe(("t",))
    assert relation is not None
    known = {c.name: (c.nullable, c.has_default, c.generated) for c in relation.columns}
    assert known == {
        "id": (False, True, False),
        "a": (False, True, False),
        "n": (False, False, False),
        "m": (True, True, False),
        "g": (True, False, True),
        "v": (True, False, True),
    }
    assert relation.detail["unique"] == [("id",)]


def test_watermarks_lag_behind_the_greatest_value__R_F3(one):
    one.make("t", {"w": "timestamp(6) null", "n": "bigint", "s": "varchar(9)"})
    one.sql("insert into t values ('2026-01-01 10:00:30.5', 500, 'x'), (null, null, null)")
    with MySQL().source(one.config) as source:
        request = ReadRequest(table=("t",), watermark="w")
        time_column, number, text = source.describe(request).columns
        bound = source.bound(request, time_column, 60)
        assert (bound.value, bound.type) == ("2026-01-01 09:59:30+00", "timestamptz")
        assert "60 s" in bound.warning
        later = replace(request, since="2026-01-01 09:59:45+00")
        assert source.bound(later, time_column, 60).value == "2026-01-01 09:59:45+00"
        assert source.bound(request, number, 10).value == "490"
        with pytest.raises(SourceError, match="watermark s"):
            source.bound(request, text, 10)


def test_since_reads_times_and_numbers_from_the_bound_on__R_F3(one):
    rows: list[Row] = [
        (1, "2026-01-01 09:59:59.000000+00", "1.50"),
        (2, "2026-01-01 10:00:00.000000+00", "2.50"),
        (3, None, None),
    ]
    one.make("t", {"id": "int", "w": "timestamp(6) null", "d": "decimal(10,2)"}, rows)
    with MySQL().source(one.config) as source:
        source.snapshot()
        for column, since in (("w", "2026-01-01 10:00:00.5+00"), ("d", "1.75")):
            request = request_for(source, "t", watermark=column, since=since)
            assert sorted(row[0] for row in read_all(source, request)) == [2, 3]
            assert source.count(request) == 2


# --- making tables, and the way round -----------------------------------------------------------


def test_a_table_made_for_another_engine_keeps_its_values(one):
    columns = [
        Column("id", ColumnType(Kind.INTEGER, "bigint", bits=64), nullable=False),
        Column("name", ColumnType(Kind.TEXT, "text")),
        Column("any", ColumnType(Kind.DECIMAL, "numeric")),
        Column("d", ColumnType(Kind.DECIMAL, "numeric(20,4)", precision=20, scale=4)),
        Column("b", ColumnType(Kind.BOOLEAN, "boolean")),
        Column("u", ColumnType(Kind.UUID, "uuid")),
        Column("j", ColumnType(Kind.JSON, "jsonb")),
        Column("t", ColumnType(Kind.TIMESTAMPTZ, "timestamp with time zone")),
        Column("o", ColumnType(Kind.BYTES, "bytea")),
    ]
    row = (
        1,
        "Case ",
        "1.1",
        "2.5",
        True,
        str(uuid.uuid4()),
        '{"a":1.10}',
        "2026-01-01 00:00:00+00",
        b"\0",
    )
    with MySQL().sink(one.config) as sink:
        sink.create(("t",), columns, ["id"], "postgresql")
        relation = sink.describe(("t",))
        assert relation is not None
        assert relation.key == ("id",)
        for column in columns:
            theirs = relation.column(column.name)
            assert theirs is not None
            assert sink.fit(column, theirs, "postgresql").refusal is None, column.name
    write(one, "t", [row])
    found = one.rows("t")[0]
    assert found[1] == "Case "
    assert found[4] == 1
    assert (found[5], found[6], found[8]) == (row[5], row[6], row[8])
    assert len(one.sql("select 1 from t where name = 'case ' or name = 'Case'")) == 0


def test_more_digits_than_mysql_holds_are_refused_by_column(one):
    wide = Column("d", ColumnType(Kind.DECIMAL, "numeric(80,40)", precision=80, scale=40))
    with MySQL().sink(one.config) as sink, pytest.raises(SinkError, match="column d: "):
        sink.create(("t",), [wide], [], "postgresql")


def test_both_tables_have_one_checksum_after_a_copy(harness):
    columns = {sample.name: sample.native for sample in SAMPLES}
    rows = list(zip(*(sample.cells for sample in SAMPLES), strict=True))
    harness.make("t", columns, rows)
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t")
        relation = source.describe(request)
        source.snapshot()
        found = read_all(source, request)
    with MySQL().sink(harness.config) as sink:
        sink.create(("u",), relation.columns, [], "mysql")
    write(harness, "u", found)
    sums = {checksum.of_table("mysql", harness.config, table).digest for table in ("t", "u")}
    assert len(sums) == 1


# --- configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "url is missing"),
        ("postgresql://u:geheim@h/d", "no MySQL URL"),
        ("mysql://u:geheim@h:port/d", "no MySQL URL"),
        ("mysql://u:geheim@h", "names no database"),
        ("mysql://u:geheim@h/d?colour=geheim", "parameter colour"),
        ("mysql://u:geheim@h/d?ssl=geheim", "ssl must be one of"),
    ],
)
def test_a_bad_url_is_explained_and_not_echoed(url, says):
    problems = MySQL().check_config({"url": url})
    assert len(problems) == 1
    assert says in problems[0]
    assert "geheim" not in problems[0]
    assert MySQL().check_config({"url": "mariadb://u:p@h/d?ssl=verify&ssl_ca=/x"}) == []


def test_a_server_that_is_not_there_is_an_error_without_the_password():
    config = {"url": "mysql://u:geheim@127.0.0.1:1/d"}
    with pytest.raises(SourceError) as caught:
        MySQL().test(config)
    assert "geheim" not in str(caught.value)
    assert not caught.value.permanent


def test_the_product_and_version_are_told(harness):
    assert MySQL().test(harness.config).startswith(("MariaDB 10", "MariaDB 11", "MySQL 8"))


def test_a_missing_driver_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert MySQL().missing() == "pymysql"
    assert MySQL().capabilities.extra == "mysql"


def test_members_of_an_enum_are_read():
    assert types.members("enum('a','it''s','x,y','')") == ("a", "it's", "x,y", "")
