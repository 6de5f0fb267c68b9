"""SQLite as source and sink: the conformance suite, and the traps that are SQLite's own."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
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
    Kind,
    Lane,
    Load,
    Part,
    ReadRequest,
    Row,
    SinkError,
    SourceError,
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


# --- values that SQLite would change without a word ---------------------------------------------


@pytest.mark.parametrize(
    ("native", "cell", "says"),
    [
        ("REAL", float("nan"), "is NaN"),
        ("BLOB", float("nan"), "is NaN"),
        ("REAL", -0.0, "negative zero"),
        ("REAL", 2**53 + 1, "a float would round"),
        ("NUMERIC", "12345678901234567890.5", "more digits"),
        ("DECIMAL(30,10)", "1234567890.123456789", "more digits"),
        ("JSON", "1.10", "looks like a number"),
        ("DATE", "2026", "looks like a number"),
        ("INTEGER", 2**63, "beyond 64-bit"),
        ("TEXT", "\ud800", "not valid Unicode"),
        ("TEXT", True, "truth value"),
    ],
)
def test_a_value_that_would_be_changed_is_refused_by_column(harness, native, cell, says):
    harness.make("t", {"id": "INTEGER", "my col": native})
    with pytest.raises(SinkError, match=f"column my col: .*{says}") as caught:
        write(harness, "t", [(1, cell)])
    assert caught.value.permanent
    assert harness.rows("t") == []


@pytest.mark.parametrize(
    ("native", "cell", "stored"),
    [
        ("TEXT", 0.1234567890123456, "0.1234567890123456"),
        ("TEXT", 5, "5"),
        ("NUMERIC", "1.5", 1.5),
        ("NUMERIC", "12345678901234567", 12345678901234567),
        ("NUMERIC", "0.1", 0.1),
        ("REAL", 2**53, float(2**53)),
    ],
)
def test_a_value_that_keeps_its_meaning_is_stored(harness, native, cell, stored):
    harness.make("t", {"id": "INTEGER", "c": native})
    write(harness, "t", [(1, cell)])
    assert harness.rows("t") == [(1, stored)]


def test_null_into_the_rowid_is_refused_and_not_numbered(harness):
    harness.make("t", {"id": "INTEGER", "c": "TEXT"}, key=["id"])
    for cell in (None, "x"):
        with pytest.raises(SinkError, match="column id: a value is no integer"):
            write(harness, "t", [(cell, "a")])
    assert harness.rows("t") == []


def test_reals_keep_every_digit_from_file_to_file(harness, tmp_path):
    values = [(1, 0.1 + 0.2), (2, 1 / 3), (3, 5e-324), (4, 123456789.123456789)]
    harness.make("t", {"id": "INTEGER", "v": "REAL"}, values)
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t")
        source.snapshot()
        assert read_all(source, request) == values


def test_decimals_stored_as_numbers_are_read_as_digits(harness):
    harness.make("t", {"v": "DECIMAL(30,10)"}, [(1,), (0.1,), (1e-7,), (10**18,), (None,)])
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t")
        source.snapshot()
        found = [row[0] for row in read_all(source, request)]
    assert found == ["1", "0.1", "0.0000001", str(10**18), None]


def test_a_strict_table_binds_its_values_and_others_do_not(harness):
    harness.sql("create table strictly (id integer primary key, n int, t text, a any) strict")
    harness.sql("create table loosely (id integer primary key, n int)")
    with SQLite().source(harness.config) as source:
        strict = source.describe(ReadRequest(table=("strictly",)))
        loose = source.describe(ReadRequest(table=("loosely",)))
    assert [column.type.loose for column in strict.columns] == [False, False, False, True]
    assert [column.type.loose for column in loose.columns] == [True, True]


def test_a_table_that_ignores_conflicts_is_not_obeyed(harness):
    harness.sql("create table t (id integer unique on conflict ignore, v text)")
    harness.sql("insert into t values (1, 'old')")
    with pytest.raises(SinkError, match=r"UNIQUE constraint failed: t\.id"):
        write(harness, "t", [(1, "new")])


def test_a_constraint_error_names_the_column_and_no_value(harness):
    harness.sql("create table t (id integer primary key, v text not null)")
    with pytest.raises(SinkError, match=r"NOT NULL constraint failed: t\.v") as caught:
        write(harness, "t", [(77777, None)])
    assert "77777" not in str(caught.value)


# --- keys ---------------------------------------------------------------------------------------


def merge(harness: SQLiteHarness, table: str, rows: list[Row], **changes: Any) -> Any:
    load = load_of(harness, table, mode="incremental", how="merge", **changes)
    with SQLite().sink(harness.config) as sink:
        assert sink.refusals(load) == []
        sink.stage(load)
        sink.write(load, batches(rows), staging=True)
        sink.begin(load)
        counts = sink.publish(load)
        assert sink.count(load) == len({row[0] for row in rows})
        sink.commit()
        sink.unstage(load)
        return counts


def test_keys_that_a_collation_takes_for_one_are_not_merged(harness):
    harness.sql("create table t (k text collate nocase primary key not null, v text)")
    harness.sql("insert into t values ('a', 'old')")
    with pytest.raises(SinkError, match=r"UNIQUE constraint failed: t\.k"):
        merge(harness, "t", [("A", "new")])
    assert harness.rows("t") == [("a", "old")]
    assert merge(harness, "t", [("a", "new"), ("b", "x")]).updated == 1
    assert harness.rows("t") == [("a", "new"), ("b", "x")]


def test_a_change_of_case_alone_is_a_change(harness):
    harness.sql("create table t (k integer primary key, v text collate nocase)")
    harness.sql("insert into t values (1, 'a')")
    assert merge(harness, "t", [(1, "A")]).updated == 1
    assert harness.rows("t") == [(1, "A")]


def test_a_null_in_a_key_is_refused(harness):
    harness.sql("create table t (k text primary key, v text)")
    with pytest.raises(SinkError, match="key column k: a row's key is NULL"):
        merge(harness, "t", [(None, "x")])


def test_incremental_counts_and_scans_only_what_is_staged(harness):
    harness.make("t", {"id": "INTEGER", "v": "TEXT"}, [(1, "a"), (2, "b")], key=["id"])
    load = load_of(harness, "t", mode="incremental", how="merge")
    with SQLite().sink(harness.config) as sink:
        sink.stage(load)
        sink.write(load, batches([(2, "B"), (3, "c")]), staging=True)
        sink.begin(load)
        sink.publish(load)
        rows = [row for batch in sink.scan(load) for row in batch.data]
        assert sorted(rows) == [(2, "B"), (3, "c")]
        sink.commit()


# --- refusals -----------------------------------------------------------------------------------


def refusals(harness: SQLiteHarness, table: str, **changes: Any) -> list[str]:
    load = load_of(harness, table, **changes)
    with SQLite().sink(harness.config) as sink:
        return sink.refusals(load)


def test_referenced_tables_views_and_triggers_are_refused_before_anything(harness):
    harness.sql("create table parent (id integer primary key, v text)")
    harness.sql("create table child (p integer references parent(id) on delete cascade)")
    harness.sql("create view look as select 1 as one")
    assert "foreign keys of child" in refusals(harness, "parent")[0]
    assert refusals(harness, "parent", mode="incremental", how="merge") == []
    assert "is a view" in refusals(harness, "look")[0]
    harness.sql("create table watched (id integer primary key)")
    harness.sql(
        'create trigger "on insert" before insert on watched begin select raise(ignore); end'
    )
    assert "the trigger on insert on insert" in refusals(harness, "watched")[0]
    harness.sql('drop trigger "on insert"')
    harness.sql("create trigger u after update on watched begin select 1; end")
    assert refusals(harness, "watched") == []
    assert "trigger u on update" in refusals(harness, "watched", mode="incremental", how="merge")[0]


def test_a_key_without_its_unique_index_is_refused(harness):
    harness.make("t", {"id": "INTEGER", "v": "TEXT"}, key=["id"])
    load = replace(load_of(harness, "t", mode="incremental", how="merge"), key=("v",))
    with SQLite().sink(harness.config) as sink:
        assert "no unique index on exactly (v)" in sink.refusals(load)[0]


# --- the file -----------------------------------------------------------------------------------


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
        ("", "url is missing"),
        ("postgresql://u:geheim@h/d", "no SQLite URL"),
        ("sqlite://geheim/x.db", "no SQLite URL"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///x.db?mode=geheim", "parameter mode"),
        ("sqlite:///x.db?timeout=geheim", "no number"),
    ],
)
def test_a_bad_url_is_explained_and_not_echoed(url, says):
    problems = SQLite().check_config({"url": url})
    assert len(problems) == 1
    assert says in problems[0]
    assert "geheim" not in problems[0]
    assert SQLite().check_config({"url": "sqlite:///x.db?timeout=5"}) == []
    assert "colour" in SQLite().check_config({"url": "sqlite:///x.db", "colour": "red"})[0]


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path):
    (tmp_path / "x.db").write_text("something else entirely, long enough to be a header" * 30)
    with pytest.raises(SourceError, match="file is not a database"):
        SQLite().test({"url": f"sqlite:///{tmp_path}/x.db"})


def test_the_version_is_told(harness):
    assert SQLite().test(harness.config) == f"SQLite {sqlite3.sqlite_version}"


# --- snapshots, locks and stops -----------------------------------------------------------------


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
        other.execute("rollback")


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


# --- queries and watermarks ---------------------------------------------------------------------


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
