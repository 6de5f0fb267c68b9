"""Behind a transaction pooler: DATABASE_DIRECT_URL is for LISTEN, sessions are nobody's.

With a real PgBouncer where there is one; else with the same code path on the server itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg import conninfo
from run_support import Recorder, Rows, in_thread, new_job, run
from support import pooler
from support.waiting import until
from worker_support import Claimer, Gate, Worker, new_datasource, new_run, new_runs

from db import session
from dispatch import catalog, enqueue
from dispatch.cancel import cancel
from dispatch.catalog import jobs
from dispatch.recovery import recover_expired


@pytest.fixture
def pooled(database: str, rows: Rows, configure: Callable[..., Any]) -> Iterator[None]:
    """The connections of the product are pooled."""
    with contextlib.ExitStack() as stack:
        through = database
        if pooler.program() is not None:
            through = stack.enter_context(pooler.pooled(database))
        configure(
            DATABASE_URL=through,
            # Spelt differently, so that it is another endpoint also where there is no pooler.
            DATABASE_DIRECT_URL=conninfo.make_conninfo(database, connect_timeout=7),
            REDIS_URL="redis://127.0.0.1:1/0",
        )
        session.dispose()
        assert session.is_pooled()
        yield
        session.dispose()


def test_no_session_keeps_anything(rows: Rows, pooled: Any) -> None:
    new_runs(rows, new_job(rows, "orders", "allow"), 10)
    claimer = Claimer()
    try:
        for _ in range(10):
            assert claimer.next() is not None
        left = claimer.link.get().execute(
            """select (select count(*) from pg_prepared_statements),
                 current_setting('enable_seqscan'), current_setting('lock_timeout')"""
        )
        assert left.fetchone() == (0, "on", "0")
    finally:
        claimer.close()


def test_a_transaction_has_its_deadlines(pooled: Any) -> None:
    with session.transaction(lock_seconds=1.5) as connection:
        found = connection.exec_driver_sql(
            "select current_setting('lock_timeout'), current_setting('statement_timeout')"
        ).one()
    assert tuple(found) == ("1500ms", "30s")


def test_the_catalog_is_read_and_edited(rows: Rows, pooled: Any) -> None:
    job = new_job(rows, "orders")
    with catalog.reading() as reading:
        assert [found.name for found in catalog.all_jobs(reading)] == ["orders"]
        rows("insert into job (name, handler) values ('later', 'report')")
        # What it reads is as it was at its start, and its deadlines hold too.
        assert [found.id for found in catalog.all_jobs(reading)] == [job]
        settings = "current_setting('transaction_read_only'), current_setting('lock_timeout')"
        found = reading.connection().exec_driver_sql(f"select {settings}").one()
        assert tuple(found) == ("on", "5s")
    with catalog.editing() as editing:
        jobs.set_switch(editing, "later", "paused", True, actor="someone")
    assert rows("select name from job where paused") == [{"name": "later"}]


def test_runs_go_from_trigger_to_end(rows: Rows, recorder: Recorder, pooled: Any) -> None:
    worker = Worker(rows, recorder)
    try:
        source = new_datasource(rows, "shop")
        worker.job("orders", lambda run: run.params["n"], overlap="allow", source_id=source)
        ids = [enqueue.submit(recorder.ports, "orders", {"n": n}).run_id for n in range(12)]
        assert sorted(worker.run(ids[0])) == sorted(ids)
        assert [run(rows, run_id)["result"] for run_id in ids] == list(range(12))
    finally:
        worker.close()


def test_a_cancel_is_heard_on_the_direct_connection__R_K2(
    rows: Rows, recorder: Recorder, pooled: Any
) -> None:
    gate = Gate()
    worker = Worker(rows, recorder)
    try:
        run_id = new_run(rows, worker.job("slow", gate))
        working = in_thread(lambda: worker.run(run_id))
        until("the heartbeat", lambda: worker.coordinator._keeper.is_connected)
        cancel(recorder.ports, run_id, actor="someone")
        working.result(5)
        assert run(rows, run_id)["status"] == "CANCELLED"
    finally:
        worker.close()


def test_a_lost_run_is_recovered__R_R1(rows: Rows, recorder: Recorder, pooled: Any) -> None:
    claimer = Claimer()
    try:
        held = claimer.directed(new_run(rows, new_job(rows, "orders")))
        assert held is not None
        rows("update job_run set lease_until = clock_timestamp()")
        assert [one.run_id for one in recover_expired(recorder.ports).recovered] == [held.id]
    finally:
        claimer.close()
