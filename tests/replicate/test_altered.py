"""Tables that are altered while a run is at work: the right rows or none, never other bits."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from replication_kit import Database, Job

from dispatch.context import HandlerFailure
from tasks.replicate.connector import SinkError, SourceError
from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink
from tasks.replicate.connectors.postgresql.source import PostgreSQLSource

Make = Callable[..., Job]

CHANGED = re.compile("was altered|was changed")
ALTERS = [
    ("bigint", "42", "alter column v type double precision"),
    ("bigint", "42", "alter column v type timestamptz using to_timestamp(v)"),
    ("text", "'{}'", "alter column v type jsonb using v::jsonb"),
    ("timestamp", "'2026-01-01 12:00'", "alter column v type timestamptz"),
]


@pytest.fixture(autouse=True)
def watermarked(source: Database, sink: Database) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key, updated_at timestamptz)")
    source.execute("insert into t select i, now() from generate_series(1, 100) i")


def in_the_middle(
    database: Database, statement: str, run: Callable[[], Any]
) -> BaseException | None:
    """Begin the run while ``statement`` is open, so that it waits behind it, and then commit.

    Returns what the run raised.
    """
    failed: list[BaseException] = []
    with psycopg.connect(database.url) as other:
        other.execute(statement)

        def work() -> None:
            try:
                run()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        waiting = (
            "select count(*) from pg_locks l join pg_database d on d.oid = l.database"
            " where not granted and d.datname = current_database()"
        )
        deadline = time.monotonic() + 10
        while not database.value(waiting) and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        other.commit()
        thread.join(timeout=30)
        assert not thread.is_alive()
    return failed[0] if failed else None


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
@pytest.mark.parametrize("side", ["source", "sink"])
@pytest.mark.parametrize(("type_", "value", "alter"), ALTERS, ids=[a[2] for a in ALTERS])
def test_a_type_that_is_altered_as_the_run_begins_is_not_taken_for_the_old_one(
    source: Database,
    sink: Database,
    job: Make,
    mode: str,
    side: str,
    type_: str,
    value: str,
    alter: str,
) -> None:
    for database in (source, sink):
        database.execute(f"alter table t add v {type_}")
    source.execute(f"update t set v = {value}")  # noqa: S608
    extra = {"watermark": "updated_at"} if mode == "incremental" else {}
    database = {"source": source, "sink": sink}[side]
    failed = in_the_middle(database, f"alter table t {alter}", job(mode, **extra).run)
    if failed is None:
        # It began behind the change, and the new type can be stored as it is.
        everything = "select id, v::text from t order by id"
        assert sink.execute(everything) == source.execute(everything)
    else:
        assert isinstance(failed, SourceError | SinkError)
        assert re.search("was altered|column v: ", str(failed))
        assert sink.value("select count(*) from t") == 0


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
@pytest.mark.parametrize(
    "statement",
    [
        "alter table t alter v type numeric(10,1)",
        "create function bad() returns trigger language plpgsql as"
        " 'begin new.v := 0; return new; end';"
        "create trigger bad before insert on t for each row execute function bad()",
    ],
)
def test_a_sink_that_is_changed_during_the_load_gets_no_changed_rows(
    source: Database,
    sink: Database,
    job: Make,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    statement: str,
) -> None:
    for database in (source, sink):
        database.execute("alter table t add v numeric(10,4)")
    source.execute("update t set v = 1.2345")
    step = "truncate" if mode == "complete" else "write"
    original = getattr(PostgreSQLSink, step)

    def changed(self: PostgreSQLSink, *arguments: Any, **more: Any) -> Any:
        done = original(self, *arguments, **more)
        if mode == "complete":
            self.commit()
            self._connection.execute("begin")
        sink.execute(statement)
        return done

    monkeypatch.setattr(PostgreSQLSink, step, changed)
    with pytest.raises(SinkError, match=CHANGED):
        job(mode).run()
    assert sink.value("select count(*) from t") == 0


@pytest.mark.parametrize(
    "statement",
    [
        "grant select on t to public",
        "alter table t add extra int",
        "alter table t add check (id > 0)",
        "alter table t alter id set default 7",
        "comment on column t.id is 'new'",
        "create index late on t (updated_at)",
        "alter table t enable row level security",
    ],
)
def test_a_rename_loses_nothing_that_was_made_meanwhile(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    original = PostgreSQLSink.write

    def write(self: PostgreSQLSink, *arguments: Any, **more: Any) -> int:
        done = original(self, *arguments, **more)
        sink.execute(statement)
        return done

    monkeypatch.setattr(PostgreSQLSink, "write", write)
    oid = sink.value("select 't'::regclass::oid")
    with pytest.raises(SinkError, match=CHANGED):
        job("complete-atomic", atomic="rename").run()
    assert sink.value("select 't'::regclass::oid") == oid


@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_a_sink_that_is_dropped_meanwhile_is_named(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    snapshot = PostgreSQLSource.snapshot

    def late(self: PostgreSQLSource) -> None:
        if mode == "complete":
            sink.execute("drop table t")
        snapshot(self)

    def write(self: PostgreSQLSink, *arguments: Any, **more: Any) -> int:
        done = original(self, *arguments, **more)
        sink.execute("drop table t")
        return done

    original = PostgreSQLSink.write
    monkeypatch.setattr(PostgreSQLSource, "snapshot", late)
    if mode != "complete":
        monkeypatch.setattr(PostgreSQLSink, "write", write)
    with pytest.raises(SinkError, match=r"sink: public.t was altered or dropped"):
        job(mode).run()


def test_vacuum_and_analyze_alter_nothing(
    sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.execute("insert into t select i from generate_series(1, 1000) i; delete from t")
    original = PostgreSQLSink.write

    def write(self: PostgreSQLSink, *arguments: Any, **more: Any) -> int:
        done = original(self, *arguments, **more)
        sink.execute("vacuum analyze t")
        return done

    monkeypatch.setattr(PostgreSQLSink, "write", write)
    job("complete-atomic", atomic="rename").run()
    assert sink.value("select count(*) from t") == 100


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "complete-atomic", "atomic": "diff"},
        {"mode": "complete-atomic", "staging_schema": "nowhere"},
        {"mode": "incremental", "watermark": "id", "lag": -1},
        {"mode": "incremental", "watermark": "n"},
    ],
    ids=str,
)
def test_a_refused_job_takes_the_table_back_that_it_made(
    source: Database, sink: Database, job: Make, changes: dict[str, Any]
) -> None:
    sink.execute("drop table t")
    source.execute("alter table t drop constraint t_pkey; alter table t add n text")
    task = job("complete", create=True)
    if "staging_schema" in changes:
        task.definition["sink"]["staging_schema"] = changes.pop("staging_schema")
    if changes["mode"] == "incremental":
        task.definition["sink"]["key"] = ["id"]
    task.definition.update(changes)
    with pytest.raises(HandlerFailure):
        task.run()
    assert sink.value("select to_regclass('t')") is None
