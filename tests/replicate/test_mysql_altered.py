"""MariaDB tables that are swapped or altered while a run is at work: the right rows or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conformance import request_for
from mysql_kit import DRIVERS, INSERT, MySQLHarness, a_database, connect
from replication_kit import Job, definition

from tasks.replicate.connector import SinkError, SourceError
from tasks.replicate.connectors.mysql import MySQL
from tasks.replicate.connectors.mysql.session import Session
from tasks.replicate.connectors.mysql.sink import MySQLSink
from tasks.replicate.connectors.mysql.source import MySQLSource

ROWS = [(i, "1.20") for i in range(500)]
SWAP = "rename table t to t_old, t_new to t"
WAITING = """
select count(*) from information_schema.processlist
where db = database() and state = 'Waiting for table metadata lock'
"""
QUERY = "select t.id, t.n from t join (select max(id) as most from t) k on t.id <= k.most"


@pytest.fixture(params=DRIVERS)
def harness(request: pytest.FixtureRequest) -> Iterator[MySQLHarness]:
    with a_database(str(request.param)) as made:
        yield made


@pytest.fixture
def one() -> Iterator[MySQLHarness]:
    """For what does not depend on the driver."""
    with a_database() as made:
        yield made


def a_job(harness: MySQLHarness, mode: str = "complete-atomic", kind: str = "table") -> Job:
    for table in ("t", "u"):
        rows = ROWS if table == "t" else []
        harness.make(table, {"id": "int", "n": "decimal(10,2)"}, rows, key=["id"])
    harness.sql("create table t_new like t")
    harness.sql("create view v as select * from t")
    reads = {"table": {"table": "t"}, "view": {"table": "v"}, "query": {"query": QUERY}}
    more = {"watermark": "id", "lag": 0} if mode == "incremental" else {}
    made = definition(reads[kind], {"table": "u"}, mode, verify="checksum", **more)
    return Job(harness.config, harness.config, made, connectors=("mysql", "mysql"))


def before(
    monkeypatch: pytest.MonkeyPatch, owner: type, step: str, work: Callable[[], object]
) -> None:
    """Do the work once, when the run comes to that step."""
    original = getattr(owner, step)
    pending = [work]

    def stepped(self: Any, *arguments: Any, **more: Any) -> Any:
        if pending:
            pending.pop()()
        return original(self, *arguments, **more)

    monkeypatch.setattr(owner, step, stepped)


class Meanwhile:
    """Statements of another session, which may have to wait for the run."""

    def __init__(self, harness: MySQLHarness, *statements: str) -> None:
        self.harness, self.statements = harness, statements
        self.waited = False
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        other = connect(self.harness.database)
        with other, other.cursor() as cursor:
            for statement in self.statements:
                cursor.execute(statement)

    def __call__(self) -> None:
        self.thread.start()
        deadline = time.monotonic() + 20
        while self.thread.is_alive() and not self.waited:
            assert time.monotonic() < deadline
            self.waited = self.harness.sql(WAITING) == [("1",)]
            time.sleep(0.01)

    def ended(self) -> None:
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
@pytest.mark.parametrize("kind", ["table", "view", "query"])
@pytest.mark.parametrize("change", [SWAP, "truncate t", "alter table t modify n decimal(12,4)"])
def test_whoever_takes_the_source_away_after_the_snapshot_waits_for_the_run(
    one: MySQLHarness, monkeypatch: pytest.MonkeyPatch, mode: str, kind: str, change: str
) -> None:
    job = a_job(one, mode, kind)
    meanwhile = Meanwhile(one, "insert into t_new select * from t", change)
    before(monkeypatch, MySQLSink, "begin" if mode == "complete" else "stage", meanwhile)
    assert job.run().rows_processed == len(ROWS)
    meanwhile.ended()
    assert meanwhile.waited
    assert one.rows("u") == ROWS


@pytest.mark.parametrize("kind", ["table", "view", "query"])
@pytest.mark.parametrize("when", ["snapshot", "lock"])
def test_a_source_that_is_swapped_as_the_run_begins_arrives_whole(
    one: MySQLHarness, monkeypatch: pytest.MonkeyPatch, kind: str, when: str
) -> None:
    job = a_job(one, kind=kind)
    swap = Meanwhile(one, "insert into t_new select * from t", SWAP)
    if when == "snapshot":
        before(monkeypatch, MySQLSource, "snapshot", swap)
    else:
        execute = Session.execute

        def begun(self: Session, statement: str) -> int:
            done = execute(self, statement)
            if statement.startswith("start transaction") and not swap.thread.ident:
                swap()
            return done

        monkeypatch.setattr(Session, "execute", begun)
    assert job.run().rows_processed == len(ROWS)
    swap.ended()
    assert one.rows("u") == ROWS


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
@pytest.mark.parametrize("kind", ["table", "view", "query"])
@pytest.mark.parametrize("way", ["alter", "swap"])
def test_a_source_that_is_altered_as_the_run_begins_is_not_taken_for_the_old_one(
    one: MySQLHarness, monkeypatch: pytest.MonkeyPatch, mode: str, kind: str, way: str
) -> None:
    job = a_job(one, mode, kind)
    one.sql("insert into u values (-1, 7)")
    table = "t" if way == "alter" else "t_new"
    statements = [f"alter table {table} modify n decimal(12,4)"]
    statements.append(INSERT.format(table, "(-5, 1.2567)"))
    meanwhile = Meanwhile(one, *statements, *([SWAP] if way == "swap" else []))
    before(monkeypatch, MySQLSource, "snapshot", meanwhile)
    with pytest.raises(SourceError, match=r"nothing was changed: source: .* was altered") as it:
        job.run()
    assert not it.value.permanent
    meanwhile.ended()
    assert one.rows("u") == [(-1, "7.00")]


def test_a_wait_for_a_lock_at_the_source_stops__R_K2(
    harness: MySQLHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job(harness)
    with MySQL().source(harness.config) as source:
        request_for(source, "t")
        holder = connect(harness.database)
        with holder, holder.cursor() as cursor:
            cursor.execute("lock tables t write")
            stopped: list[float] = []

            def stop() -> None:
                stopped.append(time.monotonic())
                source.stop()

            timer = threading.Timer(0.3, stop)
            timer.start()
            with pytest.raises(SourceError):
                source.snapshot()
            assert time.monotonic() - stopped[0] < 1.0
            timer.join(timeout=5)


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
@pytest.mark.parametrize(
    "change",
    ["alter table u modify n decimal(10,1)", "alter table u engine = MyISAM",
     "alter table u modify n decimal(10,2) unsigned"],
)  # fmt: skip
def test_a_sink_that_is_altered_as_the_run_begins_gets_no_row(
    one: MySQLHarness, monkeypatch: pytest.MonkeyPatch, mode: str, change: str
) -> None:
    job = a_job(one, mode)
    one.sql("insert into u values (-1, 7)")
    meanwhile = Meanwhile(one, change)
    before(monkeypatch, MySQLSink, "begin", meanwhile)
    with pytest.raises(SinkError, match="sink: u was altered"):
        job.run()
    meanwhile.ended()
    assert not meanwhile.waited
    assert [row[0] for row in one.rows("u")] == [-1]


@pytest.mark.parametrize("mode", ["complete", "complete-atomic", "incremental"])
def test_whoever_alters_the_sink_after_it_was_looked_at_waits_for_the_commit(
    one: MySQLHarness, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    job = a_job(one, mode)
    meanwhile = Meanwhile(one, "alter table u modify n decimal(10,1)")
    looked = MySQLSink.altered

    def altered(self: MySQLSink, load: Any) -> bool:
        found = looked(self, load)
        if load.step == (1 if mode == "complete" else 0):
            meanwhile()
        return found

    monkeypatch.setattr(MySQLSink, "altered", altered)
    assert job.run().rows_processed == len(ROWS)
    meanwhile.ended()
    assert meanwhile.waited
