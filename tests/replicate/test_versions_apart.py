"""Types whose values two versions of PostgreSQL write alike and read otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import sql
from replication_kit import Database, Job, definition

from dispatch.context import HandlerFailure
from tasks.replicate.connector import Column, Fit, Lane
from tasks.replicate.connectors.postgresql import catalog, pairs, session

MADE = """
create domain wait as interval;
create type times as (a int, b interval);
create type waits as range (subtype = interval);
"""
GREATEST = "178956970 years 7 mons 2147483647 days 2562047788:00:54.775807"
"""The greatest interval before 17, whose bits and text 17 takes for infinity."""
HOLDERS = {
    "interval": "{}",
    "interval[]": '{{"{}"}}',
    "wait": "{}",
    "wait[]": '{{"{}"}}',
    "times": '(1,"{}")',
    "times[]": '{{"(1,\\"{}\\")"}}',
    "waits": '["-2 days","{}"]',
}


def described(database: Database, declared: str, version: int) -> Column:
    """The column as a server of another version would describe it."""
    database.execute(f"drop table if exists t; create table t (x {declared})")
    found = catalog.find(database.connection, ("public", "t"))
    assert found is not None
    (column,) = catalog.describe_table(database.connection, found).columns
    leaves = [leaf for leaf, _ in column.detail["leaves"]]
    return replace(column, detail={**column.detail, "newer": catalog.newer(version, leaves)})


def fit(database: Database, declared: str, versions: tuple[int, int]) -> Fit:
    ours, theirs = (described(database, declared, version) for version in versions)
    return pairs.pair(ours, theirs)


@pytest.mark.parametrize("declared", HOLDERS)
@pytest.mark.parametrize("versions", [(150000, 170000), (170000, 120000)])
def test_no_interval_goes_in_binary_to_where_its_bits_mean_another(
    sink: Database, declared: str, versions: tuple[int, int]
) -> None:
    sink.execute(MADE)
    assert Lane.COPY_BINARY not in fit(sink, declared, versions).lanes


@pytest.mark.parametrize("declared", ["interval", "interval(3)", "interval[]", "wait"])
@pytest.mark.parametrize("versions", [(150000, 120000), (170000, 180000)])
def test_an_interval_goes_in_binary_to_where_its_bits_mean_the_same(
    sink: Database, declared: str, versions: tuple[int, int]
) -> None:
    sink.execute(MADE)
    assert Lane.COPY_BINARY in fit(sink, declared, versions).lanes


def test_a_cast_within_the_binary_lane_is_no_way_around(sink: Database) -> None:
    ours = described(sink, "interval(0)", 170000)
    for version, binary in ((160000, False), (170000, True)):
        found = pairs.pair(ours, described(sink, "interval(3)", version))
        assert (Lane.COPY_BINARY in found.lanes) is binary
    assert Lane.ROWS in pairs.pair(ours, described(sink, "text", 160000)).lanes


@pytest.mark.parametrize("declared", HOLDERS)
def test_the_greatest_old_interval_is_read_as_what_no_newer_server_takes(
    source: Database, sink: Database, declared: str
) -> None:
    sink.execute(MADE)
    template = fit(sink, declared, (160000, 170000)).read_as
    assert template is not None
    source.execute(MADE)
    source.execute(f"create table t (x {declared})")
    source.execute("insert into t values (%s), (null)", HOLDERS[declared].format("1 day"))
    read = session.raw(template).format(sql.Identifier("x"))
    statement = sql.SQL("select {}, x::text from t").format(read)
    assert all(one == two for one, two in source.connection.execute(statement))
    if 150000 <= source.version < 170000:
        source.execute("update t set x = %s", HOLDERS[declared].format(GREATEST))
        assert {row[0] for row in source.connection.execute(statement)} == {pairs.POISON}


def test_char_goes_only_in_binary_to_a_server_that_does_not_know_its_newer_text(
    sink: Database,
) -> None:
    binary = frozenset({Lane.COPY_BINARY})
    for declared in ('"char"', '"char"[]'):
        assert fit(sink, declared, (150000, 140000)).lanes == binary
        assert fit(sink, declared, (140000, 150000)).lanes > binary
        assert fit(sink, declared, (160000, 180000)).lanes > binary
    sink.execute('create type letters as (a "char")')
    assert 'text of "char"' in (fit(sink, "letters", (150000, 140000)).refusal or "")
    assert fit(sink, "letters", (140000, 150000)).refusal is None


@pytest.fixture
def apart(source: Database, sink: Database) -> tuple[Database, Database]:
    """The older and the newer of two servers of which one knows infinite intervals."""
    older, newer = sorted((source, sink), key=lambda database: database.version)
    if older.version >= 170000 or newer.version < 170000:
        pytest.skip("both servers are on one side of version 17")
    return older, newer


def run(source: Database, sink: Database, mode: str) -> str:
    more = {"watermark": "id"} if mode == "incremental" else {}
    reads, writes = {"table": "t"}, {"table": "t"}
    plan = definition(reads, writes, mode, verify="checksum", **more)
    result = Job(source.config, sink.config, plan).run().result
    assert isinstance(result, dict)
    return str(result["lane"])


MODES = ("complete", "complete-atomic", "incremental")


@pytest.mark.parametrize("declared", HOLDERS)
def test_an_infinite_interval_is_refused_by_an_older_server(
    apart: tuple[Database, Database], declared: str
) -> None:
    older, newer = apart
    _made(older, newer, declared)
    for end in ("infinity",) if declared == "waits" else ("infinity", "-infinity"):
        newer.execute("truncate t")
        newer.execute("insert into t values (1, %s)", HOLDERS[declared].format(end))
        for mode in MODES:
            with pytest.raises(HandlerFailure, match="column x: "):
                run(newer, older, mode)
    assert older.value("select count(*) from t") == 0


@pytest.mark.parametrize("declared", HOLDERS)
def test_the_greatest_finite_interval_does_not_become_infinite(
    apart: tuple[Database, Database], declared: str
) -> None:
    older, newer = apart
    if older.version < 150000:
        pytest.skip("the server reads no text of its greatest interval")
    _made(older, newer, declared)
    older.execute("insert into t values (1, %s)", HOLDERS[declared].format(GREATEST))
    for mode in MODES:
        with pytest.raises(HandlerFailure, match="column x: "):
            run(older, newer, mode)
    assert newer.value("select count(*) from t") == 0


@pytest.mark.parametrize("declared", HOLDERS)
def test_every_other_interval_arrives_both_ways(
    apart: tuple[Database, Database], declared: str
) -> None:
    older, newer = apart
    _made(older, newer, declared)
    for source, sink in (apart, apart[::-1]):
        source.execute("truncate t")
        for number, value in enumerate(("1 day -00:00:00.001", "170000000 years")):
            source.execute("insert into t values (%s, %s)", number, HOLDERS[declared].format(value))
        source.execute("insert into t values (9, null)")
        statement = "select id, x::text from t order by id"
        for mode in MODES:
            sink.execute("truncate t")
            assert run(source, sink, mode) == "copy-text"
            assert sink.execute(statement) == source.execute(statement)


def _made(older: Database, newer: Database, declared: str) -> None:
    for database in (older, newer):
        database.execute(f"{MADE} create table t (id int primary key, x {declared})")
