"""A source that is truncated while a run begins: its rows arrive, or the run fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from replication_kit import Database, Job

from dispatch.context import HandlerFailure, RunStopped
from tasks.replicate import modes
from tasks.replicate.connectors.postgresql import source as postgresql

Make = Callable[..., Job]
FILL = "insert into t select i, repeat('x', 100) from generate_series(1, 5000) i"
AGAIN = f"begin; truncate t; {FILL}; commit"


@pytest.fixture
def tables(source: Database, sink: Database) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, name text)")
    source.execute(FILL)


def _until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _waiting(database: Database) -> int:
    return int(database.value("select count(*) from pg_locks where not granted"))


def in_snapshot(connection: psycopg.Connection[Any]) -> bool:
    if connection.info.transaction_status is not psycopg.pq.TransactionStatus.INTRANS:
        return False
    return connection.execute("show transaction_isolation").fetchone() == ("repeatable read",)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("kind", ["table", "query", "view", "partitioned"])
def test_a_truncate_between_snapshot_and_lock_is_seen(
    source: Database, sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    reads, table = {}, "t"
    if kind == "query":
        reads, table = {"query": "select * from t where id > (select 0 from t limit 1)"}, None
    elif kind == "view":
        source.execute("create view v as select * from t")
        table = "v"
    elif kind == "partitioned":
        source.execute("alter table t rename to one")
        source.execute("create table t (id int primary key, name text) partition by list (id)")
        source.execute("drop table one; create table rest partition of t default")
        source.execute(FILL)
    real, tries = postgresql.catalog.explain, []

    def explain(connection, query):  # type: ignore[no-untyped-def]
        if in_snapshot(connection):
            tries.append(1)
            if len(tries) == 1:
                source.execute(AGAIN)
        return real(connection, query)

    monkeypatch.setattr(postgresql.catalog, "explain", explain)
    outcome = job("complete-atomic", table, to="t", reads=reads, verify="checksum").run()
    assert len(tries) == 2
    assert outcome.rows_processed == 5000
    assert sink.value("select count(*) from t") == 5000


MOVES = {
    "a view": (
        "create view v as select * from t; create table new (like t)",
        "v",
        "insert into new select * from t; create or replace view v as select * from new",
    ),
    "a view's filter": (
        "create view v as select * from t where id > 0; alter table t add moved int",
        "v",
        "insert into t select id + 10000, name from t where id > 0; "
        "create or replace view v as select id, name from t where id > 10000",
    ),
    "a partition": (
        "alter table t rename to one;"
        "create table t (id int, name text) partition by range (id);"
        "alter table t attach partition one for values from (0) to (10000);"
        "create table two partition of t for values from (10000) to (30000)",
        "t",
        "alter table t detach partition one; insert into t select id + 10000, name from one",
    ),
    "a name": (
        "create table new (like t)",
        "t",
        "insert into new select * from t; alter table t rename to old;alter table new rename to t",
    ),
}


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("kind", MOVES)
def test_rows_that_move_between_snapshot_and_lock_are_read_once(
    source: Database, sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before, table, move = MOVES[kind]
    source.execute(before)
    real, moved = postgresql.catalog.explain, []

    def explain(connection, query):  # type: ignore[no-untyped-def]
        if not moved and in_snapshot(connection):
            moved.append(1)
            source.execute(f"begin; {move}; commit")
        return real(connection, query)

    monkeypatch.setattr(postgresql.catalog, "explain", explain)
    outcome = job("complete-atomic", table, to="t", verify="checksum").run()
    assert moved
    assert outcome.rows_processed == 5000
    there = source.execute(f"select id from {table} order by id")  # noqa: S608
    assert sink.execute("select id from t order by id") == there


@pytest.mark.usefixtures("tables")
def test_a_plan_that_differs_each_time_is_no_change_of_the_source(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute(
        "create function soon() returns timestamptz immutable language plpgsql"
        " as 'begin return clock_timestamp(); end'"
    )
    query = "select * from t where soon() > '2000-01-01'"
    job("complete", None, to="t", reads={"query": query}).run()
    query = "select id, soon()::text as name from t"
    job("complete", None, to="t", reads={"query": query}).run()
    assert sink.value("select count(*) from t") == 5000


@pytest.mark.usefixtures("tables")
def test_a_truncate_after_the_snapshot_waits_for_the_run(
    source: Database, sink: Database, job: Make
) -> None:
    sink.execute("insert into t values (0, 'old')")
    with psycopg.connect(sink.url) as holder, psycopg.connect(source.url) as late:
        holder.execute("lock table t in access share mode")
        failures: list[BaseException] = []

        def run() -> None:
            try:
                job("complete", verify="checksum").run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        _until(lambda: _waiting(sink) == 1)
        truncating = threading.Thread(target=late.execute, args=("truncate t",))
        truncating.start()
        _until(lambda: _waiting(source) >= 1)
        holder.rollback()
        thread.join(timeout=30)
        truncating.join(timeout=30)
        assert not thread.is_alive()
        assert not failures
        assert sink.value("select count(*) from t") == 5000


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_parts_do_not_wait_for_ever_behind_a_truncate(
    source: Database, sink: Database, job: Make, mode: str
) -> None:
    """The truncate waits for the leader, the parts behind it, and the leader for the parts."""
    source.execute("insert into t select i, repeat('x', 900) from generate_series(5001, 9000) i")
    task = job(mode, parallelism=2)
    sink.execute("insert into t values (0, 'old')")
    real = modes.Replication._team
    with psycopg.connect(source.url) as late:
        truncating = threading.Thread(target=late.execute, args=("truncate t",))

        def held(self, *args, **more):  # type: ignore[no-untyped-def]
            truncating.start()
            _until(lambda: _waiting(source) >= 1)
            return real(self, *args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modes.Replication, "_team", held)
            with pytest.raises(HandlerFailure, match="waits to truncate") as caught:
                task.run()
        assert not caught.value.permanent
        truncating.join(timeout=20)
        late.rollback()
    assert sink.execute("select name from t") == [("old",)]
    task.run()
    assert sink.value("select count(*) from t") == 9000


@pytest.mark.usefixtures("tables")
def test_a_wait_for_a_lock_at_the_source_stops__R_K2(source: Database, job: Make) -> None:
    context = job("complete").context()
    stopped: list[float] = []

    def stop() -> None:
        _until(lambda: _waiting(source) >= 1)
        stopped.append(time.monotonic())
        context.stop("cancelled")

    with psycopg.connect(source.url) as holder:
        holder.execute("lock table t in access exclusive mode")
        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(RunStopped):
            modes.run(context)
        assert time.monotonic() - stopped[0] < 1.0
        thread.join(timeout=10)
    assert context.warning is None


@pytest.mark.usefixtures("tables")
def test_the_right_to_read_the_view_is_enough(source: Database, sink: Database, job: Make) -> None:
    role = "cc_viewer_" + source.connection.info.dbname[-20:]
    source.execute("create view v as select * from t")
    source.execute(f"create role {role} login")
    try:
        source.execute(f"grant select on v to {role}")
        task = job("complete", "v", to="t")
        mine = source.connection.info.user
        url = source.url.replace(f"//{mine}@", f"//{role}@")
        task.source = {"url": url.replace(f"&user={mine}", f"&user={role}")}
        if task.source["url"] == source.url:
            pytest.skip("only where roles log in by trust")
        assert task.run().rows_processed == 5000
    finally:
        source.execute(f"drop owned by {role}")
        source.execute(f"drop role {role}")
