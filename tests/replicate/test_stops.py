"""A run ends within a second of its stop, whatever the servers do (R-K2, R-L3)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import psycopg
import pytest
from psycopg import sql
from replication_kit import Database, Job

from dispatch.context import RunContext, RunStopped
from tasks.replicate import modes
from tasks.replicate.connector import Fenced, Lane
from tasks.replicate.connectors.postgresql import pairs, session
from tasks.replicate.connectors.postgresql.copying import copy_out
from tasks.replicate.connectors.postgresql.source import PostgreSQLSource

Make = Callable[..., Job]


def _stopped_after(context: RunContext, ready: Callable[[], bool]) -> float:
    """Run, stop once ``ready``, and return how long the run then took to end."""
    at: list[float] = []

    def watch() -> None:
        deadline = time.monotonic() + 30
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.01)
        at.append(time.monotonic())
        context.stop("cancelled")

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(RunStopped):
        modes.run(context)
    took = time.monotonic() - at[0]
    watcher.join(timeout=10)
    return took


def _sessions(database: Database) -> int:
    return int(
        database.value(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and application_name like 'cc/%'"
        )
    )


def _wait(ready: Callable[[], bool], what: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


@pytest.fixture
def tables(source: Database, sink: Database) -> None:
    for database in (source, sink):
        database.execute("create table t (id int)")
    source.execute("insert into t values (1)")


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("mode", "query"),
    [
        ("complete", "select 1 as id from pg_sleep(60)"),
        ("complete", "select count(*)::int as id from generate_series(1, 10000000000)"),
        ("complete-atomic", "select 1 as id from pg_sleep(60)"),
    ],
)
def test_a_blocking_statement_stops__R_K2(
    source: Database, sink: Database, job: Make, mode: str, query: str
) -> None:
    context = job(mode, None, to="t", reads={"query": query}).context()
    took = _stopped_after(
        context,
        lambda: bool(
            source.value(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and application_name like 'cc/%' and state = 'active' and query ilike 'copy%'"
            )
        ),
    )
    assert took < 1.0
    _wait(lambda: _sessions(source) == 0 and _sessions(sink) == 0, "sessions to end", 3)
    left = "sink was emptied" if mode == "complete" else "old content; public.cc_stage_"
    assert left in (context.warning or "")


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("lane", list(Lane))
def test_a_copy_at_full_speed_stops__R_K2(
    source: Database, sink: Database, job: Make, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgreSQLSource, "lanes", (lane,))
    monkeypatch.setattr(pairs, "ANY", frozenset(Lane))
    query = "select i::int as id from generate_series(1, 100000000) i"
    context = job("complete", None, to="t", reads={"query": query}).context()

    def busy() -> bool:
        seen = context.take_progress()
        return seen is not None and seen.done > 50_000

    assert _stopped_after(context, busy) < 1.0
    assert sink.value("select count(*) from t") == 0


@pytest.mark.usefixtures("tables")
def test_a_wait_for_a_lock_at_the_sink_stops__R_K2(
    source: Database, sink: Database, job: Make
) -> None:
    sink.execute("insert into t values (7)")
    context = job("complete").context()
    with psycopg.connect(sink.url) as holder:
        holder.execute("select * from t")
        took = _stopped_after(
            context,
            lambda: bool(sink.value("select count(*) from pg_locks where not granted") > 0),
        )
    assert took < 1.0
    assert sink.execute("select id from t") == [(7,)]
    assert context.warning is None


@pytest.mark.usefixtures("tables")
def test_a_wait_for_a_writer_at_the_sink_stops__R_K2(
    source: Database, sink: Database, job: Make
) -> None:
    context = job("complete-atomic").context()
    with psycopg.connect(sink.url) as writer:
        writer.execute("insert into t values (7)")
        took = _stopped_after(
            context,
            lambda: bool(sink.value("select count(*) from pg_locks where not granted") > 0),
        )
        writer.commit()
    assert took < 1.0
    assert sink.execute("select id from t") == [(7,)]
    # Its session was broken off, so that nobody is left to drop what was staged.
    assert re.search(r"^the sink holds its old content; \S+ is left for", context.warning or "")


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("side", ["source", "sink"])
@pytest.mark.parametrize("lane", [Lane.COPY_BINARY, Lane.ROWS])
def test_a_frozen_backend_does_not_hold_the_run__R_K2(
    source: Database,
    sink: Database,
    job: Make,
    side: str,
    lane: Lane,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend is stopped as by SIGSTOP: it answers no cancel request."""
    source.execute("insert into t select i from generate_series(1, 3000000) i")
    monkeypatch.setattr(PostgreSQLSource, "lanes", (lane,))
    context = job("complete", bandwidth="1MB").context()
    frozen = source if side == "source" else sink
    if os.geteuid() != 0:
        pytest.skip("only root may stop another account's process")
    pids: list[int] = []

    def freeze() -> bool:
        if sink.value("select count(*) from pg_stat_activity where query ilike 'copy %stdin%'"):
            pids.extend(
                row[0]
                for row in frozen.execute(
                    "select pid from pg_stat_activity where datname = current_database()"
                    " and application_name like 'cc/%'"
                )
            )
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return bool(pids)

    try:
        assert _stopped_after(context, freeze) < 1.0
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    _wait(lambda: _sessions(source) == 0 and _sessions(sink) == 0, "sessions to end", 5)


def test_a_backend_that_was_sending_ends_with_its_client(source: Database) -> None:
    """What had arrived is read after the stop, so that nothing unread tells the server."""
    connection = session.connect(source.config, name="cc/x/1")
    blocks = copy_out(
        connection,
        sql.SQL("copy (select repeat('x', 1000) from generate_series(1, 1000000)) to stdout"),
    )
    next(blocks)
    sightings: list[bool] = []

    def blocked() -> bool:
        sightings.append(
            source.value(
                "select count(*) from pg_stat_activity where wait_event = 'ClientWrite'"
                " and datname = current_database()"
            )
            == 1
        )
        return len(sightings) > 50 and all(sightings[-50:])

    _wait(blocked, "the server to wait for its client")
    session.interrupt(connection)
    with pytest.raises(psycopg.Error):
        for _ in blocks:
            pass
    session.close(connection)
    _wait(lambda: _sessions(source) == 0, "the session to end", 3)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_killed_worker_leaves_no_session(
    source: Database,
    sink: Database,
    job: Make,
    worker: Callable[[Job], subprocess.Popen[bytes]],
    parallelism: int,
) -> None:
    source.execute("insert into t select i from generate_series(1, 300000) i")
    task = job("complete", bandwidth="200kB", parallelism=parallelism)
    assert _soonest_gone(source, sink, lambda: worker(task), parallelism) < 1.0


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("busy", ["source", "sink"])
def test_a_killed_worker_s_statement_ends(
    source: Database,
    sink: Database,
    job: Make,
    worker: Callable[[Job], subprocess.Popen[bytes]],
    busy: str,
) -> None:
    """The server looks for the worker meanwhile, and does not wait until it has rows to send."""
    if (source if busy == "source" else sink).version < 140000:
        pytest.skip("client_connection_check_interval came with PostgreSQL 14")
    with ExitStack() as stack:
        if busy == "source":
            task = job(
                "complete", None, to="t", reads={"query": "select 1 as id from pg_sleep(60)"}
            )
        else:
            holder = stack.enter_context(psycopg.connect(sink.url))
            holder.execute("lock table t")
            task = job("complete")
        assert _soonest_gone(source, sink, lambda: worker(task), 1, waits=busy) < 1.0


def test_a_server_looks_for_its_client_four_times_a_second(source: Database) -> None:
    if source.version < 140000:
        pytest.skip("client_connection_check_interval came with PostgreSQL 14")
    with closing(session.connect(source.config, name="cc/x/1")) as connection:
        look = connection.execute("show client_connection_check_interval").fetchone()
    assert look == ("250ms",)


OURS = """
select count(*) from pg_stat_activity
where datname = current_database() and application_name like 'cc/%' and state = 'active'
"""
WAITING = {
    "copy": OURS + " and query ilike 'copy %stdin%'",
    "source": OURS + " and query ilike 'copy %pg_sleep%'",
    "sink": OURS + " and wait_event_type = 'Lock'",
}


def _soonest_gone(
    source: Database,
    sink: Database,
    start: Callable[[], subprocess.Popen[bytes]],
    parallelism: int,
    waits: str = "copy",
) -> float:
    """Seconds from a worker's death to the end of its last session; the best of three, because
    a busy machine has its own delays."""
    database = source if waits == "source" else sink
    soonest = float("inf")
    for _ in range(3):
        process = start()
        _wait(lambda: database.value(WAITING[waits]) >= parallelism, waits, 30)
        process.send_signal(signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        _wait(lambda: _sessions(source) == 0 and _sessions(sink) == 0, "sessions to end", 5)
        soonest = min(soonest, time.monotonic() - began)
        if soonest < 1.0:
            break
    return soonest


@pytest.mark.usefixtures("tables")
def test_a_frozen_worker_does_not_hold_up_the_next_attempt__R_F5(
    source: Database, sink: Database, job: Make, worker: Callable[[Job], subprocess.Popen[bytes]]
) -> None:
    source.execute("insert into t select i from generate_series(1, 300000) i")
    task = job("complete", bandwidth="200kB")
    process = worker(task)
    _wait(
        lambda: bool(
            sink.value("select count(*) from pg_stat_activity where query ilike 'copy %stdin%'")
        ),
        "the copy to begin",
        30,
    )
    process.send_signal(signal.SIGSTOP)
    try:
        task.fence += 1
        del task.definition["bandwidth"]
        began = time.monotonic()
        task.run()
        assert time.monotonic() - began < 10
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=20) != 0
    assert sink.value("select count(*) from t") == 300001


@pytest.mark.usefixtures("tables")
def test_a_stale_attempt_writes_nothing__R_F5(source: Database, sink: Database, job: Make) -> None:
    task = job("complete")
    stale = task.context()
    task.run()
    sink.execute("update t set id = 42")
    with pytest.raises(Fenced):
        modes.run(stale)
    assert sink.execute("select id from t") == [(42,)]
