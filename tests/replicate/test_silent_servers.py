"""A run whose servers fall silent, also for new connections, ends within a second of its stop.

A proxy before each passes nothing from then on and closes nothing, as a frozen host does: nobody
answers a cancel request.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from mysql_kit import DRIVERS, SERVER, MySQLHarness, a_database
from replication_kit import Database, Job, definition, url_of
from support.proxy import Proxy, before_database, proxy
from support.waiting import until

from dispatch.context import RunContext, RunStopped
from tasks.replicate import modes
from tasks.replicate.connector import Lane
from tasks.replicate.connectors.mysql import drivers
from tasks.replicate.connectors.postgresql import session
from tasks.replicate.connectors.postgresql.source import PostgreSQLSource

Make = Callable[..., Job]
ENDLESS = "select i::int as id, repeat('x', 100) as name from generate_series(1, 100000000) i"
SESSIONS = """
select count(*) from pg_stat_activity
where datname = current_database() and application_name like 'cc/%'
"""
COPIES = SESSIONS + " and query ilike 'copy %stdin%'"


@dataclass
class Way:
    """A proxy before a server, and the datasource that goes through it."""

    proxy: Proxy
    config: dict[str, str]


@pytest.fixture
def way() -> Iterator[Callable[[Database | MySQLHarness], Way]]:
    """Puts a proxy before a database's server."""
    with ExitStack() as stack:

        def before(end: Database | MySQLHarness) -> Way:
            if isinstance(end, Database):
                found, through = stack.enter_context(before_database(end.url))
                return Way(found, {"url": url_of(through)})
            options = drivers.parameters({"url": f"{SERVER.rstrip('/')}/mysql"})
            found = stack.enter_context(proxy((options["host"], options["port"])))
            head, _, database = end.config["url"].rpartition("/")
            user = head.rpartition("@")[0]
            return Way(found, {"url": f"{user}@127.0.0.1:{found.port}/{database}"})

        yield before


@pytest.fixture
def mysql(request: pytest.FixtureRequest) -> Iterator[MySQLHarness]:
    with a_database(request.param) as made:
        yield made


def stopped_after(context: RunContext, ready: Callable[[], object], *silent: Proxy) -> float:
    """Run; once ``ready``, let the servers fall silent, and stop. The seconds until it ended."""
    at: list[float] = []

    def watch() -> None:
        try:
            until("the run to be at work", ready, 30)
            for each in silent:
                each.hang()
            # What was on its way arrives, and the run waits for more.
            time.sleep(0.3)
        finally:
            at.append(time.monotonic())
            context.stop("cancelled")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(RunStopped):
            modes.run(context)
        return time.monotonic() - at[0]
    finally:
        watcher.join(timeout=35)
        for each in silent:
            each.resume()


def copies(sink: Database) -> int:
    """How many sessions of the run load rows."""
    return int(sink.value(COPIES))


def sessions_end(*databases: Database) -> None:
    for database in databases:
        until("sessions to end", lambda end=database: end.value(SESSIONS) == 0, 5)


@pytest.mark.parametrize(
    ("silent", "lane"),
    [
        ("source", Lane.COPY_BINARY),
        ("sink", Lane.COPY_BINARY),
        ("both", Lane.ROWS),
    ],
)
def test_a_run_between_silent_servers_stops__R_K2(
    source: Database,
    sink: Database,
    way: Callable[[Database], Way],
    monkeypatch: pytest.MonkeyPatch,
    silent: str,
    lane: Lane,
) -> None:
    monkeypatch.setattr(PostgreSQLSource, "lanes", (lane,))
    sink.execute("create table t (id int, name text)")
    ways = {"source": way(source), "sink": way(sink)}
    work = definition({"query": ENDLESS}, {"table": "t"}, "complete")
    job = Job(ways["source"].config, ways["sink"].config, work)
    hanging = [each.proxy for side, each in ways.items() if silent in (side, "both")]
    assert stopped_after(job.context(), lambda: copies(sink), *hanging) < 1.0
    sessions_end(source, sink)


def test_a_parallel_run_between_silent_servers_stops__R_K2(
    source: Database, sink: Database, way: Callable[[Database], Way]
) -> None:
    source.execute(
        "create table t as select i as id, repeat('x', 200) as name"
        " from generate_series(1, 100000) i"
    )
    sink.execute("create table t (id int, name text)")
    ours, theirs = way(source), way(sink)
    more = {"parallelism": 2, "bandwidth": "10MB"}
    work = definition({"table": "t"}, {"table": "t"}, "complete-atomic", **more)
    context = Job(ours.config, theirs.config, work).context()
    took = stopped_after(context, lambda: copies(sink) >= 2, ours.proxy, theirs.proxy)
    assert took < 1.0
    sessions_end(source, sink)


@pytest.mark.parametrize("mysql", DRIVERS, indirect=True)
def test_a_run_from_a_silent_mysql_stops__R_K2(
    mysql: MySQLHarness, sink: Database, way: Callable[[MySQLHarness], Way]
) -> None:
    columns = {"id": "int", "name": "longtext"}
    mysql.make("t", columns, [(i, "x" * 10_000) for i in range(300)], key=["id"])
    sink.execute("create table t (id int, name text)")
    ours = way(mysql)
    query = "select a.id, a.name from t a, t b"
    work = definition({"query": query}, {"table": "t"}, "complete", fetch_size=10)
    context = Job(ours.config, sink.config, work, ("mysql", "postgresql")).context()
    assert stopped_after(context, lambda: copies(sink), ours.proxy) < 1.0
    assert sink.value("select count(*) from t") == 0


def lost_at_commit(way: Way) -> Callable[[], bool]:
    """The server falls silent with the next commit, whose connection breaks; whether somebody
    has come to it since."""
    seen: list[int] = []

    def commits(data: bytes) -> bool:
        if b"commit\0" not in data and not data.endswith(b"\x03commit"):
            return False
        seen.append(way.proxy.connections)
        way.proxy.hang()
        return True

    way.proxy.cut_when(commits, answered=False)
    return lambda: bool(seen) and way.proxy.connections > seen[0]


def test_a_commit_that_is_settled_with_a_silent_server_is_left__R_K2(
    source: Database, sink: Database, way: Callable[[Database], Way]
) -> None:
    for database in (source, sink):
        database.execute("create table t (id int primary key)")
    theirs = way(sink)
    work = definition({"table": "t"}, {"table": "t"}, "complete")
    context = Job(source.config, theirs.config, work).context()
    settles = lost_at_commit(theirs)
    assert stopped_after(context, settles, theirs.proxy) < 1.0
    assert context.warning == modes.LOST + "it may have been emptied"
    sessions_end(sink)


@pytest.mark.parametrize("mysql", DRIVERS, indirect=True)
def test_a_commit_that_is_settled_with_a_silent_mysql_is_left__R_K2(
    mysql: MySQLHarness, source: Database, way: Callable[[MySQLHarness], Way]
) -> None:
    source.execute("create table t (id int primary key)")
    mysql.make("t", {"id": "int"}, key=["id"])
    theirs = way(mysql)
    work = definition({"table": "t"}, {"table": "t"}, "complete")
    context = Job(source.config, theirs.config, work, ("postgresql", "mysql")).context()
    settles = lost_at_commit(theirs)
    assert stopped_after(context, settles, theirs.proxy) < 1.0
    assert context.warning == modes.LOST + "it may have been emptied"


def test_a_libpq_that_cannot_leave_a_cancel_is_not_asked_for_one__R_K2(
    source: Database, way: Callable[[Database], Way], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before version 17 it waits for the server's answer, and keeps all threads waiting."""
    asked: list[Any] = []
    monkeypatch.setattr(psycopg.capabilities, "has_cancel_safe", lambda check=False: False)
    monkeypatch.setattr(psycopg.Connection, "cancel", lambda end: asked.append(end))
    connection = session.connect(source.config, name="cc/x/1")

    def interrupt() -> None:
        time.sleep(0.2)
        session.interrupt(connection)

    stop = threading.Thread(target=interrupt)
    stop.start()
    with contextlib.closing(connection), pytest.raises(psycopg.OperationalError):
        connection.execute("select pg_sleep(60)")
    stop.join(timeout=5)
    assert not asked
    if source.version >= 140000:
        sessions_end(source)
