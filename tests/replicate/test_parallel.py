"""Parallel runs: one snapshot, every row once, processes that end with their run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from mysql_kit import a_database
from psycopg import conninfo
from replication_kit import Database, Job, url_of

from dispatch.context import HandlerFailure, RunStopped
from tasks.replicate import modes, parts, registry
from tasks.replicate.connectors.postgresql.sink import PostgreSQLSink

Make = Callable[..., Job]
DDL = "create table t (id int primary key, name text)"


@pytest.fixture
def filled(source: Database, sink: Database) -> None:
    source.execute(DDL)
    sink.execute(DDL)
    source.execute("insert into t select i, repeat('x', 100) from generate_series(1, 20000) i")


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
@pytest.mark.parametrize("query", [False, True])
def test_parts_bring_every_row_once(
    source: Database, sink: Database, job: Make, mode: str, query: bool
) -> None:
    reads = {"query": "select * from t"} if query else {}
    outcome = job(
        mode, None if query else "t", to="t", reads=reads, parallelism=3, verify="checksum"
    ).run()
    assert outcome.rows_processed == 20000
    assert outcome.counters["read"] == 20000
    assert sink.value("select count(distinct id) from t") == 20000


@pytest.mark.usefixtures("filled")
def test_parts_of_an_incremental_read_bring_what_changed(
    source: Database, sink: Database, job: Make
) -> None:
    for database in (source, sink):
        database.execute("alter table t add updated_at timestamptz not null default now()")
        database.execute("update t set updated_at = now() - interval '1 day'")
    task = job("incremental", watermark="updated_at", parallelism=3, verify="checksum")
    assert task.run().counters["inserted"] == 20000
    source.execute("update t set name = 'new', updated_at = now() where id % 2 = 0")
    counters = task.run().counters
    assert (counters["updated"], counters["inserted"]) == (10000, 0)
    assert counters["read"] - counters["unchanged"] == 10000
    assert sink.value("select count(*) from t where name = 'new'") == 10000


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("mode", ["complete", "complete-atomic"])
def test_parts_fill_another_engine_that_many_may_write(
    source: Database, job: Make, mode: str
) -> None:
    with a_database() as harness:
        harness.sql("create table t (id int primary key, name text) engine = innodb")
        harness.sql("insert into t values (-1, 'old')")
        task = job(mode, "t", to="t", parallelism=3, verify="checksum")
        task.connectors = ("postgresql", "mysql")
        task.sink = harness.config
        assert task.run().rows_processed == 20000
        (found,) = harness.sql("select count(distinct id), min(id) from t")
        assert tuple(map(int, found)) == (20000, 1)


UNREPEATABLE = {
    "select gen_random_uuid()::text as name, id from t": "gen_random_uuid",
    "select now()::text as name, id from t": "now",
    "select current_timestamp::text as name, id from t": "CURRENT_TIMESTAMP",
    "select id, name from t where random() < 2": "random",
    "select id, name from t limit 15000": "Limit",
    "select id, name from t tablesample system (100)": "Sample Scan",
    "select row_number() over ()::int as id, name from t": "WindowAgg",
}


@pytest.mark.usefixtures("filled")
def test_a_query_that_differs_from_reader_to_reader_has_one(
    source: Database, sink: Database, job: Make
) -> None:
    if source.version < 130000:
        source.execute("create extension pgcrypto")  # where gen_random_uuid() was before
    for number, (query, step) in enumerate(UNREPEATABLE.items()):
        reads = {"query": query}
        if number % 2:
            source.execute(f"create view v{number} as {query}")
            reads = {"table": f"v{number}"}
        rows = source.connection.execute(query.encode()).rowcount
        outcome = job("complete", None, to="t", reads=reads, parallelism=4).run()
        assert outcome.result["warnings"] == [
            "one reader instead of 4: several might not get the same rows of the query or view "
            f"({step} in its plan)"
        ]
        assert outcome.rows_processed == rows
        assert sink.value("select count(distinct id) from t") == rows


@pytest.mark.usefixtures("filled")
def test_a_join_whose_functions_are_immutable_is_shared(
    source: Database, sink: Database, job: Make
) -> None:
    source.execute(
        'create function "A b"(x text) returns text language plpgsql immutable as $$'
        "begin return upper(x); end $$"
    )
    query = (
        'select a.id, "A b"(b.name) as name from t a join t b on b.id = abs(a.id) '
        "where lower(a.name) ~ 'x'"
    )
    outcome = job("complete", None, to="t", reads={"query": query}, parallelism=3).run()
    assert "warnings" not in outcome.result
    assert sink.value("select count(distinct id) from t where name ~ '^X'") == 20000
    source.execute('alter function "A b" volatile')
    outcome = job("complete", None, to="t", reads={"query": query}, parallelism=3).run()
    assert "A b" in outcome.result["warnings"][0]


@pytest.mark.usefixtures("filled")
def test_a_foreign_table_has_one_reader(source: Database, sink: Database, job: Make) -> None:
    source.execute("create extension file_fdw")
    source.execute("create server f foreign data wrapper file_fdw")
    source.execute(
        "create foreign table far (id int, name text) server f"
        " options (program 'echo 1,a', format 'csv')"
    )
    outcome = job("complete", "far", to="t", parallelism=2).run()
    assert "foreign table" in outcome.result["warnings"][0]
    assert sink.execute("select * from t") == [(1, "a")]


@pytest.mark.usefixtures("filled")
def test_the_first_failure_ends_all_parts(source: Database, sink: Database, job: Make) -> None:
    sink.execute("alter table t add check (id <> 19999)")
    with pytest.raises(HandlerFailure, match="violates check constraint") as caught:
        job("complete", "t", parallelism=3).run()
    assert caught.value.code == "sink_error"
    _no_sessions(sink)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("side", ["source", "sink"])
def test_parts_that_cannot_all_connect_leave_the_table_as_it_was(
    source: Database, sink: Database, job: Make, side: str
) -> None:
    sink.execute("insert into t values (0, 'old')")
    database = source if side == "source" else sink
    role = "cc_few_" + database.connection.info.dbname[-20:]
    database.execute(f"create role {role} login connection limit 3")
    try:
        database.execute(f"grant all on schema public to {role}; grant all on t to {role}")
        task = job("complete", parallelism=3)
        few = {"url": url_of(conninfo.make_conninfo(database.url, user=role))}
        try:
            psycopg.connect(few["url"]).close()
        except psycopg.OperationalError:
            pytest.skip("only where roles log in by trust")
        setattr(task, side, few)
        context = task.context()
        with pytest.raises(HandlerFailure, match="too many connections for role") as caught:
            modes.run(context)
        assert caught.value.code == f"{side}_error"
        assert context.warning is None
        assert sink.execute("select * from t") == [(0, "old")]
        _no_sessions(database)
        database.execute(f"alter role {role} connection limit 4")
        assert task.run().rows_processed == 20000
    finally:
        database.execute(f"drop owned by {role}")
        database.execute(f"drop role {role}")


@pytest.mark.usefixtures("filled")
def test_a_trigger_that_appears_before_the_parts_write_is_refused(
    source: Database, sink: Database, job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.execute(
        "create function loud() returns trigger language plpgsql as"
        " $$begin new.name := upper(new.name); return new; end$$"
    )
    commit = PostgreSQLSink.commit

    def commits(self: PostgreSQLSink) -> None:
        commit(self)
        sink.execute("create trigger loud before insert on t for each row execute function loud()")

    monkeypatch.setattr(PostgreSQLSink, "commit", commits)
    with pytest.raises(HandlerFailure, match=r"was changed while the run was at work: .* loud"):
        job("complete", parallelism=2).run()
    assert sink.value("select count(*) from t") == 0


@pytest.mark.usefixtures("filled")
def test_a_stop_ends_all_parts_within_a_second__R_K2(
    source: Database, sink: Database, job: Make
) -> None:
    context = job("complete", "t", parallelism=2, bandwidth="200kB").context()
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.monotonic())
        context.stop("cancelled")

    progress = threading.Thread(target=_wait_for_rows, args=(context, stop))
    progress.start()
    with pytest.raises(RunStopped):
        modes.run(context)
    assert time.monotonic() - stopped[0] < 1.0
    progress.join(timeout=10)
    _no_sessions(sink)
    assert context.warning is not None


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("filled")
def test_what_a_part_prints_is_no_report(
    job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third party's connector prints when it is loaded, as a library may at any time."""
    registry.connectors()  # here it is not loaded: only in the parts
    installed = tmp_path / "loud-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{registry.GROUP}]\nloud = loud:Loud\n")
    (tmp_path / "loud.py").write_text(
        f"open({str(tmp_path / 'loaded')!r}, 'w').close()\n"
        "import os, subprocess\n"
        "print('good morning')\n"
        "os.write(1, b'from C\\n')\n"
        "subprocess.run(['echo', 'from a child'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert job("complete", "t", parallelism=2).run().rows_processed == 20000
    assert (tmp_path / "loaded").exists()


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("line", ["good morning", "1", "\\xff", "[" * 20000])
def test_a_line_that_is_no_report_is_the_parts_failure(
    sink: Database, job: Make, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "part.py"
    script.write_text(
        "import sys\n"
        f"sys.stdout.buffer.write(b'{line}\\n')\n"
        "sys.stdout.flush()\n"
        "sys.stdin.buffer.read()\n"
    )
    monkeypatch.setattr(parts, "SCRIPT", script)
    context = job("complete", "t", parallelism=2).context()
    with pytest.raises(HandlerFailure, match="wrote a line that is no report") as caught:
        modes.run(context)
    assert caught.value.code == "handler_error"
    assert context.warning is None
    _no_sessions(sink)


def _wait_for_rows(context, then: Callable[[], None]) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = context.take_progress()
        if seen is not None and seen.done > 0:
            break
        time.sleep(0.02)
    then()


def _no_sessions(database: Database) -> None:
    """Within two seconds no session of a run is left."""
    deadline = time.monotonic() + 2
    left = -1
    while time.monotonic() < deadline:
        left = database.value(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and application_name like 'cc/%'"
        )
        if left == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"{left} sessions are left")
