"""What SQLite would change or merge without a word, and what is refused before a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance import (
    batches,
    read_all,
    request_for,
)
from sqlite_kit import SQLiteHarness, load_of, write

from tasks.replicate.connector import (
    ReadRequest,
    Row,
    SinkError,
)
from tasks.replicate.connectors.sqlite import SQLite


@pytest.fixture
def harness(tmp_path: Path) -> SQLiteHarness:
    return SQLiteHarness(tmp_path / "it's 100% here.db")


@pytest.mark.parametrize(
    ("native", "cell", "says"),
    [
        ("REAL", float("nan"), "is NaN"),
        ("BLOB", float("nan"), "is NaN"),
        ("REAL", -0.0, "negative zero"),
        ("REAL", 2**53 + 1, "a float would round"),
        ("NUMERIC", "12345678901234567890.5", "more digits"),
        ("DECIMAL(30,10)", "1234567890.123456789", "more digits"),
        ("NUMERIC", "1e999999999", "more digits"),
        ("NUMERIC", "1e9999999999999999999", "an exponent"),
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
        ("NUMERIC", "-Infinity", float("-inf")),
        ("NUMERIC", "NaN", "NaN"),
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


@pytest.mark.parametrize("clause", ["ignore", "replace", "fail", "rollback"])
@pytest.mark.parametrize(
    ("column", "row", "says"),
    [
        ("v text unique on conflict {}", (1, "c"), r"UNIQUE constraint failed: t\.v"),
        ("v text not null on conflict {} default 'x'", (1, None), r"NOT NULL .* failed: t\.v"),
    ],
)
@pytest.mark.parametrize("how", ["merge", "diff"])
def test_nor_is_it_when_a_row_changes(harness, clause, column, row, says, how):
    """Ignored, an update would be counted as done; replaced, it would remove another row."""
    harness.sql(f"create table t (id integer primary key, {column.format(clause)})")
    harness.sql("insert into t values (1, 'a'), (2, 'c')")
    mode = {"merge": "incremental", "diff": "complete-atomic"}[how]
    load = load_of(harness, "t", mode=mode, how=how)
    with SQLite().sink(harness.config) as sink:
        sink.stage(load)
        sink.write(load, batches([row, (2, "c")]), staging=True)
        sink.begin(load)
        with pytest.raises(SinkError, match=says):
            sink.publish(load)
        sink.rollback()
    assert harness.rows("t") == [(1, "a"), (2, "c")]


def test_a_constraint_error_names_the_column_and_no_value(harness):
    harness.sql("create table t (id integer primary key, v text not null)")
    with pytest.raises(SinkError, match=r"NOT NULL constraint failed: t\.v") as caught:
        write(harness, "t", [(77777, None)])
    assert "77777" not in str(caught.value)


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


@pytest.mark.parametrize("native", ["INTEGER", ""])
def test_a_change_of_the_type_alone_is_a_change(harness, native):
    harness.make("t", {"k": native, "x": ""}, [(1, 1), (2, 2.0)], key=["k"])
    rows: list[Row] = [(1, 1.0), (2, 2.0)] if native else [(1.0, 1), (2, 2.0)]
    counts = merge(harness, "t", rows)
    assert (counts.updated, counts.unchanged) == (1, 1)
    assert str(harness.rows("t")) == str(rows)


def test_an_infinite_number_stays_one_from_file_to_file(harness, tmp_path):
    harness.make("t", {"n": "NUMERIC"}, [(float("-inf"),), (1.5,), (float("inf"),)])
    other = SQLiteHarness(tmp_path / "other.db")
    other.make("t", {"n": "NUMERIC"})
    with SQLite().source(harness.config) as source:
        request = request_for(source, "t")
        source.snapshot()
        write(other, "t", read_all(source, request))
    assert other.rows("t") == harness.rows("t")


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
