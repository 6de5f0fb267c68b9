"""SQLite as source and sink: the suite, its file, its locks, queries and watermarks."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conformance import (
    Harness,
    SinkConformance,
    SourceConformance,
    batches,
    read_all,
    request_for,
)
from replication_kit import Job, definition
from sqlite_kit import SAMPLES, SQLiteHarness, load_of, write

from tasks.replicate import checksum
from tasks.replicate.connector import (
    Column,
    ColumnType,
    Kind,
    Lane,
    Part,
    ReadRequest,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.sqlite import SQLite


@pytest.fixture
def harness(tmp_path: Path) -> SQLiteHarness:
    return SQLiteHarness(tmp_path / "it's 100% here.db")


class TestSQLiteSource(SourceConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return SQLiteHarness(tmp_path / "source.db")


class TestSQLiteSink(SinkConformance):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return SQLiteHarness(tmp_path / "sink.db")


@pytest.mark.parametrize("create", [True, False])
def test_a_sink_table_that_differs_by_case_only_is_named(harness, create):
    harness.make("UPPER", {"id": "INTEGER"}, [(1,)])
    source = SQLiteHarness(harness.path.with_name("source.db"))
    source.make("upper", {"id": "INTEGER"}, [(2,)])
    job = Job(
        source.config,
        harness.config,
        definition({"table": "upper"}, {"table": "upper"}, "complete", create=create),
        connectors=("sqlite", "sqlite"),
    )
    with pytest.raises(SinkError, match="any case for one, and UPPER is there already") as caught:
        job.run()
    assert caught.value.permanent
    assert harness.sql("select id from UPPER") == [(1,)]


@pytest.mark.parametrize("reads", ["t", "part", "parts"])
@pytest.mark.parametrize("link", ["symbolic", "hard", "spelling"])
def test_a_table_is_not_replicated_onto_itself(harness, link, reads):
    harness.make("t", {"id": "INTEGER"}, [(1,), (2,)], key=["id"])
    harness.sql("create view part as select id from T where id = 1")
    harness.sql("create view parts as select p.id from part p left join part o on o.id = p.id")
    other = harness.path.with_name("other.db")
    if link == "symbolic":
        other.symlink_to(harness.path)
    elif link == "hard":
        other.hardlink_to(harness.path)
    else:
        other = harness.path.parent / "." / ".." / harness.path.parent.name / harness.path.name
    job = Job(
        harness.config,
        {"url": f"sqlite:///{other}?timeout=3"},
        definition({"table": reads}, {"table": "t"}, "complete"),
        connectors=("sqlite", "sqlite"),
    )
    with pytest.raises(SinkError, match="t is both source and sink") as caught:
        job.run()
    assert caught.value.permanent
    assert harness.sql("select id from t") == [(1,), (2,)]


def test_a_missing_source_file_is_named_and_not_made(tmp_path):
    config = {"url": f"sqlite:///{tmp_path}/none.db"}
    with pytest.raises(SourceError, match=r"none\.db does not exist"):
        SQLite().source(config)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_sink_file_is_made_with_its_table_only(tmp_path):
    path = tmp_path / "new.db"
    config = {"url": f"sqlite:///{path}"}
    columns = [
        Column("id", ColumnType(Kind.INTEGER, "bigint", bits=64), nullable=False),
        Column("big", ColumnType(Kind.INTEGER, "numeric", bits=64, unsigned=True)),
        Column("d", ColumnType(Kind.DECIMAL, "numeric(20,4)", precision=20, scale=4)),
        Column("j", ColumnType(Kind.JSON, "jsonb")),
    ]
    with SQLite().sink(config) as sink:
        assert sink.describe(("t",)) is None
        assert not path.exists()
        sink.create(("t",), columns, ["id"], "postgresql")
        relation = sink.describe(("t",))
    assert relation is not None
    assert relation.key == ("id",)
    assert [column.type.kind for column in relation.columns] == [
        Kind.INTEGER,
        Kind.DECIMAL,
        Kind.DECIMAL,
        Kind.JSON,
    ]
    harness = SQLiteHarness(path)
    write(harness, "t", [(1, str(2**64 - 1), "123.4500", "1.10")])
    assert harness.rows("t") == [(1, str(2**64 - 1), "123.4500", "1.10")]


def test_a_name_of_another_case_is_not_the_table(harness):
    harness.make("Orders", {"id": "INTEGER"})
    with (
        SQLite().source(harness.config) as source,
        pytest.raises(SourceError, match=r"orders does not exist.*did you mean Orders\?"),
    ):
        source.describe(ReadRequest(table=("orders",)))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "url: is missing"),
        ("postgresql://u:geheim@h/d", "no SQLite URL"),
        ("sqlite://geheim/x.db", "no SQLite URL"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///x.db?mode=geheim", "parameter mode"),
        ("sqlite:///x.db?timeout=geheim", "no number"),
    ],
)
def test_a_bad_url_is_explained_and_not_echoed(url, says):
    (problem,) = SQLite().check_config({"url": url})
    assert problem.key == "url"
    assert says in str(problem)
    assert "geheim" not in str(problem)
    assert SQLite().check_config({"url": "sqlite:///x.db?timeout=5"}) == []
    (problem,) = SQLite().check_config({"url": "sqlite:///x.db", "colour": "red"})
    assert problem.key == "colour"


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path):
    (tmp_path / "x.db").write_text("something else entirely, long enough to be a header" * 30)
    with pytest.raises(SourceError, match="file is not a database"):
        SQLite().test({"url": f"sqlite:///{tmp_path}/x.db"})


def test_the_version_is_told(harness):
    assert SQLite().test(harness.config) == f"SQLite {sqlite3.sqlite_version}"


def test_a_read_sees_one_state_although_others_write(harness):
    harness.make("t", {"id": "INTEGER"}, [(i,) for i in range(100)])
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t", fetch_size=10)
        source.snapshot()
        pages = source.read(request, Part(0), Lane.ROWS)
        first = next(pages)
        harness.sql("delete from t")
        assert first.rows + sum(page.rows for page in pages) == 100
        assert source.count(request) == 100


def test_a_source_changes_nothing(harness):
    harness.make("t", {"id": "INTEGER"}, [(1,)])
    with SQLite().source(harness.config) as source:
        source.describe(ReadRequest(table=("t",)))
        source.snapshot()
        with pytest.raises(SourceError, match="readonly"):
            source._session.execute("delete from t")


def test_stop_breaks_a_wait_for_a_lock_within_a_second__R_K2(harness):
    harness.make("t", {"id": "INTEGER"})
    load = load_of(harness, "t")
    with closing(sqlite3.connect(harness.path, isolation_level=None)) as other:
        other.execute("begin immediate")
        with SQLite().sink(harness.config) as sink:
            timer = threading.Timer(0.2, sink.stop)
            timer.start()
            started = time.monotonic()
            with pytest.raises(SinkError, match="stopped"):
                sink.begin(load)
            assert time.monotonic() - started < 1.2
            timer.join(timeout=5)
        other.execute("rollback")


def test_a_lock_that_is_never_freed_is_an_error_that_says_so(harness):
    harness.make("t", {"id": "INTEGER"})
    load = load_of(harness, "t")
    config = {"url": f"sqlite:///{harness.path}?timeout=0.2"}
    with closing(sqlite3.connect(harness.path, isolation_level=None)) as other:
        other.execute("begin immediate")
        with SQLite().sink(config) as sink:
            with pytest.raises(SinkError, match=r"another connection held its lock") as caught:
                sink.begin(load)
            assert not caught.value.permanent
            for way_out in ("?timeout=SECONDS", "one concurrency key with limit: 1"):
                assert way_out in str(caught.value)
        other.execute("rollback")


def test_a_source_that_is_locked_says_what_to_do(harness):
    harness.sql("pragma journal_mode = delete")
    harness.make("t", {"id": "INTEGER"})
    config = {"url": f"sqlite:///{harness.path}?timeout=0.2"}
    with closing(sqlite3.connect(harness.path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        with pytest.raises(SourceError, match=r"held its lock for 0\.2 s.*WAL.*\?timeout=SECONDS"):
            SQLite().test(config)
        other.execute("rollback")


def locked_out(harness: SQLiteHarness) -> bool:
    """Whether another connection is kept from reading."""
    with closing(sqlite3.connect(harness.path, timeout=0)) as reader:
        try:
            reader.execute("select count(*) from t").fetchall()
        except sqlite3.OperationalError as error:
            return str(error) == "database is locked"
    return False


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_large_transaction_locks_readers_out_before_it_commits_outside_wal_alone(harness, mode):
    harness.sql(f"pragma journal_mode = {mode}")
    harness.make("t", {"id": "INTEGER", "words": "TEXT"}, [(1, "x")], key=["id"])
    # More than SQLite's cache of two megabytes.
    rows = [(i, "x" * 100) for i in range(40_000)]
    with SQLite().sink(harness.config) as sink:
        load = load_of(harness, "t")
        sink.begin(load)
        sink.write(load, batches([(2, "x")]), staging=False)
        assert not locked_out(harness)
        sink.rollback()
        sink.begin(load)
        sink.truncate(load)
        sink.write(load, batches(rows), staging=False)
        assert locked_out(harness) == (mode == "delete")
        sink.rollback()
        load = load_of(harness, "t", mode="complete-atomic", how="delete")
        sink.stage(load)
        sink.write(load, batches(rows), staging=True)
        # Staging lies in a file of its own.
        assert not locked_out(harness)
        sink.begin(load)
        sink.publish(load)
        assert locked_out(harness) == (mode == "delete")
        sink.rollback()


def test_readers_see_old_or_new_content_and_never_wait_in_wal_mode(harness):
    harness.make("t", {"id": "INTEGER"}, [(i,) for i in range(1000)], key=["id"])
    load = load_of(harness, "t", mode="complete-atomic", how="delete")
    with SQLite().sink(harness.config) as sink:
        sink.stage(load)
        sink.write(load, batches([(i,) for i in range(500)]), staging=True)
        assert harness.sql("select count(*) from t") == [(1000,)]
        sink.begin(load)
        sink.publish(load)
        assert harness.sql("select count(*) from t") == [(1000,)]
        sink.commit()
        assert harness.sql("select count(*) from t") == [(500,)]


def test_a_closed_sink_leaves_no_staging_behind(harness):
    harness.make("t", {"id": "INTEGER"}, key=["id"])
    load = load_of(harness, "t", mode="complete-atomic", how="delete")
    with SQLite().sink(harness.config) as sink:
        sink.stage(load)
        sink.write(load, batches([(1,)]), staging=True)
    names = [row[0] for row in harness.sql("select name from sqlite_master where type = 'table'")]
    assert names == ["t"]


def test_a_query_keeps_the_types_of_plain_columns(harness):
    harness.make("t", {"id": "INTEGER", "price": "DECIMAL(10,2)"}, [(1, 2.5)])
    with SQLite().source(harness.config) as source:
        request = ReadRequest(query="select id, price, price * 2 as double from t; ")
        relation = source.describe(request)
        source.describe(request)  # twice is no harm
    kinds = [column.type.kind for column in relation.columns]
    assert kinds == [Kind.INTEGER, Kind.DECIMAL, Kind.TEXT]


def test_a_bad_query_or_where_is_an_error_before_anything(harness):
    harness.make("t", {"id": "INTEGER"})
    with SQLite().source(harness.config) as source:
        for request in (
            ReadRequest(query="select absent from t"),
            ReadRequest(table=("t",), where="absent = 1"),
        ):
            with pytest.raises(SourceError, match="no such column: absent") as caught:
                source.describe(request)
            assert caught.value.permanent


def bound_of(harness: SQLiteHarness, lag: float | None = 60.0, **changes: Any) -> Any:
    with SQLite().source(harness.config) as source:
        request = ReadRequest(table=("t",), watermark="w", **changes)
        relation = source.describe(request)
        column = relation.column("w")
        assert column is not None
        return source.bound(request, column, lag)


def test_the_bound_lies_a_lag_below_the_greatest_value_and_never_falls__R_F3(harness):
    harness.make("t", {"w": "TIMESTAMP"}, [("2026-01-01 10:00:30.5",), ("2026-01-01 09:00:00",)])
    bound = bound_of(harness)
    assert (bound.value, bound.type) == ("2026-01-01 09:59:30", "timestamp")
    assert "60 s" in bound.warning
    assert bound_of(harness, since="2026-01-01 09:59:45").value == "2026-01-01 09:59:45"
    harness.make("t", {"w": "INTEGER"}, [(500,), (None,)])
    assert (bound_of(harness, 10).value, bound_of(harness, 10).type) == ("490", "bigint")
    harness.make("t", {"w": "INTEGER"})
    assert bound_of(harness).value is None


def test_a_clock_that_is_ahead_does_not_raise_the_bound__R_F3(harness):
    harness.make("t", {"w": "TIMESTAMPTZ"}, [("2999-01-01 00:00:00+00",)])
    bound = bound_of(harness)
    assert bound.value < "2900"
    assert bound.value.endswith("+00")


@pytest.mark.parametrize(
    ("native", "value"),
    [
        ("TIMESTAMP", 1767261600),
        ("TIMESTAMP", "2026-01-01"),
        ("TIMESTAMP", "2026-01-01 10:00"),
        ("TIMESTAMP", "2026-01-01 10:00:00+02:00"),
        ("TIMESTAMP", "01/02/2026 10:00:00"),
        ("DATE", "2026-1-1"),
        ("INTEGER", "seven"),
        ("INTEGER", 1.5),
        ("DECIMAL", "many"),
    ],
)
def test_a_watermark_in_another_form_is_refused_not_missed__R_F3(harness, native, value):
    harness.make("t", {"w": native}, [(value,)])
    with pytest.raises(SourceError, match="watermark w: 1 rows hold something else"):
        bound_of(harness)


@pytest.mark.parametrize(
    ("native", "value"),
    [
        ("TIMESTAMP", "2026-02-30 00:00:00"),
        ("TIMESTAMP", "2026-19-01 00:00:00"),
        ("TIMESTAMPTZ", "2026-01-01 00:00:60+00"),
        ("DATE", "2026-02-30"),
        ("DATE", "0000-00-00"),
    ],
)
def test_a_highest_value_that_is_no_time_is_refused_by_column__R_F3(harness, native, value):
    harness.make("t", {"w": native}, [(value,)])
    with pytest.raises(SourceError, match="watermark w: its highest value is no time") as caught:
        bound_of(harness)
    assert caught.value.permanent
    assert value not in str(caught.value)


@pytest.mark.parametrize("native", ["TIMESTAMP", "DATE"])
def test_where_the_calendar_begins_the_bound_stays__R_F3(harness, native):
    harness.make(
        "t", {"w": native}, [("0001-01-01 00:00:00" if native != "DATE" else "0001-01-01",)]
    )
    assert bound_of(harness).value is None


@pytest.mark.parametrize("lag", [1e11, 1e300])
def test_a_lag_of_more_than_a_century_is_refused_by_column__R_F3(harness, lag):
    harness.make("t", {"w": "TIMESTAMP"})
    with pytest.raises(SourceError, match="watermark w is a time, and lag is longer") as caught:
        bound_of(harness, lag)
    assert caught.value.permanent


def test_a_real_watermark_is_exact_and_finite__R_F3(harness):
    harness.make("t", {"w": "DECIMAL"}, [(0.1234567890123456,), (-9e999,)])
    assert bound_of(harness, 0).value == "0.1234567890123456"
    harness.sql("insert into t values (9e999)")
    assert bound_of(harness, 0).value == "0.1234567890123456"
    harness.sql("delete from t where w = 0.1234567890123456")
    assert bound_of(harness, 0).value is None


@pytest.mark.parametrize("native", ["TEXT", "BOOLEAN", "DECIMAL TEXT", "BLOB"])
def test_a_column_without_an_order_is_no_watermark__R_F3(harness, native):
    harness.make("t", {"w": native})
    with pytest.raises(SourceError, match="watermark w"):
        bound_of(harness)


def test_since_finds_every_form_of_the_same_moment__R_F3(harness):
    forms = [
        "2026-01-01 10:00:00",
        "2026-01-01T10:00:00Z",
        "2026-01-01 10:00:00.000+00",
        "2026-01-01 10:00:00+00:00",
    ]
    rows: list[Row] = [(i, form) for i, form in enumerate(forms)]
    rows.append((99, "2026-01-01 09:59:59.999"))
    harness.make("t", {"id": "INTEGER", "w": "TIMESTAMPTZ"}, rows)
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t", watermark="w", since="2026-01-01 10:00:00.5+00")
        source.snapshot()
        assert sorted(row[0] for row in read_all(source, request)) == [0, 1, 2, 3]
        assert source.count(request) == 4


def test_both_files_have_one_checksum_after_a_copy(harness, tmp_path):
    columns = {sample.name: sample.native for sample in SAMPLES}
    rows = list(zip(*(sample.cells for sample in SAMPLES), strict=True))
    harness.make("t", columns, rows)
    other = SQLiteHarness(tmp_path / "other.db")
    other.make("t", columns)
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t")
        source.snapshot()
        write(other, "t", read_all(source, request))
    sums = {checksum.of_table("sqlite", h.config, "t").digest for h in (harness, other)}
    assert len(sums) == 1


def test_generated_columns_and_defaults_are_known(harness):
    harness.sql(
        "create table t (id integer primary key, a text not null default 'x', n text not null,"
        " g text generated always as (a || n) stored)"
    )
    with SQLite().sink(harness.config) as sink:
        relation = sink.describe(("t",))
    assert relation is not None
    known = {c.name: (c.nullable, c.has_default, c.generated) for c in relation.columns}
    assert known == {
        "id": (False, True, False),
        "a": (False, True, False),
        "n": (False, False, False),
        "g": (True, False, True),
    }


def test_decimal_of_python_is_never_a_cell(harness):
    """The driver hands out ints, floats, text and bytes; the interface has no other cells."""
    harness.make("t", {"v": "DECIMAL(10,2)"}, [(1.25,)])
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t")
        source.snapshot()
        cell = read_all(source, request)[0][0]
    assert isinstance(cell, str)
    assert Decimal(cell) == Decimal("1.25")


def test_a_text_that_is_not_utf_8_is_refused_by_column_and_not_shown(harness):
    harness.make("t", {"id": "integer", "v": "text"}, [(1, "x")])
    with closing(sqlite3.connect(harness.path)) as file, file:
        file.execute("insert into t values (2, cast(x'736563726574ff' as text))")
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t")
        with pytest.raises(SourceError, match="column v: a text is not valid UTF-8") as caught:
            read_all(source, request)
    assert caught.value.permanent
    assert "secret" not in str(caught.value)
