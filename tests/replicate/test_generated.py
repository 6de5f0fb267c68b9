"""Columns that the sink computes: the source computes them too, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mysql_kit import a_database as mysql_database
from replication_kit import Database, Job, definition
from sqlite_kit import SQLiteHarness

from dispatch.context import HandlerFailure

Make = Callable[..., Job]
MODES: dict[str, dict[str, Any]] = {
    "complete": {},
    "complete-atomic": {},
    "incremental": {"watermark": "id"},
}
COMPUTED = "create table t (id int primary key, n int generated always as ({}) stored)"
REFUSED = r"nothing was changed: column n of .* is generated: .*leave it out {}, or make it a plain"


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_column_does_not_become_a_computed_one(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    source.execute("create table t (id int primary key, n int)")
    source.execute("insert into t values (1, 7)")
    sink.execute(COMPUTED.format("id * 2"))
    sink.execute("insert into t values (5)")
    for reads in ({}, {"columns": ["id", "n"]}):
        with pytest.raises(HandlerFailure, match=REFUSED.format("by source.columns")) as caught:
            job(mode, reads=reads, **MODES[mode]).run()
        assert caught.value.permanent
    query = {"query": "select id, n from t"}
    with pytest.raises(HandlerFailure, match=REFUSED.format("of the query")):
        job(mode, table=None, reads=query, **MODES[mode]).run()
    assert sink.execute("select id, n from t") == [(5, 10)]
    job(mode, reads={"columns": ["id"]}, verify="checksum", **MODES[mode]).run()
    assert (1, 2) in sink.execute("select id, n from t")


@pytest.mark.parametrize("mode", MODES)
def test_what_both_compute_alike_is_compared_and_not_written(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    for database in (source, sink):
        database.execute(COMPUTED.format("id * 2"))
    source.execute("insert into t values (1), (2)")
    for reads in ({}, {"columns": ["n", "id"]}):
        result = job(mode, reads=reads, verify="checksum", **MODES[mode]).run().result
        assert "is generated" not in str(result)
        assert sink.execute("select id, n from t order by id") == [(1, 2), (2, 4)]


@pytest.mark.parametrize("mode", MODES)
def test_what_both_compute_otherwise_is_told_and_found_by_a_checksum(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    source.execute(COMPUTED.format("id * 2"))
    sink.execute(COMPUTED.format("id * 3"))
    source.execute("insert into t values (1)")
    outcome = job(mode, **MODES[mode]).run()
    assert "column n of public.t is generated at both ends" in str(outcome.result["warnings"])
    assert sink.execute("select id, n from t") == [(1, 3)]
    source.execute("insert into t values (2)")
    with pytest.raises(HandlerFailure, match=r"computes for itself: n\. .*expression") as caught:
        job(mode, verify="checksum", **MODES[mode]).run()
    assert caught.value.code == "verify_failed"
    assert sink.value("select count(*) from t") == (0 if mode == "complete" else 1)


def test_a_computed_column_of_another_type_is_refused(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute(COMPUTED.format("id * 2"))
    sink.execute("create table t (id int, n date generated always as ('2026-11-01'::date) stored)")
    with pytest.raises(HandlerFailure, match="column n: integer does not go into date"):
        job("complete").run()


def test_a_computed_column_that_is_made_a_plain_one_meanwhile_is_noticed(
    source: Database, sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.replicate.connectors.postgresql.source import PostgreSQLSource

    for database in (source, sink):
        database.execute(COMPUTED.format("id * 2"))
    snapshot = PostgreSQLSource.snapshot

    def late(self: PostgreSQLSource) -> None:
        sink.execute("alter table t drop n, add n int")
        snapshot(self)

    monkeypatch.setattr(PostgreSQLSource, "snapshot", late)
    with pytest.raises(HandlerFailure, match="t was altered or dropped"):
        job("complete").run()


def test_mysql_computes_no_plain_column_either(source: Database) -> None:
    source.execute("create table t (id int primary key, n int)")
    source.execute("insert into t values (1, 7)")
    with mysql_database() as sink:
        sink.sql(COMPUTED.format("id * 2"))
        task = _job(source.config, sink.config, ("postgresql", "mysql"))
        with pytest.raises(HandlerFailure, match=REFUSED.format("by source.columns")):
            task.run()
        # Nobody can tell whether another engine's expression comes to the same.
        source.execute("drop table t; " + COMPUTED.format("id * 2"))
        with pytest.raises(HandlerFailure, match=REFUSED.format("by source.columns")):
            task.run()


def test_mysql_compares_what_both_compute() -> None:
    with mysql_database() as source, mysql_database() as sink:
        for database in (source, sink):
            database.sql(COMPUTED.format("id * 2"))
        source.sql("insert into t (id) values (1)")
        task = _job(source.config, sink.config, ("mysql", "mysql"))
        assert "warnings" not in task.run().result
        assert [tuple(row) for row in sink.sql("select id, n from t")] == [("1", "2")]
        sink.sql("drop table t")
        sink.sql(COMPUTED.format("id * 3"))
        with pytest.raises(HandlerFailure, match=r"computes for itself: n\. .*expression"):
            task.run()


def test_sqlite_compares_what_both_compute(tmp_path: Path) -> None:
    source, sink = (SQLiteHarness(tmp_path / name) for name in ("source.db", "sink.db"))
    for database in (source, sink):
        database.sql(COMPUTED.format("id * 2"))
    source.sql("insert into t (id) values (1)")
    task = _job(source.config, sink.config, ("sqlite", "sqlite"))
    # It does not tell its expressions.
    assert "generated at both ends" in str(task.run().result["warnings"])
    assert sink.sql("select id, n from t") == [(1, 2)]
    sink.sql("drop table t")
    sink.sql(COMPUTED.format("id * 3"))
    with pytest.raises(HandlerFailure, match=r"computes for itself: n\. .*expression"):
        task.run()


def _job(source: Any, sink: Any, connectors: tuple[str, str]) -> Job:
    reads = {"table": "t"}
    plan = definition(reads, reads, "complete", verify="checksum")
    return Job(source, sink, plan, connectors)
