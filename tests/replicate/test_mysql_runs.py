"""A run against MariaDB: refusals before it, its fence and staging, and how it is stopped."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conformance import (
    batches,
    request_for,
)
from mysql_kit import (
    DRIVERS,
    SERVER,
    MySQLHarness,
    a_database,
    load_of,
)
from support.waiting import until

from tasks.replicate.connector import (
    CommitUnknown,
    Fenced,
    Lane,
    Part,
    Row,
    SinkError,
    SourceError,
)
from tasks.replicate.connectors.mysql import MySQL, drivers, staging


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def harness(driver: str) -> Iterator[MySQLHarness]:
    with a_database(driver) as made:
        yield made


@pytest.fixture
def one() -> Iterator[MySQLHarness]:
    """For what does not depend on the driver."""
    with a_database() as made:
        yield made


def refusals(harness: MySQLHarness, table: str, **changes: Any) -> list[str]:
    load = load_of(harness, table, **changes)
    with MySQL().sink(harness.config) as sink:
        return sink.refusals(load)


def test_harmful_targets_are_refused_before_anything(one):
    one.make("parent", {"id": "int"}, key=["id"])
    one.sql("create table child (p int, foreign key (p) references parent (id))")
    assert "foreign keys of" in refusals(one, "parent")[0]
    assert refusals(one, "parent", mode="incremental", how="merge") == []
    one.sql("create view look as select 1 as one")
    assert "is a view" in refusals(one, "look")[0]
    one.sql("create table old (id int) engine = MyISAM")
    assert "no transactions" in refusals(one, "old")[0]
    one.make("watched", {"id": "int"}, key=["id"])
    one.sql("create trigger t1 before insert on watched for each row set new.id = new.id + 1")
    assert "the trigger t1 on insert" in refusals(one, "watched")[0]
    tables = [row[0] for row in one.sql("show tables")]
    assert "claimcheck_fence" not in tables


def test_rights_are_tried_without_a_change(one):
    one.make("t", {"id": "int"}, [(1,)], key=["id"])
    user = f"u{uuid.uuid4().hex[:10]}"
    one.sql(f"create user {user}@'%' identified by 'pa:ss/word'")
    try:
        one.sql(f"grant select, insert on {one.database}.* to {user}@'%'")
        host = SERVER.rpartition("@")[2].rstrip("/")
        url = f"mysql+pymysql://{user}:pa%3Ass%2Fword@{host}/{one.database}"
        with MySQL().sink({"url": url}) as sink:
            relation = sink.describe(("t",))
            assert relation is not None
            load = replace(load_of(one, "t"), relation=relation)
            found = sink.refusals(load)
        assert len(found) == 1
        assert "may not delete on" in found[0]
        with pytest.raises(SourceError, match="Access denied") as caught:
            MySQL().test({"url": url.replace("word", "wrong")})
        assert "wrong" not in str(caught.value)
    finally:
        one.sql(f"drop user {user}@'%'")
    assert one.rows("t") == [(1,)]


def test_orphaned_staging_of_older_attempts_is_swept_and_no_other(one):
    one.make("t", {"id": "int"}, key=["id"])
    loads = [
        load_of(one, "t", mode="complete-atomic", how="delete", run_id=f"run{n}", fence=n, scope=s)
        for n, s in ((1, "mine"), (2, "other"), (3, "mine"))
    ]
    with MySQL().sink(one.config) as sink:
        for load in loads:
            sink.stage(load)
        names = [row[0] for row in one.sql("show tables like 'claimcheck\\_stage%'")]
        assert names == ["claimcheck_stage_run2", "claimcheck_stage_run3"]
        assert [name for name in sink._session.rows("show tables") if "stage" in name[0]]
    with MySQL().source(one.config) as source:
        assert source.tables() == [("t",)]


def test_staging_that_another_session_holds_is_left_to_a_later_run(one):
    """As a dump in one transaction does, which holds what it has read until it has ended."""
    one.make("t", {"id": "int"}, key=["id"])

    def staged(fence: int) -> Any:
        return load_of(
            one, "t", mode="complete-atomic", how="delete", run_id=f"run{fence}", fence=fence
        )

    def stages() -> list[str]:
        return [name for (name,) in one.sql("show tables like 'claimcheck\\_stage%'")]

    with MySQL().sink(one.config) as sink:
        sink.stage(staged(1))
        other = drivers.connect(one.config, name="holder", seconds=5)
        with contextlib.closing(other), contextlib.closing(other.cursor()) as holder:
            holder.execute("begin")
            holder.execute(f"select * from {staging.name(staged(1))}")  # noqa: S608
            assert sink.unstage(staged(1)) == staging.name(staged(1))
            sink.stage(staged(2))
            assert sink.unstage(staged(2)) is None
            assert stages() == ["claimcheck_stage_run1"]
        sink.stage(staged(3))
        assert sink.unstage(staged(3)) is None
    assert stages() == []


def test_old_staging_of_a_job_that_runs_no_more_is_swept(one, monkeypatch):
    one.make("t", {"id": "int"}, key=["id"])

    def staged(scope: str) -> Any:
        return load_of(one, "t", mode="complete-atomic", how="delete", run_id=scope, scope=scope)

    def stages() -> list[str]:
        found = one.sql("show tables like 'claimcheck\\_stage%'")
        return [name.rpartition("_")[2] for (name,) in found]

    with MySQL().sink(one.config) as gone, MySQL().sink(one.config) as broken:
        gone.stage(staged("gone"))
        broken.stage(staged("loading"))
    one.admin.begin()
    one.sql("insert into claimcheck_stage_loading (id) values (1)")
    with MySQL().sink(one.config) as living, MySQL().sink(one.config) as sink:
        living.stage(staged("living"))
        sink.stage(staged("young"))
        assert stages() == ["gone", "living", "loading", "young"]
        monkeypatch.setattr(staging, "ORPHANED_SECONDS", 0)
        sink.stage(staged("last"))
        assert stages() == ["last", "living", "loading", "young"]
    one.admin.rollback()


def test_a_newer_attempt_ends_the_session_of_a_frozen_older_one__R_F5(one):
    one.make("t", {"id": "int"}, [(1,)], key=["id"])
    old_load = load_of(one, "t")
    new_load = replace(old_load, fence=2, run_id="newer")
    with MySQL().sink(one.config) as old, MySQL().sink(one.config) as new:
        old.begin(old_load)
        old.truncate(old_load)  # holds locks, and is never heard of again
        started = time.monotonic()
        new.begin(new_load)
        new.truncate(new_load)
        new.write(new_load, batches([(2,)]), staging=False)
        new.commit()
        assert time.monotonic() - started < 5
        with pytest.raises((SinkError, CommitUnknown)):
            old.commit()
        old.rollback()
    assert one.rows("t") == [(2,)]


def test_a_later_step_of_an_older_attempt_waits_for_the_newer_and_is_fenced__R_F5(one):
    one.make("t", {"id": "int"}, key=["id"])
    old_load = load_of(one, "t")
    with MySQL().sink(one.config) as old:
        old.begin(old_load)
        old.commit()
        one.sql("update claimcheck_fence set fence = 9 where step = 0")
        with pytest.raises(Fenced):
            old.begin(replace(old_load, step=1))
        old.rollback()


@pytest.mark.parametrize("landed", [True, False])
def test_a_connection_that_breaks_at_commit_is_settled__R_F5(harness, landed):
    harness.make("t", {"id": "int"}, key=["id"])
    load = load_of(harness, "t")
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        sink.write(load, batches([(1,)]), staging=False)
        if landed:
            sink._session.execute("commit")
        sink._session.cut()
        with pytest.raises(CommitUnknown):
            sink.commit()
        assert sink.settle(load) is landed
    assert harness.rows("t") == ([(1,)] if landed else [])


def stopped_within_a_second(end: Any, work: Any, error: type[Exception]) -> None:
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.monotonic())
        end.stop()

    timer = threading.Timer(0.3, stop)
    timer.start()
    with pytest.raises(error):
        work()
    assert time.monotonic() - stopped[0] < 1.0
    timer.join(timeout=5)


def test_stop_breaks_a_wait_for_a_row_lock__R_K2(harness):
    harness.make("t", {"id": "int"}, [(1,)], key=["id"])
    load = load_of(harness, "t")
    harness.admin.begin()
    harness.sql("select * from t for update")
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        stopped_within_a_second(sink, lambda: sink.truncate(load), SinkError)
        sink.rollback()
    harness.admin.rollback()
    assert harness.rows("t") == [(1,)]


def test_stop_breaks_a_load_whose_target_is_locked__R_K2(harness):
    harness.make("t", {"id": "int"}, [(1,)], key=["id"])
    load = load_of(harness, "t")
    harness.admin.begin()
    harness.sql("insert into t values (500)")
    rows: list[Row] = [(i,) for i in range(2, 200_000)]
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        stopped_within_a_second(
            sink, lambda: sink.write(load, batches(rows), staging=False), SinkError
        )
        sink.rollback()
    harness.admin.rollback()
    assert harness.rows("t") == [(1,)]


class FreezingProxy:
    """Passes bytes between a client and the server until it is frozen, and then none."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.frozen = threading.Event()
        self.sockets = [self.listener]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        options = drivers.parameters({"url": f"{SERVER.rstrip('/')}/mysql"})
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection((options["host"], options["port"]))
                self.sockets += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self.pump, args=(one, other), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if self.frozen.is_set():
                    return
                other.sendall(data)

    def close(self) -> None:
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_stop_breaks_what_waits_for_a_frozen_server__R_K2(harness):
    harness.make("t", {"id": "int"}, [(1,)], key=["id"])
    load = load_of(harness, "t")
    with contextlib.closing(FreezingProxy()) as proxy:
        head, _, database = harness.config["url"].rpartition("/")
        url = f"{head.rpartition('@')[0]}@127.0.0.1:{proxy.port}/{database}"
        rows: list[Row] = [(i,) for i in range(2, 500_000)]
        for fence, work in enumerate(("statement", "load"), start=1):
            proxy.frozen.clear()
            load = replace(load, fence=fence)  # a newer attempt ends the session left hanging
            with MySQL().sink({"url": url}) as sink:
                sink.begin(load)
                proxy.frozen.set()
                if work == "statement":
                    blocked = partial(sink.truncate, load)
                else:
                    blocked = partial(sink.write, load, batches(rows), staging=False)
                stopped_within_a_second(sink, blocked, SinkError)
                sink.rollback()
    assert harness.rows("t") == [(1,)]


BUSY = """
select id from information_schema.processlist
where db = database() and info like 'select benchmark%'
"""
STALE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from test_mysql_runs import MySQL, load_of
class Harness:
    config = json.loads(sys.argv[2])
load = load_of(Harness(), "t", scope=sys.argv[3])
sink = MySQL().sink(Harness.config)
sink.begin(load)
sink.truncate(load)
print("begun", flush=True)
sink._session.execute("select benchmark(1000000000, sha2('x', 512))")
"""


def test_a_killed_worker_s_statement_is_ended_by_the_next_attempt__R_F5(one):
    """The server does not look for the client of a statement that runs."""
    one.make("t", {"id": "int"}, [(1,)], key=["id"])
    load = load_of(one, "t", scope=one.database, fence=2)
    path = [str(Path(__file__).parent), *sys.path]
    given = [json.dumps(path), json.dumps(one.config), load.scope]
    stale = subprocess.Popen([sys.executable, "-c", STALE, *given], stdout=subprocess.PIPE)
    assert stale.stdout is not None
    with contextlib.closing(stale.stdout):
        assert stale.stdout.readline() == b"begun\n"
        until("the statement", lambda: one.sql(BUSY))
        stale.kill()
        stale.wait()
    with MySQL().sink(one.config) as sink:
        began = time.monotonic()
        sink.begin(load)
        assert time.monotonic() - began < 1.0
        sink.rollback()
    until("the statement's end", lambda: not one.sql(BUSY), 2)
    assert one.rows("t") == [(1,)]


def test_a_commit_whose_driver_trips_over_a_stopped_connection_is_unknown__R_K2(one, monkeypatch):
    one.make("t", {"id": "int"}, key=["id"])
    load = load_of(one, "t")
    with MySQL().sink(one.config) as sink:

        class Tripping:
            def cursor(self) -> Any:
                sink.stop()
                raise AttributeError("'NoneType' object has no attribute 'sendall'")

        sink.begin(load)
        with monkeypatch.context() as patch:
            patch.setattr(sink._session, "_connection", Tripping())
            with pytest.raises(CommitUnknown):
                sink.commit()
        # What was not even begun is known.
        with pytest.raises(SinkError) as caught:
            sink.commit()
        assert not isinstance(caught.value, CommitUnknown)


def test_what_stops_the_source_ends_the_load_and_passes_through(harness):
    class Stopped(BaseException):
        pass

    def broken() -> Iterator[Any]:
        yield from batches([(1,)])
        raise Stopped

    harness.make("t", {"id": "int"}, key=["id"])
    load = load_of(harness, "t")
    with MySQL().sink(harness.config) as sink:
        sink.begin(load)
        with pytest.raises(Stopped):
            sink.write(load, broken(), staging=False)
        sink.rollback()
        sink.begin(load)  # the connection is as good as before
        sink.rollback()
    assert harness.rows("t") == []
    assert not [t for t in threading.enumerate() if t.name == "claimcheck-load"]


def test_a_reader_that_leaves_early_is_not_made_to_read_the_rest(harness):
    harness.make("t", {"id": "int", "v": "longtext"}, [(i, "x" * 10_000) for i in range(3000)])
    with MySQL().source(harness.config) as source:
        request = request_for(source, "t", fetch_size=10)
        source.snapshot()
        pages = source.read(request, Part(0), Lane.ROWS)
        assert next(pages).rows == 10
        started = time.monotonic()
        pages.close()
        assert time.monotonic() - started < 1.0
