"""What MySQL would change, merge or leave out without a word is refused by column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conformance import (
    batches,
    read_all,
    request_for,
)
from mysql_kit import (
    DRIVERS,
    MySQLHarness,
    a_database,
    load_of,
    write,
)

from tasks.replicate.connector import (
    Column,
    ColumnType,
    Kind,
    Row,
    SinkError,
)
from tasks.replicate.connectors.mysql import MySQL, faults, loading


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
        (1005, "Can't create table `d`.`t` (errno: 150 'secret')"): (
            "Can't create table `d`.`t` (errno: 150 (a value))"
        ),
        (9999, "Something about 'secret' and 'secret"): "Something about (a value) and (a value)",
    }
    for (code, text), wanted in cases.items():
        found = faults.clean(code, text)
        assert "secret" not in found
        assert found == wanted


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
    with pytest.raises(SinkError, match="key column k: 1 key differs"):
        merge(one, "t", [(pair[0], 1), (pair[1], 2)])
    merge(one, "t", [(pair[0], 1)])
    with pytest.raises(SinkError, match="key column k: 1 key differs"):
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
